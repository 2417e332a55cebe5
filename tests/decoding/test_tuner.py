"""The choice of widths in worlds whose costs and acceptances are known: never slower, fast where it can be."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from hspec_decoding.tuner import WIDTHS, Tuner, Used


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
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def tuner(self, fixed: Sequence[int | None] | None = None, adapt: bool = True) -> Tuner:
        return Tuner(self.sequential, fixed or [None] * len(self.sequential), self.block, adapt)

    def run(self, tuner: Tuner, rounds: int) -> float:
        """Seconds a token over so many rounds."""
        seconds, tokens = 0.0, 0
        for _ in range(rounds):
            gained, spent = self.round(tuner, tuner.plan())
            tokens, seconds = tokens + gained, seconds + spent
        return seconds / tokens

    def round(self, tuner: Tuner, widths: tuple[int, ...], room: int | None = None) -> tuple[int, float]:
        """One round, of which the tuner is told: tokens gained and true seconds."""
        did = [[0, 0, 0, 0, 0.0] for _ in widths]  # proposed, kept, refused, passes, seconds
        room = self.block if room is None else room
        drafted = self._propose(len(widths) - 1, room, widths, did) if widths else 0
        kept = self._check(len(widths) - 1, drafted, did) if widths else 0
        tuner.learn(widths, [Used(*map(int, row[:4]), row[4]) for row in did], 0, self._measured(self.target))
        return kept + 1, self.target + sum(row[3] * cost for row, cost in zip(did, self.cost, strict=False))

    def _propose(self, level: int, room: int, widths: Sequence[int], did: list[list[float]]) -> int:
        if not self.sequential[level]:
            self._pass(level, did)
            return min(room, widths[level]) if self.chance.random() < self.found else 0
        tokens = 0
        while tokens < min(room, widths[level]):
            below = self._propose(level - 1, room - tokens - 1, widths, did) if level else 0
            tokens += 1 + (self._check(level - 1, below, did) if level else 0)
            self._pass(level, did)
        return tokens

    def _pass(self, level: int, did: list[list[float]]) -> None:
        did[level][3] += 1
        did[level][4] += self._measured(self.cost[level])

    def _check(self, level: int, drafted: int, did: list[list[float]]) -> int:
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
        """Seconds a token of the best choice that never changes, plain decoding among them."""
        tuner = self.tuner()
        tuner.cost = dict.fromkeys(range(len(self.cost)), tuner.acceptance[0])
        choices = list(tuner._choices())

        def run(widths: tuple[int, ...]) -> float:
            rounds = [
                self.round(self.tuner(), widths) for _ in range(1500)
            ]  # so many that the best is not the luckiest
            return sum(spent for _, spent in rounds) / sum(gained for gained, _ in rounds)

        return min(self.target, *map(run, choices))


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
    assert tuner.plain_rounds > 9000


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
    assert tuner.plan()[-1] == 7
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


def test_times_that_grow_with_the_block() -> None:
    """Without the fixed shape the target's time depends on what it is given: between widths measured it is a line."""
    tuner = Tuner([True], [None], 63)
    for width in (6, 0, 24):
        tuner.learn((width,) * (width > 0), [Used(width, width, 0, width, 0.01 * width)], width, 1.0 + width / 24)
    assert tuner.seconds((24,)) == pytest.approx(2.24)
    assert tuner.seconds((12,)) == pytest.approx(1.5 + 0.12)
    assert tuner.seconds((63,)) == pytest.approx(2.0 + 0.63)
    assert tuner.plain_seconds == 1.0


@pytest.mark.parametrize(("fixed", "widths"), [([3, 5], (3, 5)), ([None, 5], (2, 5)), ([63, 63], (7, 7))])
def test_widths_that_the_user_set(fixed: list[int | None], widths: tuple[int, ...]) -> None:
    world = World([True, True], [0.01, 0.01], [0.9, 0.9])
    assert world.tuner(fixed, adapt=False).plan() == widths
    tuner = world.tuner(fixed)
    for _ in range(200):
        planned = tuner.plan()
        assert all(own in (None, got) or got == 7 for own, got in zip(fixed, planned, strict=False))
        world.round(tuner, planned)


def test_an_upper_width_below_a_lower_one() -> None:
    """Then no block of the upper level is worth a choice; trying again must do with what there is."""
    world = World([True, True], [0.5, 0.5], [0.0, 0.0])
    assert world.run(world.tuner([5, 3]), 3000) < 1.02 * world.target


def test_without_levels_all_is_plain() -> None:
    tuner = Tuner([], [], 7)
    assert tuner.plan() == ()
    tuner.learn((), [], 0, 0.5)
    assert (tuner.plain_seconds, tuner.plain_rounds) == (0.5, 1)


def test_widths_fit_the_block() -> None:
    tuner = Tuner([True, False], [None, None], 5)
    for choice in tuner._choices():
        assert all(width in WIDTHS for width in choice)
        assert max(choice) <= 5
        assert list(choice) == sorted(choice)
