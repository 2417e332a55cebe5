"""What says which keys a row sees.

Letters: B sequences, R query rows, H query heads, HK key/value heads (H % HK == 0), G = H // HK, C slots of the cache,
D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

PACKED = 64  # most rows of a decoding block; the heads of a group share one read of their keys up to here


@dataclass(frozen=True, eq=False)
class Reach:
    """Which slots of a cache the rows of a block see: row r of sequence b those of `slots[b]` up to `first[b] + r`.

    `slots` and `first` are int64 [B]. `extent` bounds, for each sequence, the slots looked at: it changes nothing but
    the shape of the work. With `window` a row sees only the last `window` positions.

    `tree` int64 [B, R], R <= 64, makes the block a tree: of its slots row r sees those whose bit is set, bit j standing
    for slot first[b] + j and its own bit among them; a row's position is then its depth. With `start` int64 [B] no row
    sees a slot before start[b]; `span` may bound first + R - start as `extent` bounds first + R.
    """

    slots: Tensor
    first: Tensor
    rows: int
    extent: tuple[int, ...]
    window: int | None = None
    tree: Tensor | None = None
    start: Tensor | None = None
    span: int | None = None
    known: tuple[tuple[int, int], ...] | None = None  # slot and first of each sequence, where the host knows them

    _biases: dict[int, Tensor] = field(default_factory=dict, repr=False)
    _counters: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.tree is not None and self.rows > PACKED:
            raise ValueError(f"a tree has at most {PACKED} rows: {self.rows}")

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Slot and first of each sequence."""
        return self.known or tuple(zip(self.slots.tolist(), self.first.tolist(), strict=True))

    def begin(self, b: int) -> int:
        """The first slot of sequence b that a reference looks at."""
        return 0 if self.start is None else int(self.start[b])

    def bias(self, b: int, group: int, dtype: torch.dtype) -> Tensor:
        """What is added to the scores of sequence b: 0 or -inf, [1, 1, R * group or R, extent - start]."""
        if b not in self._biases:
            self._biases[b] = self._bias(b, group, dtype)
        return self._biases[b]

    def counters(self, count: int) -> Tensor:
        """Zeros that kernels count with and leave at zero, int32 [count]."""
        if count not in self._counters:
            self._counters[count] = torch.zeros(count, dtype=torch.int32, device=self.first.device)
        return self._counters[count]

    def hidden(self, b: int) -> Tensor:
        """What the rows of sequence b do not see, bool [R, extent - start]."""
        device = self.first.device
        first = self.first[b]
        keys = torch.arange(self.begin(b), self.extent[b], device=device)
        if self.tree is None:
            at, places = first + torch.arange(self.rows, device=device)[:, None], keys
            hidden = keys > at
        else:
            seen = (self.tree[b, :, None] >> torch.arange(self.rows, device=device)) & 1
            depth = first + seen.sum(1) - 1
            at, row = depth[:, None], (keys - first).clamp(0, self.rows - 1)
            places = torch.where(keys < first, keys, depth[row])
            hidden = (keys >= first) & ((seen[:, row] == 0) | (keys >= first + self.rows))
        return hidden if self.window is None else hidden | (places <= at - self.window)

    def _bias(self, b: int, group: int, dtype: torch.dtype) -> Tensor:
        hidden = self.hidden(b)
        bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
        if self.rows <= PACKED:
            bias = bias.repeat_interleave(group, dim=0)
        return bias[None, None]
