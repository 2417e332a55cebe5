"""Attention of a block of query rows over a KV cache.

Letters: B sequences, R query rows, H query heads, HK key/value heads (H % HK == 0), G = H // HK, C slots of the cache,
D head_dim.
"""

from __future__ import annotations

from torch import Tensor

from hspec_kernels.attention.cut import SPLIT
from hspec_kernels.attention.prefill import attend_chunk, by_cudnn
from hspec_kernels.attention.prefix import Chosen, Prefix, Quantized
from hspec_kernels.attention.quantized import GROUP, QuantizedKV
from hspec_kernels.attention.reach import PACKED, Reach
from hspec_kernels.attention.reference import attend_reference, attend_with_reference
from hspec_kernels.shapes import on_triton

__all__ = [
    "GROUP",
    "PACKED",
    "SPLIT",
    "Chosen",
    "Prefix",
    "Quantized",
    "QuantizedKV",
    "Reach",
    "attend",
    "attend_reference",
    "attend_split",
    "attend_with",
    "attend_with_reference",
]


def attend(query: Tensor, keys: Tensor, values: Tensor, reach: Reach, tile: int = 16) -> Tensor:
    """Softmax attention scaled by 1/sqrt(D).

    query [B, R, H, D], keys and values [S, HK, C, D] -> [B, R, H, D]

    A row's bits depend neither on the other rows nor, on a GPU, on the extent; `tile` is the rows that the kernel
    makes room for, and fixes the shape of its work.
    """
    if on_triton(query) and reach.rows <= PACKED:
        return attend_split(query, keys, values, reach, tile)[0]
    if by_cudnn(query, reach):
        return attend_chunk(query, keys, values, reach)
    return attend_reference(query, keys, values, reach)


def attend_split(query: Tensor, keys: Tensor, values: Tensor, reach: Reach, tile: int = 16) -> tuple[Tensor, Tensor]:
    """`attend` by the Triton kernels; also the natural log-sum-exp [B, R, H] of each row's scores, float32."""
    from hspec_kernels.attention.launch import launch

    return launch(query, None, keys, values, reach, tile)


def attend_with(
    query: Tensor, prefix: Prefix | None, keys: Tensor, values: Tensor, reach: Reach, tile: int = 16
) -> tuple[Tensor, Tensor]:
    """Attention over the whole of a prefix and, of the slots of keys and values, over those that `reach` says.

    query [B, R, H, D], keys and values [S, HK, C, D] -> [B, R, H, D], and the natural log-sum-exp [B, R, H], float32

    A row's bits depend neither on the other rows, nor on what stands beyond the prefix's live entries, nor on extents.
    """
    if not on_triton(query):
        return attend_with_reference(query, prefix, keys, values, reach)
    from hspec_kernels.attention.launch import launch

    return launch(query, prefix, keys, values, reach, tile)
