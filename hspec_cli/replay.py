"""`hspec replay`: the dashboard of a recorded run."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from hspec_cli.words import Command, real

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hspec_cli.dashboard.stream import Timed

FRAME = 0.1  # seconds between two frames
EXAMPLES = """\
Examples:
  hspec run --record run.jsonl "Summarize this" < report.txt
  hspec replay run.jsonl
  hspec replay run.jsonl --speed 10
  hspec replay run.jsonl --plain

A recording holds the events of a run and the text of its answer, not the prompt. Where stdout is no
terminal, plain lines are printed at once."""


@dataclass(frozen=True)
class Replay(Command):
    """Play the dashboard of a recorded run: FILE, as `hspec run --record` wrote it."""

    file: Annotated[str, Argument(metavar="FILE", help="A recording.")]
    speed: Annotated[
        float,
        Option("--speed", parser=real("--speed", 0.01), metavar="X", help="So many times as fast as it was."),
    ] = 1.0
    plain: Annotated[bool, Option("--plain", help="Print plain lines at once.")] = False
    debug: Annotated[bool, Option("--debug", help="Show tracebacks.")] = False

    def execute(self) -> int:
        """Play it; 0, or 130 after Ctrl-C."""
        from hspec_cli.dashboard.stream import read
        from hspec_cli.progress import can_redraw

        timed = read(self.file)
        if self.plain or not can_redraw(sys.stdout):
            for line in _lines(timed):
                print(line, flush=True)
            return 0
        return _play(timed, self.speed)


def _lines(timed: Sequence[Timed]) -> Iterator[str]:
    """A line whenever a phase ends and every HEARTBEAT seconds of decoding, the text, the figures."""
    from hspec_cli.dashboard.live import plain
    from hspec_cli.dashboard.parts import clock, status
    from hspec_cli.dashboard.state import State, fold
    from hspec_cli.progress import HEARTBEAT
    from hspec_cli.stage import tame

    state, text, said = State(), [], 0.0
    for one in timed:
        before, state = state, fold(state, one.at, one.record)
        text.append(getattr(one.record, "text", ""))
        if state.work and state.work.done >= state.work.total and before.work != state.work:
            yield f"{clock(one.at):>9}  {state.work.total:,} {state.work.what}"
        elif state.rounds is not before.rounds and one.at - said >= HEARTBEAT:
            said = one.at
            yield f"{clock(one.at):>9}  {status(state)}"
    yield from ("", tame("".join(text)), "")
    yield from plain(state)


def _play(timed: Sequence[Timed], speed: float) -> int:
    """Draw frame after frame; what it came to stays behind."""
    from hspec_cli.dashboard.live import Screen, leave_behind
    from hspec_cli.dashboard.state import State, folded
    from hspec_cli.failures import INTERRUPTED

    screen, state, done, code = Screen(sys.stdout), State(), 0, 0
    began = time.monotonic()
    try:
        with screen.guarded():
            while done < len(timed):
                now = (time.monotonic() - began) * speed
                due = next((n for n in range(done, len(timed)) if timed[n].at > now), len(timed))
                state, done = folded(timed[done:due], state), due
                screen.draw(state, now)
                time.sleep(FRAME)
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        screen.close()
    leave_behind(state, sys.stdout)
    return code
