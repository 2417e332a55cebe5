"""A bench for people: tables of 80 columns without lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from hspec_cli.bench import figures
from hspec_cli.bench.records import LOSSY, Outcome, Published, Result, Row
from hspec_offload.sizes import human

WIDE, WIDEST = 100, 120  # columns from which on memory and energy are in the table; of the widest one
LEGEND = (
    "ms/token: median of a token of each sequence after the prompt, range: fastest to slowest trial. "
    "× plain: over the fastest plain decoding in the same case. tok/pass: tokens that a pass of the whole model "
    "brings. kept: share of each level's tokens that the next one kept, cheapest first. first: time to first token, "
    "prompt read anew. ceiling: of the speed that one read of weights and keys a token allows; more than 100 % "
    "needs fewer passes than tokens."
)


def listing(result: Result) -> str:
    """All tables, as wide as the terminal; without escape codes where stdout is none."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    console.width = min(console.width, WIDEST)
    with console.capture() as captured:
        _print(console, result)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def _print(console: Any, result: Result) -> None:
    from rich.text import Text

    console.print(Text(headline(result)))
    for outcome in result.outcomes:
        if result.published and not any(row.trials for row in outcome.rows):
            continue  # its rows and the reason stand beside the published figures
        console.print(Text(f"\n{figures.heading(outcome.case)}", "bold"))
        if outcome.ceiling:
            console.print(Text(figures.ceiling_words(outcome.ceiling), "dim"))
        console.print(_table(outcome, console.width >= WIDE))
        if console.width < WIDE:
            for line in _memory(outcome):
                console.print(Text(line, "dim"))
        for remark in figures.remarks(outcome):
            console.print(Text(f"note: {remark}"))
    if result.published:
        console.print(Text("\nBeside the published figures", "bold"))
        console.print(_published(result.published))
        for line in _reasons(result.published):
            console.print(Text(line))
    for note in result.notes:
        console.print(Text(f"\nnote: {note}"))
    if any(row.trials for outcome in result.outcomes for row in outcome.rows):
        console.print(Text(f"\n{LEGEND}", "dim"))


def headline(result: Result) -> str:
    """What was measured, on what."""
    draft = f" with the draft {result.draft}" if result.draft else ""
    trials = f"{result.trials} trial{'s' * (result.trials != 1)}, methods in turn"
    if not result.trials:
        return f"{result.model} on {result.host}: nothing could be run"
    return (
        f"{result.model}{draft} in {result.dtype} on {result.host}; {result.text}, seed {result.seed}, "
        f"{trials}, {result.seconds:.0f} s in all"
    )


def _table(outcome: Outcome, wide: bool) -> Any:
    from rich.table import Table
    from rich.text import Text

    columns = [figures.SPEED_UP, figures.PER_PASS]
    more = [figures.FIRST, figures.CEILING, *[figures.MEMORY, figures.JOULES] * wide]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("method", overflow="fold", min_width=14)
    for head in ("ms/token", "range", *(c.head for c in columns), "kept", *(c.head for c in more)):
        table.add_column(head, justify="right", no_wrap=True)
    fastest = _fastest(outcome.rows)
    for row in outcome.rows:
        cells = [row.method, figures.MS.text(outcome, row), figures.spread(outcome, row)]
        cells += [column.text(outcome, row) for column in columns]
        cells += [figures.accepted(row), *(column.text(outcome, row) for column in more)]
        table.add_row(*(Text(cell) for cell in cells), style="bold" if row is fastest else "")
    return table


def _fastest(rows: Sequence[Row]) -> Row | None:
    """The row with the highest speed-up, where there is a choice."""
    told = [row for row in rows if row.speed_up and row.role != LOSSY]
    return max(told, key=lambda row: row.speed_up or 0.0) if len(told) > 1 else None


def _memory(outcome: Outcome) -> Iterator[str]:
    """Memory, and energy, of every method in one line."""
    parts = [f"{row.method} {human(row.memory.total)}" for row in outcome.rows if row.memory]
    if parts:
        yield "memory: " + ", ".join(parts)
    spent = [f"{row.method} {row.joules:.2f}" for row in outcome.rows if row.joules is not None]
    if spent:
        yield "joules a token: " + ", ".join(spent)


def _published(rows: Sequence[Published]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for head in ("setting", "method"):
        table.add_column(head, overflow="fold")
    for head in ("paper", "here", "kept there", "here"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        cells = (row.setting, row.method, *published_cells(row))
        table.add_row(*(Text(cell) for cell in cells))
    return table


def published_cells(row: Published) -> tuple[str, str, str, str]:
    """Speed-ups there and here, acceptance there and here."""
    pairs = ((row.speed_up, figures.times), (row.measured, figures.times))
    shares = (row.acceptance, row.measured_acceptance)
    told = [figures.NONE if value is None else words(value) for value, words in pairs]
    kept = [figures.NONE if value is None else f"{value:.3f}".removeprefix("0") for value in shares]
    return told[0], told[1], kept[0], kept[1]


def _reasons(rows: Sequence[Published]) -> Iterator[str]:
    """Why settings were not run, each reason once."""
    reasons: dict[str, int] = {}
    for row in rows:
        if row.reason:
            reasons[row.reason] = reasons.get(row.reason, 0) + 1
    for reason, count in reasons.items():
        yield f"note: not run here ({count} row{'s' * (count > 1)}): {reason}"
