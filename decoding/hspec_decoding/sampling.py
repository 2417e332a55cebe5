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
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from hspec_profiles.errors import UsageError

COLDEST = 1e-30  # the least temperature that float32 can divide by without harm
_MASK = (1 << 64) - 1
_WEYL, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


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


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [N, V] below each row's largest, over the temperature; -inf where top-k, top-p or min-p drop a token.

    Filters apply in that order, each to what the former left; top-p keeps tokens up to and including the first that
    brings their mass to `top_p`. Temperature must not be 0. Rows are worked one by one: sums over several at once may
    round differently.
    """
    return torch.cat([_filtered_row(row[None], sampling) for row in logits])


def _filtered_row(logits: Tensor, sampling: Sampling) -> Tensor:
    scaled = (logits - logits.amax()) / max(sampling.temperature, COLDEST)
    if 0 < sampling.top_k < scaled.shape[-1]:
        floor = scaled.topk(sampling.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < floor, float("-inf"))
    if sampling.top_p < 1:
        scaled = scaled.masked_fill(scaled < _nucleus_floor(scaled, sampling.top_p), float("-inf"))
    if sampling.min_p > 0:
        scaled = scaled.masked_fill(scaled < math.log(sampling.min_p), float("-inf"))
    return scaled


def _nucleus_floor(scaled: Tensor, top_p: float) -> Tensor:
    """Smallest logit [1, 1] in the nucleus of a row. Sorts the head of the row; all of it only where that is flat."""
    total = scaled.logsumexp(-1, keepdim=True)
    for head in (min(256, scaled.shape[-1]), scaled.shape[-1]):
        ordered = scaled.topk(head, dim=-1).values
        before = ((ordered - total).exp().cumsum(-1) < top_p).sum()
        if before < head:
            return ordered[:, before, None]
    return ordered[:, -1:]


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
    """The coupled sample of each row of logits [N, V], for sequences `keys` at absolute `positions`."""
    if not sampling.greedy:
        size, device = logits.shape[-1], logits.device
        rows = [gumbel(sampling.seed, key, at, size, device) for key, at in zip(keys, positions, strict=True)]
        logits = filtered(logits, sampling) + torch.stack(rows)
    tokens: list[int] = logits.argmax(-1).tolist()
    return tokens


@lru_cache(maxsize=64)
def gumbel(seed: int, key: int, position: int, size: int, device: torch.device) -> Tensor:
    """Standard Gumbel noise [size] of one position of one sequence: the same numbers, to the bit, for every caller.

    The position's stream is SplitMix64 (Steele et al., OOPSLA 2014); token t takes its value t. So vocabularies of
    different sizes share the noise of the tokens that they share.
    """
    start = _signed(_mix(_mix(_mix(seed) ^ key) ^ position))
    z = torch.arange(1, size + 1, device=device) * _signed(_WEYL) + start
    z = (z ^ _shifted(z, 30)) * _signed(_MIX1)
    z = (z ^ _shifted(z, 27)) * _signed(_MIX2)
    z = _shifted(z ^ _shifted(z, 31), 11)
    # 53 bits in float64 first: small uniforms keep their precision, and small ones decide who wins.
    uniform = ((z.double() + 0.5) * 2.0**-53).float().clamp_(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: int) -> int:
    """SplitMix64's output function of one 64-bit integer."""
    z = (z + _WEYL) & _MASK
    z = ((z ^ (z >> 30)) * _MIX1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX2) & _MASK
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    return z - (1 << 64) if z >= 1 << 63 else z


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
        self.generator = torch.Generator().manual_seed(_mix(_mix(seed) ^ key) >> 1)

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
