"""Standard streams and context limits: section S of the cases that users of other tools hit."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import case_models as models
import case_tools as cases
import pytest
import tiny_models
from case_models import speaker
from case_tools import ESCAPES, Hspec, answered, environment, program, refused


@pytest.fixture(scope="module")
def abc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers `?` with `abc` and ends."""
    return speaker(tmp_path_factory.mktemp("abc"), "?", "abc", then=1)


def test_S1_redirected_streams(tmp_path: Path, abc: Path) -> None:
    """With stdout and stderr in files, stdout holds the answer alone and stderr plain lines."""
    (tmp_path / "p").write_bytes(b"?")
    argv = program("run", "-m", abc, "--raw", "--method", "triforce")
    with (tmp_path / "p").open("rb") as p, (tmp_path / "o").open("wb") as o, (tmp_path / "e").open("wb") as e:
        done = subprocess.run(argv, stdin=p, stdout=o, stderr=e, env=environment(tmp_path), timeout=60)
    err = (tmp_path / "e").read_text()
    assert done.returncode == 0, err
    assert (tmp_path / "o").read_bytes() in (b"abc", b"abc\n")
    assert not ESCAPES.search(err), err


def test_S1_no_escape_codes_even_when_colour_is_wanted(
    hspec: Hspec, abc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Colours asked for by the environment never reach stdout."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("CLICOLOR_FORCE", "1")
    assert answered(hspec("run", "-m", abc, "--raw", "-v", "--stats", "?")).text == "abc"


def test_S2_no_input_at_all(tmp_path: Path, abc: Path) -> None:
    """`</dev/null` without a prompt is a usage error at once, never a loop."""
    begun = time.monotonic()
    done = subprocess.run(
        program("run", "-m", abc),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment(tmp_path),
        timeout=60,
    )
    refused(cases.Result(done.returncode, done.stdout, done.stderr.decode()), 2, "prompt")
    assert time.monotonic() - begun < 15


def test_S2_piped_and_terminal_input(hspec: Hspec, abc: Path) -> None:
    """A pipe is read to its end; a terminal without a prompt is a usage error with an example."""
    assert answered(hspec("run", "-m", abc, "--raw", stdin=b"?")).text == "abc"
    refused(hspec("run", "-m", abc, terminal=True), 2, "hspec run")


@pytest.mark.parametrize("data", [b"caf\xe9 \xff?", b"a\xed\xa0\x80b?", b"\xff\xfe?"])
def test_S4_invalid_utf8(hspec: Hspec, abc: Path, data: bytes) -> None:
    """Input that is not UTF-8 is read with replacement characters and one warning."""
    result = answered(hspec("run", "-m", abc, "--raw", stdin=data))
    assert result.text == "abc"
    assert len([line for line in result.err.splitlines() if "UTF-8" in line]) == 1, result.err


@pytest.mark.parametrize("data", ["a\r\nb?", "é漢?"])
def test_S4_odd_but_valid_bytes(hspec: Hspec, abc: Path, data: str) -> None:
    """CRLF and characters beyond ASCII reach the model as they are, without a warning."""
    result = answered(hspec("run", "-m", abc, "--raw", "--json", stdin=data.encode()))
    expected = models.tokenizer_of(abc).encode(data).ids
    assert result.document["prompt_tokens"] == len(expected)
    assert "UTF-8" not in result.err


def test_S4_nul(hspec: Hspec, abc: Path) -> None:
    """NUL bytes either reach the model or are left out with a note; the run goes on."""
    result = answered(hspec("run", "-m", abc, "--raw", "--json", stdin=b"a\0b?"))
    assert result.document["text"] == "abc"
    left_out = len(models.tokenizer_of(abc).encode("ab?").ids)
    assert result.document["prompt_tokens"] == left_out + ("NUL" not in result.err)


def test_S4_byte_order_mark(hspec: Hspec, abc: Path) -> None:
    """A UTF-8 byte order mark at the head of a file is no part of the prompt."""
    plain = answered(hspec("run", "-m", abc, "--raw", "--json", stdin=b"a?")).document
    marked = answered(hspec("run", "-m", abc, "--raw", "--json", stdin=b"\xef\xbb\xbfa?")).document
    assert marked["prompt_tokens"] == plain["prompt_tokens"]
    assert marked["text"] == "abc"


def with_code(model: Path, marker: Path) -> None:
    """Add `auto_map` code to a model directory that leaves `marker` behind when it runs."""
    code = f"import pathlib\npathlib.Path({str(marker)!r}).touch()\nclass Config: ...\nclass Model: ...\nclass T: ...\n"
    (model / "modeling_odd.py").write_text(code)
    names = {"AutoConfig": "modeling_odd.Config", "AutoModelForCausalLM": "modeling_odd.Model"}
    models.edit(model / "config.json", auto_map=names)
    tokenizer = {"AutoTokenizer": ["modeling_odd.T", "modeling_odd.T"]}
    models.edit(model / "tokenizer_config.json", auto_map=tokenizer)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_S7_code_of_a_known_family_never_runs(hspec: Hspec, tmp_path: Path, role: str) -> None:
    """`auto_map` of a family of ours is ignored with one note, and a piped `y` is text like any other."""
    target = speaker(tmp_path / "target", "?", "abc", then=1)
    draft = speaker(tmp_path / "draft", "?", "abc", then=1)
    with_code(target if role == "target" else draft, tmp_path / "ran")
    run = ["run", "-m", target, "--draft-model", draft, "--raw", "--json"]
    result = answered(hspec(*run, stdin=b"y\ntext?"))
    assert not (tmp_path / "ran").exists()
    assert result.document["text"] == "abc"
    assert result.document["prompt_tokens"] == len(models.tokenizer_of(target).encode("y\ntext?").ids)
    assert len([line for line in result.err.splitlines() if "auto_map" in line or "code" in line]) == 1, result.err


def test_S7_code_of_an_unknown_family_never_runs(hspec: Hspec, tmp_path: Path) -> None:
    """A repository whose `model_type` is its own is refused by name, whatever is piped."""
    model = speaker(tmp_path / "model", "?", "abc", then=1)
    with_code(model, tmp_path / "ran")
    models.edit(model / "config.json", model_type="oddity")
    refused(hspec("run", "-m", model, "--raw", stdin=b"y\ntext?"), 1, "oddity")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("data", [b"", b" ", b"\n\n\t ", b"\xef\xbb\xbf"])
def test_S10_empty_prompt(hspec: Hspec, tmp_path: Path, data: bytes) -> None:
    """An empty or blank prompt is a usage error before any weight is read."""
    model = speaker(tmp_path / "model", "?", "abc", then=1)
    (model / "model.safetensors").write_bytes(b"no weights at all")
    refused(hspec("run", "-m", model, stdin=data), 2, "prompt")


@pytest.mark.parametrize("method", cases.METHODS)
def test_S11_prompt_longer_than_the_context(hspec: Hspec, abc: Path, method: str) -> None:
    """A prompt longer than `--ctx` is refused with both numbers; its head is never dropped."""
    prompt = "#" + "x" * 98 + "?"
    tokens = len(models.tokenizer_of(abc).encode(prompt).ids)
    run = ["run", "-m", abc, "--raw", "--method", method, "--ctx", 64, prompt]
    refused(hspec(*run), (2, 3), str(tokens), "64", "--ctx")


@pytest.mark.parametrize("method", cases.METHODS)
def test_S11_prompt_longer_than_the_window(hspec: Hspec, abc: Path, method: str) -> None:
    """A prompt longer than the model's window is refused with both numbers, whatever `--ctx` asks for."""
    prompt = "#" + "x" * 598 + "?"
    tokens = len(models.tokenizer_of(abc).encode(prompt).ids)
    assert tokens > 512
    refused(hspec("run", "-m", abc, "--raw", "--method", method, prompt), (1, 2, 3), str(tokens), "512")


@pytest.mark.parametrize("method", cases.METHODS)
def test_S12_answer_ends_at_the_window(hspec: Hspec, tmp_path: Path, method: str) -> None:
    """Where prompt and answer do not fit the window, the answer ends at its end, which is said with the number."""
    model = models.without_bos(speaker(tmp_path / "model", "?", "abc", positions=256))
    prompt = "?" * 200
    tokens = len(models.tokenizer_of(model).encode(prompt).ids)
    run = ["run", "-m", model, "--raw", "--method", method, "-n", 300, "--json", prompt]
    result = answered(hspec(*run))
    assert result.document["finish_reason"] == "context"
    assert 256 - tokens <= len(result.document["tokens"]) <= 256 - tokens + 1
    assert "256" in result.err


@pytest.mark.parametrize("method", cases.METHODS)
def test_S14_quiet(hspec: Hspec, tmp_path: Path, method: str) -> None:
    """With `-q` a run that works says nothing on stderr: no loading bars, reports or warnings of libraries."""
    model = tiny_models.model(tmp_path / "model", shards=True)
    models.edit(model / "generation_config.json", do_sample=False, temperature=0.7, top_p=0.9)
    result = answered(hspec("run", "-m", model, "--raw", "-q", "--method", method, "-n", 20, "hello"))
    assert result.err == ""


def test_S14_default_noise(hspec: Hspec, tmp_path: Path) -> None:
    """Without `-q` stderr away from a terminal holds plain lines, none of a library's own."""
    model = tiny_models.model(tmp_path / "model", shards=True)
    result = answered(hspec("run", "-m", model, "--raw", "-n", 20, "hello"))
    assert result.err.strip()
    assert not ESCAPES.search(result.err)
    assert not [w for w in ("it/s", "Loading", "Warning", "transformers", "torch_dtype") if w in result.err]


def test_S15_long_silence(hspec: Hspec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Away from a terminal a long prefill says plain lines of progress now and then."""
    model = tiny_models.model(tmp_path / "model", max_position_embeddings=20_000)
    for clock in ("monotonic", "perf_counter"):
        real = getattr(time, clock)
        monkeypatch.setattr(time, clock, lambda real=real: 200 * real())
    result = answered(hspec("run", "-m", model, "--raw", "-n", 2, stdin=b"word " * 3000))
    beats = [line for line in result.err.splitlines() if "%" in line or "prefill" in line.lower()]
    assert len(beats) >= 2, result.err
    assert not ESCAPES.search(result.err)
