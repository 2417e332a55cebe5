"""stdout: the answer and nothing else."""

from __future__ import annotations

import fcntl
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import BinaryIO

from hspec_profiles.errors import HspecError


class Output:
    """Writes text to a byte stream as UTF-8, as it is, at once."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._at_line_start = True
        self.terminal = stream.isatty()

    def write(self, text: str) -> None:
        """Write `text` and flush. Raises BrokenPipeError when nobody reads any more."""
        rest = text.encode("utf-8", "replace")
        while rest:
            written = self._stream.write(rest)
            if written is None:  # a pipe that does not block and is full
                select.select([], [self._stream], [])
            rest = rest[written or 0 :]
        self._stream.flush()
        if text:
            self._at_line_start = text.endswith("\n")

    def end_line(self) -> None:
        """End the line that was begun, if one was."""
        if not self._at_line_start:
            self.write("\n")


@contextmanager
def only_the_answer() -> Iterator[Output]:
    """Yield the real stdout; whatever else prints meanwhile, Python or C, finds itself on stderr."""
    stdout = sys.stdout
    if stdout is None or stdout.closed:
        raise HspecError("standard output is closed, the answer has nowhere to go")
    stdout.flush()
    try:
        kept = _copy(stdout.fileno())
    except OSError:  # no file of the system under it
        with redirect_stdout(sys.stderr):
            yield Output(stdout.buffer)
        return
    with open(kept, "wb", buffering=0) as raw, redirect_stdout(sys.stderr), _diverted():
        yield Output(raw)


@contextmanager
def _diverted() -> Iterator[None]:
    """Point file descriptor 1 at stderr, or at nothing where that is closed, during the block."""
    try:
        kept = _copy(1)
    except OSError:  # closed
        yield
        return
    try:
        os.dup2(2, 1)
    except OSError:
        _discard(1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _copy(number: int) -> int:
    """A second descriptor of the same file, none of the three standard ones."""
    return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)


def _discard(number: int) -> None:
    """Let what is written to this descriptor go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def settle() -> None:
    """Flush stdout; what it cannot take goes nowhere, so that the interpreter's last flush stays silent."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        _discard(1)
