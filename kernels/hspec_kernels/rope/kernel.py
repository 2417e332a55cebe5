"""Triton: norm, rotation and cache append of one head of one row a program."""

import triton
import triton.language as tl

from hspec_kernels.pdl.kernel import await_earlier


@triton.jit
def rope_append_kernel(
    p_x,
    p_cos,
    p_sin,
    p_qn,
    p_kn,
    p_q,
    p_k,
    p_v,
    p_slot,
    p_first,
    R,
    eps,
    s_ks,
    s_kh,
    s_kt,
    s_vs,
    s_vh,
    s_vt,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    BH: tl.constexpr,
    NORMED: tl.constexpr,
    PDL: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1)
    i_b, r = i_row // R, i_row % R
    o_d = tl.arange(0, BH)
    half: tl.constexpr = D // 2
    inside = o_d < half
    p_x += (i_row * (H + 2 * HK) + i_h) * D + o_d
    await_earlier(PDL)
    low = tl.load(p_x, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(p_x + half, mask=inside, other=0.0).to(tl.float32)
    slot, at = tl.load(p_slot + i_b), tl.load(p_first + i_b) + r
    if i_h < H + HK:
        if NORMED:
            scale = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / D + eps)
            p_n = p_qn if i_h < H else p_kn
            low = low * scale * tl.load(p_n + o_d, mask=inside, other=0.0).to(tl.float32)
            high = high * scale * tl.load(p_n + half + o_d, mask=inside, other=0.0).to(tl.float32)
        cos = tl.load(p_cos + i_row * D + o_d, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(p_sin + i_row * D + o_d, mask=inside, other=0.0).to(tl.float32)
        low, high = low * cos - high * sin, high * cos + low * sin
        p_o = p_q + (i_row * H + i_h) * D
        if i_h >= H:
            p_o = p_k + slot * s_ks + (i_h - H).to(tl.int64) * s_kh + at * s_kt
        tl.store(p_o + o_d, low, mask=inside)
        tl.store(p_o + half + o_d, high, mask=inside)
    else:
        p_o = p_v + slot * s_vs + (i_h - H - HK).to(tl.int64) * s_vh + at * s_vt
        tl.store(p_o + o_d, low, mask=inside)
        tl.store(p_o + half + o_d, high, mask=inside)
