"""PTX that widens four-bit codes, two elements to a register; `quantized_kernel` puts it in line.

Integer instructions run at half rate on NVIDIA's cards since Volta: one for each weight takes as long as half of the
weight's bytes take to arrive, so they are what is saved here.
"""

from __future__ import annotations

import torch

from hspec_kernels.linear.quantized import NF4


def permute(dtype: torch.dtype, odd: bool, pairs: bool) -> str:
    """PTX that looks four bytes of NF4 codes up and gives their odd or even elements as two packed registers.

    A PRMT picks four bytes of eight by the low three bits of four nibbles: one for the low bytes and one for the high
    bytes of either half of the table. `m` holds the nibbles' top bits, which choose the half. The tables are xored with
    a zero that the assembler does not see through (the grid is flat), or it would copy them before every use.
    `pairs`: packs neighbours first, which the assembler then finds packed where even and odd elements are joined again.
    """
    table = torch.tensor(NF4, dtype=dtype).view(torch.uint8).view(16, 2).T.contiguous().view(torch.int32)
    words = [word & 0xFFFFFFFF for word in table.flatten().tolist()]
    lines = [".reg .b32 z, s, q, m, a, b, l, h, n, o, " + ", ".join(f"k{i}" for i in range(8))]
    lines += [".reg .b16 e, f, g, i", "mov.u32 z, %ctaid.z"]
    lines += [f"xor.b32 k{i}, z, {word:#x}" for i, word in enumerate(words)]
    lines += ["and.b32 s, $2, 0x77777777", "shl.b32 q, $2, 4"]
    for half, tops in enumerate(("0xd9c8", "0xfbea")):
        lines += [f"prmt.b32 m, q, $2, {tops}"]
        for out, at in (("l", 0), ("h", 4)):
            lines += [
                f"prmt.b32 a, k{at}, k{at + 1}, s",
                f"prmt.b32 b, k{at + 2}, k{at + 3}, s",
                f"lop3.b32 {out}, a, b, m, 0xd8",  # m ? b : a
            ]
        if pairs:
            lines += ["prmt.b32 n, l, h, 0x4051", "mov.b32 {e, f}, n"]
            lines += ["prmt.b32 o, l, h, 0x6273", "mov.b32 {g, i}, o"]
            lines += [f"mov.b32 ${half}, {'{f, i}' if odd else '{e, g}'}"]
        else:
            lines += [f"prmt.b32 ${half}, l, h, {'0x6240' if odd else '0x7351'}"]
        lines += ["mul.hi.u32 s, s, 0x10000"]  # a shift, but not by the unit that is busy
    return "{ " + "; ".join(lines) + "; }"


def affine(dtype: torch.dtype, plane: int) -> str:
    """PTX that makes nibble `plane` of two 16-bit words code * step + minimum, as one packed register.

    A code in the low byte of a bfloat16 is a subnormal number, code * 2^-133 or 16 code * 2^-133, so one FMA by
    step * 2^101 (or 2^97) gives the weight over 2^32; the kernel puts that right at its end. Half precision has not the
    range: there the code is put under the exponent of 1024, which is taken off again.
    """
    low = plane % 2 == 0
    mask = "0x000f000f" if low else "0x00f000f0"
    lines = [".reg .b32 t, p, s, m, c, d", f"shr.u32 t, $1, {0 if plane < 2 else 8}"]
    if dtype == torch.bfloat16:
        lines += [
            f"and.b32 t, t, {mask}",
            "mov.b32 c, 0x2f807200",  # 2^101 for the step and 2^-32 for the minimum
            "mov.b32 d, 0x80008000",  # -0
            "fma.rn.bf16x2 p, $2, c, d",
            "prmt.b32 s, p, p, 0x1010",
            "prmt.b32 m, p, p, 0x3232",
            *([] if low else ["mov.b32 c, 0x3d803d80", "fma.rn.bf16x2 s, s, c, d"]),  # 1 / 16
            "fma.rn.bf16x2 $0, t, s, m",
        ]
    else:
        lines += [
            f"lop3.b32 t, t, {mask}, 0x64006400, 0xea",  # t & mask | exponent
            f"mov.b32 c, {'0x3c003c00' if low else '0x2c002c00'}",  # 1 or 1 / 16
            f"mov.b32 d, {'0xe400e400' if low else '0xd400d400'}",  # -1024 or -64
            "fma.rn.f16x2 t, t, c, d",
            "shl.b32 s, $2, 16",
            "and.b32 m, $2, 0xffff0000",
            "cvt.rn.f16x2.f32 s, s, s",
            "cvt.rn.f16x2.f32 m, m, m",
            "fma.rn.f16x2 $0, t, s, m",
        ]
    return "{ " + "; ".join(lines) + "; }"
