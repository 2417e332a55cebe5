"""Launch shapes that were measured to be faster on a GPU than the defaults, which were measured on an H200."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from hspec_kernels.linear.kernel import Blocks
    from hspec_kernels.linear.quantized_kernel import Launch

__all__ = ["TUNED_BLOCKS", "TUNED_LAUNCHES", "Matrix"]


class Matrix(NamedTuple):
    """Weights [outputs, inner] that tiles of `tile` rows are multiplied with: what a launch shape is chosen for."""

    device: torch.device
    dtype: torch.dtype  # of the rows
    form: str | None  # of weights in 4 bits
    outputs: int
    inner: int
    tile: int


TUNED_BLOCKS: dict[Matrix, Blocks] = {}
TUNED_LAUNCHES: dict[Matrix, Launch] = {}  # of weights in 4 bits
