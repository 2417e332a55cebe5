"""Writing a safetensors file without holding its tensors in memory.

The format: eight bytes of header length, a JSON header with each tensor's type, shape and byte range, the tensors.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hspec_profiles.errors import HspecError

PIECE = 32 << 20  # bytes of one piece of a large tensor
ITEM = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes of one element


@dataclass(frozen=True)
class Stored:
    """One tensor to be written: its safetensors dtype (`F32`), its shape, and its bytes in pieces when asked."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[memoryview]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM[self.dtype]


def write_safetensors(path: Path, tensors: Sequence[Stored], wrote: Callable[[int], None]) -> None:
    """Write one safetensors file, a piece at a time; `wrote` is told the bytes of each."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            before = file.tell()
            for piece in tensor.pieces():
                file.write(piece)
                wrote(len(piece))
            if file.tell() - before != tensor.nbytes:
                raise HspecError(f"`{tensor.name}` gave {file.tell() - before:,} bytes, not {tensor.nbytes:,}")
        file.flush()
        os.fsync(file.fileno())
