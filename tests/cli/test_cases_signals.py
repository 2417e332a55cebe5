"""Interrupts and closed pipes: section S of the cases that users of other tools hit."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import case_tools as cases
import psutil
import pytest
import tiny_models
from case_models import speaker
from case_tools import environment, program

ENDLESS = 60_000  # tokens: minutes of output, so that only a signal or a closed pipe ends the run


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers `?` with lines of `abc` for as long as it is let."""
    return speaker(tmp_path_factory.mktemp("endless"), "?", "abc\n", positions=2 * ENDLESS)


def test_S3_closed_pipe(tmp_path: Path, endless: Path) -> None:
    """A reader that leaves after five bytes ends the run quietly and soon, with the code of a broken pipe."""
    argv = program("run", "-m", endless, "--raw", "-n", ENDLESS, "?")
    run = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(tmp_path, PYTHONUNBUFFERED="1"),
    )
    assert run.stdout is not None
    assert run.stderr is not None
    with run:
        assert run.stdout.read(5) == b"abc\n?"
        run.stdout.close()
        code = run.wait(20)
        err = run.stderr.read().decode()
    assert code in (141, -signal.SIGPIPE, 0), err
    assert not [word for word in ("Traceback", "Exception ignored", "Broken pipe", "error:") if word in err], err


@contextlib.contextmanager
def running(tmp_path: Path, *argv: str | Path | float, terminal: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a process group of its own; its stderr is a terminal when asked."""
    master, slave = pty.openpty() if terminal else (None, subprocess.PIPE)
    with subprocess.Popen(
        program(*argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=slave,
        env=environment(tmp_path, TERM="xterm"),
        start_new_session=True,
    ) as run:
        if master is not None:
            os.close(slave)
            run.stderr = os.fdopen(master, "rb", buffering=0)
        try:
            yield run
        finally:
            if run.poll() is None:
                run.kill()


def drained(stream: object) -> bytes:
    """The rest of a stream; a terminal whose other end is closed gives an error for its end."""
    parts = []
    with contextlib.suppress(OSError):
        while part := stream.read(4096):  # type: ignore[attr-defined]
            parts.append(part)
    return b"".join(parts)


def worked(run: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until a run has used this much processor time, of which loading takes some two seconds."""
    process, deadline = psutil.Process(run.pid), time.monotonic() + 60
    while process.cpu_times().user < seconds and time.monotonic() < deadline:
        assert run.poll() is None, "the run ended before its signal"
        time.sleep(0.05)


def test_S9_interrupted_while_loading(tmp_path: Path, endless: Path) -> None:
    """SIGINT while libraries and weights load ends the run within two seconds with 130 and no traceback."""
    with running(tmp_path, "run", "-m", endless, "--raw", "-n", ENDLESS, "?") as run:
        deadline = time.monotonic() + 60
        while "libtorch" not in Path(f"/proc/{run.pid}/maps").read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        sent = time.monotonic()
        run.send_signal(signal.SIGINT)
        assert run.wait(20) == 130
        assert time.monotonic() - sent < 2
        assert run.stdout is not None
        assert drained(run.stdout) == b""
        assert b"Traceback" not in drained(run.stderr)


@pytest.mark.parametrize("terminal", [False, True])
def test_S9_interrupted_while_decoding(tmp_path: Path, endless: Path, terminal: bool) -> None:
    """SIGINT ends decoding within two seconds, keeps the text, leaves no process and no bent terminal."""
    argv = ("run", "-m", endless, "--raw", "-n", ENDLESS, "?")
    with running(tmp_path, *argv, terminal=terminal) as run:
        assert run.stdout is not None
        head = run.stdout.read(8)
        children = psutil.Process(run.pid).children(recursive=True)
        sent = time.monotonic()
        run.send_signal(signal.SIGINT)
        out = head + drained(run.stdout)
        assert run.wait(10) == 130
        assert time.monotonic() - sent < 2
        err = drained(run.stderr).decode()
    text = out.decode().rstrip("\n")
    assert ("abc\n?" * (len(text) // 5 + 1)).startswith(text)
    assert "Traceback" not in err
    assert err.count("\x1b[?25l") == err.count("\x1b[?25h")
    assert not [child for child in children if child.is_running()]


def test_S9_interrupted_while_reading_the_prompt_in(tmp_path: Path) -> None:
    """SIGINT before the first token ends the run within two seconds with 130 and no traceback."""
    model = tiny_models.model(tmp_path / "model", max_position_embeddings=120_000)
    (tmp_path / "long").write_bytes(b"word " * 20_000)
    with running(tmp_path, "run", "-m", model, "--raw", "-v", "-f", tmp_path / "long", "-n", 9) as run:
        worked(run, seconds=5)
        sent = time.monotonic()
        run.send_signal(signal.SIGINT)
        assert run.wait(20) == 130
        assert time.monotonic() - sent < 2
        assert run.stdout is not None
        assert drained(run.stdout) == b""
        assert b"Traceback" not in drained(run.stderr)


def test_S9_interrupted_twice(tmp_path: Path, endless: Path) -> None:
    """A second SIGINT ends the run at once."""
    with running(tmp_path, "run", "-m", endless, "--raw", "-n", ENDLESS, "?") as run:
        assert run.stdout is not None
        run.stdout.read(8)
        run.send_signal(signal.SIGINT)
        time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        sent = time.monotonic()
        assert run.wait(10) in (130, -signal.SIGINT)
        assert time.monotonic() - sent < 1
        assert b"Traceback" not in drained(run.stderr)


def test_S9_interrupted_json(tmp_path: Path, endless: Path) -> None:
    """With `--json` an interrupted run still gives its document, which says so."""
    with running(tmp_path, "run", "-m", endless, "--raw", "--json", "-v", "-n", ENDLESS, "?") as run:
        assert run.stdout is not None
        worked(run, seconds=5)
        run.send_signal(signal.SIGINT)
        out, code = drained(run.stdout), run.wait(10)
        err = drained(run.stderr).decode()
    assert code == 130, err
    document = cases.Result(code, out, err).document
    assert document["finish_reason"] == "interrupted"
    assert document["text"].startswith("abc\n?abc")
