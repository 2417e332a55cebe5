"""Probes of the CPU, the disk and NVML: what they count, what they take, why they give nothing."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hspec_profiles.probes import cpu, nvml
from hspec_profiles.probes import disk as disk_probe
from hspec_profiles.probes.disk import BLOCK, disk
from hspec_profiles.probes.timing import Effort, Figure, Unknown

MB = 1 << 20
SHORT = Effort(seconds=0.02, largest=32 * MB)
PLENTY = 1 << 40
CPU_PROBES: dict[str, Callable[[int, Effort], Figure]] = {
    "dram": cpu.dram,
    "attention": lambda free, effort: cpu.attention(1, free, effort),
    "attention_rows": lambda free, effort: cpu.attention(16, free, effort),
    "product": cpu.product,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with cpu.threads(1):
        yield


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every tensor that a probe makes."""
    sizes: list[int] = []

    def noting(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noted(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            sizes.append(tensor.nbytes)
            return tensor

        return noted

    for name in ("ones", "full"):
        monkeypatch.setattr(torch, name, noting(getattr(torch, name)))
    return sizes


@pytest.fixture
def amounts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the CPU probes count as one time of their work, which is done once and takes a second."""
    counted: list[float] = []

    def once(work: Callable[[], object], amount: float, _seconds: float) -> float:
        work()
        counted.append(amount)
        return amount

    monkeypatch.setattr(cpu, "rate", once)
    return counted


# --- the CPU -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CPU_PROBES)
def test_a_plausible_speed(name: str) -> None:
    found = CPU_PROBES[name](PLENTY, Effort(0.02, 64 * MB)).value
    assert found is not None
    assert 1e6 < found < 1e13


@pytest.mark.parametrize("free", [128 * MB, 130 * MB, 1000 * MB, PLENTY])
@pytest.mark.parametrize("name", CPU_PROBES)
def test_no_more_than_a_quarter_of_the_memory(name: str, free: int, made: list[int], amounts: list[float]) -> None:
    CPU_PROBES[name](free, Effort(0, 256 * MB))
    assert 32 * MB <= sum(made) <= min(free // 4, 257 * MB) + MB  # queries and rows are small
    assert amounts[0] == pytest.approx(sum(made), rel=0.05)


@pytest.mark.parametrize("name", CPU_PROBES)
def test_too_little_memory(name: str) -> None:
    with pytest.raises(Unknown, match=r"not enough memory: 50 MB free, (67|134) MB needed"):
        CPU_PROBES[name](50_000_000, Effort(0, 256 * MB))


def test_attention_is_over_keys_of_the_whole_buffer(amounts: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.Size, torch.Size, torch.dtype]] = []
    attend = functional.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen.append((query.shape, key.shape, key.dtype))
        return attend(query, key, value)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: False)
    cpu.attention(16, PLENTY, Effort(0, 64 * MB))
    tokens = 32 * MB // (32 * 128 * 2)
    assert seen == [
        ((1, 32, 16, 128), (1, 32, tokens, 128), torch.bfloat16),
        ((1, 32, 16, 128), (1, 32, tokens // 2, 128), torch.float32),
    ]
    assert amounts == [64 * MB, 32 * MB]  # of bfloat16, however many they take


@pytest.mark.parametrize(
    ("hardware", "speeds", "said"),
    [
        (True, {torch.bfloat16: 2.0, torch.float32: 9.0}, Figure(2.0, "measured, computed in bfloat16")),
        (False, {torch.bfloat16: 2.0, torch.float32: 9.0}, Figure(9.0, "measured, computed in float32")),
        (False, {torch.bfloat16: 2.0, torch.float32: 1.0}, Figure(2.0, "measured, computed in bfloat16")),
    ],
)
def test_attention_says_in_which_type(
    hardware: bool, speeds: dict[torch.dtype, float], said: Figure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: hardware)
    monkeypatch.setattr(cpu, "_attention", lambda dtype, *_: speeds[dtype])
    assert cpu.attention(1, PLENTY, SHORT) == said


def test_threads_are_put_back() -> None:
    with cpu.threads(2):
        assert torch.get_num_threads() == 2
    with pytest.raises(ZeroDivisionError), cpu.threads(2):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 1


# --- the disk ----------------------------------------------------------------------------------------------------


def test_reading_a_file_that_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_probe, "LARGEST", 4)
    found = disk(tmp_path / "not" / "yet" / "there", Effort(1.0))
    assert found.value is not None
    assert 1e6 < found.value < 1e12
    assert found.how.startswith("measured")
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_is_read_as_long_as_there_is_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, reads = [0.0], [0]
    read, write = os.preadv, os.pwrite

    def slow_write(*args: Any) -> int:
        now[0] += 0.3
        return write(*args)

    def slow_read(*args: Any) -> int:
        now[0] += 0.5 if reads[0] else 30  # the first read wakes the disk up
        reads[0] += 1
        return read(*args)

    monkeypatch.setattr(os, "pwrite", slow_write)
    monkeypatch.setattr(os, "preadv", slow_read)
    monkeypatch.setattr(disk_probe, "LARGEST", 6)
    assert disk(tmp_path, Effort(100.0), lambda: now[0]).value == pytest.approx(BLOCK / 0.5)
    assert reads[0] == 6
    reads[0] = 1
    assert disk(tmp_path, Effort(1.0), lambda: now[0]).value == pytest.approx(BLOCK / 0.5)
    assert reads[0] == 1 + 3


def test_a_file_system_without_direct_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_file: int, command: int, *_: int) -> int:
        if command == disk_probe.fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "Invalid argument")
        return 0

    monkeypatch.setattr(disk_probe, "LARGEST", 4)
    monkeypatch.setattr(disk_probe.fcntl, "fcntl", refuse)
    assert "perhaps partly from memory" in disk(tmp_path, Effort(0.1)).how


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_probe.shutil, "disk_usage", lambda _: SimpleNamespace(free=300 * MB))
    with pytest.raises(Unknown, match="almost full"):
        disk(tmp_path, SHORT)


def test_a_short_read_is_no_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_probe, "LARGEST", 4)
    monkeypatch.setattr(os, "preadv", lambda *_: 100)
    with pytest.raises(Unknown, match="the disk moved 100 of"):
        disk(tmp_path, SHORT)


# --- NVML --------------------------------------------------------------------------------------------------------


class Refusal(Exception):
    """Stands in for NVMLError."""


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An NVML that works; tests make it worse."""
    made = SimpleNamespace(NVMLError=Refusal, open=0)

    def opened(by: int) -> None:
        made.open += by

    made.nvmlInit, made.nvmlShutdown = lambda: opened(1), lambda: opened(-1)
    made.nvmlSystemGetDriverVersion = lambda: "580.65.06"
    made.nvmlDeviceGetHandleByUUID = {"GPU-abc": 1}.__getitem__
    for value, name in enumerate(("CurrPcieLinkGeneration", "CurrPcieLinkWidth", "MaxPcieLinkGeneration")):
        setattr(made, f"nvmlDeviceGet{name}", lambda _handle, value=value: value)
    made.nvmlDeviceGetMaxPcieLinkWidth = lambda _handle: 3
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def refusing(*_: object) -> None:
    raise Refusal("Not Supported")


def test_nvml(library: SimpleNamespace) -> None:
    assert nvml.driver() == "580.65.06"
    assert nvml.link("abc") == nvml.Link(generation=0, width=1, most_generation=2, most_width=3)
    assert library.open == 0


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetCurrPcieLinkWidth"])
def test_nvml_that_refuses(call: str, library: SimpleNamespace) -> None:
    setattr(library, call, refusing)
    with pytest.raises(Unknown, match="NVML: Not Supported"):
        nvml.link("abc")
    assert library.open == 0


def test_no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(Unknown, match="`nvidia-ml-py` is not installed"):
        nvml.link("abc")


def test_the_driver_as_the_kernel_tells(library: SimpleNamespace, tmp_path: Path) -> None:
    library.nvmlSystemGetDriverVersion = refusing
    assert nvml.driver(tmp_path) == "unknown"
    told = tmp_path / "proc/driver/nvidia/version"
    told.parent.mkdir(parents=True)
    for line in (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.183.01  Release Build",
    ):
        told.write_text(f"{line}\nGCC version:  gcc version 12.3.0\n")
        assert nvml.driver(tmp_path) == "535.183.01"
