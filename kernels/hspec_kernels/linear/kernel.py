"""Triton: skinny matrix product; each program reads BN rows of the weights once, whatever the rows of x."""

import triton
import triton.language as tl

WIDE = (64, 128, 4, 3)  # BN, BK, warps, stages; measured on an H200
MIDDLE = (32, 128, 4, 4)
NARROW = (32, 256, 4, 5)
DEEP = (32, 512, 4, 4)
TALL = (32, 128, 4, 4)  # for tiles of more than 16 rows, whose part of x takes shared memory too
SQUARE = (64, 128, 4, 3)  # for tiles of 64 rows where there are outputs enough to fill the GPU


def blocks(outputs: int, inner: int, tile: int) -> tuple[int, int, int, int]:
    """Launch shape for weights [outputs, inner]: enough programs to fill the GPU, enough bytes in flight in each."""
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
    EVEN: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
):
    # Tiles of rows are next to each other, so that all but the first find the weights in the L2 cache.
    o_m = tl.program_id(0) * BM + tl.arange(0, BM)
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    rows, outputs = o_m < M, o_n < N
    p_x += o_m[:, None].to(tl.int64) * s_x + o_k[None, :]
    p_w += o_n[None, :].to(tl.int64) * s_w + o_k[:, None]
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
    at = o_m[:, None].to(tl.int64) * N + o_n[None, :]
    if BIASED:
        acc += tl.load(p_bias + o_n, mask=outputs, other=0.0).to(tl.float32)[None, :]
    if ADDED:
        acc += tl.load(p_add + at, mask=rows[:, None] & outputs[None, :], other=0.0).to(tl.float32)
    tl.store(p_out + at, acc, mask=rows[:, None] & outputs[None, :])
