"""Triton: silu(gate) * up."""

import triton
import triton.language as tl

from hspec_kernels.pdl.kernel import await_earlier

BLOCK = 1024


@triton.jit
def silu_times(gate, up):
    """silu(gate) * up in float32."""
    gate = gate.to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)


@triton.jit
def silu_mul_kernel(p_x, p_out, F, B: tl.constexpr, PDL: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_f = tl.program_id(1) * B + tl.arange(0, B)
    inside = o_f < F
    await_earlier(PDL)
    gate = tl.load(p_x + i_row * 2 * F + o_f, mask=inside, other=0.0)
    up = tl.load(p_x + i_row * 2 * F + F + o_f, mask=inside, other=0.0)
    tl.store(p_out + i_row * F + o_f, silu_times(gate, up), mask=inside)
