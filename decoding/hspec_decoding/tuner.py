"""Levels and widths from measurements: which levels to use and how many tokens each should propose.

Acceptance and step times are measured as the run goes. The rate of every choice follows from them (TriForce, arXiv
2404.11912, section 4.3; Leviathan et al., arXiv 2211.17192, equation 1), plain decoding is one of the choices, and so
speculation is used only while it is measured to be faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter

from hspec_offload.speculation import WIDTHS

MEMORY = 0.96  # share of an average that one more round leaves to the past
PROBE_COST = 0.012  # share of the time that may go into trying speculation again
STALE = 64  # rounds after which a level's measurements are worth renewing
GUESSED = 0.8  # acceptance of a level of which nothing is known
# Of what a guessed acceptance lacks to 1, the share that is hoped for: the unknown is tried. The weight of a guess.
HOPE, GUESS = 0.75, 6.0
TREES, HALVING = (3, 7, 15, 31, 63), 0.55  # nodes of a tree; tokens to expect of it each time they double
WORTHWHILE = 0.6  # share of the best rate that a choice must promise to be tried for that


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


@dataclass
class Growth:
    """What trees bring, by the number of their nodes: tokens kept of the branch that was foreseen."""

    deepest: int
    kept: dict[int, Average] = field(default_factory=dict)

    def learn(self, nodes: int, kept: Sequence[int]) -> None:
        """Enter what was kept of trees of at most so many nodes."""
        self.kept.setdefault(nodes, Average(self.brings(nodes), 1)).add(sum(kept), len(kept))

    def brings(self, nodes: int) -> float:
        """Tokens to expect, where nothing is measured in proportion to the logarithm of the nodes."""
        nearest = min(self.kept, key=lambda known: abs(known - nodes), default=None)
        if nearest is None:
            return HALVING * math.log2(nodes + 1)
        return self.kept[nearest].mean * math.log2(nodes + 1) / math.log2(nearest + 1)

    def depth(self, nodes: int) -> int:
        """Tokens of the longest branch that is worth drafting."""
        return max(1, min(self.deepest, nodes, round(2 * self.brings(nodes)) + 1))


@dataclass(frozen=True)
class Used:
    """What one level did in one round."""

    proposed: int
    kept: int
    refused: int
    passes: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """Levels of one round, cheapest first, and how many tokens each proposes at a time; none for plain decoding."""

    levels: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()


PLAIN = Plan()


@dataclass
class Tuner:
    """Chooses the levels and widths of the next round. The target, above all levels, is not counted."""

    sequential: Sequence[bool]  # per level: one pass a token (a model), or one for all (n-grams)
    fixed: Sequence[int | None]  # per level: the width that the user set
    block: int  # tokens that the target's block has room for
    adapt: bool = True  # else always the first chain, at the widths to begin with
    chains: Sequence[tuple[int, ...]] = ()  # levels that may work together, cheapest first; () for all of them
    guesses: Sequence[float] = ()  # per level: the acceptance to begin with
    trees: Mapping[int, Growth] = field(default_factory=dict)  # levels whose widths are nodes of trees
    rows: int = 1  # the target's blocks are of a multiple of so many
    rounds: int = 0
    plain_rounds: int = 0
    acceptance: dict[int, Average] = field(
        default_factory=dict
    )  # level -> chance of a token to be kept, by any verifier
    yields: dict[int, Average] = field(default_factory=dict)  # level -> share of a width that it fills
    cost: dict[int, Average] = field(default_factory=dict)  # level -> seconds of a pass
    target: dict[int, Average] = field(default_factory=dict)  # rows drafted -> seconds of the target's pass
    seen: dict[int, int] = field(default_factory=dict)  # level -> tokens that its acceptance was measured by
    used: dict[tuple[int, ...], int] = field(default_factory=dict)  # chain -> rounds
    last: dict[int, int] = field(default_factory=dict)  # level -> round of its last use
    next_probe: int = 0
    probes: int = 0

    def __post_init__(self) -> None:
        for level in range(len(self.sequential)):
            self.acceptance[level] = Average(self._guess(level) * GUESS, GUESS)
            self.yields[level] = Average(1.0, 1.0)
        self.chains = self.chains or [tuple(range(len(self.sequential)))]
        parts = dict.fromkeys(chain[:n] for chain in self.chains for n in range(1, len(chain) + 1))
        self._parts = list(parts) if self.block else []
        self._worked_out: dict[object, float] = {}  # from the measurements of this round

    def plan(self) -> Plan:
        """What to do in the next round."""
        self._worked_out.clear()
        if not self._parts:
            return PLAIN
        if not self.adapt:
            return self._first(self.chains[0])
        for chain in self.chains:
            if any(level not in self.cost for level in chain):
                return self._first(chain)
        if 0 not in self.target:
            return PLAIN
        plans = [self._best(part) for part in self._parts]
        best = max(plans, key=self.rate)
        if self.rate(best) > self.rate(PLAIN):
            if any(level not in self.seen for level in best.levels):
                return self._first(best.levels)  # what is only hoped for is not worth a long block
            return self._renewal(plans, self.rate(best)) or best
        return self._probe(plans) if self.rounds >= self.next_probe else PLAIN

    def learn(self, plan: Plan, used: Sequence[Used], drafted: int, target_seconds: float) -> None:
        """Enter a round: what each used level did, the tokens given to the target, its seconds."""
        self._worked_out.clear()
        self.rounds += 1
        self.plain_rounds += not plan.levels
        self.used[plan.levels] = self.used.get(plan.levels, 0) + 1
        self.target.setdefault(drafted // self.rows * self.rows, Average()).add(target_seconds, 1)
        for level, width, did in zip(plan.levels, plan.widths, used, strict=True):
            self.last[level] = self.rounds
            if did.passes:
                self.cost.setdefault(level, Average()).add(did.seconds, did.passes)
            self.acceptance[level].add(did.kept, did.kept + did.refused)
            self.seen[level] = self.seen.get(level, 0) + did.kept + did.refused
            if not self.sequential[level] and level not in self.trees:
                self.yields[level].add(did.proposed / width, did.passes)

    def rate(self, plan: Plan) -> float:
        """Tokens a second that a plan promises."""
        return self.tokens(plan) / self.seconds(plan)

    def promise(self, plan: Plan) -> float | None:
        """Seconds a token that a plan promises; None as long as too little is measured."""
        known = self.target if plan.levels else self.target.keys() & {0}
        return 1 / self.rate(plan) if known and all(level in self.cost for level in plan.levels) else None

    def tokens(self, plan: Plan) -> float:
        """Tokens that a pass of the verifier above these levels brings: those kept and one of its own."""
        return self._brings(plan.levels[-1], plan.widths[-1]) if plan.levels else 1.0

    def seconds(self, plan: Plan) -> float:
        """Seconds of one round: the target's pass and all below it."""
        return self._target_seconds(plan.widths[-1] if plan.levels else 0) + self._seconds_below(plan)

    @property
    def plain_seconds(self) -> float:
        """Measured seconds of one token decoded without speculation."""
        return self.target[0].mean

    @property
    def fell_back(self) -> bool:
        """Whether most rounds after the first few were plain because that measured faster."""
        return self.plain_rounds > max(4, self.rounds // 2)

    def _first(self, chain: Sequence[int]) -> Plan:
        """Widths to begin with: the paper's 2 and 6, a whole block of n-grams (arXiv 2404.11912, table 8)."""
        first = [6 if place or not self.sequential[level] else 2 for place, level in enumerate(chain)]
        widths = [min(self.block, self.fixed[level] or width) for level, width in zip(chain, first, strict=True)]
        widths = [self.fixed[n] or TREES[1] if n in self.trees else w for n, w in zip(chain, widths, strict=True)]
        return Plan(tuple(chain), tuple(widths))

    def _best(self, chain: tuple[int, ...]) -> Plan:
        """The best widths of a chain. Below the top a level's best width is that of the cheapest token handed up."""
        widths: list[int] = []
        seconds, brought = 0.0, 1.0  # of a block of the level below
        for place, level in enumerate(chain):
            above = self.cost[chain[place + 1]].mean if place + 1 < len(chain) else None
            step = self.cost[level].mean + seconds
            tried = []
            for width in self._widths(level):
                spent = step * width / brought if self.sequential[level] else step
                checked = self._target_seconds(width) if above is None else above
                tried.append((self._brings(level, width) / (checked + spent), width, spent))
            _, width, seconds = max(tried, key=itemgetter(0))
            brought = self._brings(level, width)
            widths.append(width)
        return Plan(chain, tuple(widths))

    def _widths(self, level: int) -> Sequence[int]:
        fixed = self.fixed[level]
        if level in self.trees:
            return (fixed,) if fixed else TREES
        return (min(fixed, self.block),) if fixed else [w for w in WIDTHS if w <= self.block]

    def _renewal(self, plans: Sequence[Plan], rate: float) -> Plan | None:
        """A plan whose levels have not been tried for long, if it might do: texts change, and so does acceptance."""
        if self.rounds < self.next_probe:
            return None
        stale = [p for p in plans if self.rounds - min(self.last.get(n, 0) for n in p.levels) > STALE]
        plan = max(stale, key=self.rate, default=None)
        if plan is None or self.rate(plan) < WORTHWHILE * rate:
            return None
        self.next_probe = self.rounds + max(8, round((rate / self.rate(plan) - 1) / PROBE_COST))
        return plan

    def _probe(self, plans: Sequence[Plan]) -> Plan:
        """A plan other than the last one tried: a level not tried again would never be known."""
        self.probes += 1
        tried = plans[self.probes % len(plans)]
        loss = self.seconds(tried) / self.seconds(PLAIN)
        self.next_probe = self.rounds + max(16, round(loss / PROBE_COST))
        return tried

    def _guess(self, level: int) -> float:
        return self.guesses[level] if self.guesses else GUESSED

    def _once(self, key: object, work: Callable[[], float]) -> float:
        """What `work` comes to; the search asks for the same again and again."""
        found = self._worked_out.get(key)
        if found is None:
            self._worked_out[key] = found = work()
        return found

    def _brings(self, level: int, width: int) -> float:
        return self._once((level, width), partial(self._brought, level, width))

    def _brought(self, level: int, width: int) -> float:
        if level in self.trees:
            return 1 + self.trees[level].brings(width)
        hope = HOPE * (1 - self._guess(level)) * GUESS / (GUESS + self.seen.get(level, 0))
        kept = min(self.acceptance[level].mean + hope, 0.999)
        whole = (1 - kept ** (width + 1)) / (1 - kept)
        filled = self.yields[level].mean
        return filled * whole + (1 - filled)

    def _seconds_below(self, plan: Plan) -> float:
        """Seconds that the plan's levels take to propose one block."""
        seconds, brought = 0.0, 1.0
        for level, width in zip(plan.levels, plan.widths, strict=True):
            passes = width / brought if self.sequential[level] else 1.0
            seconds = passes * (self.cost[level].mean + seconds)
            brought = self._brings(level, width)
        return seconds

    def _target_seconds(self, drafted: int) -> float:
        return self._once(drafted, partial(self._seconds_of_target, drafted))

    def _seconds_of_target(self, drafted: int) -> float:
        """Between the nearest widths measured; the time of a block is taken to grow evenly."""
        drafted = drafted // self.rows * self.rows
        below = max((n for n in self.target if n <= drafted), default=None)
        above = min((n for n in self.target if n >= drafted), default=None)
        if below is None or above is None:
            return self.target[below if above is None else above].mean  # type: ignore[index]
        low, high = self.target[below].mean, self.target[above].mean
        return low if above == below else low + (high - low) * (drafted - below) / (above - below)

    def choices(self) -> Iterator[Plan]:
        """The best plan of every way to use the levels, for a person to see; costs must have been measured."""
        for part in self._parts:
            if all(level in self.cost for level in part):
                yield self._best(part)
