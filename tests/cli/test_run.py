"""`hspec run` from words to answer, over tiny models and over an engine that follows a script."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import tiny_models
from case_tools import Hspec, Result, environment, program

from hspec_decoding.checkpoints import hub
from hspec_decoding.events import Emitted, Finished, LevelReport, Prefilled, Report
from hspec_profiles.errors import HspecError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.model(tmp_path_factory.mktemp("models") / "target")


# --- a real engine -----------------------------------------------------------------------------------------------


def test_stream_and_document_are_one_answer(hspec: Hspec, model: Path) -> None:
    """The stream is the document's text and a line end; stderr has one summary, none under `-q`."""
    run = ("run", "-m", model, "-n", 12, "--temp", 0.8, "--seed", 5)
    streamed = hspec(*run, "hello")
    assert streamed.code == 0, streamed.err
    written = hspec(*run, "--json", stdin=b"hello\n")
    document = written.document
    assert streamed.out.decode() in (document["text"] + "\n", document["text"])
    assert (document["finish_reason"], len(document["tokens"]), document["seed"]) == ("length", 12, 5)
    assert document["sampling"]["temperature"] == 0.8
    assert document["levels"][-1]["name"] == "target(full)"
    assert document["context"] == document["prompt_tokens"] + 12
    assert len(streamed.err.splitlines()) == len(written.err.splitlines()) == 1
    assert streamed.err.startswith("hspec: 12 tokens (cut at -n) in ")
    assert streamed.err.rstrip().endswith("temperature 0.8, seed 5")
    assert hspec(*run, "-q", "hello") == Result(0, streamed.out, "")


def test_stats_follow_the_summary(hspec: Hspec, model: Path) -> None:
    err = hspec("run", "-m", model, "-n", 8, "--stats", "-v", "hello").err.splitlines()
    assert any(line.startswith("level ") and "acceptance" in line for line in err)
    assert err[-1].startswith("target(full)")
    assert any("context" in line for line in err)


def test_greedy_unless_the_model_samples(hspec: Hspec, tmp_path: Path) -> None:
    model = tiny_models.model(tmp_path / "model")
    made = model / "generation_config.json"
    made.write_text('{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "top_k": null}')
    sampling = hspec("run", "-m", model, "-n", 2, "--json", "hello").document["sampling"]
    assert sampling == {"temperature": 0.6, "top_p": 0.9, "top_k": 0, "min_p": 0.0}
    made.write_text('{"do_sample": false, "temperature": 0.6, "top_p": 0.9}')
    sampling = hspec("run", "-m", model, "-n", 2, "--json", "hello").document["sampling"]
    assert sampling == {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def test_terminal(tmp_path: Path, model: Path) -> None:
    """On a terminal the answer and the summary are plain text, and the cursor is there at the end."""
    master, slave = pty.openpty()
    argv = program("run", "-m", model, "-n", 5, "hello")
    env = environment(tmp_path, TERM="xterm-256color")
    with subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave, env=env) as run:
        os.close(slave)
        said = b""
        try:
            while part := os.read(master, 4096):
                said += part
        except OSError:  # the other end is closed
            pass
    os.close(master)
    assert run.returncode == 0, said
    assert b"hspec: 5 tokens" in said
    assert said.count(b"\x1b[?25l") == said.count(b"\x1b[?25h")
    assert said.endswith(b"\r\n")


# --- an engine that follows a script -----------------------------------------------------------------------------


class Scripted:
    """Stands for the engine: `script` yields the events."""

    stack, device, dtype, plan = "target(full)", "cpu", "float32", None
    script: Callable[[Any], Iterator[Any]]
    note: str | None = None
    plan: object = None
    stacks: tuple[Any, ...] = ()
    ranks: object = None

    def __init__(self) -> None:
        self.notes = ["a note of the engine"]
        self.closed = False

    def generate(self, request: Any) -> Iterator[Any]:
        try:
            yield Prefilled(1, len(request.prompt))
            yield from type(self).script(request)
        finally:
            self.closed = True

    def report(self) -> Report:
        assert self.closed
        return Report(9, 3, 0.5, 1.0, (LevelReport("target(full)", 3, 3, 3, 1.0),), self.stack, 0, self.note)


Script = Callable[[Callable[[Any], Iterator[Any]]], type[Scripted]]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Script:
    """`scripted(events)`: the command's engine yields `events(request)`."""

    def put(script: Callable[[Any], Iterator[Any]]) -> type[Scripted]:
        class Engine(Scripted):
            pass

        Engine.script = staticmethod(script)
        monkeypatch.setattr("hspec_decoding.engine.Engine", SimpleNamespace(load=lambda *_, **__: Engine()))
        return Engine

    return put


def ids(model: Path, text: str) -> tuple[int, ...]:
    from hspec_decoding.text.tokens import Tokenizer

    return tuple(i for i in Tokenizer.load(model).encode(text) if i != 0)


def test_stop_string_cuts_text_and_ids(hspec: Hspec, model: Path, scripted: Script) -> None:
    made: list[type[Scripted]] = []

    def events(_request: Any) -> Iterator[Any]:
        yield Emitted(ids(model, "ab"))
        yield Emitted(ids(model, "cd STOP more"))
        raise AssertionError("asked for more after the stop")

    made.append(scripted(events))
    document = hspec("run", "-m", model, "-n", 99, "--json", "--stop", "STOP", "hello").document
    assert (document["text"], document["finish_reason"]) == ("abcd ", "stop")
    assert tuple(document["tokens"]) == ids(model, "abcd ")
    assert document["notes"] == ["a note of the engine"]
    assert hspec("run", "-m", model, "-n", 99, "--stop", "STOP", "hello").out == b"abcd \n"


def test_interrupt_keeps_what_there_is(hspec: Hspec, model: Path, scripted: Script) -> None:
    """Ctrl-C while decoding: the text so far, a summary or a document that says so, exit 130."""

    def events(_request: Any) -> Iterator[Any]:
        yield Emitted(ids(model, "partial"))
        signal.raise_signal(signal.SIGINT)
        yield Emitted(ids(model, "never"))

    scripted(events)
    streamed = hspec("run", "-m", model, "-n", 99, "hello")
    assert (streamed.code, streamed.out) == (130, b"partial\n")
    assert "(interrupted)" in streamed.err
    written = hspec("run", "-m", model, "-n", 99, "--json", "hello")
    assert written.code == 130
    assert (written.document["text"], written.document["finish_reason"]) == ("partial", "interrupted")


def test_interrupt_while_loading(hspec: Hspec, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("hspec_decoding.engine.Engine", SimpleNamespace(load=load))
    assert hspec("run", "-m", model, "-n", 99, "--json", "hello") == Result(130, b"", "hspec: interrupted\n")


def test_failure_inside_an_answer(hspec: Hspec, model: Path, scripted: Script) -> None:
    """What was said ends its line before the error is told; a document is not written at all."""

    def events(_request: Any) -> Iterator[Any]:
        yield Emitted(ids(model, "so far"))
        raise HspecError("non-finite logits after 9 tokens")

    scripted(events)
    streamed = hspec("run", "-m", model, "-n", 99, "hello")
    assert (streamed.code, streamed.out) == (1, b"so far\n")
    assert streamed.err == "error: non-finite logits after 9 tokens\n"
    assert hspec("run", "-m", model, "-n", 99, "--json", "hello").out == b""


def test_noise_of_libraries_stays_off_stdout(hspec: Hspec, model: Path, scripted: Script) -> None:
    def events(_request: Any) -> Iterator[Any]:
        print("a library's advice")
        yield Emitted(ids(model, "x"))
        yield Finished("eos")

    scripted(events)
    result = hspec("run", "-m", model, "-n", 99, "hello")
    assert result.out == b"x\n"
    assert "a library's advice" in result.err


def test_answer_cut_by_the_context(hspec: Hspec, model: Path, scripted: Script) -> None:
    """The engine's `length` is the context's end where the context left less than was asked for."""
    asked: list[Any] = []

    def events(request: Any) -> Iterator[Any]:
        asked.append(request)
        yield Emitted(ids(model, "x"))
        yield Finished("length")

    scripted(events)
    result = hspec("run", "-m", model, "--raw", "-c", 40, "-n", 100, "--json", "hello")
    document = result.document
    assert (document["finish_reason"], document["context"]) == ("context", 40)
    assert asked[0].max_tokens == 40 - len(asked[0].prompt)
    assert f"at most {asked[0].max_tokens} tokens instead of 100" in result.err
    assert document["notes"][0] in result.err


def test_full_disk(model: Path, scripted: Script, monkeypatch: pytest.MonkeyPatch, hspec: Hspec) -> None:
    def events(_request: Any) -> Iterator[Any]:
        yield Emitted(ids(model, "x"))
        yield Finished("eos")

    scripted(events)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        result = hspec("run", "-m", model, "-n", 99, "hello")
    assert result.code == 1
    assert result.err.splitlines()[0] == "error: no space left on device"


# --- before anything is loaded -----------------------------------------------------------------------------------


def test_order_of_refusals(hspec: Hspec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Usage, then the prompt, then the config; nothing is fetched for what is refused."""

    def fetch(*_: object, **__: object) -> Path:
        raise AssertionError("fetched")

    monkeypatch.setattr(hub, "fetch", fetch)
    nowhere = ("run", "-m", tmp_path / "nowhere")
    assert "--temp" in hspec(*nowhere, "--temp", -1, stdin=b"").err
    assert hspec(*nowhere, stdin=b"").err.startswith("error: the prompt is empty")
    assert "nowhere" in hspec(*nowhere, "hello").err
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "oddity"}')
    refused = hspec("run", "-m", tmp_path / "odd", "hello")
    assert (refused.code, refused.out) == (1, b"")
    assert "oddity" in refused.err
    assert "no-draft" in hspec("run", "-m", "llama2-7b-128k", "-md", "./no-draft", "hello").err


# --- drafts ------------------------------------------------------------------------------------------------------


@pytest.fixture
def alias(monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path) -> Path:
    """Where the draft of the model is said to be; nothing is there."""
    draft = tmp_path / "draft"
    monkeypatch.setattr(hub, "alias", lambda name: SimpleNamespace(draft=str(draft)) if name == str(model) else None)
    return draft


def test_draft_of_an_alias_is_done_without(hspec: Hspec, model: Path, alias: Path) -> None:
    """Missing or of another vocabulary: one note, an answer all the same. One that was asked for is an error."""
    result = hspec("run", "-m", model, "-n", 4, "--json", "hello")
    assert result.code == 0, result.err
    assert result.document["draft_model"] is None
    assert [note for note in result.document["notes"] if note.startswith("no draft model") and str(alias) in note]
    assert hspec("run", "-m", model, "-n", 4, "--draft-model", alias, "hello").code == 1
    tiny_models.model(alias, tokenizer=False)
    tiny.tokenizer(alias, permute=3)
    result = hspec("run", "-m", model, "-n", 4, "hello")
    assert result.code == 0
    assert "another vocabulary" in result.err
    refused = hspec("run", "-m", model, "-n", 4, "-md", alias, "hello")
    assert (refused.code, refused.out) == (1, b"")
    assert "--draft-model none" in refused.err


def test_draft_of_an_alias_is_used(hspec: Hspec, model: Path, alias: Path) -> None:
    """Unless plain decoding or no draft is asked for."""
    tiny_models.model(alias)
    run = ("run", "-m", model, "-n", 4, "--json")
    assert hspec(*run, "hello").document["draft_model"] == str(alias)
    assert hspec(*run, "--draft-model", "none", "hello").document["draft_model"] is None
    for plain in (("--method", "autoregressive"), ("--levels", "ngram > target(full)")):
        assert hspec(*run, *plain, "hello").document["draft_model"] is None
        noted = hspec(*run, *plain, "-md", alias, "hello").document
        assert (noted["draft_model"], len(noted["notes"])) == (None, 1)
