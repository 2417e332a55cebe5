"""What NVIDIA's management library tells about the driver and the slots."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hspec_profiles.cgroup import text
from hspec_profiles.probes.timing import Unknown


class Link(NamedTuple):
    """A PCIe link: generation and width in lanes, as it runs now and as card and slot allow."""

    generation: int
    width: int
    most_generation: int
    most_width: int


@contextmanager
def _library() -> Iterator[Any]:
    """The library, open during the block. Raises Unknown for whatever it refuses."""
    try:
        import pynvml
    except ImportError:
        raise Unknown("`nvidia-ml-py` is not installed") from None
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as refusal:
        raise Unknown(f"NVML: {refusal}") from None


def driver(root: Path = Path("/")) -> str:
    """The driver's version; `unknown` where neither the library nor the kernel tells. `root` stands in for `/`."""
    try:
        with _library() as library:
            return str(library.nvmlSystemGetDriverVersion())
    except Unknown:
        found = re.search(r"Module.*?\s(\d+\.[\d.]+)", text(root / "proc/driver/nvidia/version"))
        return found[1] if found else "unknown"


def link(uuid: str) -> Link:
    """The PCIe link of the GPU that CUDA calls `uuid`. Raises Unknown."""
    with _library() as library:
        handle = library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return Link(
            library.nvmlDeviceGetCurrPcieLinkGeneration(handle),
            library.nvmlDeviceGetCurrPcieLinkWidth(handle),
            library.nvmlDeviceGetMaxPcieLinkGeneration(handle),
            library.nvmlDeviceGetMaxPcieLinkWidth(handle),
        )
