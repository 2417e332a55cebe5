"""What a host can do, as records; as TOML files of the user's, and of machines that many people have.

Sizes are bytes, rates bytes or operations a second. What nobody measured is None, and `sources` says why.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from hspec_profiles.document import Malformed, dumps, loads
from hspec_profiles.errors import HspecError, UsageError

VERSION = 1  # of the file format
HEADER = (
    "# What a host can do, for `hspec plan` and `hspec run --offload`: bytes, and bytes or operations a second.\n\n"
)


@dataclass(frozen=True)
class Gpu:
    """One GPU and its link to the host."""

    name: str
    memory: int  # bytes in all
    free: int  # bytes that a run may use
    copy: float | None = None  # bytes a second of a copy on the device, read and write counted
    matrix: float | None = None  # operations a second of a bfloat16 matrix product
    to_device: float | None = None  # bytes a second from pinned host memory
    to_host: float | None = None  # bytes a second to pinned host memory
    to_device_pageable: float | None = None
    to_host_pageable: float | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None  # lanes
    capability: tuple[int, int] | None = None  # CUDA compute capability
    identity: str = ""  # UUID, driver


@dataclass(frozen=True)
class Host:
    """The CPU, RAM and disk as one process may use them."""

    name: str  # of the processor
    cores: int  # that this process may use
    ram: int  # bytes that this process may use (cgroups), page cache not counted as used
    pinnable: int | None = None  # bytes that can be pinned
    pin: float | None = None  # bytes a second of pinning
    dram: float | None = None  # bytes a second read by all cores
    attention: float | None = None  # bytes of bfloat16 keys and values a second, attended over for one query row
    attention_rows: float | None = None  # the same for 16 rows
    product: float | None = None  # bytes of bfloat16 weights a second that the CPU multiplies with one row
    disk: float | None = None  # bytes a second read


@dataclass(frozen=True)
class HostProfile:
    """One host. `sources` tells of every figure, by its path, how it is known or why it is not."""

    name: str
    host: Host
    gpus: tuple[Gpu, ...] = ()
    peer: float | None = None  # bytes a second between two GPUs
    both_links: float | None = None  # bytes a second when all GPUs are fed from pinned memory at once
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)  # "gpus.0.copy" -> "measured", "data sheet"
    measured_at: str = ""  # ISO 8601, or nothing


def load_profile(name_or_path: str | Path) -> HostProfile:
    """The profile in a file, or one of the user's by its name, or else a shipped one.

    Raises UsageError for a name that nobody gave, HspecError for a file that holds no profile.
    """
    word = str(name_or_path)
    if "/" in word or word.endswith(".toml"):
        return _read(Path(word).expanduser())
    path = _path(word)
    if path.is_file():
        return _read(path)
    if word in shipped_profiles():
        return _parsed(resources.files(__package__).joinpath("shipped", f"{word}.toml").read_bytes(), word)
    names = ", ".join((*saved_names(), *shipped_profiles()))
    raise UsageError(f"no host profile named `{word}`", f"`hspec profile` measures this host; known names: {names}")


def saved_profile() -> HostProfile | None:
    """The profile that was measured on this host, with its GPUs and its driver; None if none was.

    Raises HspecError when the file does not hold one any more.
    """
    path = _path(host_key())
    return _read(path) if path.is_file() else None


def save_profile(profile: HostProfile, name: str) -> Path:
    """Write the user's profile `name`, whole or not at all, and return where it lies. Raises HspecError."""
    path = _path(name)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(HEADER + dumps(profile, VERSION), "utf-8")
        partial.replace(path)
    except OSError as failure:
        with suppress(OSError):
            partial.unlink()
        raise HspecError(
            f"the profile cannot be saved in `{path.parent}`: {failure.strerror}",
            "set XDG_CONFIG_HOME to a directory that can be written",
        ) from failure
    return path


def shipped_profiles() -> tuple[str, ...]:
    """Names of the profiles that come with hspec."""
    files = resources.files(__package__).joinpath("shipped").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


def saved_names() -> tuple[str, ...]:
    """Names of the user's profiles."""
    return tuple(sorted(path.stem for path in _directory().glob("[!.]*.toml")))


def check_name(name: str) -> str:
    """`name`, if a profile can be saved under it. Raises UsageError."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name.endswith(".toml"):
        raise UsageError(f"a profile's name is made of letters, digits, `.`, `_` and `-`, got '{name}'")
    if name in shipped_profiles():
        raise UsageError(
            f"`{name}` is a profile that comes with hspec", f"`hspec profile --show --name {name}` shows it"
        )
    return name


def host_key() -> str:
    """The name under which this host's own profile is saved: it changes with the host, its GPUs and their driver."""
    from hspec_profiles.probes.gpu import identities

    host = platform.node() or "host"
    digest = hashlib.sha256("\n".join((host, *identities())).encode()).hexdigest()
    return f"{re.sub('[^A-Za-z0-9]+', '-', host).strip('-') or 'host'}-{digest[:8]}"


def _directory() -> Path:
    """`$XDG_CONFIG_HOME/hspec/profiles`."""
    base = Path(os.environ.get("XDG_CONFIG_HOME", "")).expanduser()
    return (base if base.is_absolute() else Path("~/.config").expanduser()) / "hspec" / "profiles"


def _path(name: str) -> Path:
    return _directory() / f"{name}.toml"


def _read(path: Path) -> HostProfile:
    try:
        return _parsed(path.read_bytes(), str(path))
    except OSError as failure:
        raise HspecError(f"no host profile can be read at `{path}`: {failure.strerror}") from failure


def _parsed(text: bytes, where: str) -> HostProfile:
    try:
        profile = loads(HostProfile, text.decode("utf-8"), VERSION)
        _check(profile)
    except (Malformed, UnicodeDecodeError) as failure:
        problem = failure if isinstance(failure, Malformed) else "not UTF-8"
        raise HspecError(f"`{where}` is no host profile: {problem}", "`hspec profile` writes it anew") from None
    return profile


def _check(profile: HostProfile) -> None:
    """Raise Malformed for what no host can have."""
    if not profile.name or not profile.host.cores:
        raise Malformed("it needs a `name` and at least one of `host.cores`")
    for index, gpu in enumerate(profile.gpus):
        if gpu.free > gpu.memory:
            raise Malformed(f"`gpus.{index}.free` is more than its `memory`")
    records = {"": profile, "host.": profile.host, **{f"gpus.{i}.": gpu for i, gpu in enumerate(profile.gpus)}}
    for path, record in records.items():
        if still := [f"`{path}{name}`" for name, rate in vars(record).items() if isinstance(rate, float) and not rate]:
            raise Malformed(f"{', '.join(still)} must be above 0")
