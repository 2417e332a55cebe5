"""Other checkpoints as safetensors: made once, kept in the cache, never half there.

A copy lies in a directory whose name is a hash of its sources (path, size, time), so a changed source gives a new one.
It is written beside its place and renamed when whole. Tensors are streamed: one at a time, large ones in pieces.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hspec_decoding.checkpoints.files import (
    CONFIG,
    GENERATION,
    INDEX,
    TOKENIZER_FILES,
    Progress,
    Say,
    Weights,
    disk_free,
    human,
    looks_like,
    own_cache,
    read_config_file,
)
from hspec_decoding.checkpoints.gguf_file import GGUFFile, GGUFTensor, supported
from hspec_decoding.checkpoints.safetensors_file import PIECE, Stored, write_safetensors
from hspec_decoding.config import ModelConfig
from hspec_profiles.errors import DoesNotFit, HspecError

if TYPE_CHECKING:
    import torch

VERSION = 1  # raise it when a conversion's result changes
SOURCE = "source.json"


# --- the place of a copy -----------------------------------------------------------------------------------------


def place(source: Path, files: Iterable[Path]) -> Path:
    """Directory of the copy made from `source`, which is there when the copy is. `files` are all that it depends on."""
    digest = hashlib.sha256(f"{VERSION}\n{source.resolve()}".encode())
    for file in files:
        status = file.stat()
        digest.update(f"\n{file.name} {status.st_size} {status.st_mtime_ns}".encode())
    return own_cache() / "converted" / f"{source.resolve().stem}-{digest.hexdigest()[:16]}"


def _make(final: Path, source: Path, nbytes: int, fill: Callable[[Path], None], say: Say) -> Path:
    """Run `fill` on a new directory and rename it to `final`. Raises DoesNotFit when the disk lacks `nbytes`."""
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _alone(final.with_name(f".{final.name}.lock"), say):
            if not final.is_dir():  # else another process made it while this one waited
                _room(final.parent, nbytes)
                say(
                    f"converting `{source}` once to safetensors: {human(nbytes)} to {final}, "
                    f"{human(disk_free(final.parent))} free"
                )
                _fill_whole(final, source, fill)
                _drop_older(final, source)
    except OSError as error:
        kind = DoesNotFit if error.errno == errno.ENOSPC else HspecError
        raise kind(
            f"converting `{source}` failed: {error.strerror or error} in {final.parent}",
            "set XDG_CACHE_HOME to a directory with room that can be written",
        ) from None
    return final


def _fill_whole(final: Path, source: Path, fill: Callable[[Path], None]) -> None:
    partial = final.with_name(f"{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    try:
        fill(partial)
        (partial / SOURCE).write_text(json.dumps({"source": str(source.resolve()), "version": VERSION}))
        partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _alone(lock: Path, say: Say) -> Iterator[None]:
    """Hold the lock file, so that one process converts and the others wait for it."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is converting this checkpoint; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _room(directory: Path, nbytes: int) -> None:
    free = disk_free(directory)
    if nbytes > free:
        raise DoesNotFit(
            f"the converted copy needs {human(nbytes)} ({nbytes:,} bytes), {directory} has {human(free)} free",
            "free some disk, or set XDG_CACHE_HOME to a larger one",
        )


def _drop_older(final: Path, source: Path) -> None:
    """Remove copies of the same source that its change has made useless."""
    for note in final.parent.glob(f"*/{SOURCE}"):
        with contextlib.suppress(OSError, ValueError):  # another process may remove it first
            if note.parent != final and json.loads(note.read_text())["source"] == str(source.resolve()):
                shutil.rmtree(note.parent, ignore_errors=True)
                note.parent.with_name(f".{note.parent.name}.lock").unlink(missing_ok=True)


class _Count:
    """Turns bytes written into calls of a progress callback."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def __call__(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress:
            self.progress(self.done, self.total)


# --- pytorch_model*.bin ------------------------------------------------------------------------------------------


def convert_bin(weights: Weights, say: Say, progress: Progress | None = None) -> Path:
    """Directory with the safetensors copy of `pytorch_model*.bin`, its config and tokenizer files.

    Nothing but tensors is unpickled. Raises HspecError for files that are not such checkpoints.
    """
    source = weights.directory
    raw = read_config_file(source)
    others = [source / name for name in (CONFIG, GENERATION, *TOKENIZER_FILES) if (source / name).exists()]
    final = place(source, [*weights.paths, *others])
    if final.is_dir():
        return final
    for path in weights.paths:
        _check_zip(path)
    names = ModelConfig.from_dict(raw).tensors()
    nbytes = sum(path.stat().st_size for path in weights.paths)

    def fill(directory: Path) -> None:
        count = _Count(nbytes, progress)
        index: dict[str, str] = {}
        for number, path in enumerate(weights.paths, 1):
            shard = f"model-{number:05d}-of-{len(weights.files):05d}.safetensors"
            stored = [_from_torch(name, t) for name, t in _load_bin(path).items() if name in names]
            write_safetensors(directory / shard, stored, count)
            index |= dict.fromkeys((tensor.name for tensor in stored), shard)
        if missing := [name for name in names if name not in index]:
            raise HspecError(f"`{source}` lacks {len(missing)} of {len(names)} tensors: {', '.join(missing[:5])}")
        (directory / INDEX["safetensors"]).write_text(json.dumps({"weight_map": index}))
        for path in others:
            shutil.copyfile(path, directory / path.name)

    return _make(final, source, nbytes, fill, say)


def _check_zip(path: Path) -> None:
    """Raise HspecError when `path` cannot be a whole PyTorch file, from its first and last bytes."""
    import zipfile

    if seen := looks_like(path):
        raise HspecError(f"`{path}` {seen}")
    with path.open("rb") as file:
        magic = file.read(2)
    if magic == b"PK" and not zipfile.is_zipfile(path):
        raise HspecError(
            f"`{path}` is truncated: its {path.stat().st_size:,} bytes end without the directory of a PyTorch file",
            "download or copy it again",
        )


def _load_bin(path: Path) -> dict[str, torch.Tensor]:
    import pickle

    import torch

    with path.open("rb") as file:
        mapped = file.read(2) == b"PK"  # older files are one pickle stream and cannot be mapped
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError:
        raise HspecError(
            f"`{path}` is refused: it holds more than tensors, which would run code, or it is damaged",
            "hspec reads .bin files of tensors only; a safetensors version of the model is safe",
        ) from None
    except (RuntimeError, EOFError, ValueError) as error:
        raise HspecError(f"`{path}` cannot be read as a PyTorch file: {str(error).splitlines()[0]}") from None
    if not isinstance(tensors, dict) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise HspecError(f"`{path}` is not a dictionary of tensors")
    return tensors


def _from_torch(name: str, tensor: torch.Tensor) -> Stored:
    import torch

    kinds = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}
    if tensor.dtype not in kinds:
        raise HspecError(f"tensor `{name}` is {tensor.dtype}, not a floating-point type hspec reads")

    def pieces() -> Iterator[memoryview]:
        flat = tensor.detach().reshape(-1)
        step = PIECE // flat.element_size()
        for start in range(0, flat.numel(), step):
            yield flat[start : start + step].contiguous().view(torch.uint8).numpy().data

    return Stored(name, kinds[tensor.dtype], tuple(tensor.shape), pieces)


# --- GGUF --------------------------------------------------------------------------------------------------------


def convert_gguf(path: Path, say: Say, progress: Progress | None = None) -> Path:
    """Directory with the float32 safetensors copy of a GGUF file, a config.json and tokenizer files.

    Raises HspecError for unsupported, truncated or incomplete files, before anything is written.
    """
    final = place(path, [path])
    if final.is_dir():
        return final
    from hspec_decoding.checkpoints.gguf_tokenizer import tokenizer_files

    file = GGUFFile.read(path)
    raw = file.config()
    names = file.names()
    config = supported(file, raw, names)
    documents = {CONFIG: raw, GENERATION: file.generation(), **tokenizer_files(path, file.metadata, say)}
    _check_data(file)
    stored = [_from_gguf(file, hf, file.tensors[names[hf]], config) for hf in config.tensors()]
    nbytes = sum(tensor.nbytes for tensor in stored)

    def fill(directory: Path) -> None:
        write_safetensors(directory / "model.safetensors", stored, _Count(nbytes, progress))
        for name, document in documents.items():
            (directory / name).write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")

    return _make(final, path, nbytes, fill, say)


def _check_data(file: GGUFFile) -> None:
    """Raise HspecError unless every tensor's type is known and its bytes lie inside the file."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    end = 0
    for name, tensor in file.tensors.items():
        if tensor.kind not in {kind.value for kind in GGML_QUANT_SIZES}:
            raise HspecError(f"`{file.path}` stores `{name}` in ggml type {tensor.kind}, which is not known")
        block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
        end = max(end, tensor.offset + math.prod(tensor.shape) // block * nbytes)
    if end > file.size:
        raise HspecError(
            f"`{file.path}` is truncated: it has {file.size:,} bytes, its header needs {end:,}",
            "download or copy it again",
        )


def _from_gguf(file: GGUFFile, name: str, tensor: GGUFTensor, config: ModelConfig) -> Stored:
    """The tensor as float32, dequantized in groups of rows; Llama's q and k rows go back to the half-split order."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(tensor.kind)
    block, nbytes = GGML_QUANT_SIZES[kind]
    rows = tensor.shape[0] if len(tensor.shape) > 1 or block == 1 else 1
    columns = math.prod(tensor.shape) // rows
    order = _llama_rows(name, config) if config.family == "llama" else None

    def pieces() -> Iterator[memoryview]:
        shape = (rows, columns // block * nbytes)
        data: np.ndarray[Any, np.dtype[np.uint8]] = np.memmap(file.path, np.uint8, "r", tensor.offset, shape)
        step = max(1, PIECE // (4 * columns))
        for start in range(0, rows, step):
            part = data[start : start + step] if order is None else data[order[start : start + step]]
            yield np.ascontiguousarray(dequantize(part, kind), np.float32).data.cast("B")

    return Stored(name, "F32", tensor.shape, pieces)


def _llama_rows(name: str, config: ModelConfig) -> list[int] | None:
    """Row order that undoes the interleaving of rotary pairs in `q_proj` and `k_proj`; None for other tensors."""
    heads = {"q_proj": config.heads, "k_proj": config.kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return None
    size = config.head_dim
    return [h * size + 2 * j + half for h in range(heads) for half in (0, 1) for j in range(size // 2)]
