"""Host memory that a GPU copies from at full speed: pages of exactly the size asked for, registered with CUDA.

torch's own pinned memory comes in powers of two: up to twice what 64 GB of keys and values need.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

from hspec_offload.sizes import human

PORTABLE = 1  # cudaHostRegisterPortable: for all GPUs
REFUSED = "CUDA pins no more host memory"


class _Pages(mmap.mmap):
    """Anonymous pages. A tensor over them keeps them alive; they go when nothing copies, unregistered before."""

    address = 0  # of what is registered

    def __del__(self) -> None:
        if self.address:
            with suppress(RuntimeError):  # of an earlier kernel
                torch.cuda.synchronize()  # a ring copies ahead for a pass that may never come
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]


def pinned(shape: int | Sequence[int], dtype: torch.dtype = torch.uint8, notes: list[str] | None = None) -> Tensor:
    """A tensor in host memory of its own; on a host without a GPU, or where CUDA refuses, in ordinary memory.

    That it was refused is added to `notes`, once. A tensor is registered whole or not at all: no copy may cross from
    one registered range into another.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    nbytes = prod(sizes) * dtype.itemsize
    if not nbytes:
        return torch.empty(sizes, dtype=dtype)
    pages = _Pages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin
    tensor = torch.frombuffer(pages, dtype=dtype).view(sizes)
    if torch.cuda.is_available():
        refused = _register(tensor.data_ptr(), nbytes)
        if refused is None:
            pages.address = tensor.data_ptr()
        elif notes is not None and not any(note.startswith(REFUSED) for note in notes):
            notes.append(f"{REFUSED} ({human(nbytes)}: {refused}): copies from ordinary memory are slower")
    return tensor


def _register(address: int, nbytes: int) -> str | None:
    """None, or why CUDA will not."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = cudart.cudaHostRegister(address, nbytes, PORTABLE)
    if int(error) == 0:
        return None
    with suppress(RuntimeError):  # CUDA remembers the error, and the next kernel would be blamed for it
        torch.zeros(1, device="cuda")
    return str(cudart.cudaGetErrorString(error))


def seen_by(device: torch.device, tensor: Tensor) -> Tensor:
    """The same memory as a GPU sees it, which then reads it over the bus; a copy where it is not pinned."""
    if device.type != "cuda" or not tensor.is_pinned():
        return tensor.to(device)
    flat = torch.as_tensor(_Seen(tensor), device=device)
    return flat.view(tensor.dtype).view(tensor.shape)


class _Seen:
    """Bytes of a tensor, told as CUDA libraries tell each other, and the tensor that keeps them alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        told = {"shape": (self._tensor.nbytes,), "typestr": "|u1", "strides": None, "version": 3}
        return {**told, "data": (self._tensor.data_ptr(), False)}
