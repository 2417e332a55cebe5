"""What changed between two benches, for people and as JSON."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from hspec_cli.bench.compare import HEADS, RULE, Change, cells, changes, summary, warnings
from hspec_cli.bench.document import grid
from hspec_cli.bench.records import Result
from hspec_cli.show import written


def listing(old: Result, new: Result) -> str:
    """A table of 80 columns."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    made = changes(old, new)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for number, head in enumerate(HEADS):
        table.add_column(head, justify="right" if 2 <= number <= 4 else "left", overflow="fold")
    for change in made:
        style = "bold" if change.verdict in ("faster", "slower") else ""
        table.add_row(*(Text(cell) for cell in cells(change)), style=style)
    with console.capture() as captured:
        for line in warnings(old, new):
            console.print(Text(f"note: {line}"))
        console.print(table)
        for change in made:
            if change.remark:
                console.print(Text(f"note: {change.method}, {change.case.words}: {change.remark}"))
        console.print(Text(f"\n{summary(made)}\n\n{RULE}"))
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def as_markdown(old: Result, new: Result) -> str:
    """A Markdown table."""
    made = changes(old, new)
    notes = [f"* {line}" for line in warnings(old, new)]
    return "\n\n".join([*notes, grid(HEADS, [cells(change) for change in made]), summary(made), RULE])


def as_json(old: Result, new: Result) -> str:
    """One JSON document."""
    made = changes(old, new)
    document: dict[str, Any] = {
        "format": "hspec bench comparison 1",
        "warnings": list(warnings(old, new)),
        "rule": RULE,
        "changes": [_change(change) for change in made],
    }
    return written(document)


def _change(change: Change) -> dict[str, Any]:
    return {**asdict(change), "ratio": change.ratio}
