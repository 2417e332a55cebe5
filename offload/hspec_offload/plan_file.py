"""Plans as JSON and TOML, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hspec_offload.cost import PIECE
from hspec_offload.memory import ROWS
from hspec_offload.plan import Plan
from hspec_profiles.document import Malformed, dumps, loads, of_table, plain
from hspec_profiles.errors import HspecError

VERSION = 1
WEIGHTS, KEYS = ("gpu", "stream", "disk", "cpu"), ("gpu", "stream", "cpu", "split")


def document(plan: Plan, hints: Sequence[str] = ()) -> dict[str, Any]:
    """The plan for JSON; what is at its default is left out."""
    return {"version": VERSION, **plain(plan), "hints": list(hints)}


def as_toml(plan: Plan) -> str:
    """The plan as TOML."""
    return dumps(plan, VERSION)


def parsed(text: str) -> Plan:
    """The plan of a TOML text, or of a JSON document, whose hints are left aside. Raises Malformed."""
    if not text.lstrip().startswith("{"):
        return _sound(loads(Plan, text, VERSION))
    try:
        table = json.loads(text)
    except ValueError as error:
        raise Malformed(f"not JSON: {error}") from None
    table.pop("hints", None)
    return _sound(of_table(Plan, table, VERSION))


def _sound(plan: Plan) -> Plan:
    """The plan, if all that a run relies on is there: a hand may have changed it. Raises Malformed."""
    runs, firsts = plan.layers, [0, *(run.last + 1 for run in plan.layers)]
    carried = bool(plan.gpus) and not plan.resident
    for holds, rule in (
        (firsts == sorted({*firsts}) and firsts[:-1] == [run.first for run in runs], "`layers` follow one another"),
        (all(run.weights in WEIGHTS for run in runs), f"`weights` of layers are {', '.join(WEIGHTS)}"),
        (all(run.keys in KEYS for run in runs), f"`keys` of layers are {', '.join(KEYS)}"),
        (all(run.copy in ("", "int4") for run in runs), "the `copy` of layers is int4"),
        (len(plan.devices) == len(plan.gpus) + 1, "`devices` are those of `gpus`, and RAM"),
        (1 <= plan.block <= ROWS, f"a `block` has from 1 to {ROWS} rows"),
        (not carried or plan.ring_pieces * plan.piece_bytes >= PIECE, f"the ring has {PIECE:,} bytes at least"),
    ):
        if not holds:
            raise Malformed(f"it breaks a rule: {rule}")
    return plan


def read_plan(path: Path) -> Plan:
    """The plan that `hspec plan --json` wrote. Raises HspecError."""
    try:
        return parsed(path.read_text("utf-8"))
    except OSError as failure:
        raise HspecError(f"no plan can be read at `{path}`: {failure.strerror}") from failure
    except (Malformed, UnicodeDecodeError) as failure:
        problem = failure if isinstance(failure, Malformed) else "not UTF-8"
        raise HspecError(f"`{path}` is no plan: {problem}", "`hspec plan --json > FILE` writes one") from None
