"""The skinny product of decoding: few rows with a weight matrix that is read once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hspec_kernels.linear.chosen import TUNED_BLOCKS, Matrix
from hspec_kernels.linear.quantized import Quantized, quantizable, quantize
from hspec_kernels.linear.reference import linear_reference
from hspec_kernels.mlp import silu_mul
from hspec_kernels.pdl import NO_PDL, pdl_options
from hspec_kernels.shapes import on_triton, power_of_two, stages

if TYPE_CHECKING:
    from hspec_kernels.linear.kernel import Blocks

__all__ = ["ROWS", "Quantized", "gated_linear", "linear", "linear_reference", "quantizable", "quantize"]

ROWS = 512  # most rows that the kernels take; more are a prompt's, and cuBLAS's
QUANTIZED_ROWS = 64  # the same of 4-bit weights
SOON = 16  # rows up to which it pays to begin beside the kernel before: 5.5 ms for 4.6 with 32 (7B, H200)
TILE = 64  # most rows of one program


def linear(
    x: Tensor, weight: Tensor | Quantized, bias: Tensor | None = None, residual: Tensor | None = None, tile: int = 16
) -> Tensor:
    """x weightᵀ + bias + residual, accumulated in float32.

    x [..., K], weight [N, K], bias [N], residual [..., N] -> [..., N]

    A row's bits depend neither on the number of rows nor on the other rows: whatever the tiles, each sum is over the
    inner dimension from its beginning to its end, 16 elements at a time, or it is of few such sums, which depend on the
    weight's shape. Of 4-bit weights that holds for up to `tile` rows.
    """
    rows = x.reshape(-1, x.shape[-1])
    if _by_kernel(rows, weight):
        return _linear(rows, weight, bias, residual, tile).view(*x.shape[:-1], -1)
    if isinstance(weight, Tensor):
        return linear_reference(x, weight, bias, residual)
    out = weight.linear(x, bias, _dequantize(x))
    return out if residual is None else out + residual


def gated_linear(x: Tensor, weight: Tensor | Quantized, bias: Tensor | None = None, tile: int = 16) -> Tensor:
    """silu(gate) * up of [gate, up] = x weightᵀ + bias, to the bit as in two steps.

    x [..., K], weight [2 F, K], bias [2 F] -> [..., F]
    """
    rows = x.reshape(-1, x.shape[-1])
    if _by_kernel(rows, weight):
        return _linear(rows, weight, bias, None, tile, gated=True).view(*x.shape[:-1], -1)
    return silu_mul(linear(x, weight, bias, tile=tile))


def _by_kernel(rows: Tensor, weight: Tensor | Quantized) -> bool:
    most = ROWS if isinstance(weight, Tensor) else QUANTIZED_ROWS
    return len(rows) <= most and on_triton(rows) and not (rows.is_cuda and rows.element_size() > 2)


def _linear(
    rows: Tensor,
    weight: Tensor | Quantized,
    bias: Tensor | None,
    residual: Tensor | None,
    tile: int,
    gated: bool = False,
) -> Tensor:
    """The product of rows [M, K] by kernels, [M, N] or, gated, [M, N / 2]."""
    tile = max(tile, power_of_two(len(rows)))
    if isinstance(weight, Quantized):
        from hspec_kernels.linear.quantized_kernel import quantized_linear

        return quantized_linear(rows, weight, bias, residual, tile, gated=gated)
    return whole_linear(rows, weight, bias, residual, min(TILE, tile), gated=gated)


def whole_linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    tile: int,
    cut: Blocks | None = None,
    gated: bool = False,
) -> Tensor:
    """The same of weights [N, K] in the type of the rows, by tiles of `tile` rows.

    `cut` is for measurements; by default it is the one for the weight's shape, as tuned for this GPU if it was.
    """
    from hspec_kernels.linear.kernel import AHEAD, blocks, linear_kernel

    (count, inner), outputs = rows.shape, len(weight)
    cut = cut or TUNED_BLOCKS.get(Matrix(rows.device, rows.dtype, None, outputs, inner, tile))
    cut = cut or blocks(outputs, inner, tile)
    out = torch.empty(count, outputs // 2 if gated else outputs, dtype=rows.dtype, device=rows.device)
    step = cut.chains * cut.k
    linear_kernel[(-(-count // tile), -(-outputs // cut.n))](
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
        BN=cut.n,
        BK=cut.k,
        CHAINS=cut.chains,
        LINES=AHEAD // cut.n,
        EVEN=inner % step == 0,
        BIASED=bias is not None,
        ADDED=residual is not None,
        GATED=gated,
        num_warps=cut.warps,
        num_stages=stages((tile + cut.n) * step * rows.element_size(), cut.stages, rows.device),
        **(pdl_options(rows.device) if tile <= SOON else NO_PDL),
    )
    return out


def _dequantize(x: Tensor) -> Callable[[Quantized, torch.dtype], Tensor]:
    if not on_triton(x):
        return Quantized.dequantized
    from hspec_kernels.linear.quantized_kernel import dequantize

    return dequantize
