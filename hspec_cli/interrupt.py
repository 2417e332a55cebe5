"""Ctrl-C: once is a request to stop, twice is the end.

Libraries can swallow the KeyboardInterrupt that a request becomes, some while they are imported; so it is also
remembered, and `check` raises it again.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def one_is_enough() -> Iterator[None]:
    """During the block the first Ctrl-C raises KeyboardInterrupt and the second ends the process at once.

    Where Ctrl-C is ignored, as in a shell's background jobs, or handled by somebody else, nothing changes.
    """
    before = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or before is not signal.default_int_handler:
        yield
        return
    _asked.clear()
    signal.signal(signal.SIGINT, _first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _asked.clear()


def check() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was pressed."""
    if _asked.is_set():
        raise KeyboardInterrupt


_asked = threading.Event()


def _first(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _asked.set()
    raise KeyboardInterrupt
