"""Probes of GPUs on GPUs that are not there: which bytes go where, and how many are counted."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hspec_profiles.probes import gpu
from hspec_profiles.probes.nvml import Link
from hspec_profiles.probes.timing import Effort, Figure, Unknown

MB, GB = 1 << 20, 1 << 30
EFFORT = Effort(seconds=0, largest=GB)
Pretend = Callable[..., Any]


@pytest.fixture(autouse=True)
def worked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Work is done once and takes a second; the devices that are then waited for."""
    devices: list[int] = []

    def once(work: Callable[[], object], amount: float, _seconds: float, *, wait: Callable[[], object]) -> float:
        work()
        monkeypatch.setattr(torch.cuda, "synchronize", devices.append)
        wait()
        return amount

    monkeypatch.setattr(gpu, "rate", once)
    return devices


def test_copy_counts_reading_and_writing(gpus: Pretend, worked: list[int]) -> None:
    machine = gpus(free=GB)
    assert gpu.copy(1, EFFORT) == Figure(2 * 128 * MB)
    assert machine.taken == [("cuda:1", 128 * MB)] * 2
    assert worked == [1]


def test_matrix_counts_multiplications_and_additions(gpus: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        assert left.shape == right.shape == out.shape == (2048, 2048)
        assert left.dtype == right.dtype == out.dtype

    monkeypatch.setattr(torch, "mm", multiply)
    gpus(free=100 * MB)
    assert gpu.matrix(0, EFFORT) == Figure(2 * 2048**3)
    gpus(free=100 * MB, capability=(7, 5))
    assert "float16" in gpu.matrix(0, EFFORT).how
    gpus(free=90 * MB)
    with pytest.raises(Unknown, match="not enough memory: 94 MB free, 101 MB needed"):
        gpu.matrix(0, EFFORT)


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("to_device", [True, False])
def test_links(
    gpus: Pretend, worked: list[int], monkeypatch: pytest.MonkeyPatch, to_device: bool, pinned: bool
) -> None:
    machine = gpus(free=4 * GB)
    kept: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(gpu, "_on", lambda *how: kept.setdefault("device", machine.on_device(*how)))
    in_ram = gpu._in_ram
    monkeypatch.setattr(gpu, "_in_ram", lambda *how, **more: kept.setdefault("ram", in_ram(*how, **more)))
    assert gpu.link(0, 256 * MB, EFFORT, to_device=to_device, pinned=pinned) == Figure(64 * MB)
    assert kept["ram"].nbytes == kept["device"].nbytes == 64 * MB
    host = 5 if pinned else 1
    assert set(kept["device"][:9].tolist()) == {host if to_device else 7}
    assert set(kept["ram"][:9].tolist()) == {host if to_device else 7}
    assert sum(where == "pinned" for where, _ in machine.taken) == pinned
    assert worked == [0]


def test_links_take_a_quarter_of_the_lesser_memory(gpus: Pretend) -> None:
    gpus(free=128 * MB)
    assert gpu.link(0, 64 * GB, EFFORT, to_device=True, pinned=True) == Figure(32 * MB)
    assert gpu.link(0, 64 * GB, Effort(0, 16 * MB), to_device=True, pinned=True) == Figure(16 * MB)
    with pytest.raises(Unknown, match="not enough memory"):
        gpu.link(0, 16 * MB, EFFORT, to_device=True, pinned=True)


def test_slot_is_read_while_copies_run(gpus: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = gpus()
    assert gpu.slot(0, GB, EFFORT) == (Figure(5, "read during copies"), Figure(16, "read during copies"))
    assert machine.waited == [0]
    machine.link = Link(3, 8, 4, 16)
    generation, width = gpu.slot(0, GB, EFFORT)
    assert (generation.value, width.value) == (3, 8)
    assert generation.how.endswith("card and slot allow 4")
    assert width.how.endswith("card and slot allow 16")

    machine.link = Link(0, 0, 0, 0)
    with pytest.raises(Unknown, match="tells no PCIe link"):
        gpu.slot(0, GB, EFFORT)

    def refuse(_uuid: str) -> Link:
        raise Unknown("NVML: Not Supported")

    monkeypatch.setattr(gpu.nvml, "link", refuse)
    with pytest.raises(Unknown, match="Not Supported"):
        gpu.slot(0, GB, EFFORT)
    assert len(machine.waited) == 4


def test_all_links_feed_every_gpu(gpus: Pretend, worked: list[int]) -> None:
    machine = gpus(count=3)
    assert gpu.all_links(range(3), 4 * GB, EFFORT) == Figure(3 * 256 * MB)
    assert sorted(machine.taken) == sorted([*((f"cuda:{i}", 256 * MB) for i in range(3)), *[("pinned", 256 * MB)] * 3])
    assert worked == [0, 1, 2]
    machine.taken.clear()
    assert gpu.all_links(range(2), 512 * MB, EFFORT) == Figure(2 * 64 * MB)


def test_from_gpu_to_gpu(gpus: Pretend, worked: list[int]) -> None:
    machine = gpus(count=2)
    assert gpu.peer(range(2), EFFORT) == Figure(256 * MB, "measured")
    assert worked == [0, 1]
    machine.direct = False
    assert "through host memory" in gpu.peer(range(2), EFFORT).how


@pytest.mark.parametrize("probe", [gpu.peer, lambda devices, effort: gpu.all_links(devices, GB, effort)])
def test_one_gpu_has_no_other(gpus: Pretend, probe: Callable[..., object]) -> None:
    gpus()
    with pytest.raises(Unknown, match="needs two GPUs"):
        probe(range(1), EFFORT)


# --- pinning -----------------------------------------------------------------------------------------------------


def clock(step: float) -> Callable[[], float]:
    times = iter(range(1 << 20))
    return lambda: step * next(times)


def test_pinning(gpus: Pretend) -> None:
    machine = gpus()
    pin, pinnable = gpu.pinning(1, 2 * GB, Effort(60, 128 * MB), clock(0.25))
    assert machine.taken == [("pinned", 128 * MB)] * 4
    assert pin == Figure(512 * MB / 1.0)
    assert pinnable == Figure(2 * GB, "all usable RAM; 0.5 GB of it was tried")


def test_pinning_ends_with_its_time(gpus: Pretend) -> None:
    machine = gpus()
    pin, _ = gpu.pinning(1, 1 << 40, Effort(1.0, 16 * MB), clock(0.5))
    assert len(machine.taken) == 2
    assert pin.value == 32 * MB


def test_pinning_that_is_refused(gpus: Pretend) -> None:
    gpus(pinnable=300 * MB)
    pin, pinnable = gpu.pinning(1, 8 * GB, Effort(60, 128 * MB), clock(1))
    assert pinnable == Figure(256 * MB, "measured: more than 0.3 GB was refused")
    assert pin.value == pytest.approx(256 * MB / 2)
    gpus(pinnable=0)
    with pytest.raises(Unknown, match=r"pinning was refused: CUDA error: out of memory$"):
        gpu.pinning(1, 8 * GB, EFFORT)


def test_pinning_under_windows_and_without_gpus(gpus: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus()
    monkeypatch.setattr("platform.release", lambda: "6.6.87.2-microsoft-standard-WSL2")
    assert gpu.pinning(1, GB, Effort(60, 64 * MB), clock(1))[1].value is None
    with pytest.raises(Unknown, match="no GPU to pin memory for"):
        gpu.pinning(0, GB, EFFORT)


# --- which GPUs --------------------------------------------------------------------------------------------------


def test_gpus_and_their_identities(gpus: Pretend) -> None:
    gpus(count=2)
    assert gpu.count() == 2
    assert gpu.identities() == ("0000-0, driver 580.1", "0000-1, driver 580.1")


SAYS = {
    "none": (None, "no NVIDIA driver or device was found"),
    "old": (
        "CUDA initialization: The NVIDIA driver on your system is too old (found 11040). Please",
        "too old for CUDA",
    ),
    "broken": ("CUDA initialization: CUDA unknown error - this may be. Setting", "CUDA unknown error"),
}


@pytest.mark.parametrize(("says", "said"), SAYS.values(), ids=SAYS.keys())
def test_no_gpu(gpus: Pretend, monkeypatch: pytest.MonkeyPatch, says: str | None, said: str) -> None:
    gpus(count=0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def available() -> bool:
        if says:
            warnings.warn(says, stacklevel=2)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", available)
    with pytest.raises(Unknown, match=said):
        gpu.count()
    assert gpu.identities() == ()


def test_gpus_that_are_hidden_or_do_not_start(gpus: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = gpus(count=0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(Unknown, match="CUDA_VISIBLE_DEVICES='' shows none"):
        gpu.count()
    machine.count = 1

    def fail() -> None:
        raise RuntimeError("CUDA driver initialization failed, you might not have a CUDA gpu.\nmore")

    monkeypatch.setattr(torch.cuda, "init", fail)
    with pytest.raises(Unknown, match="CUDA does not start: CUDA driver initialization failed"):
        gpu.count()
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(Unknown, match="built without CUDA"):
        gpu.count()
