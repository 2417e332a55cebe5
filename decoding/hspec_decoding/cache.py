"""The KV store: keys and values of every layer at absolute positions. It owns the truth; views read it."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from hspec_decoding.config import ModelConfig
from hspec_kernels.select import gather_chunks
from hspec_offload.host_kv import HostKV

Lane = int | None | str  # layers whose rows see the same slots: those of a sliding window; of all; of what is `AWAY`


class Slots(Protocol):
    """Where a pass writes keys and values and what it attends to, per layer [sequences, kv_heads, slots, head_dim]."""

    keys: list[Tensor]
    values: list[Tensor]
    lanes: list[Lane]
    capacity: int
    device: torch.device


class KVStore:
    """Per layer keys and values `[sequences, kv_heads, capacity, head_dim]`, keys after RoPE.

    A slot is a position. What is valid is known to whoever writes: rolling back means writing over.
    """

    def __init__(
        self, config: ModelConfig, sequences: int, capacity: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`capacity` in tokens. Pages of host memory are touched only as they are written."""
        self.shape = (sequences, config.kv_heads, capacity, config.head_dim)
        self.keys = [_zeros(self.shape, dtype, device) for _ in range(config.layers)]
        self.values = [_zeros(self.shape, dtype, device) for _ in range(config.layers)]
        self.lanes: list[Lane] = list(config.windows)
        self.sequences, self.capacity = sequences, capacity
        self.device, self.dtype = device, dtype

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values together."""
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def gather(self, layer: int, index: Tensor, slots: Tensor, copy: tuple[Tensor, Tensor], chunk: int) -> None:
        """Chunks [B, HK, N] of a layer to the start of another store's keys and values."""
        gather_chunks(self.keys[layer], self.values[layer], index, slots, *copy, chunk)


Store = KVStore | HostKV


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, on a host by the system's own promise: torch would write them."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)
