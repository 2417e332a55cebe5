"""Hugging Face repositories: what the cache holds, and bringing the files it lacks.

The cache is read without huggingface_hub and without network; a repository that is whole there is never asked for
again. Only a download imports the library, with the endpoint and the cache directory of the environment of that moment.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from hspec_decoding.checkpoints.files import (
    CONFIG,
    GENERATION,
    INDEX,
    SINGLE,
    TOKENIZER_FILES,
    Progress,
    Say,
    disk_free,
    find_weights,
    hub_cache,
    human,
    own_cache,
    read_config_file,
    read_json,
)
from hspec_profiles.errors import DoesNotFit, HspecError

Inspect = Callable[[Mapping[str, Any]], None]


def cached_snapshot(repo: str) -> Path | None:
    """The cached files of a repository's main branch, complete or not; None when its config.json is not there."""
    root = _root(repo)
    try:
        commit = (root / "refs" / "main").read_text().strip()
        found = [root / "snapshots" / commit]
    except OSError:
        found = sorted(root.glob("snapshots/*"), key=lambda path: path.stat().st_mtime, reverse=True)
    return next((path for path in found if (path / CONFIG).exists()), None)


def read_config(repo: str, *, offline: bool, say: Say) -> dict[str, Any]:
    """config.json of a repository that is not cached. Raises HspecError when it cannot be had."""
    if why := _offline(offline):
        _refuse_offline(repo, why, None)
    say(f"reading the configuration of {repo} from {_endpoint()}")
    with _translated(repo):
        return read_json(_download(repo, CONFIG, None))


def bring(
    repo: str,
    *,
    offline: bool,
    inspect: Inspect,
    say: Say,
    progress: Progress | None,
    hint: str | None = None,
) -> Path:
    """A directory with the repository's config, weights (safetensors rather than `.bin`) and tokenizer files.

    `inspect` is given config.json once, before weights are downloaded, and may raise. Raises HspecError when offline
    and not cached whole, or for what the hub answers; DoesNotFit when the disk is too small.
    """
    snapshot = cached_snapshot(repo)
    missing = _missing(snapshot) if snapshot else [CONFIG]
    if snapshot and not missing:
        inspect(read_config_file(snapshot))
        return snapshot
    if why := _offline(offline):
        if not snapshot:
            _refuse_offline(repo, why, hint)
        raise HspecError(
            f"the cached copy of `{repo}` lacks {', '.join(missing)}, and {why} forbids the download"
            f"{_leftovers(repo)}; it lies in {snapshot}",
            _without(why),
        )
    with _translated(repo):
        return _bring(repo, inspect, say, progress)


def _bring(repo: str, inspect: Inspect, say: Say, progress: Progress | None) -> Path:
    sizes = _sizes(repo)
    if CONFIG not in sizes:
        raise HspecError(f"`{repo}` has no config.json at {_endpoint()}", _gguf_hint(repo, sizes))
    config = _download(repo, CONFIG, None)
    snapshot = config.parent
    inspect(read_json(config))
    weights, copied = _choose(repo, sizes, snapshot.name)
    others = [name for name in (GENERATION, *TOKENIZER_FILES) if name in sizes]
    wanted = {name: sizes[name] for name in (*others, *weights) if not (snapshot / name).exists()}
    _check_room(repo, sum(wanted.values()), sum(sizes[name] for name in weights) if copied else 0)
    total = sum(wanted.values())
    if wanted:
        say(
            f"downloading {repo}: {human(total)} in {len(wanted)} files to {hub_cache()}, "
            f"{human(disk_free(hub_cache()))} free{_leftovers(repo)}"
        )
    done = 0
    for name, size in wanted.items():
        _download(repo, name, snapshot.name, _bar(done, size, total, progress))
        done += size
    return snapshot


def _choose(repo: str, sizes: Mapping[str, int], commit: str) -> tuple[list[str], bool]:
    """The weight files to bring, with their index, and whether they must be converted afterwards."""
    for kind in ("safetensors", "bin"):
        if SINGLE[kind] in sizes:
            return [SINGLE[kind]], kind == "bin"
        if INDEX[kind] in sizes:
            _download(repo, INDEX[kind], commit)
            index = read_json(_root(repo) / "snapshots" / commit / INDEX[kind])
            files = sorted(set(index.get("weight_map", {}).values()))
            if absent := [name for name in files if name not in sizes]:
                raise HspecError(f"`{repo}`: {INDEX[kind]} names files that the repository lacks: {', '.join(absent)}")
            return [INDEX[kind], *files], kind == "bin"
    what = "adapters (adapter_config.json), no model" if "adapter_config.json" in sizes else "no weights hspec reads"
    raise HspecError(f"`{repo}` holds {what}", _gguf_hint(repo, sizes))


def _check_room(repo: str, nbytes: int, copy: int) -> None:
    """Raise DoesNotFit unless the disks have room for the download and for the converted copy."""
    for place, need, what in ((hub_cache(), nbytes, "to download"), (own_cache(), copy, "for its safetensors copy")):
        if place == own_cache() and _device(place) == _device(hub_cache()):
            need, what = need + nbytes, "to download and convert"
        free = disk_free(place)
        if need > free:
            raise DoesNotFit(
                f"`{repo}` needs {human(need)} ({need:,} bytes) {what}, {place} has {human(free)} free",
                "free some disk, or set HF_HOME and XDG_CACHE_HOME to a larger one",
            )


def _device(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return path.stat().st_dev


# --- the cache ---------------------------------------------------------------------------------------------------


def _root(repo: str) -> Path:
    return hub_cache() / f"models--{repo.replace('/', '--')}"


def _missing(snapshot: Path) -> list[str]:
    """What a snapshot lacks to be whole."""
    weights = find_weights(snapshot)
    lacks = weights.missing if weights else ["its weights"]
    tokenizer = any((snapshot / name).exists() for name in ("tokenizer.json", "tokenizer.model"))
    return lacks if tokenizer else [*lacks, "its tokenizer"]


def _leftovers(repo: str) -> str:
    sizes = [path.stat().st_size for path in (_root(repo) / "blobs").glob("*.incomplete")]
    if not sizes:
        return ""
    return f"; {human(sum(sizes))} of an interrupted download are left as {_root(repo) / 'blobs'}/*.incomplete"


# --- offline -----------------------------------------------------------------------------------------------------


def _offline(flag: bool) -> str | None:
    """What forbids the network: the flag or a variable of Hugging Face's; None when nothing does."""
    if flag:
        return "--offline"
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return f"{name}={os.environ[name]}"
    return None


def _refuse_offline(repo: str, why: str, hint: str | None) -> NoReturn:
    raise HspecError(
        f"`{repo}` is not in the cache {hub_cache()}, and {why} forbids the download",
        f"{_without(why)}, {hint}" if hint else _without(why),
    )


def _without(why: str) -> str:
    return "run once without --offline" if why == "--offline" else f"unset {why.split('=')[0]} for one run"


# --- the library -------------------------------------------------------------------------------------------------


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def _sizes(repo: str) -> dict[str, int]:
    """Bytes of every file in the root of the repository."""
    from huggingface_hub import HfApi

    info = HfApi(endpoint=_endpoint()).model_info(repo, files_metadata=True)
    return {file.rfilename: file.size or 0 for file in info.siblings or () if "/" not in file.rfilename}


def _download(repo: str, name: str, commit: str | None, bar: Any = None) -> Path:
    from huggingface_hub import hf_hub_download

    bar = bar or _bar(0, 0, 0, None)
    path = hf_hub_download(repo, name, revision=commit, cache_dir=hub_cache(), endpoint=_endpoint(), tqdm_class=bar)
    return Path(path)


def _bar(before: int, size: int, total: int, progress: Progress | None) -> type:
    """A class that the library takes for a progress bar; it draws nothing and tells `progress`."""
    furthest = 0

    class Bar:
        def __init__(self, *_: Any, initial: int = 0, total: int | None = None, **__: Any) -> None:
            self.n, self.total = initial, total

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None: ...

        def update(self, count: int = 1) -> None:
            nonlocal furthest
            self.n += count
            furthest = min(size, max(furthest, self.n))  # one file may have two bars: received and written
            if progress:
                progress(before + furthest, total)

        def set_postfix_str(self, *_: Any, **__: Any) -> None: ...

        def refresh(self, *_: Any, **__: Any) -> None: ...

        def close(self) -> None: ...

    return Bar


@contextlib.contextmanager
def _translated(repo: str) -> Iterator[None]:
    """Turn the library's exceptions into one sentence each."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        yield
    except HspecError:
        raise
    except GatedRepoError:
        raise HspecError(
            f"`{repo}` is gated: accept its terms at {_endpoint()}/{repo} and set HF_TOKEN to a token of that account"
        ) from None
    except RepositoryNotFoundError:
        raise HspecError(
            f"there is no model `{repo}` at {_endpoint()}, or it is private",
            "check the spelling; a private repository needs HF_TOKEN",
        ) from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        hint = "check HF_TOKEN" if status in (401, 403) else "try again later"
        raise HspecError(f"{_endpoint()} answered {status} for `{repo}`", hint) from None
    except OSError as error:
        if isinstance(error, LocalEntryNotFoundError):
            _refuse_unreachable(repo, error.__cause__ or error)
        kind = DoesNotFit if error.errno == errno.ENOSPC else HspecError
        hint = "set HF_HOME to a disk with room that can be written; files that are whole are kept"
        raise kind(f"downloading `{repo}` to {hub_cache()} failed: {_line(error)}", hint) from None
    except Exception as error:  # the HTTP library's own, which differs between versions of huggingface_hub
        _refuse_unreachable(repo, error)


def _refuse_unreachable(repo: str, error: BaseException) -> NoReturn:
    raise HspecError(
        f"cannot reach {_endpoint()} for `{repo}`: {_line(error)}",
        "check the network; a directory, a GGUF file or a cached model needs none",
    ) from None


def _line(error: BaseException) -> str:
    text = (getattr(error, "strerror", None) or str(error)).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


def _gguf_hint(repo: str, sizes: Mapping[str, int]) -> str | None:
    found = sorted(name for name in sizes if name.endswith(".gguf"))
    if found:
        return f"it holds GGUF files: `hf download {repo} {found[0]}` and give the file's path"
    return None
