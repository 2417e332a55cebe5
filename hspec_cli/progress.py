"""How far the work is, on stderr: a bar on a terminal that can redraw, else a line now and then."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hspec_cli.voice import Voice

HEARTBEAT = 10.0  # seconds between lines of a long silent phase
TICK = 1.0  # seconds between looks at the clock while no update comes
FLASH = 0.5  # seconds that a phase must last before a bar is worth drawing


class Progress:
    """Shows nothing; what a quiet run uses and the others refine."""

    def update(self, what: str, done: int, total: int) -> None:
        """`done` of `total` of `what`, "prompt tokens read" for one."""

    def pause(self) -> None:
        """Show nothing until the next update."""

    def close(self) -> None:
        """Show nothing any more."""


@contextmanager
def progress(voice: Voice) -> Iterator[Progress]:
    """The progress that suits stderr, closed at the end of the block."""
    shown = Progress() if voice.quiet else Bar() if can_redraw() else Heart(voice)
    try:
        yield shown
    finally:
        shown.close()


def can_redraw() -> bool:
    """Whether stderr is a terminal that understands cursor movement."""
    stream = sys.stderr
    smart = os.environ.get("TERM", "dumb") not in ("", "dumb")
    return smart and stream is not None and not stream.closed and stream.isatty()


class Bar(Progress):
    """A transient Rich bar, drawn only for phases that last."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._what = ""
        self._rich: Any = None

    def update(self, what: str, done: int, total: int) -> None:
        """Draw or redraw the bar."""
        if what != self._what:
            self.pause()
            self._what, self._began = what, time.monotonic()
        if self._rich is None:
            if time.monotonic() - self._began < FLASH or done >= total:
                return
            self._rich = _rich_progress()
            self._task = self._rich.add_task(what, total=total)
            self._rich.start()
        self._rich.update(self._task, completed=done, total=total)

    def pause(self) -> None:
        """Erase the bar and show the cursor."""
        if self._rich is not None:
            self._rich.stop()
            self._rich = None

    close = pause


def _rich_progress() -> Any:
    """A bar on stderr that vanishes when it stops; stdout is left alone."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
    )


class Heart(Progress):
    """Says where the work is after every HEARTBEAT seconds of it, also when no update comes."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice
        self._state: tuple[str, int, int] | None = None
        self._said = time.monotonic()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def update(self, what: str, done: int, total: int) -> None:
        """Remember it, and say it when the last line is long ago."""
        self._state = what, done, total
        self._beat()

    def pause(self) -> None:
        """Stay silent until the next update."""
        self._state = None

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(TICK):
            self._beat()

    def _beat(self) -> None:
        with self._lock:
            if self._state is not None and time.monotonic() - self._said >= HEARTBEAT:
                self._said = time.monotonic()
                what, done, total = self._state
                self._voice.line(f"{done:,} of {total:,} {what} ({done / max(total, 1):.0%})")
