"""Root-mean-square norm (Zhang and Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor

from hspec_kernels.norm.reference import rms_norm_reference
from hspec_kernels.pdl import pdl_options
from hspec_kernels.shapes import on_triton, power_of_two

__all__ = ["rms_norm", "rms_norm_reference"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] over the root mean square of its last dimension, computed in float32, times weight [D]."""
    if not on_triton(x):
        return rms_norm_reference(x, weight, eps)
    from hspec_kernels.norm.kernel import rms_norm_kernel

    rows, out = x.reshape(-1, x.shape[-1]), torch.empty_like(x, memory_format=torch.contiguous_format)
    rms_norm_kernel[(len(rows),)](
        rows,
        weight,
        out,
        eps,
        rows.stride(0),
        D=x.shape[-1],
        BD=power_of_two(x.shape[-1]),
        num_warps=8,
        **pdl_options(x.device),
    )
    return out
