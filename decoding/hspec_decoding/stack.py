"""The hierarchy as data: `ngram > target(retrieval:4096) > target(full)`, cheapest level first.

stack = level { ">" level }
level = name [ "(" argument { "," argument } ")" ]
argument = view [ ":" budget ] | "w=" format | "kv=" format | "width=" tokens
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from hspec_offload.speculation import Level, written
from hspec_profiles.errors import UsageError

__all__ = [
    "FORMATS",
    "LONGEST",
    "METHODS",
    "PLAIN",
    "TIDAL",
    "VIEWS",
    "Spec",
    "Stack",
    "approximate",
    "candidates",
    "method",
    "parse",
    "written",
]

LONGEST = 63  # tokens of a block behind its root
FED = "tidal-fed"
TIDAL = ("tidal", "tidal-heads", "tidal-pooled", FED)  # lists made as calibrated, or as said
VIEWS = {"target": ("full", "streaming", "retrieval", *TIDAL), "draft": ("streaming",), "ngram": (), "chimera": ()}
FORMATS = {"w": ("nf4", "int4"), "kv": ("int4", "int8")}  # of a resident copy of the target's weights, of its keys
METHODS = {
    "auto": "the fastest of TriForce with whole or 4-bit middle levels and plain decoding, measured as it runs",
    "triforce": "draft or n-grams > target with retrieved keys > target (arXiv 2404.11912)",
    "chimera": "trees of trained heads' tokens > target (arXiv 2402.15758)",
    "autoregressive": "the target alone, one token a pass",
    "tidal": "APPROXIMATE: the target with a few layers that read all keys (arXiv 2410.05076)",
    "tidal-lossless": "the same as a draft > target, which alone decides the text",
}
_TOKEN = re.compile(r"\s*(?:([A-Za-z][\w-]*)|(\d+)|([>(),:=]))")


@dataclass(frozen=True)
class Spec(Level):
    """One level as written: budget in tokens of its view, width in tokens per block; formats of 4- or 8-bit copies
    of the target's weights and of its keys and values, where the level reads those instead.
    """

    @property
    def decides(self) -> bool:
        """Whether this is the target itself over all its keys, which alone decides the text."""
        return (self.name, self.view, self.weights, self.kv) == ("target", "full", None, None)

    @property
    def tidal(self) -> bool:
        """Whether this is the target by TidalDecode."""
        return self.view in TIDAL


Stack = tuple[Spec, ...]
PLAIN: Stack = (Spec("target", "full"),)


def method(name: str, *, draft: bool) -> Stack:
    """The stack that a method stands for; without a draft model, n-grams of the text take its place."""
    if name not in METHODS:
        raise UsageError(f"unknown method: {name!r}", "methods are " + ", ".join(METHODS))
    if name == "autoregressive":
        return PLAIN
    if name == "chimera":
        return (Spec("chimera"), *PLAIN)
    if name in ("tidal", "tidal-lossless"):
        return (Spec("target", "tidal"), *PLAIN[: name == "tidal-lossless"])
    first = Spec("draft", "streaming") if draft else Spec("ngram")
    return (first, Spec("target", "retrieval"), *PLAIN)


def approximate(stack: Stack) -> bool:
    """Whether the text is not the target's own, but nearly."""
    return not stack[-1].decides


def candidates(*, draft: bool, offloaded: bool = False) -> list[Stack]:
    """What `auto` chooses between on a GPU: any proposer under any partial copy of the target, fewer keys or fewer
    bits, or under the target itself. Which is best depends on the text, so it is measured. Where weights are not on
    the GPU, copies of them may read all keys too.
    """
    proposers: list[Stack] = [(Spec("ngram"),), *[(Spec("draft", "streaming"),)] * draft]
    middles: list[Stack] = [
        (Spec("target", "retrieval"),),
        (Spec("target", "retrieval", weights="int4"),),
        (Spec("target", "full", weights="int4", kv="int4"),),
        (Spec("target", "full", kv="int4"),),
        *[(Spec("target", "full", weights="int4"),)] * offloaded,
    ]
    stacks = [(*proposer, *middle) for middle in [*middles, ()] for proposer in [*proposers, ()]]
    return [(*stack, *PLAIN) for stack in stacks if stack]


def parse(text: str) -> Stack:
    """Read a stack. Raises UsageError with the column, counted from 1."""
    reader = _Reader(text)
    stack = [reader.level()]
    while reader.peek() == ">":
        reader.take()
        stack.append(reader.level())
    if reader.peek():
        reader.fail("expected `>`")
    alone = len(stack) == 1 and stack[0].tidal and not stack[0].weights
    if alone and stack[0].view == FED:
        reader.fail("`tidal-fed` lists are made by the passes of a level behind it, as in `... > target(full)`")
    if not stack[-1].decides and not alone:
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
        if name in ("ngram", "chimera") and self.seen:
            self.fail(f"`{name}` can only be the first level")
        if self.seen and self.seen[-1].decides:
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
        if spec.kv and spec.view != "full":
            self.fail("a `kv=` copy is of all keys: its view is `full`")
        self.seen.append(spec)
        return spec

    def argument(self, spec: Spec) -> Spec:
        word = self.peek()
        if word == "width":
            self.take()
            self.expect("=")
            return replace(spec, width=self.number(1, LONGEST))
        if word in FORMATS and spec.name == "target":
            return self.copy(spec, word)
        if word not in VIEWS[spec.name]:
            copies = ["w=FORMAT", "kv=FORMAT"] if spec.name == "target" else []
            choices = [*VIEWS[spec.name], *copies, "width=N"]
            self.fail(f"expected for `{spec.name}` one of " + ", ".join(choices))
        self.take()
        if self.peek() != ":":
            return replace(spec, view=word)
        if word == "full":
            self.fail("`full` takes no budget")
        self.take()
        return replace(spec, view=word, budget=self.number(64, 1 << 24))

    def copy(self, spec: Spec, what: str) -> Spec:
        """`w=` or `kv=`, of which the latter is a copy of all keys."""
        self.take()
        self.expect("=")
        form = self.peek()
        if form not in FORMATS[what]:
            self.fail(f"expected for `{what}` one of " + ", ".join(FORMATS[what]))
        self.take()
        return replace(spec, weights=form) if what == "w" else replace(spec, kv=form)

    def number(self, low: int, high: int) -> int:
        token = self.peek()
        if not token.isdigit() or not low <= int(token) <= high:
            self.fail(f"expected a number from {low} to {high}")
        return int(self.take())
