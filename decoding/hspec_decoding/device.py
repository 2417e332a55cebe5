"""Which device and precision a run uses."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, replace

import torch

from hspec_kernels.linear import ROWS
from hspec_profiles.errors import HspecError, UsageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Shape:
    """The shape of the last verifier's pass: rows of a block, and the slots its attention is rounded up to.

    Where a row's bits depend on the number of rows, blocks are padded to always as many.
    """

    rows: int
    bucket: int
    padded: bool = True


CPU_SHAPE = Shape(rows=8, bucket=256)
# On a GPU the kernels' tiles stand at absolute positions by themselves, and in 16 bits up to 32 rows add up in one
# order. Products in float32 are cuBLAS's, which chooses by the rows.
GPU_SHAPE, GPU_SHAPE_FLOAT32 = Shape(rows=32, bucket=1, padded=False), Shape(rows=16, bucket=1)


def exact_shape(device: torch.device, dtype: torch.dtype, sequences: int = 1) -> Shape:
    """The shape in which a position's result is the same to the bit whatever is drafted around it.

    Rows add up in one order only as long as a pass, of all `sequences` together, is one for the kernels.
    """
    if device.type == "cpu":
        return CPU_SHAPE
    if dtype.itemsize > 2:
        return GPU_SHAPE_FLOAT32
    return replace(GPU_SHAPE, rows=next((rows for rows in (32, 16, 4) if rows * sequences <= ROWS), 1))


def pick_device(name: str, notes: list[str]) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N`. Raises HspecError in one sentence when a GPU cannot be used.

    `auto` without a usable GPU is the CPU; that a driver is too old is then added to `notes`.
    """
    if name == "cpu":
        return torch.device("cpu")
    if name not in ("auto", "cuda") and not re.fullmatch("cuda:[0-9]+", name):
        raise UsageError(f"unknown device: {name!r}", "devices are auto, cpu, cuda and cuda:N")
    reason = _unusable()
    if reason is None:
        count = torch.cuda.device_count()
        index = int(name[5:]) if name.startswith("cuda:") else 0
        if index >= count:
            raise UsageError(f"no such device: {name!r}, {count} GPU{'s'[: count > 1]} here")
        return torch.device("cuda", index)
    if name == "auto":
        if "driver is too old" in reason:
            notes.append(f"running on the CPU: {reason}")
        return torch.device("cpu")
    raise HspecError(f"`--device {name}` cannot be used: {reason}", "run with `--device cpu`")


def _unusable() -> str | None:
    """Why CUDA cannot be used, or None when it can."""
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    text = " ".join(str(warning.message) for warning in caught)
    if "driver" in text and "old" in text:
        return f"the NVIDIA driver is too old for CUDA {torch.version.cuda}, which this PyTorch needs"
    return text.split(". ")[0].strip().rstrip(".") or "no NVIDIA driver or device was found"


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 where the hardware multiplies it, else float16 on a GPU and float32 on a CPU."""
    if name != "auto":
        full = SHORT.get(name, name)
        if full not in DTYPES:
            raise UsageError(f"unknown dtype: {name!r}", "dtypes are auto, " + ", ".join((*SHORT, *DTYPES)))
        return DTYPES[full]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    features = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return torch.bfloat16 if features.get("avx512_bf16") or features.get("amx_bf16") else torch.float32
