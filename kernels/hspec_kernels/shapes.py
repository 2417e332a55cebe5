"""Small facts that every operation needs: which implementation, which block sizes."""

from __future__ import annotations

from torch import Tensor


def on_triton(tensor: Tensor) -> bool:
    """Whether an operation on `tensor` is for its Triton kernel rather than for its torch reference."""
    return tensor.is_cuda


def power_of_two(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()
