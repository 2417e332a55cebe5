"""How far the work is, on stderr: a bar on a terminal that can redraw, else a line now and then."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

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


def can_redraw(stream: TextIO | None = None) -> bool:
    """Whether `stream`, or else stderr, is a terminal that understands cursor movement."""
    stream = stream or sys.stderr
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
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        Task,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        """How fast it goes."""

        def render(self, task: Task) -> Text:
            return Text(f"{each_second(task.description, task.speed)}" if task.speed else "")

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        TaskProgressColumn(),
        Rate(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
    )


def each_second(what: str, rate: float) -> str:
    """A rate of `what`: 470/s, 3.1/s, 12.3 MB/s."""
    from hspec_offload.sizes import human

    if "bytes" in what:
        return f"{human(rate)}/s"
    return f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.1f}/s"


class Heart(Progress):
    """Says where the work is after every HEARTBEAT seconds of it, also when no update comes."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice
        self._state: tuple[str, int, int] | None = None
        self._first = "", 0, 0.0  # what, how far it was when it began, and when
        self._said = time.monotonic()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def update(self, what: str, done: int, total: int) -> None:
        """Remember it, and say it when the last line is long ago."""
        if what != self._first[0] or done < self._first[1]:
            self._first = what, done, time.monotonic()
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
                self._voice.line(f"{done:,} of {total:,} {what} ({done / max(total, 1):.0%}{self._pace(done, total)})")

    def _pace(self, done: int, total: int) -> str:
        """How fast, and how long still, as far as that is known."""
        what, first, began = self._first
        spent = time.monotonic() - began
        if done <= first or not spent:
            return ""
        rate = (done - first) / spent
        return f", {each_second(what, rate)}, {(total - done) / rate:,.0f} s left"
