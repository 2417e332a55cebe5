"""The skinny product of decoding: a block of 1 to 64 rows with a weight matrix that is read once."""

from __future__ import annotations

import torch
from torch import Tensor

from hspec_kernels.linear.reference import linear_reference
from hspec_kernels.shapes import on_triton, power_of_two

__all__ = ["ROWS", "linear", "linear_reference"]

ROWS = 64  # most rows that the kernel takes; more are the matrix units' business


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, tile: int = 16
) -> Tensor:
    """x weightᵀ + bias + residual, accumulated in float32.

    x [..., K], weight [N, K], bias [N], residual [..., N] -> [..., N]

    Rows are worked in tiles of `tile` (16, 32 or 64; larger where x has more rows). A row's bits depend on the tile's
    size but neither on the number of rows nor on the other rows, so a fixed tile keeps the fixed-shape rule.
    """
    rows = x.reshape(-1, x.shape[-1])
    if not on_triton(x) or len(rows) > ROWS or (x.is_cuda and x.element_size() > 2):
        return linear_reference(x, weight, bias, residual)
    from hspec_kernels.linear.kernel import blocks, linear_kernel

    count, inner = rows.shape
    outputs = len(weight)
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype, device=x.device)
    tile = max(tile, power_of_two(count))
    block_n, block_k, warps, stages = blocks(outputs, inner, tile)
    linear_kernel[(-(-outputs // block_n),)](
        rows,
        weight,
        bias if bias is not None else weight,
        residual if residual is not None else out,
        out,
        count,
        outputs,
        inner,
        rows.stride(0),
        weight.stride(0),
        BM=tile,
        BN=block_n,
        BK=block_k,
        EVEN=inner % block_k == 0,
        BIASED=bias is not None,
        ADDED=residual is not None,
        num_warps=warps,
        num_stages=stages,
    )
    return out
