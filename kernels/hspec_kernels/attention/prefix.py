"""Keys that every row of a block sees, kept elsewhere or otherwise than the slots of its tail.

Letters as in `reach`; N entries of an index.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hspec_kernels.attention.quantized import GROUP, QuantizedKV


@dataclass(frozen=True, eq=False)
class Chosen:
    """Chunks of `chunk` tokens of a store, chosen for each KV head: chunk i is slots i * chunk to (i + 1) * chunk - 1.

    keys and values [S, HK, C, D], slots int64 [B]; index int32 [B, HK, N], of which sequence b has the first count[b];
    count int64 [B].
    """

    keys: Tensor
    values: Tensor
    slots: Tensor
    index: Tensor
    count: Tensor
    chunk: int

    def tokens(self, b: int) -> tuple[Tensor, Tensor]:
        """The keys and values of sequence b, float32 [HK, n, D]."""
        device = self.index.device
        chosen = self.index[b, :, : int(self.count[b]), None].long() * self.chunk
        slots = (chosen + torch.arange(self.chunk, device=device)).flatten(1)
        heads, slot = torch.arange(len(slots), device=device)[:, None], int(self.slots[b])
        return self.keys[slot, heads, slots].float(), self.values[slot, heads, slots].float()


@dataclass(frozen=True, eq=False)
class Quantized:
    """The first whole[b] tokens of slots[b] of a quantized copy; both int64 [B], whole a multiple of 128.

    `extent` may bound `whole`: it changes nothing but the shape of the work.
    """

    kv: QuantizedKV
    slots: Tensor
    whole: Tensor
    extent: int | None = None

    def tokens(self, b: int) -> tuple[Tensor, Tensor]:
        """The keys and values of sequence b, float32 [HK, n, D]."""
        return self.kv.tokens(int(self.slots[b]), int(self.whole[b]) // GROUP)


Prefix = Chosen | Quantized
