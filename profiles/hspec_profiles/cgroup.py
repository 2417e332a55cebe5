"""Control groups: what a container, a job scheduler or the desktop lets this process use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

BASE = "sys/fs/cgroup"


def groups(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Version and directory of every cgroup of `controller`, from this process's own up to the root.

    `root` stands in for `/`. Directories need not exist: a container often sees its own cgroup as the mount's root
    while the path is the host's.
    """
    base = root / BASE
    for line in text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2, alone or beside version 1
            mounts = [(2, base), (2, base / "unified")]
        elif controller in controllers.split(","):
            mounts = [(1, base / controllers), (1, base / controller)]
        else:
            continue
        inside = PurePosixPath(*(part for part in PurePosixPath(path).parts if part not in ("/", "..")))
        yield from ((version, mount / group) for version, mount in mounts for group in (inside, *inside.parents))


def text(path: Path) -> str:
    """The file's text, empty where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def number(path: Path) -> int | None:
    """The file's number; None when it is absent, negative or says `max`."""
    found = text(path).strip()
    return int(found) if found.isdigit() else None


def table(path: Path, separator: str) -> dict[str, int]:
    """Lines `key<separator>number ...` as a dict; other lines are skipped."""
    rows = {}
    for line in text(path).splitlines():
        key, _, rest = line.partition(separator)
        words = rest.split()
        if words and words[0].isdigit():
            rows[key.strip()] = int(words[0])
    return rows
