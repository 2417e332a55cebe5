"""Triton: root-mean-square norm, one row a program."""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(p_x, p_w, p_out, eps, s_x, D: tl.constexpr, BD: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    inside = o_d < D
    x = tl.load(p_x + i_row * s_x + o_d, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    w = tl.load(p_w + o_d, mask=inside, other=0.0).to(tl.float32)
    tl.store(p_out + i_row * D + o_d, x * scale * w, mask=inside)
