"""Rows of a tree that were accepted, moved together in the caches of all layers at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hspec_kernels.compact.reference import compact_reference
from hspec_kernels.shapes import on_triton, power_of_two

__all__ = ["compact", "compact_reference", "pointers"]


def pointers(caches: Sequence[Tensor]) -> Tensor:
    """Where caches of one shape and layout lie, as `compact` wants to be told; int64 on their device."""
    return torch.tensor([cache.data_ptr() for cache in caches], device=caches[0].device)


def compact(caches: Sequence[Tensor], where: Tensor, slots: Tensor, first: Tensor, source: Tensor) -> None:
    """Put rows of every cache in other rows' places.

    caches   each [S, HK, C, D], all of one layout; `where` are their `pointers`
    slots    [B], first [B]   int64
    source   [B, R]           int64: row first[b] + r of sequence b becomes what row first[b] + source[b, r] was
    """
    if not on_triton(caches[0]):
        compact_reference(caches, slots, first, source)
        return
    from hspec_kernels.compact.kernel import compact_kernel

    (batch, rows), (_, heads, _, dim) = source.shape, caches[0].shape
    compact_kernel[(len(caches), heads, batch)](
        caches[0],
        where,
        slots,
        first,
        source.contiguous(),
        *caches[0].stride()[:3],
        rows,
        D=dim,
        BR=power_of_two(rows),
        BD=power_of_two(dim),
        num_warps=4,
    )
