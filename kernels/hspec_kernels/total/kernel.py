"""Triton: the sum of ranks' parts, some elements a program."""

import triton
import triton.language as tl


@triton.jit
def total_kernel(p_parts, p_residual, p_out, count, P: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < count
    found = tl.load(p_residual + o, mask=inside, other=0.0).to(tl.float32)
    for _ in tl.static_range(P):
        found += tl.load(p_parts + o, mask=inside, other=0.0).to(tl.float32)
        p_parts += count
    tl.store(p_out + o, found, mask=inside)
