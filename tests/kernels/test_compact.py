"""Rows that were accepted come to stand together, whatever overlaps."""

from __future__ import annotations

import pytest
import torch

from hspec_kernels.compact import compact, compact_reference, pointers


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize(("rows", "dim"), [(1, 16), (5, 24), (64, 16)])
def test_compact(rows: int, dim: int, device: torch.device) -> None:
    torch.manual_seed(rows)
    caches = [torch.randn(3, 2, 150, dim, device=device, dtype=torch.float16) for _ in range(3)]
    expected = [cache.clone() for cache in caches]
    source = torch.stack([torch.randperm(64)[:rows].sort().values for _ in range(2)]).to(device)
    numbers = torch.tensor([[2, 0], [70, 11]], device=device)
    for cache in expected:
        was = cache.clone()
        for b, (slot, first) in enumerate(zip(*numbers.tolist(), strict=True)):
            for r, row in enumerate(source[b].tolist()):
                cache[slot, :, first + r] = was[slot, :, first + row]
    moved = [cache.clone() for cache in caches]
    compact(caches, pointers(caches), *numbers, source)
    compact_reference(moved, *numbers, source)
    for a, b, c in zip(caches, moved, expected, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, c)
