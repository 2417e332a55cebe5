"""A view on a terminal: the alternate screen, redrawn where it changed, given back as it was."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from hspec_cli.dashboard.glyphs import ASCII, UNICODE, Glyphs
from hspec_cli.dashboard.view import figures, render

if TYPE_CHECKING:
    from types import FrameType

    from rich.console import ConsoleOptions, RenderResult

    from hspec_cli.dashboard.state import State

WHOLE = 40  # frames after which everything is drawn anew, should something else have written to the terminal
WIDEST = 100  # columns of what stays behind


class Screen:
    """The alternate screen of the terminal that `stream` is; entered with the first frame."""

    def __init__(self, stream: TextIO) -> None:
        self._console = console(stream)
        self._glyphs = glyphs(self._console)
        self._shown: list[Text] = []
        self._size, self._frames = (0, 0), 0
        self._open = self._closed = False
        self._lock = threading.RLock()

    def draw(self, state: State, now: float) -> None:
        """Show a state as it is at `now` seconds; nothing once closed."""
        with self._lock:
            if self._closed:
                return
            if not self._open:
                self._enter()
            size = self._console.size
            self._frames += 1
            if size != self._size or self._frames % WHOLE == 0:
                self._shown, self._size = [], size
            lines = render(state, size.width, size.height, now, self._glyphs)
            self._console.print(_Frame(lines, self._shown, size.width), end="", no_wrap=True, crop=False)
            self._shown = lines

    def close(self) -> None:
        """Give the terminal back for good."""
        with self._lock:
            self._closed = True
            self._leave()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """During the block signals that end or stop the process give the terminal back first."""
        kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)}
        ours = [number for number, handler in kept.items() if handler is signal.SIG_DFL]
        for number in ours:
            signal.signal(number, self._signalled)
        try:
            yield
        finally:
            for number in ours:
                signal.signal(number, kept[number])

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        with self._lock:
            self._leave()
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            signal.signal(number, self._signalled)  # it was only stopped, and goes on

    def _enter(self) -> None:
        self._open, self._shown, self._size = True, [], (0, 0)
        self._console.set_alt_screen(True)
        self._console.show_cursor(False)

    def _leave(self) -> None:
        if self._open:
            self._open = False
            self._console.show_cursor(True)
            self._console.set_alt_screen(False)


class _Frame:
    """Lines of a screen that differ from those shown."""

    def __init__(self, lines: list[Text], shown: list[Text], width: int) -> None:
        self.lines, self.shown, self.width = lines, shown, width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.shown:
            yield Control(ControlType.CLEAR)
        for row in range(max(len(self.lines), len(self.shown))):
            line = self.lines[row] if row < len(self.lines) else Text("")
            if row < len(self.shown) and line == self.shown[row]:
                continue
            yield Control((ControlType.CURSOR_MOVE_TO, 0, row))
            yield from line.render(console)
            if line.cell_len < self.width:
                yield Control((ControlType.ERASE_IN_LINE, 0))


def console(stream: TextIO) -> Console:
    """A console that takes text as it is."""
    return Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=False)


def glyphs(console: Console) -> Glyphs:
    """Those that the terminal's encoding has."""
    return UNICODE if console.encoding.startswith("utf") else ASCII


def leave_behind(state: State, stream: TextIO) -> None:
    """Print what a run came to, below its text."""
    made = console(stream)
    for line in figures(state, min(made.width, WIDEST), state.at, glyphs(made)):
        made.print(line, no_wrap=True, crop=False)


def plain(state: State, width: int = 80) -> Iterator[str]:
    """What a run came to as plain lines."""
    for line in figures(state, width, state.at, ASCII):
        yield line.plain.rstrip()
