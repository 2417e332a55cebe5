"""Triton: keys and values quantized group by group, and attention over them.

Scales stay out of the products. For the keys of a group a row's query is multiplied by the scales of the channels once
and its product with the minima is the same for all tokens; a token's weight is multiplied by the scale of its value,
and the minima are summed by weight. Codes are read as BIAS + code, which costs no conversion: the bits of a 16-bit
float between BIAS and 2 BIAS end in the code. What BIAS adds is taken out with the minima, from sums over the same
rounded factors as the products have.
"""

import triton
import triton.language as tl

from hspec_kernels.attention.kernel import load_rows, store_mean, store_weight, tail_part
from hspec_kernels.pdl.kernel import await_earlier


def assembly(magic: int, shift: int) -> str:
    """PTX that makes of two words a pair of 16-bit floats: 4 bits from `shift` on below the bits `magic`."""
    return f"{{ .reg .b32 x; shr.b32 x, $1, {shift}; lop3.b32 $0, x, 0x000f000f, 0x{magic:04x}{magic:04x}, 0xea; }}"


@triton.jit
def numbers(words, factor, i, BITS: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr):
    """Codes i of the words + BIAS, in the type of `factor`: by PTX where there is some."""
    if ASM is not None:
        return tl.inline_asm_elementwise(ASM[i], "=r,r", [words], dtype=factor.dtype, is_pure=True, pack=2)
    codes = (words >> (i * BITS)) & (2**BITS - 1)
    if BIAS > 0:
        return codes.to(factor.dtype) + BIAS
    return codes.to(factor.dtype)


@triton.jit
def scale_and_minimum(pair, dtype: tl.constexpr):
    """The two numbers of dtype that an integer holds, float32."""
    if dtype == tl.float32:
        scale, minimum = pair.to(tl.int32), (pair >> 32).to(tl.int32)
    elif dtype == tl.bfloat16:
        scale, minimum = pair << 16, pair & -65536
    else:
        scale, minimum = pair.to(tl.int16), (pair >> 16).to(tl.int16)
    if dtype == tl.float16:
        scale, minimum = scale.to(dtype, bitcast=True), minimum.to(dtype, bitcast=True)
    else:
        scale, minimum = scale.to(tl.float32, bitcast=True), minimum.to(tl.float32, bitcast=True)
    return scale.to(tl.float32), minimum.to(tl.float32)


@triton.jit
def folded(x, LANES: tl.constexpr):
    """Sums of every LANES-th column: within threads, as the columns of a product lie."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // LANES, LANES]), 1)


@triton.jit
def coded_part(
    block,
    codes,
    parts,
    scale,
    rows,
    base,
    i_s,
    i_m,
    i_bh,
    C,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPLIT: tl.constexpr,
    BITS: tl.constexpr,
    BIAS: tl.constexpr,
    LANES: tl.constexpr,
    ASM: tl.constexpr,
):
    """SPLIT tokens of the copy for one KV head, which every row sees; a piece of channels has one place in words."""
    i_b = (i_bh // HK).to(tl.int64)
    i_h = i_bh % HK
    begin = i_s * SPLIT
    end = tl.minimum(begin + SPLIT, tl.load(codes.p_whole + i_b).to(tl.int32))
    if begin < end:
        pieces: tl.constexpr = 16 // BITS
        width: tl.constexpr = D // pieces  # words of a token, channels of a piece
        dtype: tl.constexpr = block.p_query.dtype.element_ty
        o_m = i_m * BM + tl.arange(0, BM)
        o_d = tl.arange(0, BP)
        inside = o_d < width
        p_q = block.p_query + i_b * block.s_query[0]
        head = tl.load(codes.p_slot + i_b).to(tl.int64) * HK + i_h
        p_k = codes.p_k + head * C * width + o_d[:, None]
        p_v = codes.p_v + head * C * width + o_d[None, :] * 128
        p_kscale = codes.p_kscale + head * (C // 128) * D + o_d
        p_vscale = codes.p_vscale + head * 2 * C
        q, acc = (), ()
        for i in tl.static_range(pieces):
            q += (load_rows(block, p_q + i * width, o_m, o_d, i_h, rows, G, width).to(tl.float32) * scale,)
            acc += (tl.zeros([BM, BP], tl.float32),)
        m = tl.full([BM], -1.0e30, tl.float32)
        total = tl.zeros([BM, LANES], tl.float32)
        low_shift, high_shift = tl.zeros([BM, LANES], tl.float32), tl.zeros([BM, LANES], tl.float32)
        low_bias, high_bias = tl.zeros([BM, 8], tl.float32), tl.zeros([BM, 8], tl.float32)
        bias_d, bias_n = tl.full([BP, 8], BIAS, dtype), tl.full([BN, 8], BIAS, dtype)
        for n in range(begin, end, BN):
            o_n = n + tl.arange(0, BN)
            k = tl.load(p_k + (o_n * width)[None, :], mask=inside[:, None], other=0)
            o_v = tl.multiple_of(n % 128, BN) + n // 128 * 128 * width + tl.arange(0, BN)
            v = tl.load(p_v + o_v[:, None], mask=inside[None, :], other=0)
            factors = ()
            shift = tl.zeros([BM, BP], tl.float32)
            bias = tl.zeros([BM, 8], tl.float32)
            s = tl.zeros([BM, BN], tl.float32)
            for i in tl.static_range(pieces):
                pair = tl.load(p_kscale + n // 128 * D + i * width, mask=inside, other=0)
                slope, minimum = scale_and_minimum(pair, dtype)
                shift += q[i] * minimum[None, :]
                factors += ((q[i] * slope[None, :]).to(dtype),)
            for i in tl.static_range(pieces):
                if BIAS > 0:
                    bias = tl.dot(factors[i], bias_d, bias, input_precision="ieee")
                s = tl.dot(factors[i], numbers(k, factors[i], i, BITS, BIAS, ASM), s, input_precision="ieee")
            row_shift = tl.sum(shift, 1) - tl.max(bias, 1)
            m_new = tl.maximum(m, tl.max(s, 1) + row_shift)
            p = tl.exp2(s + (row_shift - m_new)[:, None])
            alpha = tl.exp2(m - m_new)[:, None]
            total = total * alpha + folded(p, LANES)
            slope, minimum = scale_and_minimum(tl.load(p_vscale + o_n), dtype)
            low = (p * slope[None, :]).to(dtype)
            low_shift = low_shift * alpha + folded(p * minimum[None, :], LANES)
            slope, minimum = scale_and_minimum(tl.load(p_vscale + C + o_n), dtype)
            high = (p * slope[None, :]).to(dtype)
            high_shift = high_shift * alpha + folded(p * minimum[None, :], LANES)
            if BIAS > 0:
                low_bias = tl.dot(low, bias_n, low_bias * alpha, input_precision="ieee")
                high_bias = tl.dot(high, bias_n, high_bias * alpha, input_precision="ieee")
            sums = ()
            for i in tl.static_range(pieces):
                w = low if i < pieces // 2 else high
                sums += (tl.dot(w, numbers(v, w, i, BITS, BIAS, ASM), acc[i] * alpha, input_precision="ieee"),)
            acc = sums
            m = m_new
        live = o_m // G < rows
        total = tl.sum(total, 1)
        low_shift = tl.sum(low_shift, 1) - tl.max(low_bias, 1)
        high_shift = tl.sum(high_shift, 1) - tl.max(high_bias, 1)
        for i in tl.static_range(pieces):
            shift = low_shift if i < pieces // 2 else high_shift
            store_mean(parts, base + o_m, live, total, acc[i] + shift[:, None], o_d, i * width, width, D)
        store_weight(parts, base + o_m, live, m, total)


@triton.jit(do_not_specialize=["rows", "count", "prefixes"])
def coded_kernel(
    block,
    store,
    codes,
    parts,
    scale,
    rows,
    count,
    prefixes,
    C,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    TAIL_BN: tl.constexpr,
    SPLIT: tl.constexpr,
    PREFIX_SPLIT: tl.constexpr,
    BITS: tl.constexpr,
    BIAS: tl.constexpr,
    LANES: tl.constexpr,
    ASM: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """One part: of the copy for the first `prefixes` of a head's `count` parts, then of the tail's slots."""
    i_m = tl.program_id(0)
    i_s = tl.program_id(1)
    i_bh = tl.program_id(2)
    base = (i_bh.to(tl.int64) * count + i_s) * (rows * G)
    await_earlier(PDL)
    if i_s < prefixes:
        coded_part(
            block, codes, parts, scale, rows, base, i_s, i_m, i_bh, C,
            HK, G, D, BP, BM, BN, PREFIX_SPLIT, BITS, BIAS, LANES, ASM,
        )  # fmt: skip
    else:
        tail_part(
            block, store, parts, scale, rows, base, i_s - prefixes, i_m, i_bh,
            HK, G, D, BD, BM, TAIL_BN, SPLIT, False, 2, PTX,
        )  # fmt: skip


@triton.jit
def coded(x, low, high, LEVELS: tl.constexpr, dtype: tl.constexpr):
    """Codes of x float32, which lies between low and high, their scale and their minimum, rounded to dtype."""
    scale = tl.div_rn(high - low, tl.zeros_like(low) + LEVELS).to(dtype)
    minimum = low.to(dtype)
    step = scale.to(tl.float32)
    x = x - minimum.to(tl.float32)
    x = tl.floor(tl.div_rn(x, tl.where(step == 0.0, 1.0, step) + tl.zeros_like(x)) + 0.5)
    return tl.minimum(tl.maximum(x, 0.0), LEVELS).to(tl.int32), scale, minimum


@triton.jit(do_not_specialize=["start", "C"])
def fill_kernel(
    p_key,
    p_value,
    p_k,
    p_v,
    p_kscale,
    p_vscale,
    s_kh,
    s_kt,
    s_vh,
    s_vt,
    start,
    C,
    D: tl.constexpr,
    BP: tl.constexpr,
    BITS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Keys and values of one KV head and one group of tokens, the first of which is group `start` of the copy."""
    pieces: tl.constexpr = 16 // BITS
    width: tl.constexpr = D // pieces
    dtype: tl.constexpr = p_kscale.dtype.element_ty
    i_g = tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    group = (start + i_g).to(tl.int64)
    o_t = tl.arange(0, 128)
    o_d = tl.arange(0, BP)
    inside = (o_d < width)[None, :]
    place = (i_g * 128 + o_t)[:, None].to(tl.int64)

    words = tl.zeros([128, BP], tl.int32)
    for i in tl.static_range(pieces):
        x = tl.load(p_key + i_h * s_kh + place * s_kt + (i * width + o_d)[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        codes, scale, minimum = coded(x, tl.min(x, 0)[None, :], tl.max(x, 0)[None, :], LEVELS, dtype)
        words |= codes << (i * BITS)
        p = p_kscale + ((i_h * (C // 128) + group) * D + i * width + o_d[None, :]) * 2
        tl.store(p, scale, mask=inside)
        tl.store(p + 1, minimum, mask=inside)
    p = p_k + (i_h * C + group * 128 + o_t[:, None]) * width + o_d[None, :]
    tl.store(p, words.to(tl.int16), mask=inside)

    words = tl.zeros([128, BP], tl.int32)
    for half in tl.static_range(2):
        values = ()
        low, high = tl.full([128], float("inf"), tl.float32), tl.full([128], float("-inf"), tl.float32)
        for i in tl.static_range(pieces // 2):
            o = (half * (D // 2) + i * width + o_d)[None, :]
            values += (tl.load(p_value + i_h * s_vh + place * s_vt + o, mask=inside, other=0.0).to(tl.float32),)
            low = tl.minimum(low, tl.min(tl.where(inside, values[i], float("inf")), 1))
            high = tl.maximum(high, tl.max(tl.where(inside, values[i], float("-inf")), 1))
        for i in tl.static_range(pieces // 2):
            codes, scale, minimum = coded(values[i], low[:, None], high[:, None], LEVELS, dtype)
            words |= codes << ((half * (pieces // 2) + i) * BITS)
        p = p_vscale + ((i_h * 2 + half) * C + group * 128 + o_t[:, None]) * 2
        tl.store(p, scale)
        tl.store(p + 1, minimum)
    p = p_v + (i_h * C + group * 128) * width + o_d[None, :] * 128 + o_t[:, None]
    tl.store(p, words.to(tl.int16), mask=inside)
