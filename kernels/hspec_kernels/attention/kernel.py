"""Triton: attention of a decoding block, split over the keys at absolute positions.

Every split begins at a multiple of SPLIT and parts are joined in order: a row's sums are the same whatever the length
of the cache or the number of rows beside it.
"""

import triton
import triton.language as tl

from hspec_kernels.attention.join.kernel import finish_tile, tail_bounds
from hspec_kernels.pdl.kernel import await_earlier


@triton.jit
def scaled(s, scale, PTX: tl.constexpr):
    """s * scale, never fused with what follows: steps with and without a mask must give the same bits."""
    if PTX:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [s, scale], dtype=tl.float32, is_pure=True, pack=1
        )
    return s * scale


@triton.jit
def step(q, k, v, seen, scale, m, total, acc, MASKED: tl.constexpr, PTX: tl.constexpr):
    """BN more keys: the running maximum of a row's scores, the sum of their powers and the weighted values."""
    s = scaled(tl.dot(q, k, input_precision="ieee"), scale, PTX)
    if MASKED:
        s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    total = total * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return m_new, total, acc


@triton.jit
def ones(x):
    """How many bits of an int64 are set."""
    x = x.to(tl.uint64, bitcast=True)
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def load_pair(store, p_k, p_v, slots, there, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr):
    """Keys [BD, BN] and values [BN, BD] of the slots, zero where they are not there."""
    o_d = tl.arange(0, BD)
    slots = slots.to(tl.int64)
    p_k += slots[None, :] * store.s_k[2] + o_d[:, None]
    p_v += slots[:, None] * store.s_v[2] + o_d[None, :]
    if MASKED:
        k = tl.load(p_k, mask=there[None, :] & (o_d < D)[:, None], other=0.0)
        v = tl.load(p_v, mask=there[:, None] & (o_d < D)[None, :], other=0.0)
    elif D == BD:
        k = tl.load(p_k)
        v = tl.load(p_v)
    else:
        k = tl.load(p_k, mask=(o_d < D)[:, None], other=0.0)
        v = tl.load(p_v, mask=(o_d < D)[None, :], other=0.0)
    return k, v


@triton.jit
def load_rows(block, p_q, o_m, o_d, i_h, rows, G: tl.constexpr, END: tl.constexpr):
    """Packed rows (row, head of the group) of the query [BM, BD], of channels o_d before END."""
    row = o_m // G
    p_q += row[:, None] * block.s_query[1] + (i_h * G + o_m % G)[:, None] * block.s_query[2] + o_d[None, :]
    return tl.load(p_q, mask=(row < rows)[:, None] & (o_d < END)[None, :], other=0.0)


@triton.jit
def store_mean(parts, at, live, total, acc, o_d, FROM: tl.constexpr, END: tl.constexpr, D: tl.constexpr):
    """Channels FROM + o_d of the mean of the values seen; of a row that saw nothing 0."""
    mean = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(parts.p_mean + at[:, None] * D + (FROM + o_d)[None, :], mean, mask=live[:, None] & (o_d < END)[None, :])


@triton.jit
def store_weight(parts, at, live, m, total):
    """log2 of a row's sum; a row that saw nothing weighs nothing."""
    full = total > 0
    lse = tl.where(full, m + tl.log2(tl.where(full, total, 1.0)), float("-inf"))
    tl.store(parts.p_lse + at, lse, mask=live)


@triton.jit
def visible(block, p_tree, o_n, there, at, tree, first):
    """Which of the slots o_n that are there the rows see: rows at positions `at`, or with the bits of a tree."""
    if block.p_tree is not None:
        inside = tl.minimum(tl.maximum(o_n - first, 0), 63)
        bit = (tree[:, None] >> inside[None, :].to(tl.int64)) & 1
        seen = ((o_n < first)[None, :] | (bit != 0)) & there[None, :]
        if block.window is not None:
            node = tl.load(p_tree + inside, mask=there & (o_n >= first), other=1)
            place = tl.where(o_n < first, o_n, first + ones(node) - 1)
            seen &= place[None, :] > at[:, None] - block.window
    else:
        seen = (o_n[None, :] <= at[:, None]) & there[None, :]
        if block.window is not None:
            seen &= o_n[None, :] > at[:, None] - block.window
    return seen


@triton.jit
def tail_part(
    block,
    store,
    parts,
    scale,
    rows,
    base,
    i_s,
    i_m,
    i_bh,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPLIT: tl.constexpr,
    APART: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
):
    """One split of the slots for one KV head: BM packed rows (row, head of the group) against SPLIT keys."""
    i_b = (i_bh // HK).to(tl.int64)
    i_h = i_bh % HK
    first, low, origin = tail_bounds(block, i_b, SPLIT)
    begin = (origin + i_s) * SPLIT
    end = tl.minimum(begin + SPLIT, first + rows)
    used = (begin < end) & (begin + SPLIT > low)
    if used:
        o_m = i_m * BM + tl.arange(0, BM)
        row = o_m // G
        at = first + row
        tree = at
        p_tree = block.p_tree
        if block.p_tree is not None:
            p_tree += i_b * rows
            tree = tl.load(p_tree + row, mask=row < rows, other=0)
            at = first + ones(tree) - 1
        q = load_rows(block, block.p_query + i_b * block.s_query[0], o_m, tl.arange(0, BD), i_h, rows, G, D)
        slot = tl.load(store.p_slot + i_b).to(tl.int64)
        p_k = store.p_k + slot * store.s_k[0] + i_h.to(tl.int64) * store.s_k[1]
        p_v = store.p_v + slot * store.s_v[0] + i_h.to(tl.int64) * store.s_v[1]
        m = tl.full([BM], -1.0e30, tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, BD], tl.float32)
        if block.window is not None or block.p_start is not None:
            begin = tl.maximum(begin, low // BN * BN)
        elif APART:
            masked = tl.minimum(end, first // BN * BN)
            for n in tl.range(begin, masked, BN, num_stages=STAGES):
                o_n = n + tl.arange(0, BN)
                k, v = load_pair(store, p_k, p_v, o_n, o_n < end, D, BD, False)
                m, total, acc = step(q, k, v, o_n < end, scale, m, total, acc, False, PTX)
            begin = tl.maximum(begin, masked)
        for n in tl.range(begin, end, BN, num_stages=STAGES):
            o_n = n + tl.arange(0, BN)
            there = o_n < end
            if block.p_start is not None:
                there &= o_n >= low
            k, v = load_pair(store, p_k, p_v, o_n, there, D, BD, True)
            seen = visible(block, p_tree, o_n, there, at, tree, first)
            m, total, acc = step(q, k, v, seen, scale, m, total, acc, True, PTX)
        store_mean(parts, base + o_m, row < rows, total, acc, tl.arange(0, BD), 0, D, D)
        store_weight(parts, base + o_m, row < rows, m, total)
    return used


@triton.jit
def chosen_part(
    block,
    store,
    chunks,
    parts,
    scale,
    rows,
    base,
    i_s,
    i_m,
    i_bh,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    PTX: tl.constexpr,
):
    """SPLIT tokens of the chosen chunks of one KV head, which every row sees."""
    i_b = (i_bh // HK).to(tl.int64)
    i_h = i_bh % HK
    begin = i_s * SPLIT
    end = tl.minimum(begin + SPLIT, tl.load(chunks.p_count + i_b).to(tl.int32) * CHUNK)
    used = begin < end
    if used:
        o_m = i_m * BM + tl.arange(0, BM)
        q = load_rows(block, block.p_query + i_b * block.s_query[0], o_m, tl.arange(0, BD), i_h, rows, G, D)
        slot = tl.load(store.p_slot + i_b).to(tl.int64)
        p_k = store.p_k + slot * store.s_k[0] + i_h.to(tl.int64) * store.s_k[1]
        p_v = store.p_v + slot * store.s_v[0] + i_h.to(tl.int64) * store.s_v[1]
        p_index = chunks.p_index + i_b * chunks.s_index[0] + i_h.to(tl.int64) * chunks.s_index[1]
        m = tl.full([BM], -1.0e30, tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, BD], tl.float32)
        for n in range(begin, end, BN):
            o_n = n + tl.arange(0, BN)
            there = o_n < end
            slots = tl.load(p_index + o_n // CHUNK, mask=there, other=0) * CHUNK + o_n % CHUNK
            k, v = load_pair(store, p_k, p_v, slots, there, D, BD, True)
            m, total, acc = step(q, k, v, there[None, :], scale, m, total, acc, True, PTX)
        store_mean(parts, base + o_m, o_m // G < rows, total, acc, tl.arange(0, BD), 0, D, D)
        store_weight(parts, base + o_m, o_m // G < rows, m, total)
    return used


@triton.jit(do_not_specialize=["rows", "count", "prefixes"])
def partial_kernel(
    block,
    store,
    chosen,
    chunks,
    parts,
    output,
    scale,
    rows,
    count,
    prefixes,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,
    PREFIX_SPLIT: tl.constexpr,
    APART: tl.constexpr,
    JOIN: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """One part: of the chosen chunks for the first `prefixes` of a head's `count` parts, then of the tail's slots."""
    i_m = tl.program_id(0)  # fastest, so that the tiles of one split find its keys in the L2 cache
    i_s = tl.program_id(1)
    i_bh = tl.program_id(2)
    base = (i_bh.to(tl.int64) * count + i_s) * (rows * G)
    await_earlier(PDL)
    used = False
    p_count = None
    if CHUNK > 0:
        p_count = chunks.p_count
        if i_s < prefixes:
            used = chosen_part(
                block, chosen, chunks, parts, scale, rows, base, i_s, i_m, i_bh,
                HK, G, D, BD, BM, BN, CHUNK, PREFIX_SPLIT, PTX,
            )  # fmt: skip
        else:
            used = tail_part(
                block, store, parts, scale, rows, base, i_s - prefixes, i_m, i_bh,
                HK, G, D, BD, BM, BN, SPLIT, APART, None, PTX,
            )  # fmt: skip
    else:
        used = tail_part(
            block, store, parts, scale, rows, base, i_s, i_m, i_bh, HK, G, D, BD, BM, BN, SPLIT, APART, None, PTX
        )
    if JOIN > 0:  # noqa: SIM102  # known when compiling, unlike the other
        if used:
            finish_tile(
                block, parts, p_count, output, rows, count, prefixes, i_m, i_bh,
                HK, G, D, BD, BM, JOIN, SPLIT, CHUNK, PREFIX_SPLIT,
            )  # fmt: skip
