"""How fast the disk reads, past the page cache."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hspec_profiles.probes.timing import Effort, Figure, Unknown

BLOCK = 8 << 20  # bytes of one read, enough for a disk to work on several parts of it at once
LARGEST, LEAST = 64, 4  # blocks of the file
SHARE = 10  # part of the free disk that the file may take

Clock = Callable[[], float]


def disk(directory: Path, effort: Effort, clock: Clock = time.perf_counter) -> Figure:
    """Bytes a second read from a file in `directory`, or in its nearest parent that there is.

    The file has no name, so it goes with this process however that ends.
    """
    place = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    blocks = min(LARGEST, shutil.disk_usage(place).free // SHARE // BLOCK)
    if blocks < LEAST:
        raise Unknown("the disk is almost full")
    with tempfile.TemporaryFile(dir=place) as file, mmap.mmap(-1, BLOCK) as buffer:  # mapped: it begins at a page
        written = _write(file.fileno(), buffer, blocks, effort.seconds, clock)
        return _read(file.fileno(), buffer, written, effort.seconds, clock)


def _write(file: int, buffer: mmap.mmap, blocks: int, seconds: float, clock: Clock) -> int:
    """Fill the file, for about `seconds`, with what does not compress; the blocks written."""
    began = clock()
    for block in range(blocks):
        if block >= LEAST and clock() - began > seconds:
            return block
        buffer[:] = os.urandom(BLOCK)
        _whole(os.pwrite(file, buffer, block * BLOCK))
        os.fdatasync(file)
    return blocks


def _read(file: int, buffer: mmap.mmap, blocks: int, seconds: float, clock: Clock) -> Figure:
    """Read the file once, for about `seconds`; the median of its blocks."""
    direct = _past_the_cache(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    samples: list[float] = []
    for block in range(blocks):
        began = clock()
        _whole(os.preadv(file, [buffer], block * BLOCK))
        samples.append(max(clock() - began, 1e-9))
        if sum(samples) > seconds:
            break
    how = "measured" if direct else "measured, perhaps partly from memory: this file system keeps what it wrote"
    return Figure(BLOCK / statistics.median(samples), how)


def _whole(moved: int) -> None:
    if moved != BLOCK:
        raise Unknown(f"the disk moved {moved:,} of {BLOCK:,} bytes")


def _past_the_cache(file: int) -> bool:
    """Ask for reads that bypass the page cache; False where the file system knows none."""
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as failure:
        if failure.errno != errno.EINVAL:
            raise
        return False
    return True
