"""Attention over trees, tails, chosen chunks and quantized copies: against float64, against references, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hspec_kernels import shapes
from hspec_kernels.attention import (
    Chosen,
    Prefix,
    Quantized,
    QuantizedKV,
    Reach,
    attend,
    attend_reference,
    attend_split,
    attend_with,
    attend_with_reference,
    cut,
)
from hspec_kernels.attention.launch import launch
from hspec_kernels.attention.quantized import GROUP, quantize_reference

# Interpreted bfloat16 products are wrong in Triton itself, so bfloat16 is for GPUs.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SHAPES = [(2, 1, 64, 1), (1, 4, 80, 3), (1, 7, 96, 5), (1, 8, 128, 3), (1, 1, 256, 2)]  # KV heads, group, D, rows
NAN = float("nan")

on_triton = pytest.mark.usefixtures("on_triton")


def error(found: Tensor, wanted: Tensor) -> float:
    """Root mean square of the difference over that of what is wanted."""
    difference = (found.double() - wanted.double()).square().mean().sqrt()
    return float(difference / wanted.double().square().mean().sqrt())


def random(*size: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size) + seed)).to(device, dtype)


def whole_numbers(*numbers: int, device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)


def exact(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """One row [H, D] over keys and values [HK, n, D], written out in float64: [H, D] and log-sum-exps [H]."""
    group = len(query) // len(keys)
    k, v = (x.double().repeat_interleave(group, dim=0) for x in (keys, values))
    scores = (k @ query.double()[:, :, None])[..., 0] * query.shape[1] ** -0.5
    return (scores.softmax(-1)[:, None] @ v)[:, 0], scores.logsumexp(-1)


# what fits into shared memory


def on_a_card(monkeypatch: pytest.MonkeyPatch, capability: int, memory: int) -> None:
    monkeypatch.setattr(shapes, "shared_memory", lambda _: memory)
    monkeypatch.setattr(cut, "shared_memory", lambda _: memory)
    monkeypatch.setattr(cut, "_capability", lambda _: capability)


def cut_for(group: int, dim: int, width: int, capacity: int, prefix: Any = None) -> cut.Cut:
    """The cut of 16 rows of `width` bytes a number, as on a GPU."""
    query: Any = SimpleNamespace(
        shape=(1, 16, group, dim), is_cuda=True, element_size=lambda: width, device=torch.device("cuda")
    )
    keys: Any = SimpleNamespace(shape=(1, 1, capacity, dim))
    reach: Any = SimpleNamespace(start=None, tree=None)
    return cut.cut_of(query, prefix, keys, reach, 16)


def test_stages_are_what_shared_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("cuda")
    on_a_card(monkeypatch, 8, 101_376)
    assert [shapes.stages(32_768, wanted, card) for wanted in (1, 2, 4)] == [1, 2, 3]
    assert shapes.stages(32_768, 4, card, 40_000) == 1
    assert shapes.stages(200_000, 4, card) == 1
    assert shapes.stages(200_000, 4, torch.device("cpu")) == 4


@pytest.mark.parametrize(("capability", "memory"), [(9, 232_448), (8, 101_376), (8, 166_912), (12, 101_376)])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_every_cut_fits(capability: int, memory: int, width: int, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values under way, the query and its weights, whatever the group."""
    on_a_card(monkeypatch, capability, memory)
    chosen_chunks = SimpleNamespace()
    for group, prefix in [(group, prefix) for group in (1, 4, 7, 8) for prefix in (None, chosen_chunks)]:
        found = cut_for(group, dim, width, 1 << 20, prefix)
        whole = shapes.power_of_two(dim)
        held = found.stages - (0 if found.rows >= 64 and capability == 9 else 1)
        tile = found.rows * (whole + found.keys) * width
        assert held * 2 * found.keys * whole * width + tile <= memory
        assert found.stages >= (2 if prefix is None else 3)


def test_what_fixes_the_order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 keys a step; splits of 1024, or of 256 in short caches."""
    on_a_card(monkeypatch, 9, 232_448)
    for capacity, split in ((1 << 20, 1024), (16_384, 256)):
        for dim, group, block in ((64, 1, 16), (128, 8, 64), (256, 8, 64)):
            found = cut_for(group, dim, 2, capacity)
            assert (found.split, found.keys, found.rows, found.warps) == (split, 64, block, 4)


# trees


def tree_masks(parents: list[int]) -> list[int]:
    """The ancestors of each node and itself, as bits; the parent of a root is -1."""
    masks: list[int] = []
    for node, parent in enumerate(parents):
        masks.append(1 << node | (masks[parent] if parent >= 0 else 0))
    return masks


def signed(mask: int) -> int:
    return mask - (1 << 64) if mask >> 63 else mask


@st.composite
def trees(draw: st.DrawFn, most: int = 12) -> list[int]:
    size = draw(st.integers(1, most))
    return [draw(st.integers(-1, node - 1)) for node in range(size)]


def check_tree(parents: list[int], first: int, window: int | None, device: torch.device, dim: int = 16) -> None:
    """Each node sees what it would see at the end of its own path."""
    masks, rows = tree_masks(parents), len(parents)
    query, keys, values = (random(1, n, m, dim, device=device) for n, m in ((rows, 4), (2, 90), (2, 91)))
    keys[:, :, first + rows :], values[:, :, first + rows :] = NAN, NAN
    tree = torch.tensor([[signed(mask) for mask in masks]], device=device)
    slots = whole_numbers(0, device=device)
    reach = Reach(slots, whole_numbers(first, device=device), rows, (first + rows,), window, tree)
    out, lse = attend_with(query, None, keys, values, reach)
    assert error(attend(query, keys, values, reach), out) < 1e-5
    for row, mask in enumerate(masks):
        path = [*range(first), *(first + j for j in range(rows) if mask >> j & 1)]
        path = path[-window:] if window else path
        wanted, wanted_lse = exact(query[0, row], keys[0, :, path], values[0, :, path])
        assert error(out[0, row], wanted) < 1e-5
        assert error(lse[0, row], wanted_lse) < 1e-5


@given(parents=trees(), first=st.integers(0, 70), window=st.none() | st.integers(1, 40))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_node_sees_its_path(parents: list[int], first: int, window: int | None) -> None:
    check_tree(parents, first, window, torch.device("cpu"))


@on_triton
@pytest.mark.parametrize("first", [0, 5, 62])
@pytest.mark.parametrize("window", [None, 3])
def test_a_node_sees_its_path_in_the_kernel(first: int, window: int | None, device: torch.device) -> None:
    draws = torch.Generator().manual_seed(first)
    for rows in (1, 6, 17):
        parents = [int(torch.randint(-1, node, (1,), generator=draws)) if node else -1 for node in range(rows)]
        check_tree(parents, first, window, device)


@on_triton
def test_a_tree_of_64_rows(device: torch.device) -> None:
    """The last bit is the sign."""
    check_tree([-1, 0, 0, *range(60), 62], 3, None, device)


def test_a_tree_has_at_most_64_rows() -> None:
    empty = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="64 rows: 65"):
        Reach(empty, empty, 65, (65,), tree=torch.zeros(1, 65, dtype=torch.int64))


@on_triton
@pytest.mark.parametrize("window", [None, 50])
def test_a_tree_that_is_a_chain_has_the_bits_of_a_block(window: int | None, device: torch.device) -> None:
    query, keys, values = (random(2, n, m, 64, device=device) for n, m in ((6, 4), (1, 300), (1, 301)))
    slots, first = whole_numbers(1, 0, device=device), whole_numbers(253, 7, device=device)
    chain = whole_numbers(*((2 << row) - 1 for row in range(6)), device=device).expand(2, 6)
    plain = Reach(slots, first, 6, (259, 13), window)
    for found, wanted in zip(
        attend_split(query, keys, values, replace(plain, tree=chain)),
        attend_split(query, keys, values, plain),
        strict=True,
    ):
        assert torch.equal(found, wanted)


# tails


@on_triton
@pytest.mark.parametrize("window", [None, 33])
def test_a_tail_begins_where_it_starts(window: int | None, device: torch.device) -> None:
    """What is before is not looked at; a bound on the tail's length changes no bit."""
    query, keys, values = (random(2, n, m, 80, device=device) for n, m in ((3, 4), (2, 700), (2, 701)))
    slots, first, start = (whole_numbers(*pair, device=device) for pair in ((1, 0), (600, 20), (500, 17)))
    keys[1, :, :500], values[1, :, :500], keys[0, :, :17], values[0, :, :17] = NAN, NAN, NAN, NAN
    reach = Reach(slots, first, 3, (640, 23), window, start=start)
    out, lse = attend_split(query, keys, values, reach)
    wanted, wanted_lse = attend_with_reference(query, None, keys, values, reach)
    assert error(out, wanted) < 1e-5
    assert error(lse, wanted_lse) < 1e-5
    assert error(attend_reference(query, keys, values, reach), wanted) < 1e-5
    bounded = attend_split(query, keys, values, replace(reach, span=103))
    assert torch.equal(bounded[0], out)
    assert torch.equal(bounded[1], lse)


# chosen chunks


def chosen(kv_heads: int, dim: int, chunk: int, device: torch.device, dtype: torch.dtype, spare: int = 3) -> Chosen:
    """Two sequences of chunks out of order, each KV head its own; entries beyond are far outside the store."""
    keys, values = (random(3, kv_heads, 640 + i, dim, device=device, dtype=dtype)[:, :, :640] for i in range(2))
    counts = (300 // chunk, 70 // chunk)
    index = torch.full((2, kv_heads, counts[0] + spare), 1 << 30, dtype=torch.int32)
    for b, head in torch.cartesian_prod(torch.arange(2), torch.arange(kv_heads)).tolist():
        order = torch.randperm(640 // chunk, generator=torch.Generator().manual_seed(head + b))
        index[b, head, : counts[b]] = order[: counts[b]]
    slots, count = whole_numbers(2, 0, device=device), whole_numbers(*counts, device=device)
    return Chosen(keys, values, slots, index.to(device), count, chunk)


def tail(kv_heads: int, dim: int, rows: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Reach]:
    """A store of tails: of the first sequence 40 slots and the rows, of the second the rows alone; NaN beyond."""
    keys, values = (random(2, kv_heads, 70 + i, dim, device=device, dtype=dtype)[:, :, :70] for i in range(2))
    slots, first, start = (whole_numbers(*pair, device=device) for pair in ((1, 0), (45, 3), (5, 3)))
    for store in (keys, values):
        store[1, :, 45 + rows :], store[0, :, 3 + rows :] = NAN, NAN
        store[1, :, :5], store[0, :, :3] = NAN, NAN
    return keys, values, Reach(slots, first, rows, (45 + rows, 3 + rows), start=start)


def in_float(prefix: Prefix) -> Prefix:
    return (
        replace(prefix, keys=prefix.keys.float(), values=prefix.values.float())
        if isinstance(prefix, Chosen)
        else prefix
    )


def check_prefix(query: Tensor, prefix: Prefix, keys: Tensor, values: Tensor, reach: Reach, bound: float) -> None:
    """Output and log-sum-exp against the reference, and the reference against float64."""
    out, lse = attend_with(query, prefix, keys, values, reach)
    wanted = attend_with_reference(query.float(), in_float(prefix), keys.float(), values.float(), reach)
    assert out.dtype == query.dtype
    assert error(out, wanted[0]) < bound
    assert error(lse, wanted[1]) < bound
    for b, slot in enumerate(reach.slots.tolist()):
        before = prefix.tokens(b)
        for row in range(reach.rows):
            seen = slice(reach.begin(b), int(reach.first[b]) + row + 1)
            both = [torch.cat((x, y[slot, :, seen].float()), 1) for x, y in zip(before, (keys, values), strict=True)]
            by_row, by_row_lse = exact(query[b, row].float(), both[0], both[1])
            assert error(wanted[0][b, row], by_row) < 1e-5
            assert error(wanted[1][b, row], by_row_lse) < 1e-5


@on_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "rows", "chunk"),
    [(*shape, chunk) for shape, chunk in zip(SHAPES, (8, 1, 16, 8, 1), strict=True)],
)
def test_chosen_chunks(
    dtype: torch.dtype, kv_heads: int, group: int, dim: int, rows: int, chunk: int, device: torch.device
) -> None:
    query = random(2, rows, kv_heads * group, dim, device=device, dtype=dtype)
    prefix = chosen(kv_heads, dim, chunk, device, dtype)
    check_prefix(query, prefix, *tail(kv_heads, dim, rows, device, dtype), BOUND[dtype])


@on_triton
def test_all_chunks_in_order_are_plain_attention(device: torch.device) -> None:
    """A prefix and a tail of one store, the tail a tree's, against the same tree over the whole store."""
    query, keys, values = (random(1, n, m, 64, device=device) for n, m in ((4, 6), (2, 320), (2, 321)))
    zero, first = whole_numbers(0, device=device), whole_numbers(290, device=device)
    index = torch.arange(256 // 16, dtype=torch.int32, device=device).expand(1, 2, -1).contiguous()
    prefix = Chosen(keys, values, zero, index, whole_numbers(16, device=device), 16)
    tree = torch.tensor([[1, 3, 5, 13]], device=device)
    reach = Reach(zero, first, 4, (294,), tree=tree)
    found = attend_with(query, prefix, keys, values, replace(reach, start=whole_numbers(256, device=device)))
    for part, wanted in zip(found, attend_split(query, keys, values, reach), strict=True):
        assert error(part, wanted) < 1e-5


# quantized copies


def filled(
    bits: int, kv_heads: int, dim: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, QuantizedKV]:
    """A store of two sequences of 512 tokens, whose keys have a strong channel, and a copy of 3 groups of either."""
    keys, values = (random(2, kv_heads, 512 + i, dim, device=device)[:, :, :512] for i in range(2))
    keys[..., 3] += 12.0
    keys, values = keys.to(dtype), values.to(dtype)
    kv = QuantizedKV(2, kv_heads, 512, dim, bits, dtype, device)
    for slot in range(2):
        kv.fill(keys, values, slot, 0, 1)
        kv.fill(keys, values, slot, 1, 3)
        kv.fill(keys, values, slot, 3, 3)
    return keys, values, kv


@on_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "dim"), [(4, 80), (4, 128), (8, 64), (8, 96)])
def test_filling(dtype: torch.dtype, bits: int, dim: int, device: torch.device) -> None:
    """The kernel's copy is the reference's, is within half a step of the store, and is made where it belongs."""
    keys, values, kv = filled(bits, 2, dim, device, dtype)
    keys[0, 0, :128, 1] = 0.5  # a channel that does not change
    kv.fill(keys, values, 0, 0, 1)
    for slot in range(2):
        k, v = (x[slot, :, : 3 * GROUP] for x in (keys, values))
        for found, wanted in zip(kv.part(slot, 0, 3), quantize_reference(k, v, bits, dtype), strict=True):
            if found.dtype != torch.float32:
                assert torch.equal(found, wanted) or (dtype == torch.float32 and device.type == "cuda")
            else:  # a compiled division may round the last bit of a scale the other way, and a code with it
                torch.testing.assert_close(found, wanted)
        for found, store in zip(kv.tokens(slot, 3), (k, v), strict=True):
            assert error(found, store) < (0.12 if bits == 4 else 0.008)
    assert kv.tokens(0, 1)[0][0, :, 1].eq(0.5).all()
    assert kv.key_scales[:, :, 3].isnan().all()
    assert kv.nbytes < (0.36 if bits == 4 else 0.62) * 4 * keys.nbytes / keys.element_size()


@pytest.mark.parametrize(("bits", "dim"), [(3, 64), (4, 66)])
def test_what_cannot_be_quantized(bits: int, dim: int) -> None:
    with pytest.raises(ValueError, match=r"bits: 3|multiple of 4: 66"):
        QuantizedKV(1, 1, 128, dim, bits, torch.float16, torch.device("cpu"))


@on_triton
@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.float32, 8), *((dtype, bits) for dtype in DTYPES[1:] for bits in (4, 8))], ids=str
)
@pytest.mark.parametrize(("kv_heads", "group", "dim", "rows"), SHAPES)
def test_quantized(
    dtype: torch.dtype, kv_heads: int, group: int, dim: int, rows: int, bits: int, device: torch.device
) -> None:
    """A copy and the store's own tail, of one sequence with no whole group; the store before the tail is NaN."""
    query = random(2, rows, kv_heads * group, dim, device=device, dtype=dtype)
    keys, values, kv = filled(bits, kv_heads, dim, device, dtype)
    slots, whole, first = (whole_numbers(*pair, device=device) for pair in ((1, 0), (384, 0), (400, 9)))
    for store in (keys, values):
        store[1, :, :384], store[1, :, 400 + rows :], store[0, :, 9 + rows :] = NAN, NAN, NAN
    reach = Reach(slots, first, rows, (400 + rows, 9 + rows), start=whole)
    check_prefix(query, Quantized(kv, slots, whole), keys, values, reach, 2 * BOUND[dtype])


# to the bit


def prefixes(device: torch.device) -> list[tuple[Prefix, Prefix]]:
    """A prefix of either kind, each with one that differs in what does not count."""
    dtype = torch.float16
    few, more = chosen(2, 64, 8, device, dtype), chosen(2, 64, 8, device, dtype, spare=70)
    _, _, kv = filled(4, 2, 64, device, dtype)
    slots, whole = whole_numbers(1, 0, device=device), whole_numbers(384, 128, device=device)
    return [(few, more), (Quantized(kv, slots, whole), Quantized(kv, slots, whole, extent=384))]


@on_triton
@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("group", [1, 4])
def test_rows_with_a_prefix_do_not_depend_on_their_neighbours(kind: int, group: int, device: torch.device) -> None:
    """Neither on how many there are, nor on room in the index, nor on extents."""
    prefix, other = prefixes(device)[kind]
    rows = 6
    query = random(2, rows, 2 * group, 64, device=device, dtype=torch.float16)
    keys, values, reach = tail(2, 64, rows, device, torch.float16)
    whole = attend_with(query, prefix, keys, values, reach)
    for row in (0, 1, 5):
        one = replace(reach, first=reach.first + row, rows=1, extent=(70, 70), span=64)
        for found, wanted in zip(attend_with(query[:, row : row + 1], other, keys, values, one), whole, strict=True):
            assert torch.equal(found, wanted[:, row : row + 1])


@on_triton
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_steps_without_a_mask_change_nothing(dtype: torch.dtype, group: int, device: torch.device) -> None:
    """To the bit: a loop of their own, and for a row whether its step is one of them."""
    query = random(1, 16, group, 128, device=device, dtype=dtype)
    keys, values = (random(1, 1, 400 + i, 128, device=device, dtype=dtype) for i in range(2))
    zero = whole_numbers(0, device=device)
    reach = Reach(zero, whole_numbers(310, device=device), 16, (326,))
    usual = cut.cut_of(query, None, keys, reach, 16)
    apart, together = replace(usual, apart=True), replace(usual, apart=False)
    whole = launch(query, None, keys, values, reach, 16, together)
    assert torch.equal(launch(query, None, keys, values, reach, 16, apart)[0], whole[0])
    for row in (0, 9, 10, 15):  # keys 256 to 319 are one step: up to row 9 they need a mask
        one = Reach(zero, whole_numbers(310 + row, device=device), 1, (326,))
        found = launch(query[:, row : row + 1], None, keys, values, one, 16, apart)
        assert torch.equal(found[0], whole[0][:, row : row + 1])


@on_triton
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("with_prefix", [False, True])
def test_the_last_program_joins_the_parts(group: int, with_prefix: bool, device: torch.device) -> None:
    """As a kernel of its own would; its counters are back at zero, and neighbours do not matter."""
    query = random(2, 5, 2 * group, 80, device=device)
    keys, values = (random(2, 2, 300 + i, 80, device=device) for i in range(2))
    prefix = chosen(2, 80, 8, device, torch.float32) if with_prefix else None
    slots, first, start = (whole_numbers(*pair, device=device) for pair in ((1, 0), (254, 3), (150, 0)))
    reach = Reach(slots, first, 5, (300, 8), start=start)
    fused = replace(cut.cut_of(query, prefix, keys, reach, 16), split=64, prefix_split=64, fused=True)
    wanted = attend_with_reference(query, prefix, keys, values, reach)
    found = [launch(query, prefix, keys, values, reach, 16, fused) for _ in range(2)]
    for part, again, exactly in zip(*found, wanted, strict=True):
        assert error(part, exactly) < 1e-5
        assert torch.equal(part, again)
    one = Reach(slots, first + 4, 1, (400, 400), start=start)
    alone = launch(query[:, 4:], prefix, keys, values, one, 16, fused)
    assert torch.equal(alone[0], found[0][0][:, 4:])
    assert not any(counter.any() for counter in reach._counters.values())


def test_without_a_gpu_the_reference_answers() -> None:
    device = torch.device("cpu")
    query = random(2, 3, 4, 64, device=device)
    prefix, (keys, values, reach) = chosen(2, 64, 8, device, torch.float32), tail(2, 64, 3, device, torch.float32)
    for found, wanted in zip(
        attend_with(query, prefix, keys, values, reach),
        attend_with_reference(query, prefix, keys, values, reach),
        strict=True,
    ):
        assert torch.equal(found, wanted)
