"""The coupled sample of rows of logits in torch: filters, noise, and the token that both together choose."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

COLDEST = 1e-30  # the least temperature that float32 can divide by without harm
_MASK = (1 << 64) - 1
_WEYL, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def choose_reference(logits: Tensor, options: Tensor, streams: Tensor, positions: Tensor) -> Tensor:
    """What `choose` computes, row by row."""
    each = 4 * len(logits) // options.numel()  # rows that share their options
    by = options.reshape(-1, 4).tolist()
    tokens = torch.full((len(logits),), -1)
    for n, (row, key, at) in enumerate(zip(logits, streams.tolist(), positions.tolist(), strict=True)):
        if not row.amax().isfinite():
            continue
        temperature, top_p, top_k, min_p = by[n // each]
        if temperature > 0:
            row = filtered(row[None], temperature, top_p, int(top_k), min_p)[0]
            row = row + gumbel(key, at, len(row), row.device)
        tokens[n] = row.argmax()
    return tokens.to(logits.device)


def filtered(logits: Tensor, temperature: float, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> Tensor:
    """Logits [N, V] below each row's largest, over the temperature; -inf where top-k, top-p or min-p drop a token.

    Filters apply in that order, each to what the former left; `top_k` 0, `top_p` 1 and `min_p` 0 drop nothing. Top-p
    keeps tokens up to and including the first that brings their mass to `top_p`. Tokens of one logit are kept or
    dropped together. Temperature must not be 0. Rows are worked one by one: sums over several at once may round
    differently.
    """
    return torch.cat([_filtered_row(row[None], temperature, top_p, top_k, min_p) for row in logits])


def _filtered_row(logits: Tensor, temperature: float, top_p: float, top_k: int, min_p: float) -> Tensor:
    scaled = (logits - logits.amax()) / max(temperature, COLDEST)
    if 0 < top_k < scaled.shape[-1]:
        floor = scaled.topk(top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < floor, float("-inf"))
    if top_p < 1:
        scaled = scaled.masked_fill(scaled < _nucleus_floor(scaled, top_p), float("-inf"))
    if min_p > 0:
        scaled = scaled.masked_fill(scaled < math.log(min_p), float("-inf"))
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


def stream(seed: int, key: int) -> int:
    """The noise of one sequence, as a signed integer of 64 bits: what `choose` and `gumbel` are told of it."""
    return _signed(mix(mix(seed) ^ key))


@lru_cache(maxsize=64)
def gumbel(stream: int, position: int, size: int, device: torch.device) -> Tensor:
    """Standard Gumbel noise [size] of one position of one sequence: the same numbers, to the bit, for every caller.

    The position's stream is SplitMix64 (Steele et al., OOPSLA 2014); token t takes its value t. So vocabularies of
    different sizes share the noise of the tokens that they share.
    """
    return -torch.log(-torch.log1p(-uniform(bits(stream, position, size, device))))


def gumbel_of(streams: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """The noise of single tokens: what `gumbel` has for them, of streams, positions and tokens int64."""
    z = (tokens + 1) * _signed(_WEYL) + _mixed((streams ^ positions) + _signed(_WEYL))
    return -torch.log(-torch.log1p(-uniform(_shifted(_mixed(z), 11))))


def _mixed(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _signed(_MIX1)
    z = (z ^ _shifted(z, 27)) * _signed(_MIX2)
    return z ^ _shifted(z, 31)


def bits(stream: int, position: int, size: int, device: torch.device) -> Tensor:
    """53 random bits [size], int64, of each token at one position of one sequence."""
    z = torch.arange(1, size + 1, device=device) * _signed(_WEYL) + _signed(mix(stream ^ position))
    return _shifted(_mixed(z), 11)


def uniform(bits: Tensor) -> Tensor:
    """53 random bits as a float32 above 0 and below 1.

    Small numbers decide who wins, and float32 holds them as precisely as large ones: of the 2^53 equally likely
    numbers (bits + 1/2) 2^-53 each is moved by 2^-23 of itself at most, so no probability changes by more than
    rounding. The last float32 below 1 takes also what would round to 1, where the noise would not be finite.
    """
    return ((bits.float() + 0.5) * 2.0**-53).clamp_(max=1 - 2.0**-24)


def mix(z: int) -> int:
    """SplitMix64's output function of one 64-bit integer."""
    z = (z + _WEYL) & _MASK
    z = ((z ^ (z >> 30)) * _MIX1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX2) & _MASK
    return z ^ (z >> 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(z: int) -> int:
    return z - (1 << 64) if z >= 1 << 63 else z
