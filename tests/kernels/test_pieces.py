"""Keys that arrive piece by piece: the bits of keys that lie in one store."""

from __future__ import annotations

import pytest
import torch

from hspec_kernels.attention import Reach, attend_split, attend_with_reference
from hspec_kernels.attention.pieces import Pieces
from hspec_kernels.select import gather_chunks

pytestmark = pytest.mark.usefixtures("on_triton")

DTYPES = [torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
UNIT = 1024


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "kv_heads", "group", "dim", "first", "long"),
    [(1, 2, 1, 64, 2300, True), (5, 1, 4, 32, 2300, False), (16, 1, 7, 16, 1024, False), (3, 1, 2, 64, 1023, True)],
)
def test_pieces(
    rows: int, kv_heads: int, group: int, dim: int, first: int, long: bool, dtype: torch.dtype, device: torch.device
) -> None:
    capacity = 17_000 if long else 4096
    generator = torch.Generator().manual_seed(rows)
    keys, values = (
        torch.zeros(1, kv_heads, capacity, dim, dtype=dtype, device=device).index_copy_(
            2,
            torch.arange(first + rows, device=device),
            torch.randn(1, kv_heads, first + rows, dim, generator=generator).to(device, dtype),
        )
        for _ in range(2)
    )
    query = torch.randn(1, rows, kv_heads * group, dim, generator=generator).to(device, dtype)
    at = torch.tensor([first], device=device)
    reach = Reach(torch.zeros_like(at), at, rows, (first + rows,))
    wanted, sums = attend_split(query, keys, values, reach)
    pieces = Pieces(query, at, first + rows, kv_heads, capacity)
    origin = first // UNIT * UNIT
    for start in range(0, origin, UNIT):
        part = slice(start, start + UNIT)
        pieces.add(keys[:, :, part].clone(), values[:, :, part].clone(), start, at - start)
    tail = slice(origin, origin + UNIT + 512)
    pieces.add(keys[:, :, tail].clone(), values[:, :, tail].clone(), origin, at - origin)
    out, lse = pieces.join()
    assert lse is not None
    assert torch.equal(out, wanted)
    assert torch.equal(lse, sums)


def test_attended_elsewhere(device: torch.device) -> None:
    """A part that comes with its log-sum-exp takes the place of the keys that it stands for."""
    keys, values = torch.randn(2, 1, 2, 2100, 32, dtype=torch.float16).to(device)
    query, at = torch.randn(1, 3, 4, 32).to(device, torch.float16), torch.tensor([2097], device=device)
    zero = torch.zeros_like(at)
    wanted, sums = attend_split(query, keys, values, Reach(zero, at, 3, (2100,)))
    first = Reach(zero, zero + 1024, 3, (1024,))
    out, lse = attend_with_reference(query.float(), None, keys[:, :, :1024], values[:, :, :1024], first)
    pieces = Pieces(query, at, 2100, 2, 4096)
    pieces.add_attended(out[0], lse[0], 1024)
    pieces.add(keys[:, :, 1024:], values[:, :, 1024:], 1024, at - 1024)
    found, found_sums = pieces.join()
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(found_sums, sums, rtol=1e-4, atol=1e-4)


def test_gather_from_units(device: torch.device) -> None:
    """Units [S, U, HK, T, D] are read as the one store that they make up."""
    units = torch.randn(2, 5, 2, 2, 64, 24).to(device)  # [S, U, keys or values, HK, T, D]
    whole = [units[:, :, n].transpose(1, 2).flatten(2, 3) for n in (0, 1)]
    index = torch.stack([torch.randperm(40)[:9] for _ in range(4)]).view(2, 2, 9).to(device)
    index[0, 0, 4] = -1
    slots = torch.tensor([1, 0], device=device)
    found, wanted = torch.zeros(2, 2, 2, 2, 80, 24, device=device)
    gather_chunks(units[:, :, 0], units[:, :, 1], index, slots, *found, 8)
    gather_chunks(*whole, index, slots, *wanted, 8)
    assert torch.equal(found, wanted)
    assert found.count_nonzero() > 0
