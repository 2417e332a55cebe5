"""Triton: root-mean-square norm, one row a program."""

import triton
import triton.language as tl

from hspec_kernels.pdl.kernel import await_earlier, prefetch


@triton.jit
def rms_norm_kernel(p_x, p_w, p_out, eps, s_x, D: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    inside = o_d < D
    prefetch(p_w + tl.minimum(tl.arange(0, (BD + 63) // 64) * 64, D - 1), PDL)
    await_earlier(PDL)
    x = tl.load(p_x + i_row * s_x + o_d, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(p_w + o_d, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    tl.store(p_out + i_row * D + o_d, x * scale * w, mask=inside)
