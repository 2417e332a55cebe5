"""Where a run's records go: stamped at once, then taken to a recording and a screen by a thread of its own."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from hspec_cli.dashboard import stream
from hspec_cli.dashboard.state import State, fold
from hspec_cli.dashboard.stream import Record, Timed
from hspec_decoding.events import InFlight

if TYPE_CHECKING:
    from hspec_cli.dashboard.live import Screen

FRAME = 0.15  # seconds between two frames at least
SHARE = 0.008  # of the time that frames may take


class Feed:
    """Takes records from the run without making it wait."""

    def __init__(self, recording: TextIO | None = None, screen: Screen | None = None) -> None:
        """The recording gets its header now; the screen is opened with the first frame, the thread by `start`."""
        self.failure: Exception | None = None  # what ended the recording or the screen
        self.in_flight: Callable[[], int | None] = _nothing
        self._recording, self._screen = recording, screen
        self._began, self._queue = time.monotonic(), deque[Timed]()
        self._state = State()
        self._lit: int | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dashboard", daemon=True)
        if recording:
            recording.write(stream.header() + "\n")

    def start(self) -> None:
        """Begin to take records away."""
        self._thread.start()

    def put(self, record: Record) -> None:
        """Take a record that comes now."""
        self._queue.append(Timed(time.monotonic() - self._began, record))

    def close(self) -> State:
        """Take the last records away, leave the screen, close the recording; the state in the end."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._leave()
        self._take()
        if self._recording:
            with suppress(OSError):
                self._recording.close()
        return self._state

    def _run(self) -> None:
        pause = FRAME
        while not self._over.wait(pause):
            self._look()
            started = time.thread_time()
            self._take()
            self._draw()
            pause = max(FRAME, (time.thread_time() - started) / SHARE)

    def _look(self) -> None:
        """See which layer is in flight."""
        layer = self.in_flight()
        if layer != self._lit:
            self._lit = layer
            self.put(InFlight(layer))

    def _take(self) -> None:
        taken = [self._queue.popleft() for _ in range(len(self._queue))]
        for timed in taken:
            self._state = fold(self._state, timed.at, timed.record)
        if self._recording and taken:
            try:
                stream.write(self._recording, taken)
            except (OSError, ValueError) as failure:
                self.failure, self._recording = failure, None

    def _draw(self) -> None:
        if self._screen is None:
            return
        try:
            self._screen.draw(self._state, time.monotonic() - self._began)
        except Exception as failure:  # a picture that cannot be drawn is no reason to lose the answer
            self.failure = failure
            self._leave()

    def _leave(self) -> None:
        screen, self._screen = self._screen, None
        if screen is not None:
            with suppress(OSError, ValueError):
                screen.close()


def _nothing() -> int | None:
    """What is in flight where nothing is streamed."""
    return None
