"""stdout, stderr, signals: who may write what where."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from hspec_cli import output, progress, voice
from hspec_cli.interrupt import check, one_is_enough
from hspec_cli.main import main
from hspec_cli.models import Models
from hspec_cli.output import Output, only_the_answer
from hspec_cli.progress import Bar, Heart
from hspec_cli.voice import Voice
from hspec_profiles.errors import HspecError

# --- stdout ------------------------------------------------------------------------------------------------------


def test_only_the_answer_reaches_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    """Prints of Python and of C libraries land on stderr; afterwards stdout is itself again."""
    with only_the_answer() as out:
        print("a library's bar")
        os.write(2, b"")
        out.write("[/INST] :smile: \x1b é")
    print("after")
    said = capfd.readouterr()
    assert said.out == "[/INST] :smile: \x1b éafter\n"
    assert said.err == "a library's bar\n"


def test_c_prints_reach_stderr(tmp_path: Path) -> None:
    """File descriptor 1 itself is diverted while the answer is written."""
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(tmp_path / "out", os.O_CREAT | os.O_WRONLY), 1)
        os.dup2(os.open(tmp_path / "err", os.O_CREAT | os.O_WRONLY), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        with only_the_answer() as out:
            os.write(1, b"noise")
            out.write("answer")
        os.write(1, b" end")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / "out").read_bytes() == b"answer end"
    assert (tmp_path / "err").read_bytes() == b"noise"


def test_closed_stderr_lets_nothing_into_the_answer(tmp_path: Path) -> None:
    """The copy of stdout does not take the number of a closed stderr, and notes have nowhere else to go."""
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(tmp_path / "out", os.O_CREAT | os.O_WRONLY), 1)
        os.close(2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), None
        with only_the_answer() as out:
            os.write(1, b"noise")
            voice.write("a note")
            print("advice")
            out.write("answer")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / "out").read_bytes() == b"answer"


def test_last_line_ends_once() -> None:
    for text, whole in (("a", "a\n"), ("a\n", "a\n"), ("", "")):
        stream = io.BytesIO()
        out = Output(stream)
        out.write(text)
        out.write("")
        out.end_line()
        assert stream.getvalue().decode() == whole


def test_full_pipe_that_does_not_block() -> None:
    """A stdout shared with a program that made it non-blocking loses nothing."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    text = "x" * 300_000
    pid = os.fork()
    if pid == 0:
        with os.fdopen(writing, "wb", buffering=0) as stream:
            os.close(reading)
            Output(stream).write(text)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        assert stream.read() == text.encode()
    assert os.waitpid(pid, 0)[1] == 0


def test_closed_stdout_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(HspecError, match="closed"), only_the_answer():
        pass


def test_reader_that_went_away(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 141 without a word, and nothing left for the interpreter to complain about."""
    reading, writing = os.pipe()
    os.close(reading)
    kept = os.dup(1)
    with os.fdopen(writing, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert main(["--help"]) == 141
        os.dup2(gone.fileno(), 1)
        output.settle()
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), gone.fileno())
    os.dup2(kept, 1)
    os.close(kept)
    assert capsys.readouterr().err == ""


# --- stderr ------------------------------------------------------------------------------------------------------


def test_quiet_and_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    for quiet, verbose, said in ((False, False, "note: a\nhspec: b\n"), (True, True, "")):
        told = Voice(quiet, verbose)
        told.note("a")
        told.note("a")
        told.line("b")
        told.detail("c")
        assert capsys.readouterr().err == said
        assert told.notes == ["a"]
    Voice(verbose=True).detail("c")
    assert capsys.readouterr().err == "hspec: c\n"


def test_stderr_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", buffering=1) as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        voice.write("to nobody")
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), gone.fileno())
    monkeypatch.setattr(sys, "stderr", None)
    voice.write("to nobody")


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("term", "redraws"), [("xterm", True), ("dumb", False), ("", False), (None, False)])
def test_who_can_redraw(monkeypatch: pytest.MonkeyPatch, term: str | None, redraws: bool) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    if term is None:
        monkeypatch.delenv("TERM", raising=False)
    else:
        monkeypatch.setenv("TERM", term)
    assert progress.can_redraw() is redraws
    with progress.progress(Voice()) as shown:
        assert isinstance(shown, Bar if redraws else Heart)
    with progress.progress(Voice(quiet=True)) as shown:
        assert not isinstance(shown, Bar | Heart)


class Clock:
    """Seconds that pass when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def test_heartbeats_are_plain_and_rare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(monkeypatch)
    heart = Heart(Voice())
    for done in range(0, 101, 4):
        heart.update("prompt tokens read", 10 * done, 1000)
        clock.now += 1
    heart.pause()
    clock.now += 60
    heart.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "hspec: 400 of 1,000 prompt tokens read (40%, 40/s, 15 s left)",
        "hspec: 800 of 1,000 prompt tokens read (80%, 40/s, 5 s left)",
    ]


def test_heart_beats_without_updates(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Also a single step that takes minutes shows that the run is alive."""
    monkeypatch.setattr(progress, "HEARTBEAT", 0.05)
    monkeypatch.setattr(progress, "TICK", 0.01)
    heart = Heart(Voice())
    heart.update("layers loaded", 1, 32)
    time.sleep(0.3)
    heart.close()
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 6
    assert set(lines) == {"hspec: 1 of 32 layers loaded (3%)"}


def test_bar_gives_the_cursor_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, terminal = Clock(monkeypatch), Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    bar = Bar()
    bar.update("[bold]layers[/INST]", 0, 9)
    assert terminal.getvalue() == ""  # nothing for what is over at once
    clock.now = 1
    bar.update("[bold]layers[/INST]", 3, 9)
    bar.update("prompt tokens read", 0, 9)
    bar.close()
    drawn = terminal.getvalue()
    assert "[bold]layers[/INST]" in drawn
    assert drawn.count("\x1b[?25l") == drawn.count("\x1b[?25h") == 1


# --- Ctrl-C ------------------------------------------------------------------------------------------------------


def test_first_interrupt_asks_and_second_ends() -> None:
    before = signal.getsignal(signal.SIGINT)
    with one_is_enough():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before


def test_ignored_interrupts_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with one_is_enough():
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_interrupted_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_self: Models) -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    monkeypatch.setattr(Models, "execute", interrupted)
    assert main(["models"]) == 130
    assert capsys.readouterr() == ("", "hspec: interrupted\n")


def test_swallowed_interrupt_is_remembered() -> None:
    """A library that catches everything delays a request to stop and does not undo it."""
    with one_is_enough():
        check()
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            check()
    check()
