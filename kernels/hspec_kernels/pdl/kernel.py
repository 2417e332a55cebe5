"""Triton: what a kernel begins with that may run beside the one before it."""

import triton
import triton.language as tl


@triton.jit
def await_earlier(PDL: tl.constexpr):
    """Wait until all that earlier kernels wrote can be read, and let the next kernel begin."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(p, PDL: tl.constexpr):
    """Bring the lines at pointers p to the L2 cache: what no earlier kernel writes need not wait for them."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0", "=r,l", [p.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
