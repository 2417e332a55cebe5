"""How much RAM this process may really use: the machine's, or less inside a container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

UNLIMITED = 1 << 60  # bytes; cgroup v1 spells "no limit" as a number just below 2**63


def usable_ram(root: Path = Path("/")) -> int:
    """Bytes that can still be allocated: the least of `MemAvailable` and of the room under every memory cgroup
    from this process's own up to the root. File cache that the kernel would give back is not counted as used.

    `root` stands in for `/` in tests. Files that do not exist are skipped.
    """
    rooms = [_available(root), *_cgroup_rooms(root)]
    return max(0, min(room for room in rooms if room is not None))


def _available(root: Path) -> int:
    kilobytes = _table(root / "proc/meminfo", ":").get("MemAvailable")
    if kilobytes is not None:
        return kilobytes * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """Limit minus what is in use, in bytes, for every cgroup above this process that has a limit."""
    base = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2, alone or beside version 1
            for mount in (base, base / "unified"):
                yield from _rooms(mount, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _rooms(base / "memory", path, *files)


def _rooms(mount: Path, path: str, limit_file: str, used_file: str, idle_key: str) -> Iterator[int]:
    # A container often sees its own cgroup as the mount's root while `path` is the host's: then only the root exists.
    inside = PurePosixPath(*(part for part in PurePosixPath(path).parts if part not in ("/", "..")))
    for group in (inside, *inside.parents):
        limit = _number(mount / group / limit_file)
        if limit is None or limit >= UNLIMITED:
            continue
        used = _number(mount / group / used_file) or 0
        idle = _table(mount / group / "memory.stat", " ").get(idle_key, 0)
        yield limit - max(0, used - idle)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """The file's number; None when it is absent or says `max`."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _table(path: Path, separator: str) -> dict[str, int]:
    """Lines `key<separator>number ...` as a dict; other lines are skipped."""
    rows = {}
    for line in _text(path).splitlines():
        key, _, rest = line.partition(separator)
        words = rest.split()
        if words and words[0].isdigit():
            rows[key.strip()] = int(words[0])
    return rows
