"""Attention of one sequence's rows over keys that arrive piece by piece, or were attended to elsewhere.

Letters as in `reach`; a piece holds T tokens. Parts stand where they would if all keys lay in one store, and are joined
in the same order: moving keys changes no bit.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hspec_kernels.attention.reach import Reach
from hspec_kernels.attention.reference import attend_reference, attend_with_reference
from hspec_kernels.shapes import on_triton

LOG2_E = 1.4426950408889634
MOST_ROWS = 32  # packed rows of one program: carrying keys takes longer than reading them twice


class Pieces:
    """The attention of a query [1, R, H, D], R <= 64, row 0 of which stands at position `first`.

    Every piece is added once, then `join` gives the result.
    """

    def __init__(self, query: Tensor, first: Tensor, extent: int, kv_heads: int, capacity: int) -> None:
        """`first` int64 [1]; `extent` bounds the positions that are looked at; `capacity`: slots that the one store
        would have, which fix the order of sums.
        """
        self.query, self.first, self.extent, self.kv_heads = query, first, extent, kv_heads
        self.zero = torch.zeros_like(first)
        self.kernels = _Launched(self, capacity) if on_triton(query) else None
        self.added: list[tuple[int, Tensor, Tensor]] = []
        self.elsewhere: tuple[Tensor, Tensor, int] | None = None

    def add(self, keys: Tensor, values: Tensor, start: int, first: Tensor) -> None:
        """Keys and values [1, HK, T, D] of positions from `start` on, a multiple of 1024; `first` [1] is the query's
        own less `start`. What stands behind the rows' own positions is not looked at.
        """
        if self.kernels:
            self.kernels.add(keys, values, start, first)
        else:
            self.added.append((start, keys.clone(), values.clone()))  # what is enqueued here has been done there

    def add_attended(self, out: Tensor, lse: Tensor, stop: int) -> None:
        """What every row makes of positions 0 to `stop` - 1: out [R, H, D] and log-sum-exps [R, H], float32."""
        if self.kernels:
            self.kernels.add_attended(out, lse, stop)
        else:
            self.elsewhere = out, lse, stop

    def join(self) -> tuple[Tensor, Tensor | None]:
        """[1, R, H, D], and log-sum-exps [1, R, H] where they are known."""
        if self.kernels:
            return self.kernels.work.joined()
        pairs = [pair for _, *pair in sorted(self.added, key=lambda piece: piece[0])]
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*pairs, strict=True))
        begin = self.elsewhere[2] if self.elsewhere else 0
        reach = Reach(self.zero, self.first - begin, self.query.shape[1], (self.extent - begin,))
        if self.elsewhere is None:
            return attend_reference(self.query, keys, values, reach), None
        ours, our_lse = attend_with_reference(self.query.float(), None, keys, values, reach)
        out, lse = self.elsewhere[0][None], self.elsewhere[1][None]
        weight = (lse - our_lse).sigmoid()[..., None]
        return (ours + (out - ours) * weight).to(self.query.dtype), torch.logaddexp(lse, our_lse)


class _Launched:
    """The parts of a query's attention, in the places where one store's parts would be."""

    def __init__(self, pieces: Pieces, capacity: int) -> None:
        from hspec_kernels.attention.cut import cut_of
        from hspec_kernels.attention.launch import Work

        query, rows = pieces.query, pieces.query.shape[1]
        like = query.new_empty((1, pieces.kv_heads, 0, query.shape[3]))
        whole = torch.empty((1, pieces.kv_heads, capacity, query.shape[3]), dtype=query.dtype, device="meta")
        self.reach = Reach(pieces.zero, pieces.first, rows, (pieces.extent,))
        cut = cut_of(query, None, whole, self.reach, 16)
        self.cut = replace(cut, rows=min(cut.rows, MOST_ROWS), fused=False)
        self.work = Work(query, None, like, like, self.reach, self.cut)

    def add(self, keys: Tensor, values: Tensor, start: int, first: Tensor) -> None:
        from hspec_kernels.attention.launch import Work

        extent = min(keys.shape[2], self.reach.extent[0] - start)
        reach = Reach(self.reach.slots, first, self.reach.rows, (extent,))
        Work(self.work.query, None, keys, values, reach, self.cut, self.work.parts_from(start)).slots_parts(None)

    def add_attended(self, out: Tensor, lse: Tensor, stop: int) -> None:
        means, weights = self.work.parts
        taken = slice(0, stop // self.cut.split)
        heads = means.shape[0]
        means[:, taken], weights[:, taken] = 0.0, float("-inf")
        rows, _, dim = out.shape
        means[:, 0] = out.view(rows, heads, -1, dim).transpose(0, 1).flatten(1, 2)
        weights[:, 0] = lse.view(rows, heads, -1).transpose(0, 1).flatten(1) * LOG2_E
