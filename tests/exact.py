"""Exact laws of programs that draw: every branch is run and its leaf weighed, so that nothing is left to luck."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Outcome = TypeVar("Outcome", bound=Hashable)


class Branches:
    """Draws that follow a given path of decisions, then always the first branch, and note the branches passed by."""

    def __init__(self, path: Sequence[int]) -> None:
        self.path, self.taken = path, list[int]()
        self.weight = 1.0  # probability of the path taken
        self.others: list[list[int]] = []

    def coin(self, probability: float) -> bool:
        assert 0 <= probability <= 1, probability
        return self._branch([1 - probability, probability]) == 1

    def choice(self, weights: Tensor) -> int:
        return self._branch(weights.double().tolist())

    def _branch(self, weights: Sequence[float]) -> int:
        assert min(weights) >= 0, weights
        possible = [branch for branch, weight in enumerate(weights) if weight > 0]
        at = len(self.taken)
        if at < len(self.path):
            branch = self.path[at]
        else:
            branch = possible[0]
            self.others += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(branch)
        self.weight *= weights[branch] / sum(weights)
        return branch


def law(program: Callable[[Branches], Outcome]) -> dict[Outcome, float]:
    """Probability of each outcome of a program that takes all its randomness from the draws it is given."""
    found: dict[Outcome, float] = {}
    pending: list[list[int]] = [[]]
    while pending:
        draws = Branches(pending.pop())
        outcome = program(draws)
        found[outcome] = found.get(outcome, 0.0) + draws.weight
        pending += draws.others
    return found


def distance(found: dict[Outcome, float], wanted: dict[Outcome, float]) -> float:
    """Largest difference between the probabilities that two laws give to one outcome."""
    return max(abs(found.get(key, 0.0) - wanted.get(key, 0.0)) for key in found.keys() | wanted.keys())


def normal(weights: Iterable[float]) -> Tensor:
    """A float32 law from weights, as the sampler's are."""
    law = torch.tensor(list(weights), dtype=torch.float64)
    return (law / law.sum()).float()


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """Probability, in sum over rows [N, V], of a Pearson statistic at least as large as that of `counts`.

    What must not occur at all must have count 0. Rows are independent, each with its own total.
    """
    assert not counts[expected == 0].any(), "something occurred that cannot"
    possible = expected > 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).double().sum()
    freedom = possible.sum() - (possible.any(-1)).sum()
    return float(torch.special.gammaincc(freedom.double() / 2, statistic / 2))
