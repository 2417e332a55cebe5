"""`hspec run --jsonl`: one answer a line, each the one that its prompt has alone; bad lines fail by themselves."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_models
from case_models import speaker
from case_tools import Hspec, Result, environment, program, refused

CONTEXT, ENDLESS = 300, 60_000
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "the fox"},
    {"role": "user", "content": "and then?"},
]
LINES: list[dict[str, Any]] = [
    {"prompt": "the fox and the hen " * 9, "max_tokens": 30},
    {"id": "b", "prompt": "then an ant", "temperature": 1.0, "top_k": 30, "max_tokens": 14},
    {"id": 77, "messages": TALK, "temperature": 0.9, "seed": 5},
    {"id": "b2", "prompt": "then an ant", "temperature": 1.0, "top_k": 30, "max_tokens": 14, "seed": None},
    {"id": "é", "prompt": "a tea tent " * 20, "temperature": 1.3, "top_p": 0.8, "min_p": 0.01, "max_tokens": 25},
    {"id": "stop", "prompt": "the sea", "temperature": 1.0, "seed": 3, "max_tokens": 60, "stop": ["e", "a"]},
    {"prompt": "full " * 58, "max_tokens": 50},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.model(tmp_path_factory.mktemp("models") / "target", max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaker(tmp_path_factory.mktemp("endless"), "?", "abc\n", positions=2 * ENDLESS)


def lines(*made: object) -> bytes:
    return b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in made)


def answers(result: Result) -> list[dict[str, Any]]:
    assert "Traceback" not in result.err, result.err
    return [json.loads(line) for line in result.out.splitlines()]


def alone(hspec: Hspec, model: Path, line: dict[str, Any], number: int, *argv: str) -> dict[str, Any]:
    """The document of `hspec run` for one line, as its flags say it."""
    flags = {"temperature": "--temp", "max_tokens": "-n", "seed": "--seed"}
    words: list[Any] = ["--id", line.get("id", number)]
    for name in ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"):
        if line.get(name) is not None:
            words += [flags.get(name, "--" + name.replace("_", "-")), line[name]]
    for stop in line.get("stop", ()):
        words += ["--stop", stop]
    return hspec("run", "-m", model, "--json", "-n", 20, *argv, *words, line["prompt"]).document


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("--method", "autoregressive", "--batch", "2"),
        ("--levels", "ngram > target(streaming:64) > target(full)", "--batch", "3"),
        ("--method", "triforce", "--draft-model", "{model}", "--batch", "1"),
    ],
    ids=["auto", "plain", "levels", "draft"],
)
def test_each_line_is_answered_as_alone(hspec: Hspec, model: Path, argv: tuple[str, ...]) -> None:
    argv = tuple(word.format(model=model) for word in argv)
    result = hspec("run", "-m", model, "--jsonl", "-n", 20, *argv, stdin=lines(*LINES))
    found = answers(result)
    assert result.code == 0, result.err
    assert [(one["line"], one["id"]) for one in found] == [(n, line.get("id", n)) for n, line in enumerate(LINES, 1)]
    for number, (line, one) in enumerate(zip(LINES, found, strict=True), 1):
        if "prompt" in line:
            document = alone(hspec, model, line, number)
            for field in ("text", "tokens", "finish_reason", "prompt_tokens"):
                assert one[field] == document[field], (number, field)
        assert one["generated_tokens"] == len(one["tokens"])
    reasons = [one["finish_reason"] for one in found]
    assert {"length", "stop", "context"} <= set(reasons)
    assert found[1]["text"] != found[3]["text"], "noise is that of the id"


def test_what_was_said_so_far_is_the_prompt(hspec: Hspec, model: Path) -> None:
    from hspec_decoding.text.tokens import Tokenizer

    ids = Tokenizer.load(model).converse(TALK)
    asked = [{"messages": TALK}, {"messages": TALK[1:]}, {"messages": TALK[1:2]}, {"prompt": "hi"}]
    whole, without, one, same = answers(hspec("run", "-m", model, "--jsonl", "-n", 3, stdin=lines(*asked)))
    assert whole["prompt_tokens"] == len(ids) > without["prompt_tokens"] > one["prompt_tokens"]
    assert one["tokens"] == same["tokens"]
    led = answers(hspec("run", "-m", model, "--jsonl", "-n", 3, "-s", "be brief", stdin=lines(*asked)))
    assert [a["prompt_tokens"] for a in led[:2]] == [len(ids)] * 2


BAD: list[tuple[object, str]] = [
    (b"{", "not JSON: Expecting property name"),
    (b"[" * 100_000, "not JSON: "),
    (b'{"prompt": "\xff"}', "not valid UTF-8 at byte 12"),
    ([1], "not a JSON object: [1]"),
    ({"id": "mine"}, "needs `prompt` or `messages`"),
    ({"prompt": "a", "messages": TALK}, "`prompt` or `messages`, not both"),
    ({"prompt": 5}, "`prompt` must be text, got 5"),
    ({"prompt": " \n"}, "the prompt is empty"),
    ({"prompt": "a", "temprature": 1}, "unknown field `temprature`"),
    ({"prompt": "a", "temperature": "hot"}, '`temperature` must be a number, got "hot"'),
    ({"prompt": "a", "temperature": True}, "`temperature` must be a number, got true"),
    (b'{"prompt": "a", "temperature": NaN}', "`temperature` must be 0 or more, got NaN"),
    ({"prompt": "a", "temperature": -1}, "`temperature` must be 0 or more"),
    ({"prompt": "a", "top_p": 1.5}, "`top_p` must be from 0 to 1"),
    ({"prompt": "a", "top_k": 1.5}, "`top_k` must be a whole number"),
    ({"prompt": "a", "seed": 2**63}, "`seed` must be from 0 to"),
    ({"prompt": "a", "max_tokens": 0}, "`max_tokens` must be 1 or more"),
    ({"prompt": "a", "stop": [""]}, "`stop` must be text or a list of texts"),
    ({"prompt": "a", "stop": {"a": 1}}, "`stop` must be text or a list of texts"),
    ({"prompt": "a", "id": 1.5}, "`id` must be text or a whole number, got 1.5"),
    ({"prompt": "a", "id": "good"}, 'an earlier line has the id "good" too'),
    ({"prompt": "long " * 400}, "the prompt is "),
    ({"messages": []}, "ends with the user's"),
    ({"messages": TALK[:3]}, "ends with the user's"),
    ({"messages": [TALK[1], TALK[0], TALK[3]]}, "the system's may come first"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "a message has a role (system, user, assistant)"),
    ({"messages": "hi"}, "must be a list"),
]


def test_a_bad_line_fails_alone(hspec: Hspec, model: Path) -> None:
    """In its place, by its number, with one sentence; blank lines count and are no lines."""
    good = {"id": "good", "prompt": "the hen"}
    rest = [part for bad, _ in BAD for part in (bad, b"  ", {"prompt": "the hen"})]
    result = hspec("run", "-m", model, "--jsonl", "-n", 3, stdin=b"\xef\xbb\xbf" + lines(good, *rest).rstrip(b"\n"))
    found = answers(result)
    assert result.code == 1
    assert [one["line"] for one in found] == [1, *(2 + 3 * n + m for n in range(len(BAD)) for m in (0, 2))]
    for (_, says), one, after in zip(BAD, found[1::2], found[2::2], strict=True):
        assert says in one["error"]
        assert "\n" not in one["error"]
        assert "text" not in one
        assert after["tokens"] == found[0]["tokens"]
    assert found[5 * 2 - 1]["id"] == "mine", "a line that fails has its id where that is known"
    assert found[1]["id"] == 2
    (half,) = answers(hspec("run", "-m", model, "--jsonl", "-n", 1, stdin=lines({"id": "\ud800é", "prompt": "a"})))
    assert half["id"] == "\ud800é"
    assert f"{len(BAD) + 1} answers, {len(BAD)} failed" in result.err


def test_messages_need_a_template(hspec: Hspec, model: Path, tmp_path: Path) -> None:
    (raw,) = answers(hspec("run", "-m", model, "--jsonl", "--raw", stdin=lines({"messages": TALK})))
    assert "`--raw` turns off" in raw["error"]
    tiny.tokenizer(bare := tiny_models.model(tmp_path / "bare"), template=None)
    first, second = answers(
        hspec("run", "-m", bare, "--jsonl", "-n", 2, stdin=lines({"messages": TALK}, {"prompt": "a"}))
    )
    assert "no chat template" in first["error"]
    assert len(second["tokens"]) == 2


def test_order(hspec: Hspec, endless: Path) -> None:
    """In the order of the lines, or as they are finished."""
    asked = [{"prompt": "?", "max_tokens": n} for n in (40, 2, 20, 1)]
    run = ("run", "-m", endless, "--raw", "--jsonl", "--method", "autoregressive")
    ordered = answers(hspec(*run, stdin=lines(*asked)))
    assert [one["line"] for one in ordered] == [1, 2, 3, 4]
    unordered = answers(hspec(*run, "--unordered", stdin=lines(b"{", *asked)))
    assert [one["line"] for one in unordered] == [1, 5, 3, 4, 2]
    assert [one["tokens"] for one in unordered[1:]] == [ordered[n]["tokens"] for n in (3, 1, 2, 0)]


def test_a_summary_on_request(hspec: Hspec, model: Path) -> None:
    result = hspec("run", "-m", model, "--jsonl", "--json", "--stats", "-n", 5, stdin=lines(*LINES[:2], b"{"))
    *found, last = answers(result)
    told = last["summary"]
    assert (told["answered"], told["failed"]) == (2, 1)
    assert told["generated_tokens"] == sum(one["generated_tokens"] for one in found[:2])
    assert told["prompt_tokens"] == sum(one["prompt_tokens"] for one in found[:2])
    assert told["stack"].endswith("target(full)")
    assert any(line.startswith("target(full)") for line in result.err.splitlines())
    (nothing,) = answers(hspec("run", "-m", model, "--jsonl", "--json", "--stats"))
    assert nothing["summary"]["answered"] == 0


def test_memory_bounds_the_batch(hspec: Hspec, model: Path) -> None:
    """It is said beforehand, and more is refused with what has room."""
    run = ("run", "-m", model, "--jsonl", "-n", 2, "--ram", "8MB", "--method", "autoregressive")
    err = hspec(*run, stdin=lines(LINES[0])).err
    most = int(err.splitlines()[0].split("hspec: ")[1].split(" lines at a time")[0])
    assert 1 < most < 32
    assert f"{CONTEXT} tokens of a prompt and its answer" in err
    assert hspec(*run, "--batch", most, stdin=lines(LINES[0])).code == 0
    refused(hspec(*run, "--batch", most + 1, stdin=lines(LINES[0])), 3, f"`--batch {most}`", f"{most + 1} sequences")
    assert int(hspec(*run, "-c", 150, stdin=b"").err.split("hspec: ")[1].split(" ")[0]) > most
    assert hspec(*run, "-q", stdin=lines(LINES[0])).err == ""


def test_offloaded_lines_come_one_after_the_other(hspec: Hspec, model: Path) -> None:
    """Weights are read from the disk in every pass."""
    run = ("run", "-m", model, "--jsonl", "-n", 9, "--method", "autoregressive", "-c", 200)
    away = hspec(*run, "--offload", "--ram", "1MB", "--reserve", "0k", stdin=lines(*LINES[:4]))
    assert away.code == 0, away.err
    assert "one after the other, since something is offloaded" in away.err
    assert away.out == hspec(*run, stdin=lines(*LINES[:4])).out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--jsonl", "hi"), "a PROMPT is for one"),
        (("--jsonl", "-f", "x"), "`--file` is for one"),
        (("--jsonl", "--dashboard"), "`--dashboard` is for one"),
        (("--jsonl", "--record", "x"), "`--record` is for one"),
        (("--jsonl", "--id", "x"), "`--id` is for one"),
        (("--jsonl", "--batch", "0"), "`--batch` must be from 1 to 512"),
        (("--unordered", "hi"), "`--unordered` is about many"),
        (("--batch", "2", "hi"), "`--batch` is about many"),
        (("--jsonl", "-c", "301"), "`--ctx` asks for 301 tokens, "),
    ],
)
def test_words_that_contradict_each_other(hspec: Hspec, model: Path, argv: tuple[str, ...], says: str) -> None:
    refused(hspec("run", "-m", model, *argv), (2, 3), says)


# --- pipes -------------------------------------------------------------------------------------------------------


@contextmanager
def piped(tmp_path: Path, *argv: str | Path | float) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        program("run", *argv, "--jsonl"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(tmp_path),
    ) as run:
        try:
            yield run
        finally:
            run.kill()


def test_a_slow_pipe_is_answered_as_it_comes(tmp_path: Path, model: Path) -> None:
    """Whoever writes a line and reads its answer before the next one gets it; so does who writes half of one."""
    with piped(tmp_path, "-m", model, "-n", 4) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        for number in (1, 2, 3):
            line = lines({"prompt": f"the {number}"})
            run.stdin.write(line[:9])
            run.stdin.flush()
            time.sleep(0.1)
            run.stdin.write(line[9:])
            run.stdin.flush()
            assert json.loads(run.stdout.readline())["line"] == number
        run.stdin.close()
        assert run.stdout.read() == b""
        assert run.wait(20) == 0


def test_one_that_writes_everything_before_it_reads(tmp_path: Path, model: Path) -> None:
    """More lines, and more answers, than pipes hold."""
    count = 1500
    with piped(tmp_path, "-m", model, "-n", 1, "--method", "autoregressive") as run:
        assert run.stdin is not None
        assert run.stdout is not None
        run.stdin.write(lines(*([b'{"prompt": 1, "id": "%d %s"}' % (n, b"-" * 99) for n in range(count)])))
        run.stdin.write(lines({"prompt": "the"}))
        run.stdin.close()
        found = run.stdout.read().splitlines()
        assert run.wait(60) == 1
    assert len(found) == count + 1
    assert len(json.loads(found[-1])["tokens"]) == 1


def test_a_reader_that_leaves(tmp_path: Path, endless: Path) -> None:
    """After the first answer, while others are being written, ends the run soon and without a word."""
    asked = [{"prompt": "?", "max_tokens": n} for n in (3, *[40] * 400)]
    with piped(tmp_path, "-m", endless, "--raw", "-c", 1000, "--batch", 4) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdin.write(lines(*asked))
        run.stdin.flush()  # and it stays open
        run.stdout.readline()
        run.stdout.close()
        code, err = run.wait(20), run.stderr.read().decode()
    assert code in (141, -signal.SIGPIPE), err
    assert not [word for word in ("Traceback", "Exception ignored", "Broken pipe", "error:") if word in err], err


@pytest.mark.parametrize("busy", [True, False])
def test_interrupted(tmp_path: Path, endless: Path, busy: bool) -> None:
    """SIGINT while decoding, or while a line is waited for, ends with 130; what was finished is written."""
    asked = [{"prompt": "?", "max_tokens": ENDLESS}, {"prompt": "?", "max_tokens": 3}]
    with piped(tmp_path, "-m", endless, "--raw", "--batch", 2, "--unordered") as run:
        assert run.stdin is not None
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdin.write(lines(*asked[0 if busy else 1 :]))
        run.stdin.flush()
        first = json.loads(run.stdout.readline())
        run.send_signal(signal.SIGINT)
        assert run.wait(20) == 130
        assert run.stdout.read() == b""
        err = run.stderr.read().decode()
    assert first["text"] == "abc"
    assert "interrupted" in err
    assert "Traceback" not in err


def test_interrupted_in_order(hspec: Hspec, endless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that waited for an earlier one are not lost."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hspec_decoding.engine.Engine.leave", interrupted)
    asked = [{"prompt": "?", "max_tokens": n, "stop": stop} for n, stop in ((99, "x"), (1, "x"), (99, "b"))]
    result = hspec("run", "-m", endless, "--raw", "--jsonl", stdin=lines(*asked, b"{"))
    assert result.code == 130
    assert [one["line"] for one in answers(result)] == [2, 4]
