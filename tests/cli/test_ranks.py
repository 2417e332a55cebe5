"""`hspec run --ranks`: one answer by several processes, which all end when one does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny_models
from case_models import speaker
from case_tools import Hspec, answered, environment, program, refused

from hspec_cli.launch import processes
from hspec_cli.run import Run
from hspec_profiles.profile import load_profile

ENDLESS = 60_000  # tokens
SOON = 8.0  # seconds in which all ranks must be gone


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers `?` with lines of `abc` for as long as it is let."""
    return speaker(tmp_path_factory.mktemp("endless"), "?", "abc\n", positions=2 * ENDLESS)


@contextlib.contextmanager
def running(tmp_path: Path, *argv: str | Path | float) -> Iterator[subprocess.Popen[bytes]]:
    """The command, in a process group of its own; none of its processes is left behind."""
    with subprocess.Popen(
        program("run", "--device", "cpu", "--raw", *argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(tmp_path),
        start_new_session=True,
    ) as run:
        try:
            yield run
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)


def ranks_of(run: subprocess.Popen[bytes], count: int = 2) -> list[psutil.Process]:
    """Its ranks, once all have been started, the first one first."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = psutil.Process(run.pid).children()
        if len(found) == count:
            return sorted(found, key=lambda one: one.pid)
        time.sleep(0.02)
    raise AssertionError("no ranks were started")


def until(what: object, path: Path) -> None:
    """Wait until a recording holds a record of a kind."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and str(what) in path.read_text():
            return
        time.sleep(0.02)
    raise AssertionError(f"no {what} was recorded")


def ended(run: subprocess.Popen[bytes], ranks: list[psutil.Process]) -> tuple[int, str]:
    """The exit code and stderr of a run that must end soon, with all of its ranks."""
    began = time.monotonic()
    code = run.wait(30)
    assert time.monotonic() - began < SOON
    assert not psutil.wait_procs(ranks, 1)[1]
    assert run.stderr is not None
    return code, run.stderr.read().decode()


def test_two_ranks_say_what_one_process_says(hspec: Hspec, tmp_path: Path) -> None:
    """The prompt comes from a pipe, which rank 0 alone reads; the levels change nothing."""
    model = tiny_models.model(tmp_path / "model")
    words = ("run", "-m", model, "--device", "cpu", "--raw", "-n", 24, "--temp", 0.8, "--seed", 3, "--dtype", "float32")
    alone = answered(hspec(*words, stdin=b"the then and the fox"))
    argv = program(*words, "--ranks", 2, "--json", "--levels", "ngram > target(retrieval:64) > target(full)")
    both = subprocess.run(
        argv, input=b"the then and the fox", capture_output=True, env=environment(tmp_path), timeout=60
    )
    assert both.returncode == 0, both.stderr.decode()
    document = json.loads(both.stdout)
    assert document["text"] == alone.text
    assert document["levels"][0]["name"] == "ngram"
    assert document["ranks"] == 2


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_loading(tmp_path: Path, endless: Path, victim: int) -> None:
    with running(tmp_path, "-m", endless, "--ranks", 2, "-n", ENDLESS, "?") as run:
        ranks = ranks_of(run)
        deadline = time.monotonic() + 60
        while "libtorch" not in Path(f"/proc/{ranks[victim].pid}/maps").read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        ranks[victim].kill()
        code, err = ended(run, ranks)
    assert (code, err.count("error:")) == (1, 1), err
    assert f"error: rank {victim} of 2 was ended by SIGKILL" in err


@pytest.mark.parametrize("phase", ["Prefilled", "Emitted"])
def test_a_rank_killed_while_it_works(tmp_path: Path, endless: Path, phase: str) -> None:
    """While the prompt is read, and while the answer is written."""
    (tmp_path / "long.txt").write_text("abc " * 20_000)
    what = ("-f", tmp_path / "long.txt", "?") if phase == "Prefilled" else ("?",)
    record = tmp_path / "record"
    with running(tmp_path, "-m", endless, "--ranks", 2, "-n", 30_000, "--record", record, *what) as run:
        ranks = ranks_of(run)
        until(phase, record)
        ranks[1].kill()
        code, err = ended(run, ranks)
    assert (code, err.count("error:")) == (1, 1), err
    assert "error: rank 1 of 2 was ended by SIGKILL" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("whom", ["the command", "its group, as a terminal does"])
def test_interrupted(tmp_path: Path, endless: Path, whom: str) -> None:
    """What there is of the answer stays, and the exit code is 130."""
    record = tmp_path / "record"
    with running(tmp_path, "-m", endless, "--ranks", 2, "-n", ENDLESS, "--record", record, "?") as run:
        ranks = ranks_of(run)
        until("Emitted", record)
        if whom == "the command":
            run.send_signal(signal.SIGINT)
        else:
            os.killpg(run.pid, signal.SIGINT)
        code, err = ended(run, ranks)
        assert run.stdout is not None
        out = run.stdout.read()
    assert code == 130, err
    assert out.startswith(b"abc\n")
    assert "error:" not in err
    assert "Traceback" not in err


def test_no_rank_outlives_the_command(tmp_path: Path, endless: Path) -> None:
    record = tmp_path / "record"
    with running(tmp_path, "-m", endless, "--ranks", 2, "-n", ENDLESS, "--record", record, "?") as run:
        ranks = ranks_of(run)
        until("Emitted", record)
        run.kill()
        gone, alive = psutil.wait_procs(ranks, SOON)
    assert (len(gone), alive) == (2, [])


def test_ranks_that_torchrun_started(tmp_path: Path) -> None:
    """Told by the environment who they are; only the first one speaks."""
    model = tiny_models.model(tmp_path / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = program("run", "-m", model, "--device", "cpu", "--raw", "-n", 8, "the fox")
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(tmp_path, RANK=str(rank), LOCAL_RANK=str(rank), **place),
        )
        for rank in range(2)
    ]
    (out, err), (silent, no_err) = [run.communicate(timeout=60) for run in started]
    assert [run.returncode for run in started] == [0, 0], err + no_err
    assert b"8 tokens" in err
    assert out
    assert silent == b""
    assert no_err == b""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--gpus", 2, "--device", "cpu"), "`--ranks 2`"),
        (("--gpus", 2, "--ranks", 2), "give one of them"),
        (("--ranks", 2, "--device", "cuda:1"), "names one GPU, `--ranks 2` are more"),
        (("--ranks", 0), "must be from 1 to 64"),
        (("--gpus", "two"), "must be a whole number"),
    ],
)
def test_words_that_cannot_be_meant(hspec: Hspec, words: tuple[object, ...], says: str) -> None:
    refused(hspec("run", *words, "?"), 2, says)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--ranks", 5, "--device", "cpu"), "5 ranks cannot share a model of 4 attention heads"),
        (("--gpus", 2), "asks for 2 GPUs, none can be used"),
    ],
)
def test_what_ranks_find_out_is_said_once(tmp_path: Path, words: tuple[object, ...], says: str) -> None:
    model = tiny_models.model(tmp_path / "model")
    argv = program("run", "-m", model, "--raw", *words, "?")  # type: ignore[arg-type]
    run = subprocess.run(argv, capture_output=True, env=environment(tmp_path), timeout=60, stdin=subprocess.DEVNULL)
    err = run.stderr.decode()
    assert (run.returncode, err.count("error:")) == (2, 1), err
    assert says in err


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ({}, 2),
        ({"gpus": 1}, 1),
        ({"method": "tidal-lossless"}, 1),
        ({"device": "cpu"}, 1),
        ({"model": "smollm2-135m"}, 1),
        ({"model": "unknown-model"}, 1),
    ],
)
def test_as_many_gpus_as_the_profile_says_are_fastest(
    monkeypatch: pytest.MonkeyPatch, words: dict[str, Any], count: int
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("hspec_cli.launch.present", lambda: 2)
    monkeypatch.setattr("hspec_profiles.profile.saved_profile", lambda: load_profile("2x-rtx-4090"))
    assert processes(Run(**{"model": "llama2-7b-128k", "offline": True, **words})) == count
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert processes(Run(**{"model": "llama2-7b-128k", "offline": True, **words})) == 1
