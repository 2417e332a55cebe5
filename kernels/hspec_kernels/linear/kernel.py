"""Triton: skinny matrix product; each program reads BN rows of the weights once, whatever the rows of x."""

from typing import NamedTuple

import triton
import triton.language as tl

from hspec_kernels.mlp.kernel import silu_times
from hspec_kernels.pdl.kernel import await_earlier, prefetch

AHEAD = 128  # lines of weights that a program asks for before it waits for the kernel before it
FEW = 2_048  # outputs up to which K is shared out, so that programs are many and the sums of each short


class Blocks(NamedTuple):
    """How a product is cut up. What a float32 sum runs over is a matter of `chains` alone, and of their `k`."""

    n: int  # outputs of a program
    k: int  # elements of K in a step of a chain
    warps: int
    stages: int
    chains: int = 1  # sums of an output, one a warp, which share out K step by step


# Measured on an H200.
WIDE = Blocks(64, 128, 4, 3)
MIDDLE = Blocks(32, 128, 4, 4)
NARROW = Blocks(32, 256, 4, 5)
DEEP = Blocks(32, 512, 4, 4)
TALL = Blocks(32, 128, 4, 4)  # for tiles of more than 16 rows, whose part of x takes shared memory too
SQUARE = Blocks(64, 128, 4, 3)  # for tiles of 64 rows where there are outputs enough to fill the GPU
CHAINED = Blocks(8, 128, 4, 4, 4)


def blocks(outputs: int, inner: int, tile: int) -> Blocks:
    """Launch shape for weights [outputs, inner]: enough programs to fill the GPU, enough bytes in flight in each."""
    if outputs <= FEW:
        return CHAINED
    if tile >= 64 and outputs >= 8_192:
        return SQUARE
    if outputs >= 16_384:
        return WIDE
    if outputs >= 8_192:
        return MIDDLE
    if tile > 16:
        return TALL
    return DEEP if inner >= 8_192 else NARROW


@triton.jit
def product(p_x, p_w, rows, outputs, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):
    """[BM, BN] of rows of x and w that begin at p_x [BM] and p_w [BN]: each sum from the beginning of K to its end."""
    o_k = tl.arange(0, BK)
    p_x = p_x[:, None] + o_k[None, :]
    p_w = p_w[None, :] + o_k[:, None]
    acc = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        if EVEN:
            x = tl.load(p_x, mask=rows[:, None], other=0.0)
            w = tl.load(p_w, mask=outputs[None, :], other=0.0, eviction_policy="evict_first")
        else:
            inside = o_k + k < K
            x = tl.load(p_x, mask=rows[:, None] & inside[None, :], other=0.0)
            w = tl.load(p_w, mask=outputs[None, :] & inside[:, None], other=0.0, eviction_policy="evict_first")
        acc = tl.dot(x, w, acc, input_precision="ieee")
        p_x += BK
        p_w += BK
    return acc


@triton.jit
def chained_product(
    p_x, p_w, rows, outputs, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, CHAINS: tl.constexpr
):
    """The same, of CHAINS sums: each warp's own is over every CHAINS-th block of BK elements."""
    o_k = tl.arange(0, CHAINS)[:, None] * BK + tl.arange(0, BK)[None, :]
    p_x = p_x[None, :, None] + o_k[:, None, :]
    p_w = p_w[None, None, :] + o_k[:, :, None]
    rows, outputs = rows[None, :, None], outputs[None, None, :]
    acc = tl.zeros([CHAINS, BM, BN], tl.float32)
    for k in range(0, K, CHAINS * BK):
        inside = o_k + k < K
        x = tl.load(p_x, mask=rows & inside[:, None, :], other=0.0)
        w = tl.load(p_w, mask=outputs & inside[:, :, None], other=0.0, eviction_policy="evict_first")
        acc = tl.dot(x, w, acc, input_precision="ieee")
        p_x += CHAINS * BK
        p_w += CHAINS * BK
    return tl.sum(acc, 0)


@triton.jit
def linear_kernel(
    p_x,
    p_w,
    p_bias,
    p_add,
    p_out,
    M,
    N,
    K,
    s_x,
    s_w,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    CHAINS: tl.constexpr,
    LINES: tl.constexpr,
    EVEN: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    # Tiles of rows are next to each other, so that all but the first find the weights in the L2 cache.
    o_m = tl.program_id(0) * BM + tl.arange(0, BM)
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    rows, outputs = o_m < M, o_n < N
    o_w = o_n % 2 * (N // 2) + o_n // 2 if GATED else o_n  # gate and up of an output are neighbours
    p_w += tl.minimum(o_w, N - 1).to(tl.int64) * s_w
    if LINES > 0:
        prefetch(p_w[:, None] + tl.minimum(tl.arange(0, LINES) * 64, K - 1)[None, :], PDL)
    await_earlier(PDL)
    if BIASED:
        bias = tl.load(p_bias + o_w, mask=outputs, other=0.0)
    if ADDED:
        at = o_m[:, None].to(tl.int64) * N + o_n[None, :]
        added = tl.load(p_add + at, mask=rows[:, None] & outputs[None, :], other=0.0)
    p_x += o_m.to(tl.int64) * s_x
    if CHAINS > 1:
        acc = chained_product(p_x, p_w, rows, outputs, K, BM, BN, BK, CHAINS)
    else:
        acc = product(p_x, p_w, rows, outputs, K, BM, BN, BK, EVEN)
    if BIASED:
        acc += bias.to(tl.float32)[None, :]
    if ADDED:
        acc += added.to(tl.float32)
    if GATED:
        gate, up = tl.split(acc.to(p_out.dtype.element_ty).reshape(BM, BN // 2, 2))
        acc = silu_times(gate, up)
        o_n = tl.program_id(1) * (BN // 2) + tl.arange(0, BN // 2)
        N = N // 2
    at = o_m[:, None].to(tl.int64) * N + o_n[None, :]
    tl.store(p_out + at, acc, mask=rows[:, None] & (o_n < N)[None, :])
