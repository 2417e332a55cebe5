"""Triton: attention of a decoding block, split over the keys at absolute positions, and the join of the parts.

Every split begins at a multiple of SPLIT and parts are joined in order, BS at a time: a row's sums are the same
whatever the length of the cache or the number of rows beside it.
"""

import triton
import triton.language as tl


@triton.jit
def partial_kernel(
    p_q,
    p_k,
    p_v,
    p_slot,
    p_first,
    p_out,
    p_lse,
    s_qb,
    s_qr,
    s_qh,
    s_ks,
    s_kh,
    s_kt,
    s_vs,
    s_vh,
    s_vt,
    scale,
    rows,
    splits,
    window,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """One split of the keys for one KV head: BM packed rows (row, head of the group) against SPLIT keys."""
    i_m = tl.program_id(0)  # fastest, so that the tiles of one split find its keys in the L2 cache
    i_s = tl.program_id(1)
    i_bh = tl.program_id(2)
    i_b = (i_bh // HK).to(tl.int64)
    i_h = i_bh % HK
    first = tl.load(p_first + i_b).to(tl.int32)
    start = i_s * SPLIT
    if start < first + rows:
        o_m = i_m * BM + tl.arange(0, BM)
        o_d = tl.arange(0, BD)
        row = o_m // G
        head = i_h * G + o_m % G
        live = row < rows
        at = first + row
        q = tl.load(
            p_q + i_b * s_qb + row[:, None] * s_qr + head[:, None] * s_qh + o_d[None, :],
            mask=live[:, None] & (o_d < D)[None, :],
            other=0.0,
        )
        slot = tl.load(p_slot + i_b).to(tl.int64)
        p_k += slot * s_ks + i_h.to(tl.int64) * s_kh
        p_v += slot * s_vs + i_h.to(tl.int64) * s_vh
        m = tl.full([BM], -1.0e30, tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, BD], tl.float32)
        end = tl.minimum(start + SPLIT, first + rows)
        for n in range(start, end, BN):
            o_n = n + tl.arange(0, BN)
            there = o_n < end
            k = tl.load(
                p_k + o_n[None, :].to(tl.int64) * s_kt + o_d[:, None],
                mask=there[None, :] & (o_d < D)[:, None],
                other=0.0,
            )
            s = tl.dot(q, k, input_precision="ieee") * scale
            seen = (o_n[None, :] <= at[:, None]) & there[None, :]
            if WINDOWED:
                seen &= o_n[None, :] > at[:, None] - window
            s = tl.where(seen, s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            p = tl.exp2(s - m_new[:, None])
            alpha = tl.exp2(m - m_new)
            total = total * alpha + tl.sum(p, 1)
            v = tl.load(
                p_v + o_n[:, None].to(tl.int64) * s_vt + o_d[None, :],
                mask=there[:, None] & (o_d < D)[None, :],
                other=0.0,
            )
            acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            m = m_new
        full = total > 0
        acc = acc / tl.where(full, total, 1.0)[:, None]
        lse = tl.where(full, m + tl.log2(tl.where(full, total, 1.0)), float("-inf"))
        base = (i_bh.to(tl.int64) * splits + i_s) * (rows * G)
        tl.store(p_out + (base + o_m)[:, None] * D + o_d[None, :], acc, mask=live[:, None] & (o_d < D)[None, :])
        tl.store(p_lse + base + o_m, lse, mask=live)


@triton.jit
def merge_kernel(
    p_part,
    p_lse_part,
    p_first,
    p_out,
    p_lse,
    s_ob,
    s_or,
    s_oh,
    rows,
    splits,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Join the splits of one packed row, BS at a time in order: a split that is not there weighs nothing."""
    i_m = tl.program_id(0)
    i_bh = tl.program_id(1)
    i_b = (i_bh // HK).to(tl.int64)
    i_h = i_bh % HK
    used = tl.cdiv(tl.load(p_first + i_b).to(tl.int32) + rows, SPLIT)
    o_d = tl.arange(0, BD)
    m = -1.0e30
    total = 0.0
    acc = tl.zeros([BD], tl.float32)
    base = i_bh.to(tl.int64) * splits
    for s in range(0, used, BS):
        o_s = s + tl.arange(0, BS)
        there = o_s < used
        at = (base + o_s) * (rows * G) + i_m
        lse = tl.load(p_lse_part + at, mask=there, other=float("-inf"))
        m_new = tl.maximum(m, tl.max(lse, 0))
        w = tl.exp2(lse - m_new)
        part = tl.load(p_part + at[:, None] * D + o_d[None, :], mask=there[:, None] & (o_d < D)[None, :], other=0.0)
        alpha = tl.exp2(m - m_new)
        total = total * alpha + tl.sum(w, 0)
        acc = acc * alpha + tl.sum(part * w[:, None], 0)
        m = m_new
    row = i_m // G
    head = i_h * G + i_m % G
    tl.store(p_out + i_b * s_ob + row * s_or + head * s_oh + o_d, acc / total, mask=o_d < D)
    tl.store(p_lse + (i_b * rows + row) * (HK * G) + head, (m + tl.log2(total)) * 0.6931471805599453)
