"""The KV store: keys and values of every layer at absolute positions. It owns the truth; views read it."""

from __future__ import annotations

import torch

from hspec_decoding.config import ModelConfig


class KVStore:
    """Per layer keys and values `[sequences, kv_heads, capacity, head_dim]`, keys after RoPE.

    A slot is a position. What is valid is known to whoever writes: rolling back means writing over.
    """

    def __init__(
        self, config: ModelConfig, sequences: int, capacity: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`capacity` in tokens. Pages of host memory are touched only as they are written."""
        shape = (sequences, config.kv_heads, capacity, config.head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.sequences, self.capacity = sequences, capacity
        self.device = device

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values together."""
        return sum(t.nbytes for t in (*self.keys, *self.values))
