"""The dashboard as lines: a pure function of state, size and time. Sections find room by their importance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from hspec_cli.dashboard import hardware, parts
from hspec_cli.dashboard.glyphs import UNICODE, Glyphs, last_lines
from hspec_cli.dashboard.state import State

WIDE, PANEL = 104, 76  # cells from which text and figures stand side by side, and of the figures at most
TEXT = 0.3  # share of the rows that the text has at least where it stands above the figures


@dataclass(frozen=True)
class Section:
    """Some figures in one of several forms, each with its rank, in the order of their length.

    Forms are taken up by rank as long as there is room, each in place of a shorter one.
    """

    forms: list[tuple[int, list[Text]]]
    apart: bool = True  # from the section before, where there is room


def render(state: State, width: int, height: int, now: float, glyphs: Glyphs = UNICODE) -> list[Text]:
    """At most `height` lines of at most `width` cells. `now` in seconds since the start."""
    head = [parts.header(state, width, now), parts.progress(state, width, now, glyphs)][:height]
    room = height - len(head)
    if width >= WIDE and room >= 8:
        lines = _beside(state, width, room, glyphs)
    else:
        charts = (1, 3) if height < 32 else (1, 3, 6)
        figures = _fitting(_sections(state, width, charts, glyphs), room - max(2, int(TEXT * room)))
        lines = [*_text(state, width, room - len(figures), glyphs), *figures]
    return [_cut(line, width, glyphs) for line in (*head, *lines)]


def figures(state: State, width: int, now: float, glyphs: Glyphs) -> list[Text]:
    """Everything but the text, however long: what stays behind when a run is over."""
    sections = [section.forms[-1][1] for section in _sections(state, width, (3,), glyphs)]
    lines = [parts.header(state, width, now), *(line for section in sections for line in section)]
    return [_cut(line, width, glyphs) for line in lines]


def _cut(line: Text, width: int, glyphs: Glyphs) -> Text:
    """The line at no more than `width` cells, in the characters that the glyphs stand for."""
    line.truncate(width, overflow="ellipsis")
    if glyphs.encoding == "ascii" and not line.plain.isascii():
        line.plain = line.plain.replace("×", "x").replace("…", "~").encode("ascii", "replace").decode()
    return line


def _beside(state: State, width: int, room: int, glyphs: Glyphs) -> list[Text]:
    """Text at the left, figures at the right."""
    panel = min(PANEL, width * 11 // 20)
    left = width - panel - 3
    text = _text(state, left, room, glyphs)
    right = _fitting(_sections(state, panel, (1, 3, 6, 9, 12), glyphs), room, airy=True)
    made = []
    for n in range(room):
        line = text[n] if n < len(text) else Text("")
        line.truncate(left, pad=True)
        made.append(Text.assemble(line, (f" {glyphs.between} ", parts.DIM), right[n] if n < len(right) else ""))
    return made


def _text(state: State, width: int, room: int, glyphs: Glyphs) -> list[Text]:
    """The end of the text under a rule, filled up to `room` lines."""
    rule = Text(glyphs.rule * width, parts.DIM)
    above, below = [rule] * (room >= 6), [rule.copy()] * (room >= 3)
    room -= len(above) + len(below)
    lines = [Text(line) for line in last_lines(state.text, width, room)]
    return [*above, *lines, *(Text("") for _ in range(room - len(lines))), *below]


def _fitting(sections: Iterable[Section], room: int, *, airy: bool = False) -> list[Text]:
    """The lines that find room, the most important first, in their order; `airy`: apart if there is room."""
    sections = list(sections)
    taken: list[list[Text]] = [[] for _ in sections]
    steps = sorted(
        (rank, n, form) for n, section in enumerate(sections) for form, (rank, _) in enumerate(section.forms)
    )
    for _, n, form in steps:
        lines = sections[n].forms[form][1]
        if len(lines) - len(taken[n]) <= room:
            room -= len(lines) - len(taken[n])
            taken[n] = lines
    shown = [(section, lines) for section, lines in zip(sections, taken, strict=True) if lines]
    airy = airy and room >= sum(section.apart for section, _ in shown[1:])
    made: list[Text] = []
    for section, lines in shown:
        made += [Text("")] * (airy and section.apart and bool(made))
        made += lines
    return made


def _sections(state: State, width: int, charts: Sequence[int], glyphs: Glyphs) -> Iterator[Section]:
    """All there is to show, with charts of so many rows."""
    if not state.placed and not state.rounds:
        return
    if state.rounds:
        yield Section([(0, [parts.speed(state, width)])])
        plain = state.plain_speed and state.plain_speed[0]
        drawn = [parts.chart(state.history, plain, width, rows, glyphs) for rows in charts]
        yield Section(list(zip((3, 9, 12, 13, 14), drawn, strict=False)), apart=False)
        heads, *rows = parts.levels(state, width, glyphs)
        yield Section([(1, rows), (6, [heads, *rows])] if heads else [(1, rows)])
        yield Section([(2, parts.times(state, width))])
        lines = hardware.rates(state, width, glyphs)
        yield Section([(3, lines[:1]), (10, lines[1:])], apart=False)
    if state.placed:
        bars, common, legends = hardware.memory(state.placed.devices, width, glyphs)
        whole = [line for pair in zip(bars, legends, strict=True) for line in pair if line.plain.strip()]
        few = [(8, [*bars, common])] if len(bars) > 1 and width >= parts.NARROW else []
        yield Section([(4, bars), *few, (11 if few else 8, whole)])
        rows, legend = hardware.layer_map(state, width, glyphs)
        yield Section([(5, rows), *([(7, [*rows, legend])] if width >= parts.NARROW else [])])
