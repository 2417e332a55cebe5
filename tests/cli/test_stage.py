"""`hspec run` and `hspec replay` on a terminal and elsewhere: the status line, `--dashboard`, `--record`."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from case_models import speaker
from case_tools import ESCAPES, Hspec, answered, environment, program, refused
from dashboard_tools import SNAPSHOTS, Terminal, resident
from hypothesis import given, settings
from hypothesis import strategies as st

from hspec_cli.dashboard import stream
from hspec_cli.dashboard.stream import Began, Ended, Said
from hspec_cli.output import Output
from hspec_cli.progress import Progress
from hspec_cli.stage import Lined, tame
from hspec_cli.status import StatusLine
from hspec_cli.voice import Voice
from hspec_decoding.events import Emitted, LevelRound, Placed, Prefilled, Round


@pytest.fixture(scope="module")
def abc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers `?` with markup and an escape code, and ends."""
    return speaker(tmp_path_factory.mktemp("abc"), "?", "[/b]\x1bc", then=1)


# --- elsewhere ---------------------------------------------------------------------------------------------------


def test_redirected(hspec: Hspec, abc: Path, tmp_path: Path) -> None:
    """Without a terminal there are plain lines, the answer is as it is, and the recording is whole."""
    path = tmp_path / "run.jsonl"
    result = answered(hspec("run", "-m", abc, "--raw", "--dashboard", "--record", path, "?"))
    assert result.text == "[/b]\x1bc"
    assert not ESCAPES.search(result.err), result.err
    assert "`--dashboard` needs a terminal on stderr" in result.err
    told = [one.record for one in stream.read(str(path))]
    assert [type(record) for record in told if type(record) in (Began, Placed, Ended)] == [Began, Placed, Placed, Ended]
    assert "".join(record.text for record in told if isinstance(record, Said)) == result.text
    assert told[-1] == Ended("eos")
    replayed = answered(hspec("replay", path))
    assert "[/b]\\x1bc" in replayed.text
    assert not ESCAPES.search(replayed.text + replayed.err)
    assert answered(hspec("replay", path, "--plain", "--speed", 5)).out == replayed.out


def test_record_holds_no_prompt(hspec: Hspec, abc: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    answered(hspec("run", "-m", abc, "--raw", "--json", "--record", path, "my secret?"))
    assert "secret" not in path.read_text()


def test_what_is_refused(hspec: Hspec, tmp_path: Path) -> None:
    refused(hspec("run", "-q", "--dashboard", "?"), 2, "--quiet", "--dashboard")
    refused(hspec("run", "--record", tmp_path, "?"), 1, "cannot write", str(tmp_path))
    refused(hspec("replay", tmp_path / "none"), 2, "cannot read", "no such file")
    refused(hspec("replay", __file__), 1, "no recording", "hspec run --record")
    refused(hspec("replay", "x", "--speed", 0), 2, "--speed")


# --- the status line ---------------------------------------------------------------------------------------------


class Both(io.StringIO):
    """One terminal for stdout and stderr."""

    def isatty(self) -> bool:
        return True

    def bytes(self) -> Any:
        """As stdout has it."""
        outer = self

        class Raw(io.BytesIO):
            def write(self, data: Any) -> int:
                outer.write(bytes(data).decode())
                return len(data)

            def isatty(self) -> bool:
                return True

        return Raw()


def lined(both: Both) -> Lined:
    made = Lined(Output(both.bytes()), Progress(), None, False, Voice(), StatusLine(both, below=True))
    made.pace = 0.0
    return made


ROUND = Round(4, 3, (4,), 0.1, (LevelRound("ngram", 4, 3, 1, 1, 0.0), LevelRound("target(full)", 4, 4, 0, 1, 0.1)))
LINE = "40.0 tokens/s, 4.0 tokens per pass, accepted ngram 75%, "


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("ab \n", max_size=30), max_size=12), st.integers(8, 30), st.integers(2, 7))
def test_status_line_stays_below_the_text(pieces: list[str], width: int, height: int) -> None:
    """Whatever is printed, wrapped or scrolled, the text is whole and the line is the one after it."""
    os.environ["COLUMNS"] = str(width)
    both, terminal, alone, told = Both(), Terminal(width, height), Terminal(width, height), 0
    stage = lined(both)
    stage.tell(Prefilled(1, 1))
    for piece in pieces:
        stage.tell(Emitted((1, 2, 3, 4)))
        stage.say(piece)
        stage.tell(ROUND)
        terminal.feed(both.getvalue()[told:])
        alone.feed(piece)
        told = len(both.getvalue())
        text = "\n".join(alone.lines).rstrip()
        shown = "\n".join(terminal.lines).rstrip()
        if alone.column < width:  # else the line waits until there is more text
            line = terminal.lines[terminal.row + 1]
            assert LINE.startswith(line) or line.startswith(LINE[: width - 1].rstrip())
            shown = "\n".join(terminal.lines[: terminal.row + 1]).rstrip()
        assert text.endswith(shown.lstrip("\n"))
        assert terminal.column == alone.column
    stage.end()
    assert LINE[:7] not in "\n".join(terminal.feed(both.getvalue()[told:]).lines)
    del os.environ["COLUMNS"]


def test_status_line_beside_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    both = Both()
    line = StatusLine(both, below=False)
    line.draw(LINE)
    assert Terminal(40, 3).feed(both.getvalue()).lines == [LINE[:39], "", ""]
    line.erase()
    line.erase()
    assert both.getvalue() == f"\r{LINE[:39]}\x1b[K\r\x1b[K"


def test_controls_do_not_reach_a_terminal() -> None:
    assert tame("é\ta\r\nb\x1b[31m\x9b1m\x07") == "é\ta\nb\\x1b[31m\\x9b1m\\x07"


# --- a real terminal ---------------------------------------------------------------------------------------------


class Pty:
    """A command on a terminal of a given size."""

    def __init__(self, argv: list[str], env: dict[str, str], width: int, height: int) -> None:
        self.ours, theirs = pty.openpty()
        self.size(width, height)
        self.said = ""
        self.command = subprocess.Popen(
            argv, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
        )
        os.close(theirs)

    def size(self, width: int, height: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def until(self, done: Callable[[str], bool], seconds: float = 60) -> str:
        """Read until what was said since the start is so; all of it."""
        deadline = time.monotonic() + seconds
        while not done(self.said):
            assert time.monotonic() < deadline, self.said
            if select.select([self.ours], [], [], 0.1)[0]:
                try:
                    part = os.read(self.ours, 1 << 16)
                except OSError:  # the command is gone
                    break
                self.said += part.decode("utf-8", "replace").replace("\r\n", "\n")
        return self.said


def test_dashboard_on_a_terminal(tmp_path: Path) -> None:
    """It opens, follows the terminal's size, and after Ctrl-C gives screen and cursor back, the text below."""
    model = speaker(tmp_path / "endless", "?", "abd[/]\x1bc\n", positions=120_000)
    argv = program("run", "-m", model, "--raw", "--dashboard", "--record", tmp_path / "run.jsonl", "-n", 60_000, "?")
    env = environment(tmp_path, TERM="xterm-256color")
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        env.pop(name, None)
    terminal = Pty(argv, env, 80, 24)
    try:
        before = len(terminal.until(lambda said: "target(full)" in said and "abd[/]\\x1bc" in said))
        terminal.size(30, 12)
        terminal.until(lambda said: "\x1b[2J" in said[before:] and "ms/token" in said[before:])
        small = Terminal(30, 12).feed(terminal.said[terminal.said.index("\x1b[2J", before) :])
        assert small.lines[0].startswith("decoding")
        terminal.command.send_signal(signal.SIGINT)
        sent = time.monotonic()
        said = terminal.until(lambda said: "hspec: " in said and said.endswith("seed 0\n"))
        assert time.monotonic() - sent < 3
        assert terminal.command.wait(10) == 130
    finally:
        terminal.command.kill()
        terminal.command.wait()
        os.close(terminal.ours)
    left = said[said.index("\x1b[?1049l") :]
    assert said.index("\x1b[?25h") < said.index("\x1b[?1049l")
    assert (said.count("\x1b[?1049h"), said.count("\x1b[?1049l"), said.count("\x1b[?25h")) == (1, 1, 1)
    assert "abd[/]\\x1bc\n?abd[/]" in left
    assert "(interrupted)" in left
    assert "Traceback" not in said
    assert stream.read(str(tmp_path / "run.jsonl"))[-1].record == Ended("interrupted")


def test_replay_on_a_terminal(monkeypatch: pytest.MonkeyPatch, hspec: Hspec) -> None:
    """Frames up to the end, then the figures alone, on the screen as it was before."""
    both = Both()
    for name, value in (("TERM", "xterm"), ("COLUMNS", "80"), ("LINES", "24"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", both)
    assert hspec("replay", SNAPSHOTS / "resident.jsonl", "--speed", 30).code == 0
    terminal = Terminal(80, 24).feed(both.getvalue())
    assert (terminal.cursor, terminal.alternate) == (True, False)
    assert terminal.lines[0].startswith("smollm2-135m, cpu, bfloat16")
    assert [line for line in terminal.lines if line.startswith("target(full) ")]
    speeds = re.findall(r"(\d+) of 90 tokens", both.getvalue())
    assert len(speeds) >= 1
    assert resident()[-1].at > 5
