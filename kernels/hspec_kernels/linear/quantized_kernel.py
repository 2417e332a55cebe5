# mypy: ignore-errors
"""Triton: skinny product with a matrix in four bits, widened in registers on their way to the tensor cores."""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hspec_kernels.linear.chosen import TUNED_LAUNCHES, Matrix
from hspec_kernels.linear.quantized import NF4, Quantized
from hspec_kernels.linear.quantized_ptx import affine, permute
from hspec_kernels.mlp import silu_mul
from hspec_kernels.mlp.kernel import silu_times
from hspec_kernels.pdl import pdl_options
from hspec_kernels.pdl.kernel import await_earlier, prefetch
from hspec_kernels.shapes import shared_memory

DECODE = {"nf4": "pairs", "int4": "fma"}  # how codes are widened on a GPU
JOIN = 512  # elements of the output that a program of `join_kernel` sums
AHEAD = 128  # pieces of a line, of codes that a program asks for before it waits for the kernel before it


class Launch(NamedTuple):
    """How a product is cut up. What a float32 sum runs over is a matter of `split` alone."""

    n: int  # outputs of a program
    k: int  # elements of K in a step of its loop
    split: int  # programs that share an output, each with its part of K
    warps: int
    stages: int  # steps in flight; fewer where shared memory is short
    decode: str | None = None  # as in `quantized_linear_kernel`; None: the best
    swap: bool = False


# (most rows of a tile, least N, least K, launch), in order; the first that fits is taken. Measured on an H200.
LAUNCHES = {
    "int4": [
        (16, 65_536, 0, Launch(64, 256, 1, 2, 4, swap=True)),
        (16, 8_192, 0, Launch(128, 128, 4, 4, 4, swap=True)),
        (16, 0, 0, Launch(64, 256, 4, 2, 3)),
        (64, 0, 0, Launch(64, 128, 2, 4, 3, swap=True)),
    ],
    "nf4": [
        (16, 65_536, 0, Launch(64, 256, 1, 2, 4, swap=True)),
        (16, 0, 0, Launch(64, 128, 4, 2, 5)),
        (32, 0, 0, Launch(64, 128, 2, 2, 4)),
        (64, 0, 0, Launch(64, 128, 2, 4, 3)),
    ],
}


def launch_for(kind: str, outputs: int, inner: int, tile: int) -> Launch:
    """The launch for weights [outputs, inner] and a tile of rows: equal arguments always give equal launches."""
    return next(launch for rows, n, k, launch in LAUNCHES[kind] if tile <= rows and outputs >= n and inner >= k)


def stages_that_fit(launch: Launch, tile: int, shared: int) -> int:
    """Steps in flight that `shared` bytes of shared memory hold: codes, their scales, and the tile's part of x.

    One step fewer than are in flight has its own place, but Hopper's tensor cores may need x and widened weights there.
    """
    x = 2 * tile * launch.k
    step = x + launch.k * launch.n // 2 + launch.k // 64 * launch.n * 4
    return max(1, min(launch.stages, 1 + (shared - x - 128 * launch.n - 2048) // step))


HALVES = (torch.bfloat16, torch.float16)
PERMUTE = tl.constexpr(tuple(permute(t, odd, False) for t in HALVES for odd in (False, True)))
PAIRS = tl.constexpr(tuple(permute(t, odd, True) for t in HALVES for odd in (False, True)))
AFFINE = tl.constexpr(tuple(affine(t, plane) for t in HALVES for plane in range(4)))


@triton.jit
def _nf4(codes, p_table, ODD: tl.constexpr, DECODE: tl.constexpr):
    """Table values of the even (high) or odd (low) nibbles of bytes [...], in the table's type."""
    dtype = p_table.dtype.element_ty
    at: tl.constexpr = ODD + (2 if dtype == tl.float16 else 0)
    ptx: tl.constexpr = PAIRS[at] if DECODE == "pairs" else PERMUTE[at]
    if DECODE == "plain":
        values = tl.load(p_table + (codes & 15 if ODD else codes >> 4).to(tl.int32))
    else:
        values = tl.inline_asm_elementwise(ptx, "=r,=r,r", [codes], dtype=dtype, is_pure=True, pack=4)
    return values


@triton.jit
def _int4(words, scales, x, PLANE: tl.constexpr, DECODE: tl.constexpr):
    """Nibble PLANE of 16-bit words [...] by the packed steps and minima that broadcast over them, in the type of x."""
    at: tl.constexpr = PLANE + (4 if x.dtype == tl.float16 else 0)
    if DECODE == "plain":
        step = (scales << 16).to(tl.float32, bitcast=True)
        low = (scales & -65536).to(tl.float32, bitcast=True)
        values = ((words >> 4 * PLANE & 15).to(tl.float32) * step + low).to(x.dtype)
    else:
        values = tl.inline_asm_elementwise(AFFINE[at], "=r,r,r,r", [words, scales], dtype=x.dtype, is_pure=True, pack=2)
    return values


@triton.jit
def _dot(x, w, acc, SWAP: tl.constexpr):
    """acc + x wᵀ, or its transpose: the weights are then the operand that Hopper's tensor cores take from registers."""
    return tl.dot(w, x.T, acc, input_precision="ieee") if SWAP else tl.dot(x, w.T, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["M"])
def quantized_linear_kernel(
    p_x,
    p_codes,
    p_scales,
    p_table,
    p_bias,
    p_add,
    p_out,
    M,
    N,
    K,
    PART,
    s_x,
    s_row,
    s_block,
    s_scale,
    INT4: tl.constexpr,
    DECODE: tl.constexpr,
    SWAP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    SPLIT: tl.constexpr,
    LINES: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCK: tl.constexpr = 128 if INT4 else 64  # elements of a row that are decoded together
    o_m, o_n = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    o_w = tl.arange(0, 32)  # 16-bit words, or bytes, that hold the codes of a block
    o_k = tl.arange(0, 32 if INT4 else 64)
    rows, outputs = o_m < M, o_n < N
    p_codes += tl.minimum(o_n, N - 1)[:, None].to(tl.int64) * s_row
    first = tl.program_id(1) * PART
    ahead = first // BLOCK + tl.arange(0, LINES) * (1 if INT4 else 4)  # blocks of 64 bytes and of 32
    prefetch(p_codes + tl.minimum(ahead, (K - 1) // BLOCK)[None, :].to(tl.int64) * s_block, PDL)
    await_earlier(PDL)
    p_codes += o_w[None, :]
    p_x += o_m[:, None] * s_x + o_k[None, :]
    acc = tl.zeros([BN, BM] if SWAP else [BM, BN], tl.float32)
    for start in tl.range(first, tl.minimum(first + PART, K), BK, num_stages=STAGES):
        for j in tl.static_range(BK // BLOCK):
            k = start + j * BLOCK
            block = k // BLOCK
            inside = outputs if EVEN else outputs & (k < K)
            codes = tl.load(
                p_codes + block.to(tl.int64) * s_block, mask=inside[:, None], other=0, eviction_policy="evict_first"
            )
            if INT4:
                for i in tl.static_range(4):
                    at = k + 32 * i
                    x = tl.load(p_x + at, mask=rows[:, None] if EVEN else rows[:, None] & (at < K), other=0.0)
                    if i % 2 == 0:
                        scale = tl.load(p_scales + (2 * block + i // 2) * s_scale + o_n, mask=inside, other=0)
                    acc = _dot(x, _int4(codes, scale[:, None], x, i, DECODE), acc, SWAP)
            else:
                x = tl.load(p_x + k, mask=rows[:, None] if EVEN else rows[:, None] & (k < K), other=0.0)
                scale = tl.load(p_scales + block * s_scale + o_n, mask=inside, other=0.0)
                even, odd = _nf4(codes, p_table, 0, DECODE), _nf4(codes, p_table, 1, DECODE)
                part = tl.zeros_like(acc)
                if DECODE == "pairs":
                    part = _dot(x, tl.join(even, odd).reshape(BN, BLOCK), part, SWAP)
                else:
                    x_even, x_odd = tl.split(x.reshape(BM, 32, 2))
                    part = _dot(x_odd, odd, _dot(x_even, even, part, SWAP), SWAP)
                acc += part * (scale[:, None] if SWAP else scale[None, :])
    if DECODE == "fma" and p_x.dtype.element_ty == tl.bfloat16:
        acc *= 4294967296.0
    acc = acc.T if SWAP else acc
    at = o_m[:, None].to(tl.int64) * N + o_n[None, :]
    inside = rows[:, None] & outputs[None, :]
    if SPLIT > 1:
        tl.store(p_out + tl.program_id(1) * M.to(tl.int64) * N + at, acc, mask=inside)
    else:
        if BIASED:
            acc += tl.load(p_bias + o_n, mask=outputs, other=0.0).to(tl.float32)[None, :]
        if ADDED:
            acc += tl.load(p_add + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(p_out + at, acc, mask=inside)


@triton.jit
def sum_of_parts(p_parts, p_bias, at, inside, SIZE, N, SPLIT: tl.constexpr, BIASED: tl.constexpr):
    """Elements `at` of the product plus bias, of SPLIT parts of SIZE elements each."""
    acc = tl.zeros(at.shape, tl.float32)
    for i in tl.static_range(SPLIT):
        acc += tl.load(p_parts + i * SIZE.to(tl.int64) + at, mask=inside, other=0.0)
    if BIASED:
        acc += tl.load(p_bias + at % N, mask=inside, other=0.0).to(tl.float32)
    return acc


@triton.jit
def join_kernel(
    p_parts,
    p_bias,
    p_add,
    p_out,
    SIZE,
    N,
    SPLIT: tl.constexpr,
    B: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    at = tl.program_id(0) * B + tl.arange(0, B)
    await_earlier(PDL)
    if GATED:
        F = N // 2
        inside = at < SIZE // 2
        o_gate = at // F * N + at % F
        gate = sum_of_parts(p_parts, p_bias, o_gate, inside, SIZE, N, SPLIT, BIASED).to(p_out.dtype.element_ty)
        up = sum_of_parts(p_parts, p_bias, o_gate + F, inside, SIZE, N, SPLIT, BIASED).to(p_out.dtype.element_ty)
        acc = silu_times(gate, up)
    else:
        inside = at < SIZE
        acc = sum_of_parts(p_parts, p_bias, at, inside, SIZE, N, SPLIT, BIASED)
    if ADDED:
        acc += tl.load(p_add + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(p_out + at, acc, mask=inside)


@triton.jit
def dequantize_kernel(
    p_codes,
    p_scales,
    p_table,
    p_out,
    N,
    K,
    s_row,
    s_block,
    s_scale,
    INT4: tl.constexpr,
    BN: tl.constexpr,
):
    BLOCK: tl.constexpr = 128 if INT4 else 64
    o_n, o_w = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, 32)
    block = tl.program_id(1)
    outputs = o_n < N
    codes = tl.load(
        p_codes + o_n[:, None].to(tl.int64) * s_row + o_w[None, :] + block.to(tl.int64) * s_block,
        mask=outputs[:, None],
        other=0,
    )
    p_out += o_n[:, None].to(tl.int64) * K + block * BLOCK
    if INT4:
        like = tl.zeros([1], tl.float32)
        for i in tl.static_range(4):
            scale = tl.load(p_scales + (2 * block + i // 2) * s_scale + o_n, mask=outputs, other=0)
            inside = outputs[:, None] & (block * BLOCK + 32 * i < K)
            tl.store(p_out + 32 * i + o_w[None, :], _int4(codes, scale[:, None], like, i, "plain"), mask=inside)
    else:
        scale = tl.load(p_scales + block * s_scale + o_n, mask=outputs, other=0.0)
        pairs = tl.join(_nf4(codes, p_table, 0, "plain"), _nf4(codes, p_table, 1, "plain")).reshape(BN, BLOCK)
        tl.store(p_out + tl.arange(0, BLOCK)[None, :], pairs * scale[:, None], mask=outputs[:, None])


def dequantize(weight: Quantized, dtype: torch.dtype) -> Tensor:
    """The matrix [N, K] that the codes stand for, rounded to `dtype`, for products with more rows than a tile has."""
    device, (outputs, inner), int4 = weight.codes.device, weight.shape, weight.kind == "int4"
    codes, scales, strides = _words(weight)
    out = torch.empty(outputs, inner, dtype=dtype, device=device)
    dequantize_kernel[(-(-outputs // 64), -(-inner // (128 if int4 else 64)))](
        codes, scales, _table(device, torch.float32), out, outputs, inner, *strides, INT4=int4, BN=64
    )
    return out


def _words(weight: Quantized) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
    """Codes and scales in the words that the kernels read, and their strides by row, by block and by group."""
    if weight.kind == "nf4":
        return weight.codes, weight.scales, (weight.codes.stride(0), 32, weight.scales.stride(0))
    codes, scales = weight.codes.view(torch.int16), weight.scales.view(torch.int32)
    return codes, scales, (codes.stride(1), codes.stride(0), scales.stride(0))


@functools.cache
def _table(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(NF4, dtype=dtype, device=device)


def quantized_linear(
    rows: Tensor,
    weight: Quantized,
    bias: Tensor | None,
    residual: Tensor | None,
    tile: int,
    launch: Launch | None = None,
    gated: bool = False,
) -> Tensor:
    """rows [M, K] times the dequantized weight [N, K], transposed, plus bias [N] and residual [M, N]; M at most `tile`.

    `gated`: [M, N / 2], silu of the first half of the product times the second. `launch` is for measurements; by
    default it is the one for the weight's shape, as tuned for this GPU if it was.
    """
    rows, (count, inner), outputs, int4 = rows.contiguous(), rows.shape, weight.shape[0], weight.kind == "int4"
    launch = launch or TUNED_LAUNCHES.get(Matrix(rows.device, rows.dtype, weight.kind, outputs, inner, tile))
    launch = launch or launch_for(weight.kind, outputs, inner, tile)
    if gated and launch.split == 1:
        return silu_mul(quantized_linear(rows, weight, bias, residual, tile, launch))
    decode = (launch.decode or DECODE[weight.kind]) if rows.is_cuda else "plain"
    codes, scales, strides = _words(weight)
    joined = launch.split > 1
    early = pdl_options(rows.device)
    out = torch.empty(count, outputs // 2 if gated else outputs, dtype=rows.dtype, device=rows.device)
    added = residual.contiguous() if residual is not None else out
    parts = torch.empty(launch.split, count, outputs, device=rows.device) if joined else out
    quantized_linear_kernel[(-(-outputs // launch.n), launch.split)](
        rows,
        codes,
        scales,
        _table(rows.device, rows.dtype) if decode == "plain" and not int4 else rows,
        bias if bias is not None else rows,
        added,
        parts,
        count,
        outputs,
        inner,
        -(-inner // (launch.k * launch.split)) * launch.k,
        rows.stride(0),
        *strides,
        INT4=int4,
        DECODE=decode,
        SWAP=launch.swap,
        BM=tile,
        BN=launch.n,
        BK=launch.k,
        STAGES=stages_that_fit(launch, tile, shared_memory(rows.device)),
        EVEN=inner % launch.k == 0,
        SPLIT=launch.split,
        LINES=max(1, AHEAD // launch.n),
        BIASED=bias is not None and not joined,
        ADDED=residual is not None and not joined,
        num_warps=launch.warps,
        **early,
    )
    if joined:
        join_kernel[(-(-out.numel() // JOIN),)](
            parts,
            bias if bias is not None else rows,
            added,
            out,
            count * outputs,
            outputs,
            SPLIT=launch.split,
            B=JOIN,
            BIASED=bias is not None,
            ADDED=residual is not None,
            GATED=gated,
            **early,
        )
    return out
