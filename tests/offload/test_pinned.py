"""Pinned memory: registered at its exact size, unregistered before it goes, ordinary where CUDA refuses."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field

import pytest
import torch

from hspec_offload.pinned import pinned
from hspec_offload.sizes import human


@dataclass
class FakeCudart:
    """Registers until there is no more."""

    most: int
    refused: bool = False  # and not asked since
    busy: bool = False  # copies are on their way
    held: dict[int, int] = field(default_factory=dict)
    flags: set[int] = field(default_factory=set)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert address % 4096 == 0
        self.flags.add(flags)
        if sum(self.held.values()) + nbytes > self.most:
            self.refused = True
            return 2
        self.held[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        assert not self.busy
        del self.held[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return f"error {error}"


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    fake = FakeCudart(most=10_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: setattr(fake, "busy", False))
    zeros = torch.zeros

    def next_kernel(*size: int, device: str = "cpu") -> torch.Tensor:
        if device == "cuda" and fake.refused:
            fake.refused = False
            raise RuntimeError("CUDA error: of an earlier call")
        return zeros(*size)

    monkeypatch.setattr(torch, "zeros", next_kernel)
    return fake


def test_memory_has_the_size_asked_for(cudart: FakeCudart) -> None:
    notes: list[str] = []
    made = pinned((3, 500), torch.bfloat16, notes)
    assert made.shape == (3, 500)
    assert made.dtype == torch.bfloat16
    assert cudart.held == {made.data_ptr(): 3000}
    made.fill_(1.0)
    assert pinned(17).shape == (17,)
    assert pinned((0, 5)).numel() == 0
    assert not notes


def test_memory_is_given_back_with_the_last_tensor_over_it(cudart: FakeCudart) -> None:
    made = pinned(5000)
    part = made[100:200].view(torch.float32)
    del made
    gc.collect()
    assert len(cudart.held) == 1
    part.fill_(0.0)
    cudart.busy = True
    del part
    gc.collect()
    assert not cudart.held


def test_refused_memory_is_ordinary_and_said_once(cudart: FakeCudart) -> None:
    notes: list[str] = []
    made = [pinned(4000, notes=notes) for _ in range(4)]
    assert len(cudart.held) == 2
    made[3].fill_(1)
    assert not cudart.refused
    told = f"CUDA pins no more host memory ({human(4000)}: error 2): copies from ordinary memory are slower"
    assert notes == [told]


def test_a_host_without_a_gpu_has_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delattr(torch.cuda, "cudart")
    pinned((2, 3), torch.float32).fill_(1.0)
