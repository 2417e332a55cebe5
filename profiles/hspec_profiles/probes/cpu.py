"""What the CPU does with memory, all cores at once: reading, attending, multiplying."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from hspec_profiles.probes.timing import Effort, Figure, buffer_size, rate

HEADS, HEAD_DIM, INPUTS = 32, 128, 4096  # of a 7B model
LEAST = 16 << 20  # bytes; less would be read from the cores' caches


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads during the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def dram(free: int, effort: Effort) -> Figure:
    """Bytes a second of reading memory: a sum over more numbers than the caches hold."""
    size = buffer_size(effort.largest, free, LEAST)
    numbers = torch.ones(size // torch.float32.itemsize)
    return Figure(rate(numbers.sum, size, effort.seconds))


def attention(rows: int, free: int, effort: Effort) -> Figure:
    """Bytes of bfloat16 keys and values a second that `rows` queries of every head attend over.

    Where the CPU has no instructions for bfloat16, computing in float32 counts if it is faster; the keys and values
    are then twice the bytes, which the figure does not count.
    """
    figures = [Figure(_attention(torch.bfloat16, rows, free, effort), "measured, computed in bfloat16")]
    if not multiplies_bfloat16():
        figures.append(Figure(_attention(torch.float32, rows, free, effort), "measured, computed in float32"))
    return max(figures, key=lambda figure: figure.value or 0)


def _attention(dtype: torch.dtype, rows: int, free: int, effort: Effort) -> float:
    size = buffer_size(effort.largest // 2, free, LEAST, buffers=2)
    tokens = size // (HEADS * HEAD_DIM * dtype.itemsize)
    keys, values = (torch.full((1, HEADS, tokens, HEAD_DIM), 0.5, dtype=dtype) for _ in range(2))
    queries = torch.ones((1, HEADS, rows, HEAD_DIM), dtype=dtype)

    @torch.inference_mode()
    def attend() -> Tensor:
        return functional.scaled_dot_product_attention(queries, keys, values)

    return rate(attend, 2 * size * torch.bfloat16.itemsize / dtype.itemsize, effort.seconds)


def multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16."""
    features = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(features.get("avx512_bf16") or features.get("amx_bf16"))


def product(free: int, effort: Effort) -> Figure:
    """Bytes of bfloat16 weights a second that are multiplied with one row."""
    size = buffer_size(effort.largest, free, LEAST)
    weights = torch.full((size // torch.bfloat16.itemsize // INPUTS, INPUTS), 0.5, dtype=torch.bfloat16)
    row = torch.ones((1, INPUTS), dtype=torch.bfloat16)

    @torch.inference_mode()
    def multiply() -> Tensor:
        return functional.linear(row, weights)

    return Figure(rate(multiply, size, effort.seconds))
