"""A residual and the parts of a product that several ranks computed, added up in one order."""

from __future__ import annotations

import torch
from torch import Tensor

from hspec_kernels.shapes import on_triton
from hspec_kernels.total.reference import total_reference

__all__ = ["total", "total_reference"]

BLOCK = 1024  # elements of a program


def total(parts: Tensor, residual: Tensor) -> Tensor:
    """parts [P, ..., N] and residual [..., N] -> [..., N]: added in float32 from the residual on, rounded once."""
    if not on_triton(parts):
        return total_reference(parts, residual)
    from hspec_kernels.total.kernel import total_kernel

    residual = residual.contiguous()
    out = torch.empty_like(residual)
    count = residual.numel()
    total_kernel[(-(-count // BLOCK),)](parts.contiguous(), residual, out, count, P=len(parts), BLOCK=BLOCK)
    return out
