"""The skinny product of decoding: few rows with a weight matrix that is read once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hspec_kernels.linear.quantized import Quantized, quantizable, quantize
from hspec_kernels.linear.reference import linear_reference
from hspec_kernels.shapes import on_triton, power_of_two, stages

__all__ = ["ROWS", "Quantized", "linear", "linear_reference", "quantizable", "quantize"]

ROWS = 512  # most rows that the kernels take; more are a prompt's, and cuBLAS's
QUANTIZED_ROWS = 64  # the same of 4-bit weights
TILE = 64  # most rows of one program


def linear(
    x: Tensor, weight: Tensor | Quantized, bias: Tensor | None = None, residual: Tensor | None = None, tile: int = 16
) -> Tensor:
    """x weightᵀ + bias + residual, accumulated in float32.

    x [..., K], weight [N, K], bias [N], residual [..., N] -> [..., N]

    A row's bits depend neither on the number of rows nor on the other rows: whatever the tiles, each sum is over the
    inner dimension from its beginning to its end, 16 elements at a time. Of 4-bit weights that holds for up to `tile`
    rows.
    """
    rows = x.reshape(-1, x.shape[-1])
    by_kernel = on_triton(x) and not (x.is_cuda and x.element_size() > 2)
    if isinstance(weight, Tensor):
        if by_kernel and len(rows) <= ROWS:
            return _linear(rows, weight, bias, residual, tile).view(*x.shape[:-1], -1)
        return linear_reference(x, weight, bias, residual)
    if by_kernel and len(rows) <= QUANTIZED_ROWS:
        from hspec_kernels.linear.quantized_kernel import quantized_linear

        tile = max(tile, power_of_two(len(rows)))
        return quantized_linear(rows, weight, bias, residual, tile).view(*x.shape[:-1], -1)
    out = weight.linear(x, bias, _dequantize(x))
    return out if residual is None else out + residual


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, tile: int) -> Tensor:
    from hspec_kernels.linear.kernel import blocks, linear_kernel

    (count, inner), outputs = rows.shape, len(weight)
    out = torch.empty(count, outputs, dtype=rows.dtype, device=rows.device)
    tile = min(TILE, max(tile, power_of_two(count)))
    block_n, block_k, warps, wanted = blocks(outputs, inner, tile)
    linear_kernel[(-(-count // tile), -(-outputs // block_n))](
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
        num_stages=stages((tile + block_n) * block_k * rows.element_size(), wanted, rows.device),
    )
    return out


def _dequantize(x: Tensor) -> Callable[[Quantized, torch.dtype], Tensor]:
    if not on_triton(x):
        return Quantized.dequantized
    from hspec_kernels.linear.quantized_kernel import dequantize

    return dequantize
