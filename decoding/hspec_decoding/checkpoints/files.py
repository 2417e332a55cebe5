"""What lies in a model directory: which files hold the weights, and what a file is that does not hold them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hspec_offload.sizes import human as human
from hspec_profiles.errors import HspecError

Say = Callable[[str], None]  # one plain line for the person at the terminal
Progress = Callable[[int, int], None]  # bytes done, bytes in all

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
SINGLE = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}
INDEX = {"safetensors": "model.safetensors.index.json", "bin": "pytorch_model.bin.index.json"}


@dataclass(frozen=True)
class Weights:
    """The weight files of one directory; `kind` is `safetensors` or `bin`."""

    kind: str
    directory: Path
    files: tuple[str, ...]
    index: Mapping[str, str]  # tensor name -> file; empty when there is one file and no index

    @property
    def paths(self) -> list[Path]:
        return [self.directory / name for name in self.files]

    @property
    def missing(self) -> list[str]:
        """Files that the index names and the directory lacks."""
        return [name for name in self.files if not (self.directory / name).exists()]

    def verify(self) -> None:
        """Raise HspecError when files are missing, naming all of them."""
        if self.missing:
            raise HspecError(
                f"`{self.directory}` lacks {len(self.missing)} of the {len(self.files)} weight files that "
                f"{INDEX[self.kind]} names: {', '.join(self.missing)}",
                "an interrupted download or copy leaves this; bring the missing files",
            )


def find_weights(directory: Path) -> Weights | None:
    """The weights of `directory`: safetensors before `.bin`, one file before an index; None when there are none."""
    for kind in ("safetensors", "bin"):
        if (directory / SINGLE[kind]).exists():
            return Weights(kind, directory, (SINGLE[kind],), {})
        if (directory / INDEX[kind]).exists():
            index = read_json(directory / INDEX[kind]).get("weight_map")
            if not isinstance(index, dict) or not index:
                raise HspecError(f"`{directory / INDEX[kind]}` has no `weight_map`")
            _stay_inside(directory / INDEX[kind], index)
            return Weights(kind, directory, tuple(sorted(set(index.values()))), index)
    return None


def require_weights(directory: Path) -> Weights:
    """As `find_weights`, with every file there; raises HspecError for adapters, for none, for missing shards."""
    weights = find_weights(directory)
    if weights is None:
        refuse_adapters(directory)
        raise HspecError(
            f"`{directory}` holds no weights: neither {SINGLE['safetensors']} nor {SINGLE['bin']}, whole or in shards",
            _gguf_hint(directory),
        )
    weights.verify()
    return weights


def read_config_file(directory: Path) -> dict[str, Any]:
    """config.json of a model directory. Raises HspecError when there is none, naming what lies there instead."""
    if not (directory / CONFIG).exists():
        refuse_adapters(directory)
        raise HspecError(f"`{directory}` holds no config.json, so it is no model", _gguf_hint(directory))
    return read_json(directory / CONFIG)


def refuse_adapters(directory: Path) -> None:
    """Raise HspecError when `directory` holds the adapters of another model."""
    if (directory / "adapter_config.json").exists():
        base = read_json(directory / "adapter_config.json").get("base_model_name_or_path", "another model")
        raise HspecError(
            f"`{directory}` holds adapters for `{base}` (adapter_config.json), not a model",
            "merge them into their base model and give the merged directory",
        )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises HspecError with what the file looks like when it is none."""
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        seen = looks_like(path)
        raise HspecError(f"`{path}` {seen}" if seen else f"`{path}` is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise HspecError(f"`{path}` is not a JSON object but a {type(raw).__name__}")
    return raw


def looks_like(path: Path) -> str | None:
    """Why `path` cannot be what its name says, as a verb phrase; None when its first bytes do not tell."""
    try:
        with path.open("rb") as file:
            head = file.read(512).lstrip().lower()
        size = path.stat().st_size
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if head.startswith(b"version https://git-lfs"):
        return f"is a Git LFS pointer of {size:,} bytes, not the file itself; run `git lfs pull`"
    if head.startswith((b"<!doctype html", b"<html")):
        return f"is an HTML page of {size:,} bytes, probably a sign-in or error page saved as the file"
    return "is empty" if size == 0 else None


def hub_cache() -> Path:
    """Where Hugging Face keeps its downloads, by its own variables."""
    env = os.environ
    if given := env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE"):
        return _expanded(given)
    if home := env.get("HF_HOME"):
        return _expanded(home) / "hub"
    return _expanded(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def own_cache() -> Path:
    """`$XDG_CACHE_HOME/hspec`, where converted checkpoints lie."""
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "hspec"


def disk_free(path: Path) -> int:
    """Bytes free where `path` is or would be created."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _expanded(path: str) -> Path:
    return Path(os.path.expandvars(path)).expanduser()


def _stay_inside(index: Path, weight_map: Mapping[str, Any]) -> None:
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise HspecError(f"`{index}` names {file!r}, which is not a file beside it")


def _gguf_hint(directory: Path) -> str:
    found = sorted(directory.glob("*.gguf"))
    if found:
        return f"it holds GGUF files; give one of them, such as `{found[0]}`"
    return "a model directory holds config.json, *.safetensors or pytorch_model*.bin, and tokenizer files"
