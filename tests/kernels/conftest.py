"""Kernels in place of their references, on whatever device there is."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

import hspec_kernels.attention
import hspec_kernels.linear
import hspec_kernels.mlp
import hspec_kernels.norm
import hspec_kernels.rope
import hspec_kernels.total  # noqa: F401


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations take their kernels on any device, and what they do not write is NaN."""
    for name, module in list(sys.modules.items()):
        if name.startswith("hspec_kernels.") and hasattr(module, "on_triton"):
            monkeypatch.setattr(module, "on_triton", lambda _: True)
    empty, empty_like = torch.empty, torch.empty_like

    def poisoned(tensor: Tensor) -> Tensor:
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", lambda *size, **how: poisoned(empty(*size, **how)))
    monkeypatch.setattr(torch, "empty_like", lambda like, **how: poisoned(empty_like(like, **how)))
