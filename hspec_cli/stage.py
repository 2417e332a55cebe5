"""What a run is shown on: progress, then the answer as it comes, and what is said beside it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TextIO

from hspec_cli.output import Output
from hspec_cli.progress import HEARTBEAT, Progress, can_redraw, progress
from hspec_cli.voice import Voice
from hspec_profiles.errors import HspecError

if TYPE_CHECKING:
    from hspec_cli.dashboard.feed import Feed
    from hspec_cli.dashboard.state import State
    from hspec_cli.dashboard.stream import Record
    from hspec_cli.run import Run
    from hspec_cli.status import StatusLine

OFTEN = 0.2  # seconds between two looks of the status line


class Stage(Progress):
    """The answer to stdout as it comes; everything else as subclasses please."""

    def __init__(self, output: Output, shown: Progress, feed: Feed | None, silent: bool) -> None:
        """`silent`: the answer is not to be written, a document will be."""
        self._output, self._shown, self._feed, self.silent = output, shown, feed, silent
        self._written, self._most = 0, 0  # tokens

    def update(self, what: str, done: int, total: int) -> None:
        """What goes on before the engine tells anything."""
        self._shown.update(what, done, total)
        if self._feed:
            from hspec_cli.dashboard.stream import Progressed

            self._feed.put(Progressed(what, done, total))

    def pause(self) -> None:
        """As for any progress."""
        self._shown.pause()

    def tell(self, record: Record) -> None:
        """Take what the engine tells, or the command line."""
        from hspec_cli.dashboard.stream import Began
        from hspec_decoding.events import Emitted, Prefilled

        match record:
            case Began():
                self._most = record.most
            case Prefilled():
                self._shown.update("prompt tokens read", record.done, record.total)
            case Emitted():
                self._written += len(record.tokens)
                if self.silent:
                    self._shown.update("tokens written", self._written, self._most)
        if self._feed:
            self._feed.put(record)

    def watch(self, in_flight: Callable[[], int | None]) -> None:
        """Look now and then which layer is in flight."""
        if self._feed:
            self._feed.in_flight = in_flight

    def say(self, text: str) -> None:
        """Take more of the answer."""
        if self._feed and text:
            from hspec_cli.dashboard.stream import Said

            self._feed.put(Said(text))
        if not self.silent:
            self._shown.pause()
            self._write(tame(text) if self._output.terminal else text)

    def _write(self, text: str) -> None:
        self._output.write(text)

    def end(self) -> None:
        """No more text comes: end its last line."""
        self._output.end_line()

    def epilogue(self) -> None:
        """Say what is left to say when the answer is out."""


class Followed(Stage):
    """With a line of figures: below the text where both are on a terminal, now and then elsewhere."""

    def __init__(self, output: Output, shown: Progress, feed: Feed | None, silent: bool, voice: Voice) -> None:
        from hspec_cli.dashboard.state import State

        super().__init__(output, shown, feed, silent)
        self._state: State = State()
        self._voice = voice
        self._began = self._said = time.monotonic()

    def tell(self, record: Record) -> None:
        from hspec_cli.dashboard.parts import status
        from hspec_cli.dashboard.state import fold

        super().tell(record)
        now = time.monotonic()
        self._state = fold(self._state, now - self._began, record)
        if now - self._said >= self.pace and self._state.rounds:
            self._said = now
            self.show(status(self._state))

    pace = HEARTBEAT

    def show(self, words: str) -> None:
        """Say the line."""
        self._voice.line(words)


class Lined(Followed):
    """With one status line on a terminal."""

    pace = OFTEN

    def __init__(
        self, output: Output, shown: Progress, feed: Feed | None, silent: bool, voice: Voice, line: StatusLine
    ) -> None:
        super().__init__(output, shown, feed, silent, voice)
        self._line, self._words = line, ""

    def show(self, words: str) -> None:
        self._words = words
        self._line.draw(words)

    def _write(self, text: str) -> None:
        if text:
            self._line.erase()
            super()._write(text)
            self._line.passed(text)
            if self._words:
                self._line.draw(self._words)

    def end(self) -> None:
        self._line.erase()
        self._words = ""
        super().end()

    def close(self) -> None:
        self._line.erase()


class Dashboard(Stage):
    """With a live view that has the terminal to itself: text for the same terminal waits until it is gone."""

    def __init__(self, output: Output, feed: Feed, silent: bool, voice: Voice) -> None:
        super().__init__(output, Progress(), feed, silent)
        self._voice, self._text = voice, ""
        self._state: State | None = None
        voice.hold()

    def _write(self, text: str) -> None:
        if self._output.terminal:
            self._text += text
        else:
            super()._write(text)

    def end(self) -> None:
        self.close()
        super()._write(self._text)
        self._text = ""
        super().end()

    def close(self) -> None:
        assert self._feed is not None
        self._state = self._feed.close()
        self._voice.release()

    def epilogue(self) -> None:
        from hspec_cli.dashboard.live import leave_behind

        if self._state is not None and sys.stderr is not None:
            leave_behind(self._state, sys.stderr)


@contextmanager
def staged(run: Run, voice: Voice, output: Output) -> Iterator[Stage]:
    """The stage that suits the run and the terminal, closed at the end of the block."""
    recording = _open(run.record)
    draws = can_redraw()
    if run.dashboard and not draws:
        voice.note("`--dashboard` needs a terminal on stderr: plain lines instead")
    with ExitStack() as closing:
        feed = _feed(recording, run.dashboard and draws, closing, voice)
        stage = closing.enter_context(_stage(run, voice, output, feed, draws))
        yield stage


@contextmanager
def _stage(run: Run, voice: Voice, output: Output, feed: Feed | None, draws: bool) -> Iterator[Stage]:
    if run.dashboard and draws and feed:
        stage: Stage = Dashboard(output, feed, run.json, voice)
        try:
            yield stage
        finally:
            stage.close()
        return
    with progress(voice) as shown:
        if voice.quiet or (run.json and not run.dashboard):
            stage = Stage(output, shown, feed, run.json)
        elif draws:
            from hspec_cli.status import StatusLine

            assert sys.stderr is not None
            line = StatusLine(sys.stderr, below=output.terminal)
            stage = Lined(output, shown, feed, run.json, voice, line)
        elif run.dashboard:
            stage = Followed(output, shown, feed, run.json, voice)
        else:
            stage = Stage(output, shown, feed, run.json)
        try:
            yield stage
        finally:
            stage.close()


def _feed(recording: TextIO | None, live: bool, closing: ExitStack, voice: Voice) -> Feed | None:
    """What takes records away, where anybody wants them."""
    if recording is None and not live:
        return None
    from hspec_cli.dashboard.feed import Feed

    screen = None
    if live:
        from hspec_cli.dashboard.live import Screen

        screen = Screen(sys.stderr)
        closing.enter_context(screen.guarded())
    feed = Feed(recording, screen)

    def closed() -> None:
        feed.close()
        if feed.failure:
            what = "the recording" if isinstance(feed.failure, OSError) else "the dashboard"
            voice.note(f"{what} ended early: {feed.failure}")

    closing.callback(closed)
    feed.start()
    return feed


def _open(path: str | None) -> TextIO | None:
    """A new recording. Raises HspecError where it cannot be."""
    if path is None:
        return None
    try:
        return open(os.path.expanduser(path), "w", encoding="utf-8", errors="replace")
    except OSError as failure:
        raise HspecError(f"cannot write `{path}`: {str(failure.strerror).lower()}") from None


def tame(text: str) -> str:
    """The text with controls spelled out that a terminal would act on; lines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" or ord(c) > 0x9F else _spelled(c) for c in text)


def _spelled(char: str) -> str:
    return "" if char == "\r" else ascii(char)[1:-1]
