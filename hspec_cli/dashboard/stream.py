"""The stream that a dashboard is drawn from: what the engine tells and what the command line adds, with times.

A recording is JSON lines: a header with the version of the format, then one record a line, `{"t": seconds since the
start, "event": its name, ...its fields}`. It holds the answer's text and never the prompt.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, TextIO, Union, get_args, get_origin, get_type_hints

from hspec_cli import __version__
from hspec_decoding import events
from hspec_profiles.errors import HspecError, UsageError

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Began:
    """A run: what answers, how, and how much. Tokens."""

    model: str
    device: str
    dtype: str
    stack: str
    sampling: str
    prompt: int
    most: int  # of the answer
    context: int
    approximate: bool = False  # the text is only nearly the model's own


@dataclasses.dataclass(frozen=True)
class Progressed:
    """`done` of `total` of `what`, "layers loaded" for one."""

    what: str
    done: int
    total: int


@dataclasses.dataclass(frozen=True)
class Said:
    """A piece of the answer's text."""

    text: str


@dataclasses.dataclass(frozen=True)
class Ended:
    """The answer is complete, or ended early; why."""

    reason: str


Record = Began | Progressed | Said | Ended | events.Event
RECORDS: dict[str, type] = {kind.__name__: kind for kind in get_args(Record)}


@dataclasses.dataclass(frozen=True)
class Timed:
    """A record and when it came, in seconds since the start."""

    at: float
    record: Record


def header() -> str:
    """The first line of a recording."""
    return json.dumps({"hspec-recording": FORMAT, "version": __version__})


def line(timed: Timed) -> str:
    """A record as a line of JSON, without its end; fields at their defaults are left out."""
    made = {"t": round(timed.at, 6), "event": type(timed.record).__name__, **_plain(timed.record)}
    return json.dumps(made, ensure_ascii=False, separators=(",", ":"))


def write(stream: TextIO, timed: Iterable[Timed]) -> None:
    """Append records to a recording."""
    stream.write("".join(line(one) + "\n" for one in timed))
    stream.flush()


def read(path: str) -> list[Timed]:
    """A recording's records. Raises HspecError for what is none; a last line cut short is left out."""
    try:
        text = Path(path).expanduser().read_text("utf-8")
    except OSError as failure:
        raise UsageError(f"cannot read `{path}`: {str(failure.strerror).lower()}") from None
    except UnicodeDecodeError:
        raise _none(path, 1, "not UTF-8") from None
    lines = text.split("\n")
    _check(path, lines[0])
    return list(_records(path, lines[1:]))


def _check(path: str, first: str) -> None:
    try:
        version = json.loads(first)["hspec-recording"]
    except (ValueError, TypeError, KeyError):
        raise _none(path, 1, "its first line is no header") from None
    if version != FORMAT:
        raise HspecError(f"`{path}` is a recording of format {version}, this hspec reads {FORMAT}")


def _records(path: str, lines: list[str]) -> Iterator[Timed]:
    """Events whose names this version does not know are passed over."""
    for number, text in enumerate(lines, 2):
        if not text.strip():
            continue
        try:
            made = json.loads(text)
            kind = RECORDS.get(made["event"])
            if kind is not None:
                yield Timed(float(made["t"]), _record(kind, made))
        except (ValueError, TypeError, KeyError, AttributeError) as failure:
            if number == len(lines) + 1:
                return  # the run was killed while it wrote
            raise _none(path, number, str(failure) or type(failure).__name__) from None


def _none(path: str, number: int, problem: str) -> HspecError:
    return HspecError(
        f"`{path}` is no recording of hspec: line {number}: {problem}", "`hspec run --record FILE` makes one"
    )


def _plain(value: Any) -> Any:
    """Dataclasses and tuples as JSON has them."""
    if dataclasses.is_dataclass(value):
        fields = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {field.name: _plain(one) for field, one in fields if one != field.default}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _record(kind: type, made: Any) -> Any:
    """A dataclass from its fields. Raises TypeError, ValueError or KeyError for what is not one."""
    hints = _hints(kind)
    return kind(**{name: _value(hints[name], value) for name, value in made.items() if name in hints})


def _value(hint: Any, value: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin is tuple:
        return tuple(_value(args[0], one) for one in value)
    if origin in (types.UnionType, Union):
        return None if value is None else _value(next(arg for arg in args if arg is not type(None)), value)
    if origin is Literal:
        return str(value)
    if dataclasses.is_dataclass(hint):
        return _record(hint, value)  # type: ignore[arg-type]
    if not isinstance(value, (int, float) if hint is float else hint):
        raise TypeError(f"{value!r} where {hint.__name__} is due")
    return hint(value)
