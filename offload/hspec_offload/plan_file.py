"""Plans as JSON and TOML, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hspec_offload.plan import Plan
from hspec_profiles.document import Malformed, dumps, loads, plain
from hspec_profiles.errors import HspecError

VERSION = 1


def document(plan: Plan, hints: Sequence[str] = ()) -> dict[str, Any]:
    """The plan for JSON; what is at its default is left out."""
    return {"version": VERSION, **plain(plan), "hints": list(hints)}


def as_toml(plan: Plan) -> str:
    """The plan as TOML."""
    return dumps(plan, VERSION)


def parsed(text: str) -> Plan:
    """The plan of a TOML text, or of a JSON document, whose hints are left aside. Raises Malformed."""
    if not text.lstrip().startswith("{"):
        return loads(Plan, text, VERSION)
    try:
        table = json.loads(text)
    except ValueError as error:
        raise Malformed(f"not JSON: {error}") from None
    table.pop("hints", None)
    version = table.pop("version", None)
    if version != VERSION:
        raise Malformed(f"format version {version!r} where {VERSION} is read")
    return loads(Plan, dumps(table, VERSION), VERSION)


def read_plan(path: Path) -> Plan:
    """The plan that `hspec plan --json` wrote. Raises HspecError."""
    try:
        return parsed(path.read_text("utf-8"))
    except OSError as failure:
        raise HspecError(f"no plan can be read at `{path}`: {failure.strerror}") from failure
    except (Malformed, UnicodeDecodeError) as failure:
        problem = failure if isinstance(failure, Malformed) else "not UTF-8"
        raise HspecError(f"`{path}` is no plan: {problem}", "`hspec plan --json > FILE` writes one") from None
