"""Frozen dataclasses to TOML and back, every value checked on its way in."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import types
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Record = TypeVar("Record")


class Malformed(Exception):
    """A document that does not describe the record; the text says where and why."""


def dumps(record: Any, version: int) -> str:
    """The record as TOML with this `version` of its format; fields at their defaults are left out."""
    return "\n".join(_lines({"version": version, **plain(record)})) + "\n"


def loads(kind: type[Record], text: str, version: int) -> Record:
    """The record that `dumps` wrote. Raises Malformed."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Malformed(f"not TOML: {str(error)[:1].lower()}{str(error)[1:]}") from None
    return of_table(kind, table, version)


def of_table(kind: type[Record], table: dict[str, Any], version: int) -> Record:
    """The record of a document's top table, the `version` of which is taken out. Raises Malformed."""
    found = table.pop("version", None)
    if found != version:
        raise Malformed(f"format version {found!r} where {version} is read" if found is not None else "no `version`")
    return kind(**_fields(kind, table, ""))


def plain(value: Any) -> Any:
    """Dataclasses as dicts without fields at their defaults, tuples as lists."""
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        defaults = {f.name: _default(f) for f in dataclasses.fields(value)}
        return {name: plain(part) for name, part in fields.items() if part != defaults[name]}
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, tuple) else value


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _lines(table: Mapping[str, Any], path: str = "") -> list[str]:
    """The table's own values first, then its tables, as TOML demands."""
    lines = [f"{_key(name)} = {_value(part)}" for name, part in table.items() if not _is_table(part)]
    for name, part in table.items():
        for inner in part if isinstance(part, list) and _is_table(part) else [part] if _is_table(part) else []:
            head = f"{path}{_key(name)}"
            lines += ["", f"[[{head}]]" if isinstance(part, list) else f"[{head}]", *_lines(inner, f"{head}.")]
    return lines


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(part, Mapping) for part in value))


def _key(name: str) -> str:
    return name if name.replace("_", "a").isalnum() and name.isascii() else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, str):  # JSON's strings are TOML's but for one character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, int):
        return f"{value:_}" if type(value) is int else json.dumps(value)
    short = f"{value:.6g}"
    return (short if float(short) == value else repr(value)).replace("e+0", "e").replace("e+", "e")


def _fields(kind: Any, table: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Arguments of the dataclass `kind`."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints = get_type_hints(kind)
    strange = [f"`{path}{name}`" for name in table if name not in fields]
    if strange:
        raise Malformed(f"{', '.join(strange)} not known")
    needs = (f.name for f in fields.values() if f.default is f.default_factory is dataclasses.MISSING)
    missing = [f"`{path}{name}`" for name in needs if name not in table]
    if missing:
        raise Malformed(f"{', '.join(missing)} missing")
    return {name: _checked(hints[name], value, f"{path}{name}") for name, value in table.items()}


def _checked(kind: Any, value: Any, path: str) -> Any:
    """`value` as the type that a field declares. Raises Malformed."""
    if get_origin(kind) is types.UnionType:  # a field that may be absent
        return _checked(get_args(kind)[0], value, path)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return kind(**_fields(kind, value, f"{path}."))  # type: ignore[operator]
    if get_origin(kind) is tuple and isinstance(value, list):
        return _items(get_args(kind), value, path)
    if get_origin(kind) is Mapping and isinstance(value, Mapping):
        return {name: _checked(get_args(kind)[1], part, f"{path}.{name}") for name, part in value.items()}
    if kind in (str, bool) and type(value) is kind:
        return value
    if kind is int and type(value) is int and value >= 0:
        return value
    if kind is float and type(value) in (int, float) and math.isfinite(value) and value >= 0:
        return float(value)
    raise Malformed(f"`{path}` must be {WORDS.get(kind, 'a list' if get_origin(kind) is tuple else 'a table')}")


WORDS = {str: "a string", int: "a whole number, 0 or more", float: "a number, 0 or more", bool: "true or false"}


def _items(kinds: Sequence[Any], values: Sequence[Any], path: str) -> tuple[Any, ...]:
    if kinds[-1] is Ellipsis:
        kinds = [kinds[0]] * len(values)
    if len(kinds) != len(values):
        raise Malformed(f"`{path}` must have {len(kinds)} items")
    return tuple(
        _checked(kind, value, f"{path}.{i}") for i, (kind, value) in enumerate(zip(kinds, values, strict=True))
    )
