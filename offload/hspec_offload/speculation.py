"""Levels as data, what they are taken to accept, and the widths that make a round fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from hspec_offload.cost import NGRAM

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 24, 31, 40, 48, 63)
MIDDLE_ROWS = 16  # of a pass of a middle level: one tile of its kernels
SMALL = 0.015  # share of the target's bytes below which a draft model is a small one

# Share of a level's tokens that the target keeps, greedy: Qwen2.5-Coder-1.5B (YaRN ×4), 256 tokens behind 30,720
# (n-grams) and 122,880 (all else), sparse views renewed after every verify pass. Drafts: Qwen2.5-Coder 0.5B for 1.5B;
# small ones, of a hundredth of the target, as published for TriForce's.
TEXTS: Mapping[str, Mapping[str, float]] = {
    "code": {
        "ngram": 0.38,
        "draft": 0.81,
        "small draft": 0.35,
        "streaming": 0.97,
        "streaming nf4": 0.97,
        "retrieval": 0.98,
        "retrieval nf4": 0.98,
        "full nf4": 0.99,
        "full int8": 0.99,
        "full int8 nf4": 0.99,
        "full int4": 0.99,
        "full int4 nf4": 0.99,
    },
    "prose": {
        "ngram": 0.20,
        "draft": 0.78,
        "small draft": 0.35,
        "streaming": 0.72,
        "streaming nf4": 0.69,
        "retrieval": 0.71,
        "retrieval nf4": 0.68,
        "full nf4": 0.90,
        "full int8": 0.98,
        "full int8 nf4": 0.90,
        "full int4": 0.95,
        "full int4 nf4": 0.90,
    },
}


@dataclass(frozen=True)
class Level:
    """One level, as `--levels` spells it: budget in tokens of its view, formats of its copies, width in tokens."""

    name: str  # "ngram", "draft", "target"
    view: str | None = None
    budget: int | None = None
    width: int | None = None
    weights: str | None = None
    kv: str | None = None

    def __str__(self) -> str:
        view = self.view and self.view + (f":{self.budget}" if self.budget else "")
        copies = [f"{name}={form}" for name, form in (("kv", self.kv), ("w", self.weights)) if form]
        arguments = [a for a in (view, *copies, self.width and f"width={self.width}") if a]
        return self.name + (f"({', '.join(arguments)})" if arguments else "")

    @property
    def kind(self) -> str:
        """The name under which its acceptance is known."""
        if self.name != "target":
            return self.name
        return " ".join(word for word in (self.view, self.kv, self.weights and "nf4") if word)


TARGET = Level("target", "full")
Levels = tuple[Level, ...]


def written(levels: Sequence[Level]) -> str:
    """The levels in the grammar of `--levels`."""
    return " > ".join(map(str, levels))


@dataclass(frozen=True)
class Round:
    """A round of some levels: the tokens it brings to a sequence, and seconds of all its passes together."""

    levels: Levels  # with their widths
    block: int  # rows of the verify pass
    tokens: float
    seconds: float
    draft_steps: float = 0.0  # of the first level, where that is no view of the target
    middle_steps: float = 0.0  # of the target's last view but the full one

    @property
    def seconds_per_token(self) -> float:
        """Seconds of one token of a sequence."""
        return self.seconds / self.tokens


@dataclass(frozen=True)
class Costs:
    """Seconds: of verify passes by rows of their block, of a pass of a middle level by its rows, of a draft's step."""

    verify: Mapping[int, float]
    middle: Callable[[Level, int], float]
    draft: float


def fastest(levels: Levels, accepted: Mapping[str, float], costs: Costs) -> Round:
    """The widths, where none are given, and the block with which these levels, cheapest first, bring most tokens a
    second.
    """
    if len(levels) == 1:
        seconds, block = min((seconds, block) for block, seconds in costs.verify.items())
        return Round(levels, block, 1.0, seconds)
    below = _first(levels[0], costs)
    for level in levels[1:-1]:
        ways = (_checked(below, level, width, accepted, costs) for width in _widths(below, MIDDLE_ROWS, MIDDLE_ROWS))
        below = min(ways, key=lambda way: way.price)
    return _best_round(below, accepted, costs)


@dataclass(frozen=True)
class _Proposer:
    """The levels under a verifier as one: seconds of a pass of the highest, with all below, and tokens it brings."""

    levels: Levels
    seconds: float
    tokens: float = 1.0
    whole: bool = False  # one pass for a whole block, not one for each `tokens`
    draft_steps: float = 0.0
    middle_steps: float = 0.0

    @property
    def price(self) -> float:
        return self.seconds / self.tokens

    def passes(self, width: int) -> float:
        """For a block of `width` tokens."""
        return 1.0 if self.whole else width / self.tokens


def _widths(below: _Proposer, rows: int, most: int) -> Sequence[int]:
    """What the highest level may propose at a time, to a verifier of so many rows, of `most` at most: what was asked
    for, where there is a block for that, or any.
    """
    asked = below.levels[-1].width
    if asked and asked >= rows < most:
        return ()
    return (min(asked, rows - 1),) if asked else [width for width in WIDTHS if width < rows]


def _first(level: Level, costs: Costs) -> _Proposer:
    if level.name == "ngram":
        return _Proposer((level,), NGRAM, whole=True, draft_steps=1)
    if level.name == "draft":
        return _Proposer((level,), costs.draft, draft_steps=1)
    return _Proposer((level,), costs.middle(level, 1), middle_steps=1)


def _checked(below: _Proposer, level: Level, width: int, accepted: Mapping[str, float], costs: Costs) -> _Proposer:
    """A level that checks blocks of `width` tokens is again a proposer."""
    passes, top = below.passes(width), replace(below.levels[-1], width=width)
    return _Proposer(
        (*below.levels[:-1], top, level),
        costs.middle(level, width + 1) + passes * below.seconds,
        brought(accepted[top.kind], width),
        draft_steps=passes * below.draft_steps,
        middle_steps=1,
    )


def _best_round(below: _Proposer, accepted: Mapping[str, float], costs: Costs) -> Round:
    """The best width in the best block of the target."""
    kept = accepted[below.levels[-1].kind]
    *_, block, width = min(
        ((verify + below.passes(width) * below.seconds) / brought(kept, width), block, width)
        for block, verify in costs.verify.items()
        for width in _widths(below, block, max(costs.verify))
    )
    passes = below.passes(width)
    return Round(
        (*below.levels[:-1], replace(below.levels[-1], width=width), TARGET),
        block,
        brought(kept, width),
        costs.verify[block] + passes * below.seconds,
        passes * below.draft_steps,
        passes * below.middle_steps,
    )


@cache
def brought(kept: float, width: int) -> float:
    """Tokens that a verified block of `width` tokens brings, each of which is kept with chance `kept`: those before the
    first that is not, and one of the verifier's own (arXiv 2211.17192, equation 1).
    """
    return width + 1.0 if kept >= 1 else (1 - kept ** (width + 1)) / (1 - kept)


def milliseconds(seconds: float) -> str:
    """A time in ms for people, three digits; `-` where there is none."""
    ms = 1e3 * seconds
    return "-" if not ms else f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"
