"""The choice of widths in worlds whose costs and acceptances are known: never slower, fast where it can be."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from hspec_decoding.tuner import PLAIN, Average, Plan, Tuner, Used
from hspec_offload.speculation import WIDTHS


@dataclass
class World:
    """An engine in numbers. `cost` in seconds a pass and `kept`, the chance of a token to be kept, are per level."""

    sequential: Sequence[bool]
    cost: Sequence[float]
    kept: Sequence[float]
    target: float = 1.0
    block: int = 7
    found: float = 1.0  # chance that an n-gram table has something to say
    noise: float = 0.0  # spread of measured seconds
    chains: Sequence[tuple[int, ...]] = ()
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def tuner(self, fixed: Sequence[int | None] | None = None, adapt: bool = True) -> Tuner:
        return Tuner(self.sequential, fixed or [None] * len(self.sequential), self.block, adapt, self.chains)

    def run(self, tuner: Tuner, rounds: int) -> float:
        """Seconds a token over so many rounds."""
        seconds, tokens = 0.0, 0
        for _ in range(rounds):
            gained, spent = self.round(tuner, tuner.plan())
            tokens, seconds = tokens + gained, seconds + spent
        return seconds / tokens

    def round(self, tuner: Tuner, plan: Plan, room: int | None = None) -> tuple[int, float]:
        """One round, of which the tuner is told: tokens gained and true seconds."""
        did = {level: [0, 0, 0, 0, 0.0] for level in plan.levels}  # proposed, kept, refused, passes, seconds
        room = self.block if room is None else room
        drafted = self._propose(plan, room, did) if plan.levels else 0
        kept = self._check(plan.levels[-1], drafted, did) if plan.levels else 0
        tuner.learn(plan, [Used(*map(int, row[:4]), row[4]) for row in did.values()], 0, self._measured(self.target))
        return kept + 1, self.target + sum(row[3] * self.cost[level] for level, row in did.items())

    def _propose(self, plan: Plan, room: int, did: dict[int, list[float]]) -> int:
        level, width = plan.levels[-1], plan.widths[-1]
        below = Plan(plan.levels[:-1], plan.widths[:-1])
        if not self.sequential[level]:
            self._pass(level, did)
            return min(room, width) if self.chance.random() < self.found else 0
        tokens = 0
        while tokens < min(room, width):
            drafted = self._propose(below, room - tokens - 1, did) if below.levels else 0
            tokens += 1 + (self._check(below.levels[-1], drafted, did) if below.levels else 0)
            self._pass(level, did)
        return tokens

    def _pass(self, level: int, did: dict[int, list[float]]) -> None:
        did[level][3] += 1
        did[level][4] += self._measured(self.cost[level])

    def _check(self, level: int, drafted: int, did: dict[int, list[float]]) -> int:
        kept = 0
        while kept < drafted and self.chance.random() < self.kept[level]:
            kept += 1
        did[level][0] += drafted
        did[level][1] += kept
        did[level][2] += kept < drafted
        return kept

    def _measured(self, seconds: float) -> float:
        return seconds * (1 + self.noise * (2 * self.chance.random() - 1))

    def best(self) -> float:
        """Seconds a token of the best choice that never changes, plain decoding among them.

        Of all choices those that the formulas like best are run, so many rounds that the best is not the luckiest.
        """
        chains = self.chains or [tuple(range(len(self.cost)))]
        parts = {chain[:n] for chain in chains for n in range(1, len(chain) + 1)}
        widths = [width for width in WIDTHS if width <= self.block]
        choices = [
            Plan(part, chosen)
            for part in sorted(parts)
            for chosen in itertools.product(widths, repeat=len(part))
            if list(chosen) == sorted(chosen)
        ]

        tuner = self.tuner()
        for level, (cost, kept) in enumerate(zip(self.cost, self.kept, strict=True)):
            tuner.cost[level], tuner.acceptance[level] = Average(cost, 1), Average(kept, 1)
            if not self.sequential[level]:
                tuner.yields[level] = Average(self.found, 1)
        tuner.target[0] = Average(self.target, 1)

        def run(plan: Plan) -> float:
            rounds = [self.round(self.tuner(), plan) for _ in range(1000)]
            return sum(spent for _, spent in rounds) / sum(gained for gained, _ in rounds)

        return min(self.target, *map(run, sorted(choices, key=tuner.rate)[-6:]))


STACKS: dict[str, tuple[list[bool], list[float]]] = {
    "draft": ([True], [0.2]),
    "dear draft": ([True], [1.0]),
    "n-grams": ([False], [0.001]),
    "draft > middle": ([True, True], [0.1, 0.5]),
    "n-grams > middle": ([False, True], [0.001, 0.6]),
    "two dear levels": ([True, True], [0.8, 1.0]),
}


@pytest.mark.parametrize("stack", STACKS)
def test_never_slower_than_plain(stack: str) -> None:
    """Over 10,000 rounds in which nothing is ever kept, trying again costs less than 2 %."""
    sequential, cost = STACKS[stack]
    world = World(sequential, cost, [0.0] * len(cost))
    tuner = world.tuner()
    assert world.run(tuner, 10_000) < 1.02 * world.target
    assert tuner.fell_back
    assert tuner.plain_rounds > 8900


@pytest.mark.parametrize("stack", STACKS)
def test_never_slower_with_noise(stack: str) -> None:
    """Times that are measured 30 % off to either side."""
    sequential, cost = STACKS[stack]
    world = World(sequential, cost, [0.2] * len(cost), noise=0.3)
    assert world.run(world.tuner(), 4000) < 1.02 * world.target


@pytest.mark.parametrize("sequential", [[True], [False], [True, True], [False, True]])
def test_whole_blocks_where_all_is_kept_and_cheap(sequential: list[bool]) -> None:
    world = World(sequential, [0.01] * len(sequential), [1.0] * len(sequential))
    tuner = world.tuner()
    assert world.run(tuner, 200) < 0.2
    assert tuner.plan().widths[-1] == 7
    assert not tuner.fell_back


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("kept", [(0.35, 0.95), (0.9, 0.9), (0.7, 0.5), (0.05, 0.9), (0.95, 0.2)])
def test_near_the_best_choice(stack: str, kept: tuple[float, float]) -> None:
    """Within 10 % of the widths that a person would find who tried them all, learning included."""
    sequential, cost = STACKS[stack]
    world = World(sequential, cost, kept[: len(cost)])
    assert world.run(world.tuner(), 2000) < 1.1 * world.best()


@pytest.mark.parametrize("stack", ["draft", "n-grams", "draft > middle", "n-grams > middle"])
@pytest.mark.parametrize("later", [(0.95, 0.95), (0.0, 0.95)])
def test_recovers_when_acceptance_rises(stack: str, later: tuple[float, float]) -> None:
    """A text that begins strangely: after 1,000 bad rounds the levels become good, or only the upper one does."""
    sequential, cost = STACKS[stack]
    world = World(sequential, cost, [0.0] * len(cost))
    tuner = world.tuner()
    world.run(tuner, 1000)
    world.kept = later[: len(cost)]
    world.run(tuner, 2000)
    assert world.run(tuner, 1000) < 1.1 * world.best()


@pytest.mark.parametrize("stack", STACKS)
def test_gives_up_when_acceptance_falls(stack: str) -> None:
    sequential, cost = STACKS[stack]
    world = World(sequential, cost, [0.95] * len(cost))
    tuner = world.tuner()
    world.run(tuner, 500)
    world.kept = [0.0] * len(cost)
    world.run(tuner, 100)
    assert world.run(tuner, 2000) < 1.02 * world.target


def test_n_grams_that_rarely_find_anything() -> None:
    world = World([False], [0.002], [0.9], found=0.05)
    assert world.run(world.tuner(), 3000) < world.target


@pytest.mark.parametrize("sequential", [[True], [False], [True, True], [False, True]])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_rounds_without_room(sequential: list[bool], rounds: int) -> None:
    """At a bucket's edge or a text's end nothing can be drafted and nothing is measured, even in the first round."""
    world = World(sequential, [0.1] * len(sequential), [0.9] * len(sequential))
    tuner = world.tuner()
    for room in [0] * rounds + [7, 0, 7]:
        world.round(tuner, tuner.plan(), room)
    assert world.run(tuner, 300) < world.target


@pytest.mark.parametrize("adapt", [True, False])
def test_blocks_of_one_row_have_no_room(adapt: bool) -> None:
    """Everything is plain decoding then, whatever there is to draft with."""
    world = World([True, False], [0.1, 0.1], [0.9, 0.9], block=0, chains=[(0, 1), (1,)])
    tuner = world.tuner(adapt=adapt)
    tuner.cost = {level: Average(0.0, 1) for level in (0, 1)}
    assert world.run(tuner, 40) == pytest.approx(1.0)
    assert tuner.plain_rounds == tuner.rounds == 40
    assert not list(tuner.choices())


def test_times_that_grow_with_the_block() -> None:
    """Without the fixed shape the target's time depends on what it is given: between widths measured it is a line."""
    tuner = Tuner([True], [None], 63)
    tuner.learn(PLAIN, [], 0, 1.0)
    for width in (6, 24):
        tuner.learn(Plan((0,), (width,)), [Used(width, width, 0, width, 0.01 * width)], width, 1.0 + width / 24)
    assert tuner.seconds(Plan((0,), (24,))) == pytest.approx(2.24)
    assert tuner.seconds(Plan((0,), (12,))) == pytest.approx(1.5 + 0.12)
    assert tuner.seconds(Plan((0,), (63,))) == pytest.approx(2.0 + 0.63)
    assert tuner.plain_seconds == 1.0


@pytest.mark.parametrize(("fixed", "widths"), [([3, 5], (3, 5)), ([None, 5], (2, 5)), ([63, 63], (7, 7))])
def test_widths_that_the_user_set(fixed: list[int | None], widths: tuple[int, ...]) -> None:
    world = World([True, True], [0.01, 0.01], [0.9, 0.9])
    assert world.tuner(fixed, adapt=False).plan() == Plan((0, 1), widths)
    tuner = world.tuner(fixed)
    for _ in range(200):
        planned = tuner.plan()
        assert all(fixed[n] in (None, got) or got == 7 for n, got in zip(planned.levels, planned.widths, strict=True))
        world.round(tuner, planned)


def test_an_upper_width_below_a_lower_one() -> None:
    """Then no block of the upper level is worth a choice; trying again must do with what there is."""
    world = World([True, True], [0.5, 0.5], [0.0, 0.0])
    assert world.run(world.tuner([5, 3]), 3000) < 1.02 * world.target


def test_without_levels_all_is_plain() -> None:
    tuner = Tuner([], [], 7)
    assert tuner.plan() == PLAIN
    tuner.learn(PLAIN, [], 0, 0.5)
    assert (tuner.plain_seconds, tuner.plain_rounds) == (0.5, 1)


def test_widths_fit_the_block() -> None:
    world = World([True, True], [0.1, 0.2], [0.9, 0.9], block=5)
    tuner = world.tuner()
    world.run(tuner, 20)
    for plan in tuner.choices():
        assert all(width in WIDTHS for width in plan.widths)
        assert max(plan.widths) <= 5


# several chains

CHAINS = [(0, 2), (1, 2), (0, 3), (1, 3), (0, 4), (1, 4)]  # n-grams or a draft, under one of three partial targets


def several(kept: Sequence[float], found: float = 1.0) -> World:
    return World([False, True, True, True, True], [0.001, 0.05, 0.1, 0.25, 0.4], kept, 1.0, 15, found, 0.1, CHAINS)


@pytest.mark.parametrize(
    "kept",
    [
        (0.7, 0.8, 0.98, 0.98, 0.98),  # code: the cheapest middle level
        (0.2, 0.8, 0.66, 0.91, 0.95),  # prose: one that reads more
        (0.1, 0.3, 0.2, 0.4, 0.98),
        (0.9, 0.1, 0.1, 0.1, 0.1),
        (0.0, 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_near_the_best_of_several_chains(kept: tuple[float, ...]) -> None:
    world = several(kept)
    assert world.run(world.tuner(), 2000) < 1.08 * world.best()


def test_every_level_is_tried_before_one_is_chosen() -> None:
    world = several((0.5, 0.5, 0.5, 0.5, 0.5))
    tuner = world.tuner()
    world.run(tuner, len(CHAINS))
    assert set(tuner.cost) == {0, 1, 2, 3, 4}


def test_another_chain_is_found_when_the_text_changes() -> None:
    """From code to prose: the cheap level stops being kept, and one not used for long takes over."""
    world = several((0.7, 0.8, 0.98, 0.98, 0.98))
    tuner = world.tuner()
    world.run(tuner, 1000)
    world.kept = (0.2, 0.8, 0.4, 0.5, 0.97)
    world.run(tuner, 600)
    assert world.run(tuner, 1000) < 1.1 * world.best()


def test_planning_is_quick() -> None:
    """A round on a GPU takes some 20 ms: choosing must not be felt."""
    world = several((0.7, 0.8, 0.98, 0.98, 0.98))
    tuner = world.tuner()
    world.run(tuner, 50)
    started = time.perf_counter()
    for _ in range(20):
        tuner.plan()
    assert (time.perf_counter() - started) / 20 < 0.005
