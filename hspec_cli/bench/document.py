"""A bench as JSON, and back; as CSV; as Markdown."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hspec_cli.bench import figures
from hspec_cli.bench.records import (
    Case,
    Ceiling,
    Difference,
    Level,
    Memory,
    Outcome,
    Published,
    Result,
    Row,
    Trial,
)
from hspec_cli.bench.table import headline, published_cells
from hspec_profiles.errors import HspecError

FORMAT = "hspec bench 1"


def as_json(result: Result) -> str:
    """One JSON document: everything, a line for every case."""
    made = asdict(result)
    outcomes = [json.dumps(_outcome(outcome), ensure_ascii=False, allow_nan=False) for outcome in result.outcomes]
    del made["outcomes"]
    lines = [f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False, allow_nan=False)}" for k, v in made.items()]
    cases = ",\n    ".join(outcomes)
    return "{\n" + ",\n".join([f'  "format": "{FORMAT}"', *lines, f'  "outcomes": [\n    {cases}\n  ]']) + "\n}"


def _outcome(outcome: Outcome) -> dict[str, Any]:
    """The record, and beside each row what follows from it, so that nobody must compute a median."""
    made = asdict(outcome)
    for row, written in zip(outcome.rows, made["rows"], strict=True):
        written["figures"] = {column.name: column.value(outcome, row) for column in figures.ALL}
        if row.withheld:
            written["figures"]["speed_withheld"] = True
    return made


def load(path: str) -> Result:
    """The bench in a JSON file. Raises HspecError for what is none."""
    try:
        raw = json.loads(Path(path).expanduser().read_text("utf-8"))
        if raw.pop("format") != FORMAT:
            raise KeyError("format")
        outcomes = tuple(map(_read_outcome, raw.pop("outcomes")))
        published = tuple(Published(**row) for row in raw.pop("published"))
        raw["notes"] = tuple(raw["notes"])
        return Result(**raw, outcomes=outcomes, published=published)
    except OSError as failure:
        raise HspecError(f"cannot read `{path}`: {str(failure.strerror).lower()}") from failure
    except (ValueError, KeyError, TypeError, AttributeError) as failure:
        raise HspecError(f"`{path}` is not what `hspec bench --json` writes", "write it anew") from failure


def _read_outcome(raw: dict[str, Any]) -> Outcome:
    ceiling = Ceiling(**raw["ceiling"]) if raw["ceiling"] else None
    return Outcome(Case(**raw["case"]), tuple(map(_read_row, raw["rows"])), ceiling)


def _read_row(raw: dict[str, Any]) -> Row:
    del raw["figures"]
    raw["trials"] = tuple(
        Trial(**{**trial, "levels": tuple(Level(**level) for level in trial["levels"])}) for trial in raw["trials"]
    )
    raw["memory"] = Memory(**raw["memory"]) if raw["memory"] else None
    raw["difference"] = Difference(**raw["difference"]) if raw["difference"] else None
    return Row(**raw)


HEADS = ("method", "role", "context", "new", "temperature", "batch", "trials")
LAST = ("accepted", "text", "reason", "stack")


def as_csv(result: Result) -> str:
    """A line for every method in every case; empty where a figure is not known or must not be told."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow((*HEADS, *(column.name for column in figures.ALL), "ceiling_ms", *LAST))
    for outcome in result.outcomes:
        writer.writerows(_csv_row(outcome, row) for row in outcome.rows)
    return out.getvalue().rstrip("\n")


def _csv_row(outcome: Outcome, row: Row) -> list[Any]:
    case, ceiling = outcome.case, outcome.ceiling
    values = [column.value(outcome, row) for column in figures.ALL]
    told = ["" if value is None else f"{value:.6g}" if isinstance(value, float) else value for value in values]
    text = "same" if row.same else "differs" if row.same is False else "not compared"
    kept = figures.accepted(row)
    return [
        *(row.method, row.role, case.context, case.new, case.temperature, case.batch, len(row.trials)),
        *told,
        f"{1e3 * ceiling.seconds:.6g}" if ceiling else "",
        "" if kept == figures.NONE else kept,
        text if row.trials else "",
        row.reason or "",
        row.typical.stack if row.typical else "",
    ]


def as_markdown(result: Result) -> str:
    """A table for every case, as GitHub shows them."""
    parts = [headline(result)]
    for outcome in result.outcomes:
        if result.published and not any(row.trials for row in outcome.rows):
            continue
        parts.append(f"### {figures.heading(outcome.case)}")
        if outcome.ceiling:
            parts.append(figures.ceiling_words(outcome.ceiling))
        parts.append(grid(*_grid(outcome)))
        parts += [f"* {_escaped(remark)}" for remark in figures.remarks(outcome)]
    if result.published:
        heads = ("setting", "method", "paper", "here", "kept there", "here", "why not")
        rows = [(r.setting, r.method, *published_cells(r), r.reason or "") for r in result.published]
        parts += ["### Beside the published figures", grid(heads, rows)]
    parts += [f"* {_escaped(note)}" for note in result.notes]
    return "\n\n".join(parts)


def _grid(outcome: Outcome) -> tuple[Sequence[str], list[Sequence[str]]]:
    columns = (figures.SPEED_UP, figures.PER_PASS)
    more = (figures.FIRST, figures.CEILING, figures.MEMORY, figures.JOULES)
    heads = ("method", "ms/token", "range", *(c.head for c in columns), "kept", *(c.head for c in more))
    rows = [
        (
            *(row.method, figures.MS.text(outcome, row), figures.spread(outcome, row)),
            *(c.text(outcome, row) for c in columns),
            figures.accepted(row),
            *(c.text(outcome, row) for c in more),
        )
        for row in outcome.rows
    ]
    return heads, list(rows)


def grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; numbers to the right."""
    return "\n".join(_lines(heads, rows))


def _lines(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "|".join("---:" if n else "---" for n in range(len(heads))) + "|"
    for row in rows:
        yield "| " + " | ".join(map(_escaped, row)) + " |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;").replace("`", "'")
