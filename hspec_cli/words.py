"""Words to records: a command is a frozen dataclass, its fields are the options, `execute` is the work."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast, get_type_hints

import typer
from typer.core import TyperCommand

from hspec_profiles.errors import UsageError


class Command(ABC):
    """A request that can be carried out; its subclasses are frozen dataclasses."""

    @abstractmethod
    def execute(self) -> int:
        """Do it and return the exit code."""


Record = TypeVar("Record", bound=Command)


def add(app: typer.Typer, name: str, record: type[Record], *, epilog: str) -> None:
    """Give `app` a command `name` that parses its words into `record`."""
    hints = get_type_hints(record, include_extras=True)

    def parse(**words: Any) -> Record:
        return record(**words)

    parameters = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, annotation=hints[f.name], default=f.default)
        for f in dataclasses.fields(cast(Any, record))
    ]
    parse.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    parse.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name, cls=Grouped, help=inspect.getdoc(record), epilog=f"\b\n{epilog}")(parse)


class Grouped(TyperCommand):
    """A command whose plain help lists the options under the headings that `rich_help_panel` gives them."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one definition list per heading, in the order of the fields."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                heading = "Arguments" if param.param_type_name == "argument" else "General"
                groups.setdefault(getattr(param, "rich_help_panel", None) or heading, []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records, col_max=26)


def choice(flag: str, values: Sequence[str], short: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """A parser of one of `values`, or of a `short` name for one; UsageError lists them."""

    def parse(word: str) -> str:
        value = (short or {}).get(word, word)
        if value not in values:
            raise UsageError(f"`{flag}` must be one of {', '.join(values)}, got '{word}'")
        return value

    return parse


def whole(flag: str, low: int, high: int | None = None) -> Callable[[str], int]:
    """A parser of whole numbers from `low` to `high`; UsageError tells the range."""
    valid = f"{low} or more" if high is None else f"from {low} to {high}"

    def parse(word: str) -> int:
        try:
            value = int(word)
        except ValueError:
            raise UsageError(f"`{flag}` must be a whole number, {valid}, got '{word}'") from None
        if value < low or (high is not None and value > high):
            raise UsageError(f"`{flag}` must be {valid}, got {value}")
        return value

    return parse


def tokens_or_share(flag: str) -> Callable[[str], int | float]:
    """A parser of a number of tokens, or of a share of the context: 512, 5%; UsageError tells both."""

    def parse(word: str) -> int | float:
        if not word.endswith("%"):
            return whole(flag, 1)(word)
        share = real(flag, 0, 100)(word[:-1]) / 100
        if not share:
            raise UsageError(f"`{flag}` must be more than 0%, got {word}")
        return share

    return parse


def real(flag: str, low: float, high: float = math.inf) -> Callable[[str], float]:
    """A parser of finite numbers from `low` to `high`; UsageError tells the range."""
    valid = f"{low:g} or more" if high == math.inf else f"from {low:g} to {high:g}"

    def parse(word: str) -> float:
        try:
            value = float(word)
        except ValueError:
            raise UsageError(f"`{flag}` must be a number, {valid}, got '{word}'") from None
        if not (math.isfinite(value) and low <= value <= high):
            raise UsageError(f"`{flag}` must be {valid}, got {word}")
        return value

    return parse


def as_text(word: str) -> str:
    """A command-line word as valid text: bytes that are not UTF-8 become U+FFFD."""
    return os.fsencode(word).decode("utf-8", "replace")
