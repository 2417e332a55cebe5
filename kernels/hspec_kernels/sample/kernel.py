"""Triton: the coupled sample of rows of logits without a sort, each row split over programs of TILE tokens.

A filter keeps the tokens above a floor, so the choice is the token of the best score, logit plus noise, above the
highest floor. The floors of top-k and min-p are found first. That of top-p never is: the best token of all is asked
whether it is in the nucleus, which is whether the larger logits hold less than top-p of the mass; where it is not, no
token of its logit or less is either, and the best of the larger ones is asked. These candidates, each of a larger
logit and a lower score than the one before, are few: some ln(V) in a flat row, fewer in others.

1. `maxima_kernel`, by tile: the largest logit of every BLOCK tokens
2. `level_kernel`, by row: the largest logit, the choice where it is that, and the floor of top-k
3. `front_kernel`, by tile: the mass above that floor and the tile's own candidates
4. `mass_kernel`, by tile: the row's candidates, and the tile's mass above each
5. `choose_kernel`, by row: the first candidate of the nucleus

Sums are over tiles at fixed places, in a fixed order: a row's choice has nothing to do with the rows beside it.
"""

import triton
import triton.language as tl

from hspec_kernels.pdl.kernel import await_earlier

COLDEST = tl.constexpr(1e-30)
WEYL = tl.constexpr(0x9E3779B97F4A7C15)
MIX1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX2 = tl.constexpr(0x94D049BB133111EB)
UNIT = tl.constexpr(2.0**-53)
LARGEST = tl.constexpr(1 - 2.0**-24)
LOWEST = tl.constexpr(-(2**31))
FLIP = tl.constexpr(2**31 - 1)
HIGHEST_BIT = tl.constexpr(2**30)


@triton.jit
def mix(z):
    """SplitMix64's output function of uint64."""
    z += WEYL
    z = (z ^ (z >> 30)) * MIX1
    z = (z ^ (z >> 27)) * MIX2
    return z ^ (z >> 31)


@triton.jit
def start_of(p_stream, p_position, i_n):
    return mix((tl.load(p_stream + i_n) ^ tl.load(p_position + i_n)).to(tl.uint64, bitcast=True))


@triton.jit
def gumbel(start, token):
    """Noise of tokens, int32, as the reference's to within rounding."""
    bits = mix(start + token.to(tl.uint64) * WEYL) >> 11
    u = tl.minimum((bits.to(tl.float32) + 0.5) * UNIT, LARGEST)
    # -log1p(-u): by the series of 2 artanh(u / (2 - u)), whose next term is below 2^-31, where 1 - u would lose u
    q = u / (2.0 - u)
    r = q * q
    series = 2.0 * q * (1.0 + r * (1.0 / 3 + r * (1.0 / 5 + r * (1.0 / 7 + r * (1.0 / 9)))))
    return -tl.log(tl.where(u < 0.25, series, -tl.log(1.0 - u)))


@triton.jit
def temperature_of(p_option):
    return tl.maximum(tl.load(p_option), COLDEST)


@triton.jit
def scaled(x, top, temperature):
    return tl.div_rn(x - top, temperature)


@triton.jit
def least_of(floor, p_option):
    """The least scaled logit that top-k, whose floor this is, and min-p let pass."""
    min_p = tl.load(p_option + 3)
    if min_p > 0:
        floor = tl.maximum(floor, tl.log(min_p))
    return floor


@triton.jit
def scores(x, token, top, temperature, least, start):
    """Scaled logit, and that plus noise where a token may be chosen, else -inf."""
    at = scaled(x, top, temperature)
    return at, tl.where((at >= least) & (at > float("-inf")), at + gumbel(start, token), float("-inf"))


@triton.jit
def image_of(x):
    """int32 in the order of float32."""
    i = x.to(tl.int32, bitcast=True)
    return i ^ ((i >> 31) & FLIP)


@triton.jit
def kth_largest(image, k):
    """The k-th largest of a block of images, bit by bit from the highest: the largest that k of them reach."""
    at = tl.where(tl.sum((image >= 0).to(tl.int32), 0) >= k, 0, LOWEST)
    step = tl.full([], HIGHEST_BIT, tl.int32)
    while step > 0:
        at = tl.where(tl.sum((image >= at + step).to(tl.int32), 0) >= k, at + step, at)
        step = step >> 1
    return at


@triton.jit
def reaching(p_row, V, least, TILE: tl.constexpr):
    """How many of a row's images are at least `least`."""
    count = tl.zeros([TILE], tl.int32)
    for n in range(0, V, TILE):
        o_v = n + tl.arange(0, TILE)
        x = tl.load(p_row + o_v, mask=o_v < V, other=float("-inf"))
        count += ((image_of(x) >= least) & (o_v < V)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def kth_largest_of_row(p_row, V, k, TILE: tl.constexpr):
    """`kth_largest` of a whole row, read once a bit."""
    at = tl.where(reaching(p_row, V, 0, TILE) >= k, 0, LOWEST)
    step = tl.full([], HIGHEST_BIT, tl.int32)
    while step > 0:
        at = tl.where(reaching(p_row, V, at + step, TILE) >= k, at + step, at)
        step = step >> 1
    return at


@triton.jit
def maxima_kernel(p_x, p_max, s_x, V, TILE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Largest logit of each block; +inf where one is no number."""
    await_earlier(PDL)
    i_t = tl.program_id(0)
    i_n = tl.program_id(1).to(tl.int64)
    o_b = tl.arange(0, TILE // BLOCK)
    o_v = i_t * TILE + o_b[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(p_x + i_n * s_x + o_v, mask=o_v < V, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))
    tl.store(p_max + (i_n * tl.num_programs(0) + i_t) * (TILE // BLOCK) + o_b, tl.max(x, 1))


@triton.jit
def level_kernel(
    p_x,
    p_max,
    p_option,
    p_head,
    p_level,
    p_out,
    s_x,
    V,
    each,
    BLOCKS,
    BB: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row's largest logit and the floor of top-k, scaled. The largest is +inf where the choice is made here."""
    await_earlier(PDL)
    i_n = tl.program_id(0).to(tl.int64)
    p_row = p_x + i_n * s_x
    p_option += i_n // each * 4
    wanted = tl.load(p_option + 2)
    o_b = tl.arange(0, BB)
    maxima = tl.load(p_max + i_n * BLOCKS + o_b, mask=o_b < BLOCKS, other=float("-inf"))
    top, block = tl.max(maxima, 0, return_indices=True)
    whole = (top > float("-inf")) & (top < float("inf"))
    floor = float("-inf")
    if whole & (tl.load(p_option) > 0):
        if (wanted > 0) & (wanted < V):
            # The k-th largest maximum is at most the k-th largest logit, so only blocks that reach it matter.
            k = wanted.to(tl.int32)
            images = image_of(maxima)
            head = (images >= kth_largest(images, k)) & (o_b < BLOCKS)
            count = tl.sum(head.to(tl.int32), 0)
            if count <= HEAD:
                tl.store(p_head + i_n * HEAD + tl.cumsum(head.to(tl.int32), 0) - 1, o_b, mask=head)
                tl.debug_barrier()
                o_e = tl.arange(0, HEAD * BLOCK)
                there = o_e // BLOCK < count
                o_v = tl.load(p_head + i_n * HEAD + o_e // BLOCK, mask=there, other=0) * BLOCK + o_e % BLOCK
                x = tl.load(p_row + o_v, mask=there & (o_v < V), other=float("-inf"))
                image = kth_largest(image_of(x), k)
            else:
                image = kth_largest_of_row(p_row, V, k, TILE)
            last = (image ^ ((image >> 31) & FLIP)).to(tl.float32, bitcast=True)
            floor = scaled(last, top, temperature_of(p_option))
    else:
        token = -1
        if whole:
            o_v = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(p_row + o_v, mask=o_v < V, other=float("-inf"))
            token = tl.min(tl.where(x == top, o_v, V), 0)
        tl.store(p_out + i_n, token)
        top = float("inf")
    tl.store(p_level + 2 * i_n, top)
    tl.store(p_level + 2 * i_n + 1, floor)


@triton.jit
def front_kernel(
    p_x,
    p_option,
    p_stream,
    p_position,
    p_level,
    p_total,
    p_count,
    p_score,
    p_at,
    p_token,
    s_x,
    V,
    each,
    TILE: tl.constexpr,
    FRONT: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile's mass above the floor of top-k; its candidates, by falling score and rising logit.

    Their count is FRONT + 1 where there are more of them than FRONT.
    """
    await_earlier(PDL)
    i_t = tl.program_id(0)
    i_n = tl.program_id(1).to(tl.int64)
    p_option += i_n // each * 4
    top, floor = tl.load(p_level + 2 * i_n), tl.load(p_level + 2 * i_n + 1)
    if top < float("inf"):
        p_row = p_x + i_n * s_x
        o_v = i_t * TILE + tl.arange(0, TILE)
        x = tl.load(p_row + o_v, mask=o_v < V, other=float("-inf"))
        temperature, top_p = temperature_of(p_option), tl.load(p_option + 1)
        start = start_of(p_stream, p_position, i_n)
        at, score = scores(x, o_v, top, temperature, least_of(floor, p_option), start)
        here = i_n * tl.num_programs(0) + i_t
        tl.store(p_total + here, tl.sum(tl.where(at >= floor, tl.exp(at), 0.0), 0))
        most = tl.where(top_p < 1, FRONT, 1)
        count = 0
        best, index = tl.max(score, 0, return_indices=True)
        while (best > float("-inf")) & (count < most):
            token = i_t * TILE + index
            bound = scaled(tl.load(p_row + token), top, temperature)
            tl.store(p_score + here * FRONT + count, best)
            tl.store(p_at + here * FRONT + count, bound)
            tl.store(p_token + here * FRONT + count, token)
            count += 1
            score = tl.where(at > bound, score, float("-inf"))
            best, index = tl.max(score, 0, return_indices=True)
        tl.store(p_count + here, count + ((best > float("-inf")) & (top_p < 1)).to(tl.int32))


@triton.jit
def mass_kernel(
    p_x,
    p_option,
    p_level,
    p_count,
    p_score,
    p_at,
    p_token,
    p_mass,
    p_chain,
    p_length,
    s_x,
    V,
    each,
    TILE: tl.constexpr,
    BT: tl.constexpr,
    FRONT: tl.constexpr,
    CHAIN: tl.constexpr,
    PDL: tl.constexpr,
):
    """The row's candidates, joined from its tiles' by every program; for each the tile's mass of larger logits."""
    await_earlier(PDL)
    i_t = tl.program_id(0)
    i_n = tl.program_id(1).to(tl.int64)
    tiles = tl.num_programs(0)
    p_option += i_n // each * 4
    top, top_p = tl.load(p_level + 2 * i_n), tl.load(p_option + 1)
    if (top < float("inf")) & ((top_p < 1) | (i_t == 0)):
        o_v = i_t * TILE + tl.arange(0, TILE)
        x = tl.load(p_x + i_n * s_x + o_v, mask=o_v < V, other=float("-inf"))
        own = scaled(x, top, temperature_of(p_option))
        weight = tl.exp(own)
        o_f = tl.arange(0, BT * FRONT)
        listed = tl.load(p_count + i_n * tiles + o_f // FRONT, mask=o_f // FRONT < tiles, other=0)
        there = o_f % FRONT < listed
        fronts = i_n * tiles * FRONT
        score = tl.load(p_score + fronts + o_f, mask=there, other=float("-inf"))
        at = tl.load(p_at + fronts + o_f, mask=there, other=float("-inf"))
        cut = (listed > FRONT) & (o_f % FRONT == FRONT - 1)
        known = tl.min(tl.where(cut, at, float("inf")), 0)  # above this logit some tile has candidates unlisted
        most = tl.where(top_p < 1, CHAIN, 1)
        count = 0
        best, index = tl.max(score, 0, return_indices=True)
        while (best > float("-inf")) & (count < most):
            bound = tl.load(p_at + fronts + index)
            mass = tl.sum(tl.where(own > bound, weight, 0.0), 0)
            tl.store(p_mass + (i_n * CHAIN + count) * tiles + i_t, mass)
            if i_t == 0:
                tl.store(p_chain + i_n * CHAIN + count, tl.load(p_token + fronts + index))
            count += 1
            score = tl.where(at > tl.where(bound < known, bound, float("inf")), score, float("-inf"))
            best, index = tl.max(score, 0, return_indices=True)
        if i_t == 0:
            tl.store(p_length + i_n, count)


@triton.jit
def choose_kernel(
    p_x,
    p_option,
    p_stream,
    p_position,
    p_level,
    p_total,
    p_mass,
    p_chain,
    p_length,
    p_out,
    s_x,
    V,
    each,
    tiles,
    TILE: tl.constexpr,
    BT: tl.constexpr,
    CHAIN: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first of a row's candidates that is in the nucleus; beyond those listed, the row is read for each."""
    await_earlier(PDL)
    i_n = tl.program_id(0).to(tl.int64)
    p_option += i_n // each * 4
    top, floor = tl.load(p_level + 2 * i_n), tl.load(p_level + 2 * i_n + 1)
    if top < float("inf"):
        o_t = tl.arange(0, BT)
        top_p = tl.load(p_option + 1)
        target = top_p * tl.sum(tl.load(p_total + i_n * tiles + o_t, mask=o_t < tiles, other=0.0), 0)
        target = tl.where(top_p < 1, target, float("inf"))
        length = tl.load(p_length + i_n)
        token = -1
        count = 0
        beyond = True
        while (count < length) & beyond:
            token = tl.load(p_chain + i_n * CHAIN + count)
            if top_p < 1:
                mass = tl.sum(tl.load(p_mass + (i_n * CHAIN + count) * tiles + o_t, mask=o_t < tiles, other=0.0), 0)
                beyond = mass >= target
            else:
                beyond = False
            count += 1
        if beyond & (token >= 0):
            p_row = p_x + i_n * s_x
            temperature, least = temperature_of(p_option), least_of(floor, p_option)
            start = start_of(p_stream, p_position, i_n)
            while beyond:
                bound = scaled(tl.load(p_row + token), top, temperature)
                found = next_candidate(p_row, V, top, temperature, least, bound, start, TILE)
                beyond = found >= 0
                if beyond:
                    token = found
                    bound = scaled(tl.load(p_row + token), top, temperature)
                    beyond = mass_above(p_row, V, top, temperature, bound, TILE) >= target
        tl.store(p_out + i_n, token)


@triton.jit
def next_candidate(p_row, V, top, temperature, least, bound, start, TILE: tl.constexpr):
    """The token of the best score among those of a scaled logit above `bound`; -1 where there is none."""
    best = float("-inf")
    token = -1
    for n in range(0, V, TILE):
        o_v = n + tl.arange(0, TILE)
        x = tl.load(p_row + o_v, mask=o_v < V, other=float("-inf"))
        at, score = scores(x, o_v, top, temperature, least, start)
        value, index = tl.max(tl.where(at > bound, score, float("-inf")), 0, return_indices=True)
        token = tl.where(value > best, n + index, token)
        best = tl.maximum(best, value)
    return token


@triton.jit
def mass_above(p_row, V, top, temperature, bound, TILE: tl.constexpr):
    mass = 0.0
    for n in range(0, V, TILE):
        o_v = n + tl.arange(0, TILE)
        at = scaled(tl.load(p_row + o_v, mask=o_v < V, other=float("-inf")), top, temperature)
        mass += tl.sum(tl.where(at > bound, tl.exp(at), 0.0), 0)
    return mass
