"""Launches of the attention kernels: parts of a prefix and of the slots, and their join."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hspec_kernels.attention.cut import Cut, cut_of
from hspec_kernels.attention.prefix import Chosen, Prefix, Quantized
from hspec_kernels.attention.reach import Reach
from hspec_kernels.attention.records import Chunks, Codes, Output, Parts, Rows, Store
from hspec_kernels.pdl import pdl_options
from hspec_kernels.shapes import power_of_two

LOG2_E = 1.4426950408889634
WORD = {4: torch.int32, 8: torch.int64}  # the integer of so many bytes
MAGIC = {torch.bfloat16: 0x4300, torch.float16: 0x6400}  # bits of the float to which the last bits add themselves
BIAS = {torch.bfloat16: 128, torch.float16: 1024}  # and that float


def launch(
    query: Tensor, prefix: Prefix | None, keys: Tensor, values: Tensor, reach: Reach, tile: int, cut: Cut | None = None
) -> tuple[Tensor, Tensor]:
    """Attention [B, R, H, D] and log-sum-exps [B, R, H] by the kernels, cut by default or as said."""
    work = Work(query, prefix, keys, values, reach, cut or cut_of(query, prefix, keys, reach, tile))
    if isinstance(prefix, Quantized):
        work.coded_parts(prefix)
    else:
        work.slots_parts(prefix)
    return work.joined()


class Work:
    """The arguments that the kernels of one attention share."""

    def __init__(
        self,
        query: Tensor,
        prefix: Prefix | None,
        keys: Tensor,
        values: Tensor,
        reach: Reach,
        cut: Cut,
        into: Parts | None = None,
    ) -> None:
        """`into`: where the parts go, if it is among the parts of another work."""
        self.query, self.cut = query, cut
        batch, rows, heads, dim = query.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        self.live, self.chunk, prefixes = _prefix(prefix, cut)
        count = prefixes + _tail_parts(reach, cut)
        self.grid = (-(-rows * group // cut.rows), count, batch * kv_heads)
        self.fused = cut.fused and not isinstance(prefix, Quantized)
        done = reach.counters(self.grid[0] * self.grid[2]) if self.fused else None
        tree = None if reach.tree is None else reach.tree.contiguous()
        self.block = Rows(query, query.stride()[:3], reach.first, reach.start, tree, reach.window)
        self.store = _store(keys, values, reach.slots)
        self.parts = into or Parts(*self._empty(batch * kv_heads, count, rows * group, dim))
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        _, lse = self._empty(batch, rows, heads, 0)
        self.output = Output(out, out.stride()[:3], lse, done)
        self.numbers = (rows, self.parts.p_lse.stride(0) // (rows * group), prefixes)
        self.scale = dim**-0.5 * LOG2_E
        self.shape = {
            "HK": kv_heads,
            "G": group,
            "D": dim,
            "BD": max(16, power_of_two(dim)),
            "SPLIT": cut.split,
            "PREFIX_SPLIT": cut.prefix_split,
        }
        self.early = pdl_options(query.device)
        self.options = {"num_warps": cut.warps, "num_stages": cut.stages, "maxnreg": cut.registers, **self.early}

    def slots_parts(self, prefix: Chosen | None) -> None:
        """Parts of chosen chunks, if any, and of the slots; joined too where that is fused."""
        from hspec_kernels.attention import kernel

        chosen = chunks = None
        if prefix is not None:
            chosen = _store(prefix.keys, prefix.values, prefix.slots)
            chunks = Chunks(prefix.index, prefix.index.stride()[:2], prefix.count)
        kernel.partial_kernel[self.grid](
            self.block,
            self.store,
            chosen,
            chunks,
            self.parts,
            self.output,
            self.scale,
            *self.numbers,
            **self.shape,
            BM=self.cut.rows,
            BN=self.cut.keys,
            CHUNK=self.chunk,
            APART=self.cut.apart,
            JOIN=max(1, 64 // self.cut.rows) if self.fused else 0,
            PTX=self.query.is_cuda,
            **self.options,
        )

    def coded_parts(self, prefix: Quantized) -> None:
        """Parts of a quantized copy and of the slots."""
        from hspec_kernels.attention.quantized import kernel

        kv, dtype = prefix.kv, self.query.dtype
        pairs = [scales.view(WORD[2 * scales.element_size()]) for scales in (kv.key_scales, kv.value_scales)]
        assembled = self.query.is_cuda and kv.bits == 4 and dtype in MAGIC
        warps_of_a_row = max(1, 16 * self.cut.warps // self.cut.rows)
        kernel.coded_kernel[self.grid](
            self.block,
            self.store,
            Codes(kv.keys, kv.values, pairs[0], pairs[1], prefix.slots, prefix.whole),
            self.parts,
            self.scale,
            *self.numbers,
            kv.capacity,
            **self.shape,
            BP=max(16, power_of_two(kv.keys.shape[-1])),
            BM=self.cut.rows,
            BN=self.cut.coded_keys,
            TAIL_BN=self.cut.keys,
            BITS=kv.bits,
            BIAS=BIAS.get(dtype, 0) if kv.bits == 4 else 0,
            LANES=min(self.cut.coded_keys, 8 * warps_of_a_row),
            ASM=tuple(kernel.assembly(MAGIC[dtype], shift) for shift in (0, 4, 8, 12)) if assembled else None,
            PTX=self.query.is_cuda,
            **self.options,
        )

    def parts_from(self, start: int) -> Parts:
        """The parts of slots from `start` on, a multiple of a split."""
        at = start // self.cut.split
        return Parts(self.parts.p_mean[:, at:], self.parts.p_lse[:, at:])

    def joined(self) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exps of all parts."""
        if not self.fused:
            self._merge()
        return self.output.p_out, self.output.p_lse

    def _merge(self) -> None:
        from hspec_kernels.attention.join import kernel

        kernel.merge_kernel[(self.parts.p_lse.shape[2], self.grid[2])](
            self.block, self.parts, self.live, self.output, *self.numbers, **self.shape, CHUNK=self.chunk, BS=32,
            num_warps=2, **self.early,
        )  # fmt: skip

    def _empty(self, *size: int) -> tuple[Tensor, Tensor]:
        """float32 of that size, and of that size less the last dimension."""
        how: dict[str, Any] = {"dtype": torch.float32, "device": self.query.device}
        return torch.empty(*size, **how), torch.empty(*size[:-1], **how)


def _store(keys: Tensor, values: Tensor, slots: Tensor) -> Store:
    return Store(keys, keys.stride()[:3], values, values.stride()[:3], slots)


def _prefix(prefix: Prefix | None, cut: Cut) -> tuple[Tensor | None, int, int]:
    """How many entries are live [B], the tokens of an entry, and the parts that there may be."""
    if prefix is None:
        return None, 0, 0
    if isinstance(prefix, Chosen):
        live, chunk, most = prefix.count, prefix.chunk, prefix.index.shape[2] * prefix.chunk
    else:
        live, chunk, most = prefix.whole, 1, min(prefix.extent or prefix.kv.capacity, prefix.kv.capacity)
    return live, chunk, -(-most // cut.prefix_split)


def _tail_parts(reach: Reach, cut: Cut) -> int:
    """Parts that the tail may have: with a span its first part may begin anywhere in a split."""
    parts = -(-max(reach.extent) // cut.split)
    if reach.start is None or reach.span is None:
        return parts
    return min(parts, -(-reach.span // cut.split) + 1)
