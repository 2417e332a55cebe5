"""A checkpoint in place: safetensors files, mapped into memory, verified by their headers before anything is read.

A safetensors file is eight bytes of header length, a JSON header with each tensor's type, shape and byte range, then
the tensors without gaps. So a file's right size is known from its first bytes.
"""

from __future__ import annotations

import json
import math
import mmap
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hspec_decoding.checkpoints.files import GENERATION, INDEX, looks_like, read_config_file, read_json, require_weights
from hspec_decoding.config import ModelConfig
from hspec_profiles.errors import HspecError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
READABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LARGEST_HEADER = 100_000_000  # bytes; the format's own limit
AGAIN = "download or copy it again"
SHARED = "shared_with_target"  # in a draft's config.json: tensors that its target's files hold


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `offset` in bytes from the start of `file`."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Checkpoint:
    """A model directory whose files are all there and of the right size.

    `raw` is config.json, `config` its meaning, `generation` generation_config.json or empty; `tensors` are all that
    the files hold.
    """

    directory: Path
    raw: dict[str, Any]
    config: ModelConfig
    generation: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    _maps: dict[Path, mmap.mmap] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Read config.json, the index and the headers, no weights.

        Raises HspecError for an unsupported model, for missing files (all of them named), and for a file whose size
        or header is wrong.
        """
        raw = read_config_file(directory)
        config = ModelConfig.from_dict(raw)
        weights = require_weights(directory)
        if weights.kind != "safetensors":
            raise HspecError(f"`{directory}` holds .bin weights, which are read after their conversion only")
        tensors: dict[str, TensorInfo] = {}
        for path in weights.paths:
            tensors |= read_header(path)
        _check_index(weights.index, tensors, directory / INDEX["safetensors"])
        generation = directory / GENERATION
        return cls(directory, raw, config, read_json(generation) if generation.exists() else {}, tensors)

    def lent(self, target: Checkpoint) -> Checkpoint:
        """The same with what its config.json says it shares with its target."""
        names = [name for name in self.raw.get(SHARED, ()) if name in target.tensors]
        return replace(self, tensors={**{name: target.tensors[name] for name in names}, **self.tensors})

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that the config asks for, as stored."""
        return sum(self.tensors[name].nbytes for name in self.config.tensors() if name in self.tensors)

    def preflight(self) -> None:
        """Raise HspecError unless every tensor that the config asks for is there, of its shape, in floating point,
        and no layer holds a tensor that the config does not account for."""
        wanted = self.config.tensors()
        missing = [name for name in wanted if name not in self.tensors]
        if missing:
            raise HspecError(
                f"`{self.directory}` lacks {len(missing)} of the {len(wanted)} tensors that its config.json asks "
                f"for: {_first(missing)}",
                self._missing_hint(missing),
            )
        for name, shape in wanted.items():
            info = self.tensors[name]
            if info.shape != shape:
                raise HspecError(
                    f"`{info.file}`: `{name}` has shape {_shape(info.shape)}, config.json says {_shape(shape)}",
                    "config.json and the weights belong to different models",
                )
            if info.dtype not in READABLE:
                raise HspecError(
                    f"`{info.file}`: `{name}` is stored as {str(info.dtype).removeprefix('torch.')}, hspec reads "
                    "float32, float16 and bfloat16",
                    "give the 16-bit checkpoint or a GGUF file of the same model",
                )
        self._refuse_strangers(wanted)

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the mapped file in the stored dtype: nothing is copied, pages are read when touched."""
        info = self.tensors.get(name)
        if info is None:
            raise HspecError(f"`{self.directory}` has no tensor `{name}`")
        count = math.prod(info.shape)
        flat = torch.frombuffer(self._map(info.file), dtype=info.dtype, count=count, offset=info.offset)
        return flat.view(info.shape)

    def release(self, names: Iterable[str]) -> None:
        """Give the pages of these tensors back, once they have been copied; a later touch reads them again."""
        self._advise(names, mmap.MADV_DONTNEED)

    def expect(self, names: Iterable[str]) -> None:
        """Have these tensors read from the disk: they will be touched soon."""
        self._advise(names, mmap.MADV_WILLNEED)

    def _advise(self, names: Iterable[str], advice: int) -> None:
        for name in names:
            info = self.tensors[name]
            start = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
            length = (info.offset + info.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
            if info.file in self._maps and length > 0:
                self._maps[info.file].madvise(advice, start, length)

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            with path.open("rb") as file:
                # A private mapping: torch takes it for writable, and a write would not reach the file.
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[path]

    def _missing_hint(self, missing: list[str]) -> str | None:
        if missing == ["lm_head.weight"]:
            return "config.json says the head is not tied to the embedding (`tie_word_embeddings`)"
        layers = {int(at[1]) for name in self.tensors if (at := re.match(r"model\.layers\.(\d+)\.", name))}
        if len(layers) < self.config.layers:
            return f"config.json says {self.config.layers} layers, the files hold {len(layers)}"
        return AGAIN

    def _refuse_strangers(self, wanted: Mapping[str, Any]) -> None:
        """A bias or a scale that nothing reads would change the result silently."""
        inside = re.compile(r"model\.layers\.(\d+)\.(?!.*rotary_emb\.inv_freq$)")
        strangers = [
            name
            for name in self.tensors
            if name not in wanted and (at := inside.match(name)) and int(at[1]) < self.config.layers
        ]
        if strangers:
            raise HspecError(
                f"`{self.directory}` holds {len(strangers)} tensors that its config.json does not account for: "
                f"{_first(strangers)}",
                "config.json and the weights belong to different models",
            )


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of one safetensors file. Raises HspecError unless the file is exactly as long as its header says."""
    size = path.stat().st_size
    if seen := looks_like(path):
        raise HspecError(f"`{path}` {seen}", AGAIN)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > LARGEST_HEADER:
            raise HspecError(f"`{path}` is no safetensors file: {size:,} bytes that begin with no header", AGAIN)
        text = file.read(length)
    if len(text) < length:
        raise HspecError(f"`{path}` is truncated: it has {size:,} bytes, its header alone needs {8 + length:,}", AGAIN)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {name: _info(path, name, entry, 8 + length) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise HspecError(f"`{path}` is no safetensors file: its header of {length:,} bytes is damaged", AGAIN) from None
    needed = max((info.offset + info.nbytes for info in tensors.values()), default=8 + length)
    if size != needed:
        problem = "is truncated" if size < needed else "has bytes after its end"
        raise HspecError(f"`{path}` {problem}: it has {size:,} bytes, its header says {needed:,}", AGAIN)
    return tensors


def _info(path: Path, name: str, entry: Mapping[str, Any], start: int) -> TensorInfo:
    """One header entry; raises ValueError when its range and its shape disagree."""
    begin, end = entry["data_offsets"]
    if entry["dtype"] not in DTYPES:
        raise HspecError(f"`{path}`: `{name}` is stored as {entry['dtype']}, which hspec does not read")
    info = TensorInfo(path, tuple(entry["shape"]), DTYPES[entry["dtype"]], start + begin)
    if begin < 0 or end - begin != info.nbytes:
        raise ValueError
    return info


def _check_index(index: Mapping[str, str], tensors: Mapping[str, TensorInfo], path: Path) -> None:
    stale = [name for name, file in index.items() if name not in tensors or tensors[name].file.name != file]
    if stale:
        raise HspecError(
            f"`{path}` does not match the files beside it: {len(stale)} tensors are not where it says, "
            f"{_first([f'`{name}` in {index[name]}' for name in stale])}",
            "the index and the shards belong to different versions; bring both again",
        )


def _first(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "()"
