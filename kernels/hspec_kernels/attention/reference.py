"""Attention over a KV cache in torch. Letters as in `reach`."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from hspec_kernels.attention.prefix import Prefix
from hspec_kernels.attention.reach import PACKED, Reach


def attend_reference(query: Tensor, keys: Tensor, values: Tensor, reach: Reach) -> Tensor:
    """What `attend` computes, one sequence at a time."""
    group = query.shape[2] // keys.shape[1]
    parts = []
    for b, ((slot, first), extent) in enumerate(zip(reach.places, reach.extent, strict=True)):
        begin = reach.begin(b)
        ours = keys[slot : slot + 1, :, begin:extent], values[slot : slot + 1, :, begin:extent]
        rows = query[b : b + 1]
        whole = reach.rows > PACKED
        plain = reach.window is None and begin == 0
        if whole and query.is_cuda and plain and extent == first + reach.rows:
            from torch.nn.attention.bias import causal_lower_right  # a second to import, and only prefill needs it

            bias = cast(Tensor, causal_lower_right(reach.rows, extent))
        else:
            bias = reach.bias(b, group, query.dtype)
        parts.append((_whole if whole else _packed)(rows, *ours, bias))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend_with_reference(
    query: Tensor, prefix: Prefix | None, keys: Tensor, values: Tensor, reach: Reach
) -> tuple[Tensor, Tensor]:
    """What `attend_with` computes, written out in float32 over gathered or dequantized keys."""
    parts = []
    for b, ((slot, _), extent) in enumerate(zip(reach.places, reach.extent, strict=True)):
        ours = [cache[slot, :, reach.begin(b) : extent].float() for cache in (keys, values)]
        hidden = reach.hidden(b)
        if prefix is not None:
            before = prefix.tokens(b)
            ours = [torch.cat(pair, dim=1) for pair in zip(before, ours, strict=True)]
            hidden = F.pad(hidden, (before[0].shape[1], 0), value=False)
        parts.append(_written_out(query[b].float(), ours[0], ours[1], hidden))
    out, lse = (torch.stack(part) for part in zip(*parts, strict=True))
    return out.to(query.dtype), lse


def _written_out(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """query [R, H, D], keys and values [HK, n, D], hidden [R, n] -> [R, H, D] and log-sum-exps [R, H]."""
    packed = query.reshape(len(query), len(keys), -1, query.shape[-1]).transpose(0, 1)  # [HK, R, G, D]
    scores = torch.einsum("hrgd,hnd->hrgn", packed, keys) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(hidden[:, None], float("-inf"))
    out = torch.einsum("hrgn,hnd->hrgd", scores.softmax(-1), values)
    return out.transpose(0, 1).flatten(1, 2), scores.logsumexp(-1).transpose(0, 1).flatten(1)


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
