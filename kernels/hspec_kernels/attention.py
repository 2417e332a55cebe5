"""Attention of a block of query rows over cached keys and values: the seam behind which kernels go.

Letters: B sequences, R query rows, H query heads, HK key/value heads (H % HK == 0), G = H // HK, T keys, D head_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED = 64  # rows of a decoding block; the heads of a group share one read of their keys up to here


def causal_bias(
    first: int,
    rows: int,
    extent: int,
    group: int,
    *,
    window: int | None = None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """What `attend` adds to the scores: 0 where a row sees a key, -inf where it does not, [1, 1, R or R * G, T].

    Row r stands at position `first + r` and sees the keys at positions up to its own, with `window` only the last
    `window` of them. `group` is G.
    """
    at = torch.arange(first, first + rows, device=device)[:, None]
    keys = torch.arange(extent, device=device)
    hidden = keys > at if window is None else (keys > at) | (keys <= at - window)
    bias = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    if rows <= PACKED:
        bias = bias.repeat_interleave(group, dim=0)
    return bias[None, None]


def attend(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Softmax attention, scaled by 1/sqrt(D), of sequences that share a bias.

    query  [B, R, H, D]
    keys   [B, HK, T, D], values alike
    bias   from `causal_bias`
    -> out [B, R, H, D]

    A row's result depends on R and T but not on the other rows: the fixed-shape rule of decoding builds on that.
    """
    batch, rows, heads, dim = query.shape
    kv_heads = keys.shape[1]
    if rows > PACKED:
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2), keys, values, attn_mask=bias, enable_gqa=kv_heads != heads
        )
        return out.transpose(1, 2)
    packed = query.view(batch, rows, kv_heads, -1, dim).transpose(1, 2).reshape(batch, kv_heads, -1, dim)
    out = F.scaled_dot_product_attention(packed, keys, values, attn_mask=bias)
    return out.view(batch, kv_heads, rows, -1, dim).transpose(1, 2).reshape(batch, rows, heads, dim)
