"""What a training will take, before a weight is read: a few products say how fast the device is."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from hspec_decoding.config import ModelConfig
from hspec_decoding.training.target import SCORED
from hspec_offload.sizes import human, tensor_bytes
from hspec_profiles.errors import DoesNotFit
from hspec_profiles.memory import usable_ram

MASTER = 16  # bytes of a trained weight: itself, its gradient and two moments in float32
NF4 = 9 / 16  # bytes of a weight in 4 bits, scales among them
MAKING, LEARNING = 0.25, 0.35  # share of the device's matrix rate that sampling and training reach
BATCH = {"cuda": 8192, "cpu": 512}  # tokens of a step
MOST_PARTS = 16


@dataclass(frozen=True)
class Student:
    """What is trained, in numbers: weights, products with them a token, logits a token, heads of dense attention."""

    weights: int
    products: int
    logits: int
    heads: int


@dataclass(frozen=True)
class Cost:
    """Bytes on the device, tokens a second, and how a step is cut so that it fits."""

    memory: int
    making: float  # tokens of text a second
    learning: float  # tokens a second
    rows: int
    parts: int


def cost(
    target: ModelConfig, student: Student, length: int, bits: int, dtype: torch.dtype, device: torch.device
) -> Cost:
    """What it will take. Raises DoesNotFit where not even one row of `length` tokens has room."""
    shapes = target.tensors()
    total = tensor_bytes(shapes.values(), 1)
    inside = tensor_bytes((shape for name, shape in shapes.items() if ".layers." in name), 1)
    held = round(total * dtype.itemsize if bits == 16 else inside * NF4 + (total - inside) * dtype.itemsize)
    fixed = held + student.weights * (MASTER + 2) + SCORED * target.vocab_size * 6
    each = length * (8 * student.logits + 14 * target.hidden_size * 8 + 10 * student.heads * length)
    room = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else usable_ram()
    rows = min(int((0.9 * room - fixed) // each), max(1, BATCH[device.type] // length))
    if rows < 1:
        raise DoesNotFit(
            f"training needs {human(fixed + each)} on {device}, {human(room)} are free",
            "`--target-bits 4` keeps the frozen target in NF4" if bits == 16 else "a shorter `--length` needs less",
        )
    parts = min(MOST_PARTS, max(1, BATCH[device.type] // (rows * length)))
    rate, weights = matrix_rate(target.hidden_size, dtype, device), float(total)
    making = MAKING * rate / (2 * weights)
    learning = LEARNING * rate / (2 * weights + 8 * student.products)
    return Cost(fixed + rows * each, making, learning, rows, parts)


def matrix_rate(hidden: int, dtype: torch.dtype, device: torch.device) -> float:
    """Operations a second of a product like the target's own, the best of three."""
    rows = 4096 if device.type == "cuda" else 256
    x, weight = (torch.randn(n, hidden, device=device).to(dtype) for n in (rows, 4 * hidden))
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        float((x @ weight.T)[0, 0])
        best = min(best, time.perf_counter() - started)
    return 2 * rows * hidden * 4 * hidden / best
