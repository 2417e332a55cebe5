"""Attention of a block of query rows over a KV cache.

Letters: B sequences, R query rows, H query heads, HK key/value heads (H % HK == 0), G = H // HK, C slots of the cache,
D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hspec_kernels.attention.reference import PACKED, Reach, attend_reference
from hspec_kernels.shapes import on_triton, power_of_two

__all__ = ["PACKED", "Reach", "attend", "attend_reference", "attend_split"]

SPLIT = 1024  # keys that one program of the kernel reads, at absolute positions
SHORT, SHORT_SPLIT = 16_384, 256  # the same for caches of at most so many slots
LARGEST_TILE = 64  # packed rows of one program


def attend(query: Tensor, keys: Tensor, values: Tensor, reach: Reach, tile: int = 16) -> Tensor:
    """Softmax attention scaled by 1/sqrt(D).

    query [B, R, H, D], keys and values [S, HK, C, D] -> [B, R, H, D]

    A row's bits depend neither on the other rows nor, on a GPU, on the extent; `tile` is the rows that the kernel
    makes room for, and fixes the shape of its work.
    """
    if on_triton(query) and reach.rows <= PACKED:
        return attend_split(query, keys, values, reach, tile)[0]
    return attend_reference(query, keys, values, reach)


def attend_split(query: Tensor, keys: Tensor, values: Tensor, reach: Reach, tile: int = 16) -> tuple[Tensor, Tensor]:
    """`attend` by the Triton kernels; also the natural log-sum-exp [B, R, H] of each row's scores, float32."""
    from hspec_kernels.attention.kernel import merge_kernel, partial_kernel

    batch, rows, heads, dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    split = SPLIT if keys.shape[2] > SHORT else SHORT_SPLIT
    splits = -(-max(reach.extent) // split)
    whole = power_of_two(dim)
    block = min(LARGEST_TILE, max(16, power_of_two(max(tile, rows) * group)))
    empty = torch.empty
    part = empty(batch * kv_heads, splits, rows * group, dim, dtype=torch.float32, device=query.device)
    part_lse = empty(batch * kv_heads, splits, rows * group, dtype=torch.float32, device=query.device)
    out = empty(query.shape, dtype=query.dtype, device=query.device)
    lse = empty(batch, rows, heads, dtype=torch.float32, device=query.device)
    shape = {"HK": kv_heads, "G": group, "D": dim, "BD": whole, "SPLIT": split}
    partial_kernel[(-(-rows * group // block), splits, batch * kv_heads)](
        query,
        keys,
        values,
        reach.slots,
        reach.first,
        part,
        part_lse,
        *query.stride()[:3],
        *keys.stride()[:3],
        *values.stride()[:3],
        dim**-0.5 * 1.4426950408889634,
        rows,
        splits,
        reach.window or 0,
        **shape,
        BM=block,
        BN=64,
        WINDOWED=reach.window is not None,
        num_warps=4,
        num_stages=4 if whole * query.element_size() <= 256 else 2,
    )
    merge_kernel[(rows * group, batch * kv_heads)](
        part, part_lse, reach.first, out, lse, *out.stride()[:3], rows, splits, **shape, BS=32, num_warps=2
    )
    return out, lse
