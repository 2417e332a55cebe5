"""A configuration directory of its own for every test, and machines with GPUs that are not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hspec_profiles.probes import gpu, nvml

GB = 1 << 30
PCIE_5 = nvml.Link(5, 16, 5, 16)


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`$XDG_CONFIG_HOME`."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config"


@dataclass
class Gpus:
    """GPUs whose memory is the host's and whose copies are the CPU's. It records what was asked of them."""

    count: int = 1
    free: int = GB
    driver: str = "580.1"
    capability: tuple[int, int] = (9, 0)
    pinnable: int = 1 << 60  # bytes after which pinning is refused
    direct: bool = True
    link: nvml.Link = PCIE_5
    taken: list[tuple[str, int]] = field(default_factory=list)  # where and how many bytes, in order
    waited: list[int] = field(default_factory=list)  # devices

    def on_device(self, device: int, size: int) -> Tensor:
        self.taken.append((f"cuda:{device}", size))
        return torch.full((size,), 7, dtype=torch.uint8)

    def pinned(self, size: int) -> Tensor:
        if size + sum(n for where, n in self.taken if where == "pinned") > self.pinnable:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")
        self.taken.append(("pinned", size))
        return torch.full((size,), 5, dtype=torch.uint8)

    def properties(self, device: int) -> Any:
        return SimpleNamespace(
            name="Pretend 9000", total_memory=2 * GB, major=9, minor=0, uuid=f"0000-{device}", multi_processor_count=1
        )


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Gpus]:
    """`gpus(count=2, free=...) -> Gpus`: a machine that seems to have them."""

    def pretend(**how: Any) -> Gpus:
        machine = Gpus(**how)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        for name, does in {
            "is_available": lambda: machine.count > 0,
            "init": lambda: None,
            "is_initialized": lambda: True,
            "device_count": lambda: machine.count,
            "get_device_properties": machine.properties,
            "get_device_capability": lambda _device: machine.capability,
            "mem_get_info": lambda _device: (machine.free, 2 * GB),
            "can_device_access_peer": lambda _device, _other: machine.direct,
            "synchronize": machine.waited.append,
            "empty_cache": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, does)
        monkeypatch.setattr(gpu, "_on", machine.on_device)
        monkeypatch.setattr(gpu, "_pinned", machine.pinned)
        monkeypatch.setattr(gpu, "_name", lambda _device: "cpu")
        monkeypatch.setattr(nvml, "driver", lambda: machine.driver)
        monkeypatch.setattr(nvml, "link", lambda _uuid: machine.link)
        return machine

    return pretend
