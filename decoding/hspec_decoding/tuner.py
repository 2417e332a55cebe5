"""Widths from measurements: which levels to use and how many tokens each should propose.

Acceptance and step times are measured as the run goes. The rate of every choice follows from them (TriForce, arXiv
2404.11912, section 4.3; Leviathan et al., arXiv 2211.17192, equation 1), plain decoding is one of the choices, and so
speculation is used only while it is measured to be faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 24, 31, 40, 48, 63)
MEMORY = 0.94  # share of an average that one more round leaves to the past
PROBE_COST = 0.015  # share of the time that may go into trying speculation again


@dataclass
class Average:
    """A decaying mean of values with weights, begun with a guess."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, total: float, weight: float) -> None:
        """Enter `weight` observations that sum to `total`."""
        if weight > 0:
            self.total = self.total * MEMORY + total
            self.weight = self.weight * MEMORY + weight

    @property
    def mean(self) -> float:
        return self.total / self.weight


@dataclass(frozen=True)
class Used:
    """What one level did in one round."""

    proposed: int
    kept: int
    refused: int
    passes: int
    seconds: float


@dataclass
class Tuner:
    """Chooses the widths of the next round. Level 0 is the cheapest; the target, above them, is not counted."""

    sequential: Sequence[bool]  # per level: one pass a token (a model), or one for all (n-grams)
    fixed: Sequence[int | None]  # per level: the width that the user set
    block: int  # tokens that the target's block has room for
    adapt: bool = True  # else always the widths to begin with
    rounds: int = 0
    plain_rounds: int = 0
    acceptance: dict[int, Average] = field(
        default_factory=dict
    )  # level -> chance of a token to be kept, by any verifier
    yields: dict[int, Average] = field(default_factory=dict)  # level -> share of a width that it fills
    cost: dict[int, Average] = field(default_factory=dict)  # level -> seconds of a pass
    target: dict[int, Average] = field(default_factory=dict)  # rows drafted -> seconds of the target's pass
    next_probe: int = 0
    probes: int = 0

    def __post_init__(self) -> None:
        for level in range(len(self.sequential)):
            self.acceptance[level] = Average(2.4, 3.0)
            self.yields[level] = Average(1.0, 1.0)

    def plan(self) -> tuple[int, ...]:
        """Widths of the levels to use in the next round, cheapest first; empty for plain decoding."""
        if not self.sequential:
            return ()
        if not self.adapt or any(level not in self.cost for level in range(len(self.sequential))):
            return tuple(
                min(self.block, width or first) for width, first in zip(self.fixed, self._first(), strict=True)
            )
        if 0 not in self.target:
            return ()
        best = max(self._choices(), key=self.rate)
        if self.rate(best) > self.rate(()):
            return best
        return self._probe() if self.rounds >= self.next_probe else ()

    def _probe(self) -> tuple[int, ...]:
        """The best widths of one depth, of another at every call: a level not tried again would never be known."""
        self.probes += 1
        depth = 1 + self.probes % len(self.sequential)
        best = max((widths for widths in self._choices() if len(widths) == depth), key=self.rate)
        loss = self.seconds(best) / self.seconds(())
        self.next_probe = self.rounds + max(16, round(loss / PROBE_COST))
        return best

    def learn(self, widths: Sequence[int], used: Sequence[Used], drafted: int, target_seconds: float) -> None:
        """Enter a round: what each used level did, the tokens given to the target, its seconds."""
        self.rounds += 1
        self.plain_rounds += not widths
        self.target.setdefault(drafted, Average()).add(target_seconds, 1)
        for level, (width, did) in enumerate(zip(widths, used, strict=False)):
            if did.passes:
                self.cost.setdefault(level, Average()).add(did.seconds, did.passes)
            self.acceptance[level].add(did.kept, did.kept + did.refused)
            if not self.sequential[level]:
                self.yields[level].add(did.proposed / width, did.passes)

    def rate(self, widths: Sequence[int]) -> float:
        """Tokens a second that these widths promise."""
        return self.tokens(widths) / self.seconds(widths)

    def tokens(self, widths: Sequence[int]) -> float:
        """Tokens that a pass of the verifier above these levels brings: those kept and one of its own."""
        if not widths:
            return 1.0
        level = len(widths) - 1
        kept = min(self.acceptance[level].mean, 0.999)
        whole = (1 - kept ** (widths[-1] + 1)) / (1 - kept)
        filled = self.yields[level].mean
        return filled * whole + (1 - filled)

    def seconds(self, widths: Sequence[int]) -> float:
        """Seconds of one round: the target's pass and all below it."""
        return self._target_seconds(widths[-1] if widths else 0) + self._draft_seconds(widths)

    @property
    def plain_seconds(self) -> float:
        """Measured seconds of one token decoded without speculation."""
        return self.target[0].mean

    @property
    def fell_back(self) -> bool:
        """Whether most rounds after the first few were plain because that measured faster."""
        return self.plain_rounds > max(4, self.rounds // 2)

    def _first(self) -> list[int]:
        """Widths to begin with: the paper's 2 and 6, a whole block of n-grams (arXiv 2404.11912, table 8)."""
        return [6 if level or not sequential else 2 for level, sequential in enumerate(self.sequential)]

    def _draft_seconds(self, widths: Sequence[int]) -> float:
        if not widths:
            return 0.0
        level = len(widths) - 1
        passes = widths[-1] / self.tokens(widths[:-1]) if self.sequential[level] else 1.0
        return passes * (self.cost[level].mean + self._draft_seconds(widths[:-1]))

    def _target_seconds(self, drafted: int) -> float:
        """Between the nearest widths measured; the time of a block is taken to grow evenly."""
        below = max((n for n in self.target if n <= drafted), default=None)
        above = min((n for n in self.target if n >= drafted), default=None)
        if below is None or above is None:
            return self.target[below if above is None else above].mean  # type: ignore[index]
        low, high = self.target[below].mean, self.target[above].mean
        return low if above == below else low + (high - low) * (drafted - below) / (above - below)

    def _choices(self) -> Iterator[tuple[int, ...]]:
        """Every way to use the levels: from the cheapest up to some, at the widths worth trying."""

        def widths(level: int) -> Sequence[int]:
            fixed = self.fixed[level]
            return (min(fixed, self.block),) if fixed else [w for w in WIDTHS if w <= self.block]

        partial: list[tuple[int, ...]] = [()]
        for level in range(len(self.sequential)):
            free = self.fixed[level] is None
            partial = [
                (*head, width)
                for head in partial
                for width in widths(level)
                if not (head and free) or width >= min(head[-1], self.block)
            ]
            yield from partial
