"""What the engine tells while it works. Everything that a person sees is made of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reason = Literal["eos", "length", "context"]


@dataclass(frozen=True)
class Prefilled:
    """`done` of `total` prompt tokens of one sequence are in the cache."""

    done: int
    total: int
    sequence: int = 0


@dataclass(frozen=True)
class Emitted:
    """Tokens that are certain, in order; an end-of-sequence token comes last."""

    tokens: tuple[int, ...]
    sequence: int = 0


@dataclass(frozen=True)
class Round:
    """One pass of the target: how many tokens were proposed to it and kept, at which width of each level."""

    proposed: int
    kept: int
    widths: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Finished:
    """A sequence is complete."""

    reason: Reason
    sequence: int = 0


Event = Prefilled | Emitted | Round | Finished


@dataclass(frozen=True)
class LevelReport:
    """One level's work: tokens it proposed to the level above and that were kept there, its passes and seconds."""

    name: str
    proposed: int
    kept: int
    passes: int
    seconds: float
    refused: int = 0  # tokens looked at and not kept; those behind them were not looked at


@dataclass(frozen=True)
class Choice:
    """One of the stacks that an engine could use: seconds a token at its best widths, as measured, and its rounds."""

    stack: str
    widths: tuple[int, ...]
    seconds: float
    rounds: int


@dataclass(frozen=True)
class Report:
    """A run in numbers. Levels cheapest first, the target last; seconds are wall time."""

    prompt_tokens: int
    generated_tokens: int
    prefill_seconds: float
    decode_seconds: float
    levels: tuple[LevelReport, ...]
    stack: str
    seed: int
    note: str | None = None  # a fall-back, in one sentence
    plain_seconds: float | None = None  # of one token decoded without speculation, where it was measured
    setup_seconds: float = 0.0  # between prompt and first token, where passes are captured and timed
    choices: tuple[Choice, ...] = ()  # where several stacks were to choose from, best first

    @property
    def target_passes(self) -> int:
        """Verify passes of the target."""
        return self.levels[-1].passes
