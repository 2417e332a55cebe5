"""Attention mass by token, as selections see it: the same however attention is split, also at the edges of splits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hspec_kernels.attention import Reach
from hspec_kernels.attention.cut import cut_of
from hspec_kernels.attention.launch import launch
from hspec_kernels.select import score_chunks

pytestmark = pytest.mark.usefixtures("on_triton")

LENGTHS = (1500, 1024, 1025)  # behind an edge of every split, at one, and one token behind it


@pytest.mark.parametrize("split", [64, 1024, 4096])
def test_scores_do_not_depend_on_splits(split: int, device: torch.device) -> None:
    made = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(3, 1, 1600, 16, generator=made).to(device) for _ in range(2))
    query = torch.randn(3, 1, 2, 16, generator=made).to(device)
    slots, first = torch.arange(3, device=device), torch.tensor([n - 1 for n in LENGTHS], device=device)
    for n, length in enumerate(LENGTHS):
        keys[n, :, length:] = values[n, :, length:] = float("nan")
    reach = Reach(slots, first, 1, (1600,) * 3)
    _, lse = launch(query, None, keys, values, reach, 16, replace(cut_of(query, None, keys, reach, 16), split=split))
    mass = score_chunks(query, lse, torch.ones_like(slots), keys, slots, first + 1, 1600)
    for n, length in enumerate(LENGTHS):
        scores = torch.einsum("hd,nd->hn", query[n, 0], keys[n, 0, :length]) / 4
        torch.testing.assert_close(mass[n, 0, :length], scores.softmax(-1).sum(0), rtol=1e-4, atol=1e-7)
        assert (mass[n, 0, length:] == float("-inf")).all()
