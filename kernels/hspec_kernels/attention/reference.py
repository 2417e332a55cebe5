"""Attention over a KV cache in torch, and what says which keys a row sees.

Letters: B sequences, R query rows, H query heads, HK key/value heads (H % HK == 0), G = H // HK, C slots of the cache,
D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED = 64  # most rows of a decoding block; the heads of a group share one read of their keys up to here


@dataclass(frozen=True, eq=False)
class Reach:
    """Which slots of a cache the rows of a block see: row r of sequence b those of `slots[b]` up to `first[b] + r`.

    `slots` and `first` are int64 [B]. `extent` bounds, for each sequence, the slots looked at: it changes nothing but
    the shape of the work. With `window` a row sees only the last `window` slots.
    """

    slots: Tensor
    first: Tensor
    rows: int
    extent: tuple[int, ...]
    window: int | None = None

    _biases: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def bias(self, b: int, group: int, dtype: torch.dtype) -> Tensor:
        """What is added to the scores of sequence b: 0 or -inf, [1, 1, R * group or R, extent]."""
        if b not in self._biases:
            self._biases[b] = self._bias(b, group, dtype)
        return self._biases[b]

    def _bias(self, b: int, group: int, dtype: torch.dtype) -> Tensor:
        device = self.first.device
        at = self.first[b] + torch.arange(self.rows, device=device)[:, None]
        keys = torch.arange(self.extent[b], device=device)
        hidden = keys > at if self.window is None else (keys > at) | (keys <= at - self.window)
        bias = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        if self.rows <= PACKED:
            bias = bias.repeat_interleave(group, dim=0)
        return bias[None, None]


def attend_reference(query: Tensor, keys: Tensor, values: Tensor, reach: Reach) -> Tensor:
    """What `attend` computes, one sequence at a time."""
    group = query.shape[2] // keys.shape[1]
    parts = []
    for b, (slot, extent) in enumerate(zip(reach.slots.tolist(), reach.extent, strict=True)):
        ours = keys[slot : slot + 1, :, :extent], values[slot : slot + 1, :, :extent]
        rows = query[b : b + 1]
        whole = reach.rows > PACKED
        if whole and query.is_cuda and reach.window is None and extent == int(reach.first[b]) + reach.rows:
            from torch.nn.attention.bias import causal_lower_right  # a second to import, and only prefill needs it

            bias = cast(Tensor, causal_lower_right(reach.rows, extent))
        else:
            bias = reach.bias(b, group, query.dtype)
        parts.append((_whole if whole else _packed)(rows, *ours, bias))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _whole(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    shared = keys.shape[1] != query.shape[2]
    out = F.scaled_dot_product_attention(query.transpose(1, 2), keys, values, attn_mask=bias, enable_gqa=shared)
    return out.transpose(1, 2)


def _packed(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    _, rows, heads, dim = query.shape
    kv_heads = keys.shape[1]
    packed = query.view(1, rows, kv_heads, -1, dim).transpose(1, 2).reshape(1, kv_heads, -1, dim)
    out = F.scaled_dot_product_attention(packed, keys, values, attn_mask=bias)
    return out.view(1, kv_heads, rows, -1, dim).transpose(1, 2).reshape(1, rows, heads, dim)
