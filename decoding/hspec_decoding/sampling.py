"""Randomness and verification: how a token is chosen, and which drafted tokens are kept.

Two rules, both leave the law of the target's own output unchanged:

* coupled: the token at a position is `argmax(filtered logits + noise)` with Gumbel noise keyed by (seed, sequence,
  position). Every level uses the same noise, so a drafted token is kept exactly when the target would have sampled
  it, and the text depends on prompt, seed and options only. Temperature 0 is the same without noise.
* rejection: keep a drafted token with probability min(1, p/q), else draw from the normalised residual max(p - q, 0)
  (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hspec_kernels import sample as kernels
from hspec_kernels.sample import mix
from hspec_profiles.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """What the user asks of the sampler. `top_k` 0, `top_p` 1 and `min_p` 0 filter nothing."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        rules = (
            ("temperature", self.temperature, math.isfinite(self.temperature) and self.temperature >= 0, "0 or more"),
            ("top-p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top-k", self.top_k, self.top_k >= 0, "0 (off) or more"),
            ("min-p", self.min_p, 0 <= self.min_p <= 1, "from 0 to 1"),
            ("seed", self.seed, 0 <= self.seed < 1 << 63, "from 0 to 2^63 - 1"),
        )
        for name, value, holds, valid in rules:
            if not holds:
                raise UsageError(f"{name} must be {valid}: {value}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    @property
    def options(self) -> Tensor:
        """What the kernels are told, float32 [4]."""
        return torch.tensor([self.temperature, self.top_p, float(self.top_k), self.min_p])


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [N, V] below each row's largest, over the temperature; -inf where top-k, top-p or min-p drop a token."""
    return kernels.filtered(logits, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The law [N, V] that `choose` draws from, float32 rows that sum to 1; a point mass at temperature 0.

    A row that is not finite, which a broken draft may give, is no law: the uniform one takes its place.
    """
    broken = logits.isnan().any(-1, keepdim=True) | (logits == float("inf")).any(-1, keepdim=True)
    logits = logits.masked_fill(broken, 0.0)
    if sampling.greedy:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return filtered(logits, sampling).softmax(-1)


def choose(logits: Tensor, sampling: Sampling, keys: Sequence[int], positions: Sequence[int]) -> list[int]:
    """The coupled sample of each row of logits [N, V], for sequences `keys` at absolute `positions`.

    -1 where a row is not finite.
    """
    streams = [kernels.stream(sampling.seed, key) for key in keys]
    numbers = torch.tensor([streams, list(positions)], device=logits.device)
    tokens: list[int] = kernels.choose(logits, sampling.options.to(logits.device), *numbers).tolist()
    return tokens


class Draws(Protocol):
    """Where the rejection rule takes its randomness from."""

    def coin(self, probability: float) -> bool:
        """True with `probability`."""
        ...

    def choice(self, weights: Tensor) -> int:
        """An index of weights [V], drawn in proportion to them."""
        ...


class SeededDraws:
    """A fresh stream of draws, the same for the same (seed, sequence)."""

    def __init__(self, seed: int, key: int) -> None:
        self.generator = torch.Generator().manual_seed(mix(mix(seed) ^ key) >> 1)

    def coin(self, probability: float) -> bool:
        return float(torch.rand((), generator=self.generator, dtype=torch.float64)) < probability

    def choice(self, weights: Tensor) -> int:
        return int(torch.multinomial(weights.cpu(), 1, generator=self.generator))


def agree(draft: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """Coupled rule: the target's own tokens up to and including its first that `draft` did not foresee.

    `chosen` holds the target's sample after each of 0 .. len(draft) drafted tokens.
    """
    kept = 0
    while kept < len(draft) and draft[kept] == chosen[kept]:
        kept += 1
    return list(chosen[: kept + 1])


def accept(draft: Sequence[int], laws: Sequence[Tensor], target: Sequence[Tensor], draws: Draws) -> list[int]:
    """Rejection rule: keep a prefix of `draft`, then one token of the target's own; 1 .. len(draft) + 1 tokens.

    draft[i] was really drawn from laws[i] [V]; target[i] [V] is the target's law after i drafted tokens. The law of
    the result is the target's, whatever `laws` are, as long as they are the laws of the draft.
    """
    kept: list[int] = []
    for token, law, own in zip(draft, laws, target, strict=False):
        if not draws.coin(min(1.0, float(own[token]) / float(law[token]))):
            residual = (own - law).clamp(min=0)
            return [*kept, draws.choice(residual if float(residual.sum()) > 0 else own)]
        kept.append(token)
    return [*kept, draws.choice(target[len(draft)])]
