"""Attention over a cache against attention written out in float64, and a row's bits against its neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hspec_kernels.attention import PACKED, Reach, attend, attend_reference
from hspec_kernels.attention.prefill import by_cudnn

RATIOS = [(1, 1), (4, 4), (4, 2), (4, 1), (6, 2), (7, 1), (8, 1), (14, 2), (9, 3), (10, 2), (16, 1)]  # heads, KV heads


def naive(query: Tensor, keys: Tensor, values: Tensor, reach: Reach) -> Tensor:
    """Row by row and head by head."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    group = query.shape[2] // keys.shape[1]
    for b, row, head in torch.cartesian_prod(*(torch.arange(n) for n in query.shape[:3])).tolist():
        at = int(reach.first[b]) + row
        seen = slice(0 if reach.window is None else max(0, at + 1 - reach.window), min(at + 1, reach.extent[b]))
        slot = int(reach.slots[b])
        k, v = (cache[slot, head // group, seen].double() for cache in (keys, values))
        out[b, row, head] = (k @ query[b, row, head].double() / query.shape[3] ** 0.5).softmax(0) @ v
    return out


def block(
    first: list[int], rows: int, heads: int, kv_heads: int, *, extra: int = 0, window: int | None = None, dim: int = 16
) -> tuple[Tensor, Tensor, Tensor, Reach]:
    """Random queries over a cache of more sequences than take part, in another order than they are stored."""
    generator = torch.Generator().manual_seed(sum(first) + rows + heads)
    batch, capacity = len(first), max(first) + rows + extra + 5
    query = torch.randn(batch, rows, heads, dim, generator=generator)
    keys, values = torch.randn(2, batch + 1, kv_heads, capacity, dim, generator=generator)
    extent = tuple(at + rows + extra for at in first)
    slots = torch.arange(batch, 0, -1)
    return query, keys, values, Reach(slots, torch.tensor(first), rows, extent, window)


def close(found: Tensor, wanted: Tensor, relative: float = 1e-5) -> bool:
    return bool((found.double() - wanted).abs().max() <= relative * wanted.abs().max())


@pytest.mark.parametrize(("heads", "kv_heads"), RATIOS)
@pytest.mark.parametrize("rows", [1, 2, 8, 63, 64, 65, 80])
@pytest.mark.parametrize("window", [None, 5])
def test_every_share_of_heads(heads: int, kv_heads: int, rows: int, window: int | None) -> None:
    args = block([30], rows, heads, kv_heads, window=window)
    assert close(attend(*args), naive(*args))


@given(
    first=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    rows=st.integers(1, 80),
    extra=st.integers(0, 30),
    window=st.none() | st.integers(1, 60),
    ratio=st.sampled_from([(4, 2), (3, 1), (2, 2)]),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_ragged_batches(first: list[int], rows: int, extra: int, window: int | None, ratio: tuple[int, int]) -> None:
    """Sequences at different places, slots looked at beyond what any row sees, windows shorter and longer than all."""
    args = block(first, rows, *ratio, extra=extra, window=window)
    assert close(attend(*args), naive(*args))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [8, 80])
def test_half_precision(dtype: torch.dtype, rows: int) -> None:
    query, keys, values, reach = block([100], rows, 8, 2, dim=64)
    query, keys, values = query.to(dtype), keys.to(dtype), values.to(dtype)
    found = attend(query, keys, values, reach)
    assert found.dtype == dtype
    assert close(found, naive(query, keys, values, reach), 0.02)


def test_extent_changes_nothing_but_the_work() -> None:
    query, keys, values, reach = block([30, 7], 8, 4, 2, extra=40)
    less = replace(reach, extent=(38, 15), _biases={})
    torch.testing.assert_close(attend(query, keys, values, reach), attend(query, keys, values, less))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (9, 3, 64), (6, 1, 32), (14, 2, 64), (16, 2, 128)])
@pytest.mark.parametrize("extent", [256, 768, 1280])
def test_a_row_knows_nothing_of_its_block(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, extent: int) -> None:
    """At a fixed shape a position has the same bits in every row of a block of 8, whatever the other rows are."""
    generator = torch.Generator().manual_seed(heads)
    keys, values = torch.randn(2, 1, kv_heads, extent, dim, generator=generator).to(dtype)
    own = torch.randn(heads, dim, generator=generator).to(dtype)
    at, slot = extent - 20, torch.tensor([0])
    found = []
    for row in range(8):
        query = torch.randn(1, 8, heads, dim, generator=generator).to(dtype)
        query[0, row] = own
        found.append(attend(query, keys, values, Reach(slot, torch.tensor([at - row]), 8, (extent,)))[0, row])
    for row in range(1, 8):
        assert torch.equal(found[row], found[0]), row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_knows_nothing_of_its_batch(dtype: torch.dtype) -> None:
    query, keys, values, reach = block([30, 90, 61], 8, 6, 2, dim=64)
    query, keys, values = query.to(dtype), keys.to(dtype), values.to(dtype)
    together = attend(query, keys, values, reach)
    for b in range(3):
        alone = Reach(reach.slots[b : b + 1], reach.first[b : b + 1], 8, reach.extent[b : b + 1])
        assert torch.equal(attend(query[b : b + 1], keys, values, alone)[0], together[b])


# what a row sees


@given(
    first=st.integers(0, 20),
    rows=st.sampled_from([1, 5, PACKED, PACKED + 1]),
    extra=st.integers(0, 9),
    window=st.none() | st.integers(1, 30),
    group=st.integers(1, 3),
)
@settings(deadline=None, derandomize=True)
def test_bias(first: int, rows: int, extra: int, window: int | None, group: int) -> None:
    """0 for keys up to a row's own place and within its window, minus infinity for all others; heads of a group
    share a row up to the longest block."""
    extent = first + rows + extra
    bias = Reach(torch.tensor([0]), torch.tensor([first]), rows, (extent,), window).bias(0, group, torch.float32)
    times = group if rows <= PACKED else 1
    assert bias.shape == (1, 1, rows * times, extent)
    for row in range(rows):
        at = first + row
        seen = [at >= key and (window is None or key > at - window) for key in range(extent)]
        for copy in range(times):
            line = bias[0, 0, row * times + copy]
            assert (line == 0).tolist() == seen
            assert bool((line[~torch.tensor(seen)] == float("-inf")).all())


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 8, 128), (8, 2, 128), (6, 3, 64)])
@pytest.mark.parametrize(("first", "rows"), [(0, 1024), (4096, 2048), (40_960, 1500)])
def test_chunks_of_a_prompt(heads: int, kv_heads: int, dim: int, first: int, rows: int) -> None:
    """Where cuDNN takes them; pieces of keys are joined as if there were none."""
    generator = torch.Generator("cuda").manual_seed(0)
    how = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    query = torch.randn(1, rows, heads, dim, **how)
    keys, values = (torch.randn(2, kv_heads, first + rows + 9, dim, **how) for _ in range(2))
    at = torch.tensor([first], device="cuda")
    reach = Reach(torch.tensor([1], device="cuda"), at, rows, (first + rows,), known=((1, first),))
    assert by_cudnn(query, reach)
    wanted = attend_reference(query.float(), keys.float(), values.float(), replace(reach, known=None))
    assert float((attend(query, keys, values, reach) - wanted).abs().max()) < 0.02 * float(wanted.abs().max())
