"""The prompt: where its parts come from, in which order, and what is done to their bytes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hspec_cli import prompt
from hspec_cli.prompt import decode, read_prompt
from hspec_cli.voice import Voice
from hspec_profiles.errors import UsageError


class Typed(io.TextIOWrapper):
    """Standard input over bytes, a terminal or not."""

    def __init__(self, data: bytes, terminal: bool = False) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def voice() -> Voice:
    return Voice()


def read(
    monkeypatch: pytest.MonkeyPatch, argument: str | None, stdin: bytes, *files: str, terminal: bool = False
) -> str:
    monkeypatch.setattr(sys, "stdin", Typed(stdin, terminal))
    return read_prompt(argument, files, Voice())


def test_parts_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Piped text, files as given, the argument: a blank line between them."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("first\n")
    two.write_text("second\n")
    assert read(monkeypatch, "why?", b"piped\n") == "piped\n\nwhy?"
    assert read(monkeypatch, "why?", b"piped\n", str(two), str(one)) == "piped\n\nsecond\n\nfirst\n\nwhy?"
    assert read(monkeypatch, None, b"", str(one)) == "first"
    assert read(monkeypatch, "-", b"piped", str(one)) == "piped\n\nfirst"
    assert read(monkeypatch, "why?", b"piped", "-") == "piped\n\nwhy?"


@pytest.mark.parametrize("stdin", [b"", b" \n\t\n", b"\xef\xbb\xbf"])
def test_blank_pipe_leaves_the_argument_alone(monkeypatch: pytest.MonkeyPatch, stdin: bytes) -> None:
    assert read(monkeypatch, "why?", stdin) == "why?"


@pytest.mark.parametrize("argument", [None, "", "  ", "-"])
def test_nothing_to_answer(monkeypatch: pytest.MonkeyPatch, argument: str | None) -> None:
    """No text at all, from a pipe or a terminal, is a usage error with an example."""
    for terminal in (False, True):
        with pytest.raises(UsageError) as failure:
            read(monkeypatch, argument, b"", terminal=terminal)
        assert "hspec run" in (failure.value.hint or "")


@pytest.mark.parametrize("stream", [None, "closed"])
def test_no_standard_input(monkeypatch: pytest.MonkeyPatch, stream: str | None) -> None:
    closed = Typed(b"")
    closed.close()
    monkeypatch.setattr(sys, "stdin", closed if stream else None)
    assert read_prompt("why?", (), Voice()) == "why?"
    with pytest.raises(UsageError, match="empty"):
        read_prompt(None, (), Voice())


def test_terminal_is_read_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, "why?", b"not this", terminal=True) == "why?"
    assert read(monkeypatch, "-", b"but this\n", terminal=True) == "but this"


def test_missing_file_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nofile\[bold\]`: no such file"):
        read(monkeypatch, "why?", b"", str(tmp_path / "nofile[bold]"))
    with pytest.raises(UsageError, match="is a directory"):
        read(monkeypatch, "why?", b"", str(tmp_path))


def test_argument_that_is_not_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that the shell passes through become U+FFFD, as they do in piped text."""
    assert read(monkeypatch, os.fsdecode(b"caf\xe9"), b"") == "caf\ufffd"


# --- bytes -------------------------------------------------------------------------------------------------------


def test_bad_bytes_are_noted_once_with_the_first_offset(voice: Voice) -> None:
    assert decode(b"caf\xe9 \xff\xfe ok", "standard input", voice) == "caf\ufffd \ufffd\ufffd ok"
    assert len(voice.notes) == 1
    assert "at byte 3" in voice.notes[0]


def test_offset_counts_the_byte_order_mark(voice: Voice) -> None:
    assert decode(b"\xef\xbb\xbfab\xff", "it", voice) == "ab\ufffd"
    assert "at byte 5" in voice.notes[0]


def test_byte_order_mark_and_nul(voice: Voice) -> None:
    assert decode("\ufeffa\0b\0c".encode(), "it", voice) == "abc"
    assert "2 NUL bytes" in voice.notes[0]


def test_line_ends_inside_stay(voice: Voice) -> None:
    assert decode(b"a\r\nb\rc\n\n", "it", voice) == "a\r\nb\rc\n"
    assert decode(b"a\r\n", "it", voice) == "a"
    assert not voice.notes


# --- pipes that say nothing --------------------------------------------------------------------------------------


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The writing end of a pipe that is standard input."""
    reading, writing = os.pipe()
    monkeypatch.setattr(prompt, "NOTICE", 0.01)
    monkeypatch.setattr(prompt, "PATIENCE", 0.05)
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield writing
    os.close(writing)


@pytest.mark.usefixtures("pipe")
def test_silent_pipe_beside_an_argument_ends(capsys: pytest.CaptureFixture[str], voice: Voice) -> None:
    """An open pipe that never speaks cannot hold a run for ever that has another prompt, nor is it ignored."""
    with pytest.raises(UsageError, match="no text came") as failure:
        read_prompt("why?", (), voice)
    assert "< /dev/null" in (failure.value.hint or "")
    assert "waiting for text" in capsys.readouterr().err


def test_slow_pipe_is_waited_for(monkeypatch: pytest.MonkeyPatch, pipe: int, voice: Voice) -> None:
    """Text that comes late is not lost, and the end of a pipe is seen."""
    asked: list[float | None] = []

    def ready(_stream: object, seconds: float | None) -> bool:
        asked.append(seconds)
        if len(asked) == 2:
            os.write(pipe, b"late")
            os.dup2(os.open(os.devnull, os.O_WRONLY), pipe)
        return len(asked) == 2

    monkeypatch.setattr(prompt, "_ready", ready)
    assert read_prompt(None, (), voice) == "late"
    assert asked == [0.01, None]
