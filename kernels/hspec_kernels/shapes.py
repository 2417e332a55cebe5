"""Small facts that every operation needs: which implementation, which block sizes."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def on_triton(tensor: Tensor) -> bool:
    """Whether an operation on `tensor` is for its Triton kernel rather than for its torch reference."""
    return tensor.is_cuda


def power_of_two(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


def stages(bytes_per_stage: int, wanted: int, device: torch.device, fixed: int = 0) -> int:
    """At most `wanted` stages of a pipeline: as many as the shared memory of a block holds beside `fixed` bytes."""
    if device.type != "cuda":
        return wanted
    return max(1, min(wanted, (shared_memory(device) - fixed) // bytes_per_stage))


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one block may have; without a GPU there is enough."""
    if device.type != "cuda":
        return 1 << 20
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # missing in torch's stubs
