"""The hierarchy as data: `ngram > target(retrieval:4096) > target(full)`, cheapest level first.

stack = level { ">" level }
level = name [ "(" argument { "," argument } ")" ]
argument = view [ ":" budget ] | "width=" tokens
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from hspec_profiles.errors import UsageError

LONGEST = 63  # tokens of a block behind its root
VIEWS = {"target": ("full", "streaming", "retrieval"), "draft": ("streaming",), "ngram": ()}
METHODS = {
    "auto": "TriForce, falling back to plain decoding where that measures faster",
    "triforce": "draft or n-grams > target with retrieved keys > target (arXiv 2404.11912)",
    "autoregressive": "the target alone, one token a pass",
}
_TOKEN = re.compile(r"\s*(?:([A-Za-z][\w-]*)|(\d+)|([>(),:=]))")


@dataclass(frozen=True)
class Spec:
    """One level as written: budget in tokens of its view, width in tokens per block."""

    name: str
    view: str | None = None
    budget: int | None = None
    width: int | None = None

    def __str__(self) -> str:
        view = self.view and self.view + (f":{self.budget}" if self.budget else "")
        arguments = [a for a in (view, self.width and f"width={self.width}") if a]
        return self.name + (f"({', '.join(arguments)})" if arguments else "")


Stack = tuple[Spec, ...]
PLAIN: Stack = (Spec("target", "full"),)


def written(stack: Stack) -> str:
    """The stack in its own grammar."""
    return " > ".join(map(str, stack))


def method(name: str, *, draft: bool) -> Stack:
    """The stack that a method stands for; without a draft model, n-grams of the text take its place."""
    if name not in METHODS:
        raise UsageError(f"unknown method: {name!r}", "methods are " + ", ".join(METHODS))
    if name == "autoregressive":
        return PLAIN
    first = Spec("draft", "streaming") if draft else Spec("ngram")
    return (first, Spec("target", "retrieval"), *PLAIN)


def parse(text: str) -> Stack:
    """Read a stack. Raises UsageError with the column, counted from 1."""
    reader = _Reader(text)
    stack = [reader.level()]
    while reader.peek() == ">":
        reader.take()
        stack.append(reader.level())
    if reader.peek():
        reader.fail("expected `>`")
    if (stack[-1].name, stack[-1].view) != ("target", "full"):
        reader.fail("the last level must be `target(full)`, which alone decides the text")
    return tuple(stack)


class _Reader:
    """Tokens of the grammar, with the column of each."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.column = text, 0, 1
        self.seen: list[Spec] = []

    def peek(self) -> str:
        """The next token, '' at the end."""
        match = _TOKEN.match(self.text, self.at)
        if match:
            self.column = match.start(match.lastindex or 0) + 1
            return match[match.lastindex or 0]
        rest = self.text[self.at :]
        self.column = self.at + len(rest) - len(rest.lstrip()) + 1
        if rest.strip():
            self.fail("unexpected character")
        return ""

    def take(self) -> str:
        token = self.peek()
        match = _TOKEN.match(self.text, self.at)
        self.at = match.end() if match else len(self.text)
        return token

    def fail(self, why: str) -> None:
        raise UsageError(
            f"--levels, column {self.column}: {why}: {self.text!r}",
            "for example `ngram > target(retrieval:4096) > target(full)`",
        )

    def expect(self, token: str) -> None:
        if self.peek() != token:
            self.fail(f"expected `{token}`")
        self.take()

    def level(self) -> Spec:
        name = self.peek()
        if name not in VIEWS:
            self.fail("expected a level, one of " + ", ".join(VIEWS))
        if name == "ngram" and self.seen:
            self.fail("`ngram` can only be the first level")
        if self.seen and (self.seen[-1].name, self.seen[-1].view) == ("target", "full"):
            self.fail("nothing may follow `target(full)`")
        self.take()
        spec = Spec(name, VIEWS[name][0] if VIEWS[name] else None)
        if self.peek() == "(":
            self.take()
            spec = self.argument(spec)
            while self.peek() == ",":
                self.take()
                spec = self.argument(spec)
            self.expect(")")
        self.seen.append(spec)
        return spec

    def argument(self, spec: Spec) -> Spec:
        word = self.peek()
        if word == "width":
            self.take()
            self.expect("=")
            return replace(spec, width=self.number(1, LONGEST))
        if word not in VIEWS[spec.name]:
            choices = [*VIEWS[spec.name], "width=N"]
            self.fail(f"expected for `{spec.name}` one of " + ", ".join(choices))
        self.take()
        if self.peek() != ":":
            return replace(spec, view=word)
        if word == "full":
            self.fail("`full` takes no budget")
        self.take()
        return replace(spec, view=word, budget=self.number(64, 1 << 24))

    def number(self, low: int, high: int) -> int:
        token = self.peek()
        if not token.isdigit() or not low <= int(token) <= high:
            self.fail(f"expected a number from {low} to {high}")
        return int(self.take())
