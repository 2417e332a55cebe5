"""Queries and keys of a block: normed where the model does that, rotated, keys and values put into the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from hspec_kernels.pdl import pdl_options
from hspec_kernels.rope.reference import rope_append_reference
from hspec_kernels.shapes import on_triton, power_of_two

__all__ = ["rope_append", "rope_append_reference"]


def rope_append(
    stacked: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    first: Tensor,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """Rotate queries and keys (Su et al., arXiv 2104.09864, half-split), append keys and values to a cache.

    stacked  [B, R, (H + 2 HK) D]   queries, keys and values of R rows
    cos, sin [B, R, D]
    keys     [S, HK, C, D]          the cache, values alike: row r of sequence b goes to [slots[b], :, first[b] + r]
    slots    [B], first [B]         int64
    norms    weights [D] of the RMS norms of queries and keys, and their epsilon (Qwen3)
    -> queries [B, R, H, D]
    """
    batch, rows, width = stacked.shape
    kv_heads, dim = keys.shape[1], keys.shape[3]
    heads = width // dim - 2 * kv_heads
    if not on_triton(stacked):
        return rope_append_reference(stacked, cos, sin, keys, values, slots, first, norms)
    from hspec_kernels.rope.kernel import rope_append_kernel

    query = torch.empty(batch, rows, heads, dim, dtype=stacked.dtype, device=stacked.device)
    q_norm, k_norm, eps = norms if norms else (cos, cos, 0.0)
    rope_append_kernel[(batch * rows, heads + 2 * kv_heads)](
        stacked,
        cos,
        sin,
        q_norm,
        k_norm,
        query,
        keys,
        values,
        slots,
        first,
        rows,
        eps,
        *keys.stride()[:3],
        *values.stride()[:3],
        H=heads,
        HK=kv_heads,
        D=dim,
        BH=power_of_two(dim // 2),
        NORMED=norms is not None,
        num_warps=1,
        **pdl_options(stacked.device),
    )
    return query
