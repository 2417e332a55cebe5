"""What is said on stderr beside the answer: plain lines."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass, field


@dataclass
class Voice:
    """Says lines, all of them unless quiet, and remembers the notes for the JSON document."""

    quiet: bool = False
    verbose: bool = False
    notes: list[str] = field(default_factory=list)
    held: list[str] | None = None  # lines that wait

    def note(self, text: str) -> None:
        """Say, once, what the user should know about the result."""
        if text in self.notes:
            return
        self.notes.append(text)
        if not self.quiet:
            self._write(f"note: {text}")

    def line(self, text: str) -> None:
        """Say something about the run."""
        if not self.quiet:
            self._write(f"hspec: {text}")

    def detail(self, text: str) -> None:
        """Say what only `--verbose` wants."""
        if self.verbose:
            self.line(text)

    def hold(self) -> None:
        """Keep what is said from now on until `release`."""
        self.held = self.held or []

    def release(self) -> None:
        """Say what was held, and hold nothing any more."""
        lines, self.held = self.held or [], None
        for line in lines:
            write(line)

    def _write(self, text: str) -> None:
        if self.held is None:
            write(text)
        else:
            self.held.append(text)


def write(text: str) -> None:
    """Put `text` on stderr, control characters made visible; a stderr that is gone is no reason to fail."""
    safe = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(safe, file=sys.stderr, flush=True)
