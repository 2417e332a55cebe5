"""What a GPU, its link to the host and the links between GPUs do. A device is CUDA's index of it."""

from __future__ import annotations

import os
import platform
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from hspec_profiles.probes import nvml
from hspec_profiles.probes.timing import SHARE, Effort, Figure, Unknown, buffer_size, first_line, rate

COPY = 1 << 30  # bytes; a GPU's caches hold up to 128 MB
LINK = 256 << 20  # bytes; from 64 MB on, larger copies are hardly faster
PIECE = 256 << 20  # bytes pinned at a time
MATRIX = 128 << 20  # bytes: 8192 x 8192 in 16 bit
LEAST = 8 << 20  # bytes


def count() -> int:
    """GPUs that this process may use; Unknown says why there are none."""
    if torch.version.cuda is None and torch.version.hip is None:
        raise Unknown("this PyTorch is built without CUDA")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return _started()
    said = " ".join(str(warning.message) for warning in caught)
    if "driver" in said and "old" in said:
        raise Unknown(f"the NVIDIA driver is too old for CUDA {torch.version.cuda}, which this PyTorch needs")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    none = "no NVIDIA driver or device was found" if hidden is None else f"CUDA_VISIBLE_DEVICES='{hidden}' shows none"
    raise Unknown(said.split(". ")[0].strip().rstrip(".") or none)


def _started() -> int:
    """Start CUDA and count its devices."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as failure:
        raise Unknown(f"CUDA does not start: {first_line(failure)}") from None
    return torch.cuda.device_count()


def identities() -> tuple[str, ...]:
    """UUID and driver of every GPU that this process may use."""
    try:
        devices = range(count())
    except Unknown:
        return ()
    return tuple(identity(device) for device in devices)


def identity(device: int) -> str:
    """UUID and driver of a GPU."""
    return f"{uuid(device)}, driver {nvml.driver()}"


def uuid(device: int) -> str:
    """The GPU's own number, the same in every slot and after every start."""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", f"index {device}"))


def release() -> None:
    """Give memory back that torch keeps for later, on the GPUs and pinned."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    empty = getattr(torch._C, "_host_emptyCache", None) or getattr(torch._C, "_accelerator_emptyHostCache", None)
    with suppress(RuntimeError):  # of a GPU that failed before, which is told already
        torch.cuda.empty_cache()
        if empty is not None:
            empty()


def free(device: int) -> int:
    """Bytes of the GPU's memory that are free."""
    return int(torch.cuda.mem_get_info(device)[0])


def copy(device: int, effort: Effort) -> Figure:
    """Bytes a second of a copy within the GPU's memory, read and write counted."""
    size = buffer_size(COPY, free(device), LEAST, buffers=2)
    source, target = (_on(device, size) for _ in range(2))
    return Figure(rate(partial(target.copy_, source), 2 * size, effort.seconds, wait=_waiting(device)))


def matrix(device: int, effort: Effort) -> Figure:
    """Operations a second of a bfloat16 matrix product, of a float16 one where the GPU has no bfloat16."""
    modern = torch.cuda.get_device_capability(device) >= (8, 0)
    dtype = torch.bfloat16 if modern else torch.float16
    size = buffer_size(MATRIX, free(device), LEAST, buffers=3)
    n = 1 << ((size // dtype.itemsize).bit_length() - 1) // 2
    left, right, out = (torch.randn(n, n, dtype=dtype, device=_name(device)) for _ in range(3))
    found = rate(partial(torch.mm, left, right, out=out), 2 * n**3, effort.seconds, wait=_waiting(device))
    return Figure(found, "measured" if modern else "measured in float16: this GPU has no bfloat16")


def link(device: int, ram: int, effort: Effort, *, to_device: bool, pinned: bool) -> Figure:
    """Bytes a second of copies between host memory and the GPU."""
    size = buffer_size(min(LINK, effort.largest), min(ram, free(device)), LEAST)
    source, target = _in_ram(size, pinned=pinned), _on(device, size)
    if not to_device:
        source, target = target, source
    work = partial(target.copy_, source, non_blocking=pinned)
    return Figure(rate(work, size, effort.seconds, wait=_waiting(device)))


def slot(device: int, ram: int, effort: Effort) -> tuple[Figure, Figure]:
    """PCIe generation and width while copies run: an idle link slows down to save power."""
    size = buffer_size(min(LINK, effort.largest), min(ram, free(device)), LEAST)
    source, target = _in_ram(size, pinned=True), _on(device, size)
    try:
        for _ in range(8):
            target.copy_(source, non_blocking=True)
        seen = nvml.link(uuid(device))
    finally:
        torch.cuda.synchronize(device)
    if not seen.generation or not seen.width:
        raise Unknown("NVML tells no PCIe link, as in some virtual machines")
    generation, width = "read during copies", "read during copies"
    if seen.generation < seen.most_generation:
        generation += f"; card and slot allow {seen.most_generation}"
    if seen.width < seen.most_width:
        width += f"; card and slot allow {seen.most_width}"
    return Figure(seen.generation, generation), Figure(seen.width, width)


def all_links(devices: Sequence[int], ram: int, effort: Effort) -> Figure:
    """Bytes a second into all GPUs together, each fed from pinned memory of its own at the same time."""
    if len(devices) < 2:
        raise Unknown("needs two GPUs")
    least = min(len(devices) * free(device) for device in devices)
    size = buffer_size(min(LINK, effort.largest // len(devices)), min(ram, least), LEAST, buffers=len(devices))
    pairs = [(_on(device, size), _in_ram(size, pinned=True)) for device in devices]

    def feed() -> None:
        for target, source in pairs:
            target.copy_(source, non_blocking=True)

    return Figure(rate(feed, len(devices) * size, effort.seconds, wait=_waiting(*devices)))


def peer(devices: Sequence[int], effort: Effort) -> Figure:
    """Bytes a second from the first GPU to the second."""
    if len(devices) < 2:
        raise Unknown("needs two GPUs")
    first, second = devices[:2]
    size = buffer_size(LINK, min(free(first), free(second)), LEAST)
    source, target = _on(first, size), _on(second, size)
    direct = torch.cuda.can_device_access_peer(second, first)
    found = rate(partial(target.copy_, source), size, effort.seconds, wait=_waiting(first, second))
    return Figure(found, "measured" if direct else "measured, through host memory: the GPUs have no direct access")


def pinning(
    gpus: int, ram: int, effort: Effort, clock: Callable[[], float] = time.perf_counter
) -> tuple[Figure, Figure]:
    """Bytes a second of pinning fresh memory, and bytes that can be pinned; at most a quarter of `ram` is tried."""
    if not gpus:
        raise Unknown("no GPU to pin memory for")
    size = buffer_size(min(PIECE, effort.largest), ram, LEAST)
    pieces: list[Tensor] = []
    began, spent, refusal = clock(), 0.0, ""
    while not pieces or ((len(pieces) + 1) * size <= ram // SHARE and spent < effort.seconds):
        try:
            pieces.append(_pinned(size))
        except RuntimeError as failure:
            refusal = first_line(failure)
            break
        spent = clock() - began
    pinned = len(pieces) * size
    if not pinned:
        raise Unknown(f"pinning was refused: {refusal}")
    return Figure(pinned / max(spent, 1e-9)), _pinnable(pinned, ram, refused=bool(refusal))


def _pinnable(pinned: int, ram: int, *, refused: bool) -> Figure:
    """How much can be pinned, where `pinned` bytes could."""
    tried = f"{pinned / 1e9:.1f} GB"
    if refused:
        return Figure(pinned, f"measured: more than {tried} was refused")
    if "microsoft" in platform.release().lower():
        return Figure(None, f"Windows limits pinned memory; {tried} could be pinned")
    return Figure(ram, f"all usable RAM; {tried} of it was tried")


def _name(device: int) -> str:
    return f"cuda:{device}"


def _on(device: int, size: int) -> Tensor:
    return torch.ones(size, dtype=torch.uint8, device=_name(device))


def _in_ram(size: int, *, pinned: bool) -> Tensor:
    """Host memory whose pages exist: pinning brings them, writing too."""
    return _pinned(size) if pinned else torch.ones(size, dtype=torch.uint8)


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _waiting(*devices: int) -> Callable[[], None]:
    def wait() -> None:
        for device in devices:
            torch.cuda.synchronize(device)

    return wait
