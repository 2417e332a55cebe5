"""The gate of a SwiGLU layer (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

import torch
from torch import Tensor

from hspec_kernels.mlp.reference import silu_mul_reference
from hspec_kernels.pdl import pdl_options
from hspec_kernels.shapes import on_triton

__all__ = ["silu_mul", "silu_mul_reference"]


def silu_mul(stacked: Tensor) -> Tensor:
    """silu(gate) * up [..., F] of stacked gate and up [..., 2F]."""
    if not on_triton(stacked):
        return silu_mul_reference(stacked)
    from hspec_kernels.mlp.kernel import BLOCK, silu_mul_kernel

    size = stacked.shape[-1] // 2
    out = torch.empty(*stacked.shape[:-1], size, dtype=stacked.dtype, device=stacked.device)
    grid = (out.numel() // size, -(-size // BLOCK))
    silu_mul_kernel[grid](stacked.contiguous(), out, size, B=BLOCK, **pdl_options(out.device))
    return out
