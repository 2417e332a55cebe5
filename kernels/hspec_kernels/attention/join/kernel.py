"""Triton: the join of parts of an attention, by a kernel of its own or by the last program of each head's tile."""

import triton
import triton.language as tl

from hspec_kernels.pdl.kernel import await_earlier


@triton.jit
def tail_bounds(block, i_b, SPLIT: tl.constexpr):
    """The first row's slot, the first slot that any row sees, and the split that the tail's first part stands for."""
    first = tl.load(block.p_first + i_b).to(tl.int32)
    low = first * 0
    if block.p_start is not None:
        low = tl.load(block.p_start + i_b).to(tl.int32)
    origin = low // SPLIT
    if block.window is not None:
        low = tl.maximum(low, first - block.window + 1)
    return first, low, origin


@triton.jit
def join(means, p_lse, at, there, m, total, acc, D: tl.constexpr, BD: tl.constexpr):
    """Weigh in the parts at rows `at` [BS] of the buffer."""
    o_d = tl.arange(0, BD)
    lse = tl.load(p_lse + at, mask=there, other=float("-inf"))
    m_new = tl.maximum(m, tl.max(lse, 0))
    w = tl.exp2(lse - m_new)
    part = tl.load(means + at[:, None] * D + o_d[None, :], mask=there[:, None] & (o_d < D)[None, :], other=0.0)
    alpha = tl.exp2(m - m_new)
    total = total * alpha + tl.sum(w, 0)
    acc = acc * alpha + tl.sum(part * w[:, None], 0)
    return m_new, total, acc


@triton.jit(do_not_specialize=["rows", "count", "prefixes"])
def merge_kernel(
    block,
    parts,
    p_count,
    output,
    rows,
    count,
    prefixes,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BS: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,
    PREFIX_SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Join the parts of one packed row, BS at a time in order: a split that is not there weighs nothing."""
    i_m = tl.program_id(0)
    i_bh = tl.program_id(1)
    await_earlier(PDL)
    i_b = (i_bh // HK).to(tl.int64)
    i_h = i_bh % HK
    first, low, origin = tail_bounds(block, i_b, SPLIT)
    used = tl.cdiv(first + rows, SPLIT)
    o_d = tl.arange(0, BD)
    m = -1.0e30
    total = 0.0
    acc = tl.zeros([BD], tl.float32)
    base = i_bh.to(tl.int64) * count
    if CHUNK > 0:
        chosen = tl.cdiv(tl.load(p_count + i_b).to(tl.int32) * CHUNK, PREFIX_SPLIT)
        for s in range(0, chosen, BS):
            o_s = s + tl.arange(0, BS)
            at = (base + o_s) * (rows * G) + i_m
            m, total, acc = join(parts.p_mean, parts.p_lse, at, o_s < chosen, m, total, acc, D, BD)
    base += prefixes - origin
    begin = tl.maximum(low, 0) // SPLIT
    for s in range(begin // BS * BS, used, BS):
        o_s = s + tl.arange(0, BS)
        at = (base + o_s) * (rows * G) + i_m
        m, total, acc = join(parts.p_mean, parts.p_lse, at, (o_s >= begin) & (o_s < used), m, total, acc, D, BD)
    row = i_m // G
    head = i_h * G + i_m % G
    p_out = output.p_out + i_b * output.s_out[0] + row * output.s_out[1] + head * output.s_out[2]
    tl.store(p_out + o_d, acc / total, mask=o_d < D)
    tl.store(output.p_lse + (i_b * rows + row) * (HK * G) + head, (m + tl.log2(total)) * 0.6931471805599453)


@triton.jit
def join_tile(
    parts, base, begin, end, width, o_m, live, m, total, acc, D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr
):
    """Weigh in parts begin to end - 1 of the rows o_m, BS at a time; part 0 is at `base` parts of `width` rows."""
    o_d = tl.arange(0, BD)
    for s in range(begin // BS * BS, end, BS):
        found, means, m_new = (), (), m
        for i in tl.static_range(BS):
            at = (base + s + i) * width + o_m
            there = live & (s + i >= begin) & (s + i < end)
            lse = tl.load(parts.p_lse + at, there, float("-inf"), cache_modifier=".cg")
            p = parts.p_mean + at[:, None] * D + o_d[None, :]
            means += (tl.load(p, there[:, None] & (o_d < D)[None, :], 0.0, cache_modifier=".cg"),)
            found += (lse,)
            m_new = tl.maximum(m_new, lse)
        alpha = tl.exp2(m - m_new)
        total *= alpha
        acc *= alpha[:, None]
        for i in tl.static_range(BS):
            w = tl.exp2(found[i] - m_new)
            total += w
            acc += means[i] * w[:, None]
        m = m_new
    return m, total, acc


@triton.jit
def finish_tile(
    block,
    parts,
    p_count,
    output,
    rows,
    count,
    prefixes,
    i_m,
    i_bh,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BS: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,
    PREFIX_SPLIT: tl.constexpr,
):
    """Count the parts of a head's tile that are there; after the last one join them in order."""
    i_b = (i_bh // HK).to(tl.int64)
    i_h = i_bh % HK
    first, low, origin = tail_bounds(block, i_b, SPLIT)
    begin, end = tl.maximum(low, 0) // SPLIT, tl.cdiv(first + rows, SPLIT)
    chosen = 0
    if CHUNK > 0:
        chosen = tl.cdiv(tl.load(p_count + i_b).to(tl.int32) * CHUNK, PREFIX_SPLIT)
    p_done = output.p_done + i_bh * tl.num_programs(0) + i_m
    tl.debug_barrier()
    if tl.atomic_add(p_done, 1) == chosen + end - begin - 1:
        tl.store(p_done, 0)
        o_m = i_m * BM + tl.arange(0, BM)
        o_d = tl.arange(0, BD)
        row = o_m // G
        head = i_h * G + o_m % G
        live = row < rows
        m = tl.full([BM], -1.0e30, tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, BD], tl.float32)
        base = i_bh.to(tl.int64) * count
        if CHUNK > 0:
            m, total, acc = join_tile(parts, base, 0, chosen, rows * G, o_m, live, m, total, acc, D, BD, BS)
        base += prefixes - origin
        m, total, acc = join_tile(parts, base, begin, end, rows * G, o_m, live, m, total, acc, D, BD, BS)
        total = tl.where(live, total, 1.0)
        p_out = output.p_out + i_b * output.s_out[0] + row * output.s_out[1] + head * output.s_out[2]
        tl.store(p_out[:, None] + o_d[None, :], acc / total[:, None], mask=live[:, None] & (o_d < D)[None, :])
        lse = (m + tl.log2(total)) * 0.6931471805599453
        tl.store(output.p_lse + (i_b * rows + row) * (HK * G) + head, lse, mask=live)
