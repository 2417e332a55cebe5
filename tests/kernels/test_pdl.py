"""Kernels that begin before the one before them has ended: none may read or write before it has waited."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import hspec_kernels
from hspec_kernels.pdl import pdl_options

ROOT = Path(hspec_kernels.__file__).parent
MODULES = sorted(path for path in ROOT.rglob("*.py") if "pdl.kernel import await_earlier" in path.read_text())


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_kernels_wait_before_they_read_or_write(path: Path) -> None:
    """Those that are launched so wait first; what they prefetch does not count."""
    functions = re.split(r"^@triton\.jit.*\n", path.read_text(), flags=re.M)[1:]
    kernels = [text for text in functions if "PDL: tl.constexpr" in text.split("):\n")[0]]
    assert kernels
    for text in kernels:
        before, waited, _ = text.partition("    await_earlier(PDL)\n")
        assert waited
        assert not re.search(r"tl\.(load|store|atomic)|_part\(|_bounds\(|product\(", before)


def test_without_such_a_gpu_nothing_is_asked_for() -> None:
    """The interpreter knows no launch options of a GPU."""
    assert pdl_options(torch.device("cpu")) == {"PDL": False}


def test_only_hopper_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    for index, (capability, able) in enumerate([((8, 9), False), ((9, 0), True), ((12, 0), True)]):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert pdl_options(torch.device("cuda", 100 + index))["PDL"] is able
        assert pdl_options(torch.device("cuda", 100 + index)).get("launch_pdl", False) is able
