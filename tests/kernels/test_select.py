"""Selection of chunks: kernels against their torch references, ragged, poisoned, every grouping."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hspec_kernels.select as select
from hspec_kernels.select import (
    gather_chunks,
    gather_chunks_reference,
    mean_chunks,
    mean_chunks_reference,
    score_chunks,
    score_chunks_reference,
)

pytestmark = pytest.mark.usefixtures("on_triton")

# Interpreted bfloat16 products are wrong in Triton itself, so bfloat16 is for GPUs.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
NEVER, POISON = float("-inf"), float("nan")


def error(found: Tensor, wanted: Tensor) -> float:
    """Root mean square of the difference over that of what is wanted."""
    difference = (found.double() - wanted.double()).square().mean().sqrt()
    return float(difference / wanted.double().square().mean().sqrt())


def random(*size: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(device, dtype)


def integers(*numbers: int, device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "dim", "chunk"), [(2, 64, 8), (1, 80, 4), (2, 96, 8), (1, 256, 3)])
@pytest.mark.parametrize("most", [1, 3, 20])
def test_means(dtype: torch.dtype, kv_heads: int, dim: int, chunk: int, most: int, device: torch.device) -> None:
    """Only what is asked for is read and written, be it more than `most`."""
    keys = random(3, kv_heads, 30 * chunk + 2, dim, device=device, dtype=dtype)
    keys[2, :, 27 * chunk :], keys[0, :, : 5 * chunk], keys[1] = POISON, POISON, POISON
    found = torch.full((3, kv_heads, 30, dim), 7.0, device=device, dtype=dtype)
    where = (
        integers(2, 0, 1, device=device),
        integers(25 - most, 5, 9, device=device),
        integers(27, 8, 9, device=device),
    )
    wanted = found.clone()
    mean_chunks(keys, found, *where, chunk, most)
    mean_chunks_reference(keys, wanted, *where, chunk, most)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2 * BOUND[dtype])
    assert torch.equal(found == 7, wanted == 7)
    assert (wanted == 7).any(3).sum() == (90 - most - 5) * kv_heads


def test_means_in_turns(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(select, "PROGRAMS", 2)
    keys = random(1, 2, 400, 64, device=device)
    found, wanted = torch.zeros(2, 1, 2, 100, 64, device=device)
    where = (integers(at, device=device) for at in (0, 1, 99))
    mean_chunks(keys, found, *where, 4, 99)
    wanted[:, :, 1:99] = keys.unflatten(2, (100, 4)).mean(3)[:, :, 1:99]
    torch.testing.assert_close(found, wanted)


def case(
    kv_heads: int, group: int, dim: int, rows: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Two sequences: one of some rows and chunks fewer than there is room for, the rest poisoned."""
    query = random(2, rows, kv_heads * group, dim, device=device, dtype=dtype)
    lse = random(2, rows, kv_heads * group, device=device) + 3
    means = random(3, kv_heads, 150, dim, device=device, dtype=dtype)
    live = max(1, rows - 2)
    query[1, live:], lse[1, live:], means[0, :, 99:], means[1], means[2, :, 140:] = (POISON,) * 5
    slots, count = integers(2, 0, device=device), integers(140, 99, device=device)
    return query, lse, integers(rows, live, device=device), means, slots, count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "rows"),
    [(4, 1, 64, 1), (2, 4, 80, 3), (1, 8, 96, 5), (2, 7, 128, 16), (2, 1, 256, 2), (1, 8, 128, 33)],
)
def test_scores(dtype: torch.dtype, kv_heads: int, group: int, dim: int, rows: int, device: torch.device) -> None:
    query, lse, live, means, slots, count = case(kv_heads, group, dim, rows, dtype, device)
    for extent, skip in ((145, 2), (100, 0)):
        found = score_chunks(query, lse, live, means, slots, count, extent, skip)
        exact = score_chunks_reference(query.float(), lse, live, means.float(), slots, count, extent, skip)
        inside = exact > NEVER
        assert inside.sum() == kv_heads * (min(140, extent) + min(99, extent) - 2 * skip)
        assert torch.equal(found > NEVER, inside)
        assert error(found[inside], exact[inside]) < BOUND[dtype]


def test_scores_are_shares_of_attention(device: torch.device) -> None:
    """Over chunks of one token and all that a row saw, they sum to 1 for each row and head."""
    query, keys = random(1, 3, 4, 64, device=device), random(1, 2, 90, 64, device=device)
    lse = torch.einsum("rkgd,kcd->rkgc", query[0].view(3, 2, 2, 64), keys[0]).mul(64**-0.5).logsumexp(-1).view(1, 3, 4)
    args = (keys, integers(0, device=device), integers(90, device=device), 96)
    sums = score_chunks(query, lse, integers(3, device=device), *args)[0, :, :90].sum(-1)
    torch.testing.assert_close(sums, torch.full((2,), 6.0, device=device))


def test_scores_do_not_depend_on_room(device: torch.device) -> None:
    """To the bit: neither for rows, nor for chunks, nor for sequences."""
    query, lse, _, means, slots, count = case(2, 3, 64, 9, torch.float32, device)
    whole = score_chunks(query, lse, integers(5, 5, device=device), means, slots, count, 145)
    for b in range(2):
        own = slice(b, b + 1)
        few = query[own, :5], lse[own, :5], integers(5, device=device), means, slots[own], count[own]
        assert torch.equal(score_chunks(*few, 145), whole[own])
        assert torch.equal(score_chunks(*few, 60), whole[own, :, :60])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kv_heads", "dim", "chunk"), [(4, 64, 8), (2, 80, 8), (1, 96, 1), (2, 128, 2), (1, 256, 16), (2, 64, 5)]
)
def test_gather(dtype: torch.dtype, kv_heads: int, dim: int, chunk: int, device: torch.device) -> None:
    """Bit for bit; places with -1 and whatever lies beyond stay as they were."""
    keys, values = (random(3, kv_heads, 30 * chunk + 3, dim + i, device=device, dtype=dtype)[..., :dim] for i in (0, 1))
    keys[1], values[1] = POISON, POISON
    index = torch.stack([torch.randperm(30, generator=torch.Generator().manual_seed(n)) for n in range(2 * kv_heads)])
    index = index.view(2, kv_heads, 30).to(device)
    index[0, :, 3], index[1, -1, 5:] = -1, -1
    slots = integers(2, 0, device=device)
    for some in (index, index[:, :, :11]):
        found = random(2, 3, kv_heads, 31 * chunk, dim, device=device, dtype=dtype)
        wanted = found.clone()
        gather_chunks(keys, values, some, slots, *found, chunk)
        gather_chunks_reference(keys, values, some, slots, *wanted, chunk)
        assert torch.equal(found, wanted)
        taken = index[1, 0, 2] * chunk
        assert torch.equal(found[1, 0, 0, 2 * chunk : 3 * chunk], values[0, 0, taken : taken + chunk])


@pytest.mark.gpu
def test_gather_from_host_memory() -> None:
    keys, values = (torch.randn(2, 3, 4000, 64).pin_memory() for _ in range(2))
    index = torch.stack([torch.randperm(500)[:40] for _ in range(6)]).view(2, 3, 40).cuda()
    found, wanted = torch.zeros(2, 2, 2, 3, 320, 64, device="cuda")
    slots = torch.tensor([1, 0], device="cuda")
    gather_chunks(keys, values, index, slots, *found, 8)
    gather_chunks_reference(keys.cuda(), values.cuda(), index, slots, *wanted, 8)
    assert torch.equal(found, wanted)
