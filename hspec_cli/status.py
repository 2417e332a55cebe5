"""One line below the text on a terminal: it goes before more text comes, and comes back after it."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from typing import TextIO

SAVE, RESTORE, UP = "\x1b7", "\x1b8", "\x1b[A"
ROOM_BELOW = "\x1bD" + UP  # scroll if the cursor is on the last line
ERASE_BELOW = "\x1b[J"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class StatusLine:
    """Draws on `stream`, a terminal. `below`: the text is written to the same terminal, else the line stands alone."""

    def __init__(self, stream: TextIO, below: bool) -> None:
        self._stream, self._below = stream, below
        self._drawn = False
        self._cells = 0  # of text since the last line end
        self._dim = ("", "") if os.environ.get("NO_COLOR") else (DIM, PLAIN)

    def draw(self, words: str) -> None:
        """Show `words`, cut to the terminal's width, and leave the cursor where the text ends."""
        width = shutil.get_terminal_size().columns
        words = words[: width - 1]
        dim, plain = self._dim
        if not self._below:
            self._write(f"\r{dim}{words}{plain}\x1b[K")
        elif self._cells and self._cells % width == 0:
            return  # the cursor waits at the right margin, where it could not be put back
        else:
            self._write(f"{ROOM_BELOW}{SAVE}\x1b[B\r{dim}{words}{plain}\x1b[K{RESTORE}")
        self._drawn = True

    def erase(self) -> None:
        """Make room for text."""
        if self._drawn:
            self._write(ERASE_BELOW if self._below else "\r\x1b[K")
            self._drawn = False

    def passed(self, text: str) -> None:
        """Follow the cursor over text that was written."""
        from rich.cells import cell_len

        head, end, tail = text.rpartition("\n")
        self._cells = cell_len(tail) + (0 if end or head else self._cells)

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()
