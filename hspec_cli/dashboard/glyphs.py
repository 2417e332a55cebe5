"""The characters that a view is drawn with, and text that is safe to draw."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

from rich.cells import get_character_cell_size


@dataclass(frozen=True)
class Glyphs:
    """Bars are `full`, then one of `eighths`, then `rest`; `shades` tell parts of a bar apart."""

    encoding: str
    eighths: str
    rest: str
    shades: str
    line: str
    rule: str
    between: str
    layers: dict[str, str]
    flight: str

    @property
    def full(self) -> str:
        return self.eighths[-1]

    def bar(self, share: float, cells: int) -> str:
        """A bar of `cells`, filled by a share from 0 to 1."""
        filled = round(min(1.0, max(0.0, share)) * cells * (len(self.eighths) - 1))
        whole, part = divmod(filled, len(self.eighths) - 1)
        drawn = self.full * whole + (self.eighths[part] if part else "")
        return drawn + self.rest * (cells - len(drawn))


UNICODE = Glyphs(
    encoding="utf-8",
    eighths=" ▏▎▍▌▋▊▉█",
    rest="░",
    shades="█▓▒░",
    line="┄",
    rule="─",
    between="│",
    layers={"gpu": "█", "4bit": "▓", "streamed": "░", "host": "░", "cpu": "▄", "split": "▚", "disk": "▁"},
    flight="▶",
)
ASCII = Glyphs(
    encoding="ascii",
    eighths=" #",
    rest=".",
    shades="#=+-",
    line="-",
    rule="-",
    between="|",
    layers={"gpu": "#", "4bit": "4", "streamed": "~", "host": "~", "cpu": "c", "split": "/", "disk": "d"},
    flight=">",
)


def safe(text: str) -> str:
    """`text` with nothing that a terminal would act on: controls are spelled out, invisible marks left out."""
    return "".join(c if c.isprintable() else _shown(c) for c in text)


def _shown(char: str) -> str:
    if char == "\t":
        return "    "
    kind = unicodedata.category(char)
    if kind in ("Zs", "Zl", "Zp"):
        return " "
    return {"Cc": ascii(char)[1:-1], "Cf": ""}.get(kind, "\ufffd")


def last_lines(text: str, width: int, count: int) -> list[str]:
    """The last `count` lines of a text as wrapped to `width` cells, safe to draw."""
    lines: list[str] = []
    rest = text.replace("\r\n", "\n")
    while len(lines) < count:
        rest, end, line = rest.rpartition("\n")
        lines[:0] = wrapped(safe(line), width)
        if not end:
            break
    return lines[-count:] if count else []


def wrapped(line: str, width: int) -> list[str]:
    """One line cut to pieces of at most `width` cells, between words where there are such."""
    pieces, start, plain = [], 0, line.isascii()
    while (end := min(len(line), start + width) if plain else _reach(line, start, width)) < len(line):
        space = line.rfind(" ", start + 1, end + 1)
        at = space if space > 0 else max(start + 1, end)
        pieces.append(line[start:at])
        start = at + (line[at : at + 1] == " ")
    return [*pieces, line[start:]] if start < len(line) or not pieces else pieces


def _reach(line: str, start: int, width: int) -> int:
    """The end of what fits into `width` cells from `start` on."""
    used = 0
    for at in range(start, len(line)):
        used += get_character_cell_size(line[at])
        if used > width:
            return at
    return len(line)
