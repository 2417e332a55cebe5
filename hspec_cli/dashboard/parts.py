"""The sections of a view, each some lines of at most a given width."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from rich.text import Text

from hspec_cli.dashboard.glyphs import Glyphs, safe
from hspec_cli.dashboard.state import History, Level, State
from hspec_cli.progress import each_second
from hspec_cli.show import ENDED
from hspec_cli.tidal_notes import APPROXIMATE
from hspec_offload.sizes import human

HEADING, DIM, GOOD, BAD, LIT = "bold cyan", "dim", "green", "yellow", "bold reverse"
WIDE_ENOUGH = 72  # cells for a hint
NARROW = 46  # cells below which a line says only the most important
LABEL = 8  # cells of a heading in front of a line


def header(state: State, width: int, now: float) -> Text:
    """What runs, and for how long."""
    run, labelled = state.run, f"{APPROXIMATE}  " * _approximate(state)
    left = Text(f"{safe(run.model)}, {safe(run.device)}, {run.dtype}" if run else "hspec")
    right = f"{labelled}{state.phase}  {clock(now if state.ended is None else state.at)}"
    if width < NARROW:
        return Text(right.replace(" the prompt", ""), "bold")
    left.truncate(width - len(right) - 2, overflow="ellipsis", pad=True)
    return Text.assemble((left.plain, "bold"), "  ", (right, DIM))


def _approximate(state: State) -> bool:
    return state.run is not None and state.run.approximate


def clock(seconds: float) -> str:
    """A time for people: 8.3 s, 1:05, 1:02:03."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def progress(state: State, width: int, now: float, glyphs: Glyphs) -> Text:
    """How far the phase is."""
    if state.ended is not None:
        spent = f" in {clock(state.seconds)}" if state.seconds else ""
        return Text(f"{state.tokens:,} tokens{spent}{ENDED.get(state.ended, '')}", GOOD)
    if state.work:
        work = state.work
        return _bar(work.what, work.done, work.total, work.rate, work.left(now), width, glyphs)
    if state.run and state.tokens:
        speed, most = state.average, state.run.most
        left = (most - state.tokens) / speed if speed else None
        return _bar("tokens", state.tokens, most, speed, left, width, glyphs)
    return Text("")


def _bar(what: str, done: int, total: int, rate: float | None, left: float | None, width: int, glyphs: Glyphs) -> Text:
    size = human if "bytes" in what else "{:,.0f}".format
    share = done / max(1, total)
    words = [f"{size(done)} of {size(total)} {what.replace('bytes', '').strip()}"]
    if len(words[0]) > width - 5:
        words = [f"{size(done)} of {size(total)}"]
    if rate:
        words.append(each_second(what, rate))
    if left is not None:
        words.append(f"{clock(max(0.0, left))} left" + " at most" * (what == "tokens"))
    ahead, told = f"{share:4.0%} ", _joined(words, "  ", width - 5)
    cells = min(30, width - len(ahead) - len(told) - 2)
    bar = (glyphs.bar(share, cells) + "  ", GOOD) if cells >= 3 else ""
    return Text.assemble(ahead, bar, told)


def _joined(words: Sequence[str], between: str, width: int) -> str:
    """The first of the words, and of the others as many as there is room for."""
    made = words[0]
    for word in words[1:]:
        if len(made) + len(between) + len(word) > width:
            break
        made += between + word
    return made


def speed(state: State, width: int) -> Text:
    """Tokens a second beside plain decoding, and tokens a pass."""
    now, average, plain = state.speed, state.average, state.plain_speed
    if now is None or average is None:
        return Text("")
    gain = average / plain[0] if plain else None
    if width < NARROW:
        return Text(_joined([f"{now:.1f} tokens/s", *([f"{gain:.2f} ×"] if gain else [])], " ", width))
    long, short = f"{now:.1f} tokens/s (average {average:.1f})", f"{average:.1f} tokens/s"
    tries = [long, short]
    if plain:
        beaten = f"{gain:.2f} × plain decoding"
        tries = [f"{long}, {beaten}'s {plain[0]:.1f} ({plain[1]})", f"{short}, {beaten}'s {plain[0]:.1f} ({plain[1]})"]
        tries += [f"{short}, {beaten} ({plain[1]})", f"{short}, {beaten}", short]
    return Text.assemble(label("speed"), next((words for words in tries if len(words) <= width - LABEL), short))


def label(word: str) -> tuple[str, str]:
    return f"{word:<{LABEL}}", HEADING


def chart(history: History, plain: float | None, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """Speed over time in `height` rows, the newest at the right; plain decoding's is a line across."""
    cells = width - LABEL if width >= NARROW else width
    rates = [tokens / history.width for tokens in history.slots[:-1]]
    rates = _coarser(rates, cells)
    top = max([*rates, 1.2 * (plain or 0.0), 1e-9])
    level = int(plain / top * height) if plain else -1  # the row, from below, that the line is in
    return [
        _row(rates, row, top, plain, row == level, (width, cells, height), glyphs) for row in reversed(range(height))
    ]


def _coarser(rates: list[float], cells: int) -> list[float]:
    """At most so many rates: neighbours become their mean."""
    group = -(-len(rates) // cells) if cells else 1
    return [sum(rates[i : i + group]) / len(rates[i : i + group]) for i in range(0, len(rates), max(1, group))]


def _row(
    rates: Sequence[float],
    row: int,
    top: float,
    plain: float | None,
    lined: bool,
    size: tuple[int, int, int],
    glyphs: Glyphs,
) -> Text:
    width, cells, height = size
    made = Text()
    if cells < width:
        mark = f"{top:.0f}" if row == height - 1 else "plain" if lined else "0" if row == 0 else ""
        made.append(f"{mark:>{LABEL - 1}} ", DIM)
    levels = "▁▂▃▄▅▆▇█" if len(glyphs.eighths) > 2 else "#"
    steps = [round(min(1.0, max(0.0, rate / top * height - row)) * len(levels)) for rate in rates]
    signs = [levels[step - 1] if step else glyphs.line if lined else " " for step in steps]
    styles = [
        DIM if not step else GOOD if not plain or rate >= plain else BAD
        for rate, step in zip(rates, steps, strict=True)
    ]
    for style, run in groupby(zip(signs, styles, strict=True), key=itemgetter(1)):
        made.append("".join(sign for sign, _ in run), style)
    if lined:
        made.append(glyphs.line * (cells - len(rates)), DIM)
    return made


def levels(state: State, width: int, glyphs: Glyphs) -> list[Text]:
    """Headings, which may be empty, and a row for each level: tokens proposed and accepted, share of the time."""
    most = max([level.proposed for level in state.levels[:-1]], default=0)
    rows = [_level(level, most, state, width, glyphs) for level in state.levels[:-1]]
    if width < NARROW or not state.levels:
        return [Text(""), *rows]
    return [_heads(width), *rows, _target(state, width, glyphs)]


def _columns(width: int) -> tuple[int, int, int]:
    """Cells of a level's name, of its bar and of that of its time; 25 go to numbers and 6 to the time in percent."""
    time = 7 if width >= WIDE_ENOUGH else 0
    name = min(26, max(8, (width - 32 - time) * 2 // 3))
    return name, max(0, width - name - 32 - time), time


def _heads(width: int) -> Text:
    name, bar, _ = _columns(width)
    return Text(f"{'level':<{name}} {'accepted of proposed':<{bar + 24}} {'time':>6}", HEADING)


def _level(level: Level, most: int, state: State, width: int, glyphs: Glyphs) -> Text:
    accepted = level.acceptance
    share = "-" if accepted is None else f"{accepted:.0%}"
    if width < NARROW:
        short = _name(level, max(4, width // 3))
        bar = _accepted(level, level.proposed, max(2, width - len(short.plain) - 6), glyphs)
        return Text.assemble(short, " ", bar, f" {share:>4}")
    cells, bar_cells, time = _columns(width)
    name = _name(level, cells)
    counts = f"{share:>5} {f'{short_count(level.kept)} of {short_count(level.proposed)}':>18} "
    return Text.assemble(
        name, " ", _accepted(level, most, bar_cells, glyphs), counts, _time(level, state, time, glyphs)
    )


def short_count(number: int) -> str:
    """A count in at most seven characters."""
    return f"{number:,}" if number < 1_000_000 else f"{number / 1e6:.1f} M"


def _accepted(level: Level, most: int, cells: int, glyphs: Glyphs) -> Text:
    """As long as the level proposed, compared with `most`; filled as far as that was accepted."""
    length = min(cells, max(1, round(cells * level.proposed / most))) if most and level.proposed else 0
    bar = glyphs.bar(level.acceptance or 0.0, length)
    filled = len(bar.rstrip(glyphs.rest))
    return Text.assemble((bar[:filled], GOOD), (bar[filled:], DIM), " " * (cells - length))


def _time(level: Level, state: State, cells: int, glyphs: Glyphs) -> Text:
    share = level.seconds / state.seconds if state.seconds else 0.0
    return Text.assemble(f"{share:>5.0%} ", (glyphs.bar(share, cells), "magenta"))


def _target(state: State, width: int, glyphs: Glyphs) -> Text:
    target = state.levels[-1]
    cells, bar, time = _columns(width)
    name, words = _name(target, cells), Text(f"{state.per_pass or 0:.2f} tokens a pass, {target.passes:,} passes")
    words.truncate(bar + 25, overflow="ellipsis", pad=True)
    return Text.assemble(name, " ", words, _time(target, state, time, glyphs))


def times(state: State, width: int) -> list[Text]:
    """Milliseconds a token: measured, promised by the measurements of levels, predicted by the plan."""
    if not state.average:
        return []
    told = [f"{1e3 / state.average:.1f} measured"]
    promised = [done.promised for done in state.rounds if done.promised]
    if promised:
        told.append(f"{1e3 * sum(promised) / len(promised):.1f} predicted")
    if state.expected.token:
        told.append(f"{1e3 * state.expected.token:.1f} by the plan")
    if width < NARROW:
        return [Text(f"{told[0].removesuffix(' measured')} ms/token")]
    told[0] = f"ms a token: {told[0]}"
    line = _joined(told, ", ", width - LABEL)
    if state.read:
        read = [f"{line}; prompt {clock(state.read)}"]
        read += [f"{clock(state.expected.prefill)} by the plan"] if state.expected.prefill else []
        both = _joined(read, ", ", width - LABEL)
        line = both if len(both) <= width - LABEL else line
    return [Text.assemble(label("times"), line)]


def status(state: State) -> str:
    """One line: speed, tokens a pass, acceptance by level."""
    if state.speed is None:
        return ""
    words = [f"{APPROXIMATE}: " * _approximate(state) + f"{state.speed:.1f} tokens/s"]
    if len(state.levels) > 1 and state.per_pass:
        words.append(f"{state.per_pass:.1f} tokens per pass")
    accepted = [
        f"{_short(level)} {level.acceptance:.0%}" for level in state.levels[:-1] if level.acceptance is not None
    ]
    if accepted:
        words.append("accepted " + ", ".join(accepted))
    return ", ".join([*words, f"{state.tokens:,} tokens"])


def _short(level: Level) -> str:
    """The level's name without what all names have."""
    return safe(level.name.replace("target(", "").rstrip(")"))


def _name(level: Level, cells: int) -> Text:
    """The level's name in so many cells."""
    name = Text(safe(level.name) if len(level.name) <= cells else _short(level))
    name.truncate(cells, overflow="ellipsis", pad=True)
    return name
