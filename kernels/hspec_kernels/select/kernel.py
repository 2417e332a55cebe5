"""Triton: means of chunks, their scores in one read of the means, and the copy of chosen chunks."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def mean_kernel(
    p_k,
    p_means,
    p_slot,
    p_start,
    p_stop,
    s_ks,
    s_kh,
    s_kt,
    s_ms,
    s_mh,
    s_mc,
    CHUNK: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BC: tl.constexpr,
):
    """BC chunks of one head a program and turn; turns follow where the grid does not reach the last chunk."""
    i_h = tl.program_id(1).to(tl.int64)
    i_b = tl.program_id(2)
    slot = tl.load(p_slot + i_b)
    stop = tl.load(p_stop + i_b)
    p_k += slot * s_ks + i_h * s_kh
    p_means += slot * s_ms + i_h * s_mh
    o_d = tl.arange(0, BD)
    first = tl.load(p_start + i_b) + tl.program_id(0) * BC
    while first < stop:
        o_c = first + tl.arange(0, BC)
        mask = (o_c < stop)[:, None] & (o_d < D)[None, :]
        total = tl.zeros([BC, BD], tl.float32)
        for token in tl.static_range(CHUNK):
            at = (o_c * CHUNK + token)[:, None] * s_kt + o_d[None, :]
            total += tl.load(p_k + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(p_means + o_c[:, None] * s_mc + o_d[None, :], total / CHUNK, mask=mask)
        first += tl.num_programs(0) * BC


@triton.jit
def score_kernel(
    p_q,
    p_lse,
    p_live,
    p_means,
    p_slot,
    p_count,
    p_out,
    s_qb,
    s_qr,
    s_qh,
    s_lb,
    s_lr,
    s_lh,
    s_ms,
    s_mh,
    s_mc,
    scale,
    rows,
    extent,
    skip,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """BN chunks of one KV head against all packed rows (row, head of the group), BM at a time.

    BM is fixed, so that the order of the sum is the same however many rows there is room for.
    """
    start = tl.program_id(0) * BN
    i_h = tl.program_id(1)
    i_b = tl.program_id(2).to(tl.int64)
    o_n = start + tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    count = tl.minimum(tl.load(p_count + i_b), extent).to(tl.int32)
    mass = tl.zeros([BN, BM], tl.float32)
    if start < count:
        p_means += tl.load(p_slot + i_b) * s_ms + i_h.to(tl.int64) * s_mh
        k = tl.load(
            p_means + o_n[:, None].to(tl.int64) * s_mc + o_d[None, :],
            mask=(o_n < count)[:, None] & (o_d < D)[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        packed = tl.minimum(tl.load(p_live + i_b), rows).to(tl.int32) * G
        for m in range(0, packed, BM):
            o_m = m + tl.arange(0, BM)
            row = o_m // G
            head = i_h * G + o_m % G
            live = o_m < packed
            q = tl.load(
                p_q + i_b * s_qb + row[None, :] * s_qr + head[None, :] * s_qh + o_d[:, None],
                mask=live[None, :] & (o_d < D)[:, None],
                other=0.0,
            )
            whole = tl.load(p_lse + i_b * s_lb + row * s_lr + head * s_lh, mask=live, other=float("inf"))
            s = tl.dot(k, q, input_precision="ieee") * scale
            mass += tl.exp2(s - whole[None, :] * LOG2E)
    chosen = (o_n >= skip) & (o_n < count)
    p_out += (i_b * HK + i_h) * extent
    tl.store(p_out + o_n, tl.where(chosen, tl.sum(mass, 1), float("-inf")), mask=o_n < extent)


@triton.jit
def gather_kernel(
    p_k,
    p_v,
    p_index,
    p_slot,
    p_out_k,
    p_out_v,
    s_ks,
    s_ku,
    s_kh,
    s_kt,
    s_vs,
    s_vu,
    s_vh,
    s_vt,
    s_ib,
    s_ih,
    s_oks,
    s_okh,
    s_okt,
    s_ovs,
    s_ovh,
    s_ovt,
    N,
    CHUNK: tl.constexpr,
    UNIT: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
):
    """BT tokens of one head, keys and values; both are under way before either is written."""
    i_h = tl.program_id(1).to(tl.int64)
    i_b = tl.program_id(2)
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    o_d = tl.arange(0, BD)
    n = o_t // CHUNK
    chunk = tl.load(p_index + i_b * s_ib + i_h * s_ih + n, mask=n < N, other=-1)
    mask = (chunk >= 0)[:, None] & (o_d < D)[None, :]
    at = (chunk * CHUNK + o_t % CHUNK)[:, None]
    unit = at * 0
    if UNIT > 0:
        unit = at // UNIT
        at = at % UNIT
    to = o_t[:, None].to(tl.int64)
    slot = tl.load(p_slot + i_b)
    k = tl.load(p_k + slot * s_ks + unit * s_ku + i_h * s_kh + at * s_kt + o_d[None, :], mask=mask)
    v = tl.load(p_v + slot * s_vs + unit * s_vu + i_h * s_vh + at * s_vt + o_d[None, :], mask=mask)
    tl.store(p_out_k + slot * s_oks + i_h * s_okh + to * s_okt + o_d[None, :], k, mask=mask)
    tl.store(p_out_v + slot * s_ovs + i_h * s_ovh + to * s_ovt + o_d[None, :], v, mask=mask)
