"""Triton: one head of one sequence in one layer's cache a program."""

import triton
import triton.language as tl


@triton.jit
def compact_kernel(
    p_like,
    p_where,
    p_slots,
    p_first,
    p_source,
    s_s,
    s_h,
    s_t,
    R,
    D: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    i_h, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2)
    cache = tl.load(p_where + tl.program_id(0)).to(p_like.dtype)
    cache += tl.load(p_slots + i_b) * s_s + i_h * s_h + tl.load(p_first + i_b) * s_t
    o_r, o_d = tl.arange(0, BR), tl.arange(0, BD)
    source = tl.load(p_source + i_b * R + o_r, mask=o_r < R, other=0)
    mask = (o_r < R)[:, None] & (o_d < D)[None, :]
    rows = tl.load(cache + source[:, None] * s_t + o_d[None, :], mask=mask)
    tl.debug_barrier()  # places overlap: all threads have read before any writes
    tl.store(cache + o_r.to(tl.int64)[:, None] * s_t + o_d[None, :], rows, mask=mask)
