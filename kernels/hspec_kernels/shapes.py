"""Whether Triton kernels run here: on a GPU compiled, on a CPU in Triton's interpreter when that is asked for."""

from __future__ import annotations

import os

from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def on_triton(tensor: Tensor) -> bool:
    """Whether an operation on `tensor` is for its Triton kernel rather than for its torch reference."""
    return tensor.is_cuda or INTERPRETED


def power_of_two(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()
