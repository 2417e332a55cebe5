"""A layer that the CPU multiplies where its weights lie, between layers on another device.

It is for few rows: with more, the weights come to the device. A row's bits must not depend on how many rows there are,
so rows are filled up as this CPU wants them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from hspec_decoding.config import ModelConfig
from hspec_decoding.host_view import Fetched, carried_back
from hspec_decoding.model import Layer
from hspec_offload.ring import Item

if TYPE_CHECKING:
    from hspec_decoding.ranks import Ranks

CPU_ROWS = 64  # rows up to which the CPU multiplies; with more the weights come to the device


@dataclass(frozen=True)
class CPULayer(Layer):
    """A layer that the CPU multiplies: its matrices are a HostLinear each, `host` is the same layer for the CPU.

    Rows are filled up to a multiple of `unit`, so that the bits of a row do not depend on how many there are; with
    `fixed`, they are multiplied `unit` at a time.
    """

    host: Layer
    unit: int
    fixed: bool = False

    def before(self, x: Tensor, eps: float) -> Tensor:
        if many(x):
            return super().before(x, eps)
        return self._by_cpu(partial(self.host.before, eps=eps), x)

    def after(self, x: Tensor, attended: Tensor, eps: float) -> Tensor:
        if many(x):
            return super().after(x, attended, eps)
        return self._by_cpu(partial(self.host.after, eps=eps), x, attended)

    def items(self, rows: int, attention: Sequence[Item] = ()) -> Sequence[Item]:
        return super().items(rows, attention) if rows > CPU_ROWS else attention

    def together(self, ranks: Ranks) -> Self:
        """Rows are filled up as the CPU of every rank wants them: all exchange equally often."""
        fixed, unit = max(ranks.all((self.fixed, self.unit)))
        return replace(self, ranks=ranks, host=self.host.together(ranks), unit=unit, fixed=fixed)

    def _by_cpu(self, step: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """A step on tensors [B, R, ...] of the device, whose first dimensions the CPU sees as one."""
        fetched = [Fetched(tensor.flatten(0, 1)) for tensor in tensors]
        out = in_units(step, self.unit, self.fixed, *(one.tensor for one in fetched))
        return carried_back(out, tensors[0]).view(*tensors[0].shape[:2], -1)


def in_units(step: Callable[..., Tensor], unit: int, fixed: bool, *tensors: Tensor) -> Tensor:
    """A step on rows that are filled up to a multiple of `unit`, all at once or `unit` at a time."""
    rows = len(tensors[0])
    missing = -rows % unit
    filled = [F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing)) if missing else x for x in tensors]
    if fixed and rows > unit:
        return torch.cat([step(*parts) for parts in zip(*(torch.split(x, unit) for x in filled), strict=True)])[:rows]
    return step(*filled)[:rows]


def many(x: Tensor) -> bool:
    """Whether the rows [B, R, hidden] are too many for the CPU."""
    return x.shape[:2].numel() > CPU_ROWS


def row_unit(layer: Layer, config: ModelConfig, dtype: torch.dtype) -> tuple[int, bool]:
    """Rows of which every multiple gives a row the same bits on this CPU, 8 or 16; or 32, always so many at a time.

    On two cores of Zen 4 that is 8: 1 row alone differs, and in float32 also 2, 3, 5, 6 and 7. In bfloat16 a layer of
    a 7B model takes 56 ms for 1 row, 64 for 8, 66 for 16 and 96 for 32: plain decoding pays for 8 rows, not for a
    whole block. A Xeon with AMX takes 7.2 ms for 1 row and 8.6 for 32, and there multiples of 8 do not do.
    """
    x = torch.randn(40, config.hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)

    def run(x: Tensor) -> Tensor:
        stacked = layer.before(x, config.norm_eps)
        heads = stacked[:, : config.heads * config.head_dim]
        return torch.cat((stacked, layer.after(x, heads.reshape(len(x), config.heads, -1), config.norm_eps)), dim=1)

    for unit in (8, 16):
        whole = in_units(run, unit, False, x)
        spans = (slice(start, start + rows) for start, rows in PROBED)
        if all(torch.equal(in_units(run, unit, False, x[span].clone()), whole[span]) for span in spans):
            return unit, False
    return 32, True


# First row and number of rows of blocks by which a CPU is tried.
PROBED = ((0, 1), (7, 1), (32, 1), (3, 8), (16, 16), (1, 31), (5, 33), (20, 20), (2, 3), (39, 1))
