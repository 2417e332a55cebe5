"""How much RAM this process may really use: the machine's, or less inside a container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hspec_profiles.cgroup import groups, number, table

UNLIMITED = 1 << 60  # bytes; cgroup v1 spells "no limit" as a number just below 2**63


def usable_ram(root: Path = Path("/")) -> int:
    """Bytes that can still be allocated: the least of `MemAvailable` and of the room under every memory cgroup
    from this process's own up to the root. File cache, which the kernel gives back, is not counted as used.

    `root` stands in for `/` in tests. Files that do not exist are skipped.
    """
    return max(0, min([_available(root), *_cgroup_rooms(root)]))


def _available(root: Path) -> int:
    kilobytes = table(root / "proc/meminfo", ":").get("MemAvailable")
    if kilobytes is not None:
        return kilobytes * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """Limit minus what is in use, in bytes, for every cgroup above this process that has a limit."""
    for version, group in groups("memory", root):
        stat = table(group / "memory.stat", " ")
        if version == 2:  # beyond `high` the kernel slows a process down to a crawl
            limits, total = [number(group / "memory.max"), number(group / "memory.high")], ""
            used = number(group / "memory.current")
        else:  # the hierarchy's limit tells of ancestors that a container does not see
            limits, total = [number(group / "memory.limit_in_bytes"), stat.get("hierarchical_memory_limit")], "total_"
            used = number(group / "memory.usage_in_bytes")
        limit = min((limit for limit in limits if limit is not None), default=UNLIMITED)
        if limit < UNLIMITED:
            cache = sum(stat.get(f"{total}{kind}_file", 0) for kind in ("inactive", "active"))
            yield limit - max(0, (used or 0) - cache)
