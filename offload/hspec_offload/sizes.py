"""Bytes that a model takes: the first terms of every plan. Plain arithmetic, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def tensor_bytes(shapes: Iterable[Sequence[int]], element: int) -> int:
    """Bytes of tensors of these shapes with `element` bytes an element."""
    return sum(math.prod(shape) for shape in shapes) * element


def kv_bytes(layers: int, kv_heads: int, head_dim: int, tokens: int, element: int) -> int:
    """Bytes of keys and values of `tokens` tokens of one sequence over all layers."""
    return 2 * layers * kv_heads * head_dim * tokens * element


def human(nbytes: float) -> str:
    """Bytes in the unit a person would use: `270 MB`, `15.2 GB` (powers of ten)."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= 0.9995 * size:  # else it would be written as 1000 of the next smaller unit
            value = nbytes / size
            return f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{nbytes:.0f} bytes"
