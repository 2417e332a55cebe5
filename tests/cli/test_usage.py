"""Words to records: help, versions, completion, bad values, and how failures are told."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hspec_cli import __version__, failures, words
from hspec_cli.main import main
from hspec_cli.models import Models
from hspec_cli.parser import parse
from hspec_cli.run import DTYPES, RULES, SELECTIONS, SHORT_DTYPES, Run
from hspec_decoding.stack import METHODS
from hspec_profiles.errors import DoesNotFit, HspecError, UsageError

ROOT = Path(__file__).resolve().parent.parent.parent


def parsed(*argv: str) -> Run:
    command = parse(["run", *argv])
    assert isinstance(command, Run)
    return command


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL", "DRAFT_MODEL", "DTYPE", "DEVICE", "OFFLINE"):
        monkeypatch.delenv(f"HSPEC_{name}", raising=False)


# --- records -----------------------------------------------------------------------------------------------------


def test_defaults() -> None:
    assert parsed() == Run()
    assert parsed("why?").prompt == "why?"


def test_every_flag_reaches_the_record() -> None:
    argv = (
        "-m model --method triforce --rule rejection --select paper --no-exact -md draft --budget 64 --gamma 3 "
        "-n 7 -c 99 --temp 0.5 --top-p 0.9 --top-k 5 --min-p 0.1 --seed 4 --stop a --stop b -s sys -f x -f - --json "
        "--stats --dtype bf16 --device cuda:1 --offline --trust-remote-code -q -v --debug "
        "--dashboard --record z"
    )
    assert parsed(*argv.split(), "ask") == Run(
        prompt="ask",
        file=["x", "-"],
        system="sys",
        model="model",
        ctx=99,
        dtype="bfloat16",
        device="cuda:1",
        offline=True,
        trust_remote_code=True,
        method="triforce",
        rule="rejection",
        select="paper",
        exact=False,
        draft_model="draft",
        budget=64,
        gamma=3,
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=4,
        stop=["a", "b"],
        json=True,
        dashboard=True,
        record="z",
        stats=True,
        quiet=True,
        verbose=True,
        debug=True,
    )


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--temperature", "0.25"], "temperature", 0.25),
        (["--num-draft-tokens", "5"], "gamma", 5),
        (["--draft-model", "x"], "draft_model", "x"),
        (["-mx"], "model", "x"),
        (["--levels", "ngram > target(full)"], "levels", "ngram > target(full)"),
        (["--raw"], "raw", True),
        (["-"], "prompt", "-"),
        (["--", "-5 + 3?"], "prompt", "-5 + 3?"),
    ],
)
def test_aliases_and_odd_words(argv: list[str], field: str, value: object) -> None:
    assert getattr(parsed(*argv), field) == value


def test_environment_is_under_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSPEC_MODEL", "from-env")
    monkeypatch.setenv("HSPEC_DTYPE", "fp32")
    monkeypatch.setenv("HSPEC_OFFLINE", "1")
    assert (parsed().model, parsed().dtype, parsed().offline) == ("from-env", "float32", True)
    assert parsed("-m", "from-flag").model == "from-flag"
    monkeypatch.setenv("HSPEC_MODEL", "")
    assert parsed().model == "smollm2-135m"


def test_choices_are_the_engines_own() -> None:
    from hspec_decoding.device import DTYPES as known
    from hspec_decoding.device import SHORT
    from hspec_decoding.options import RULES as rules
    from hspec_decoding.sparse import SELECT

    assert set(RULES) == set(rules)
    assert set(SELECTIONS) == set(SELECT)
    assert set(DTYPES) == {"auto", *known}
    assert SHORT_DTYPES == SHORT


# --- bad words ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--method", "tri"], ("--method", "auto, triforce, chimera", "'tri'")),
        (["--rule", "x"], ("coupled, rejection",)),
        (["--select", "x"], ("verify-fed, paper",)),
        (["--dtype", "int3"], ("auto, float32, bfloat16, float16",)),
        (["--device", "gpu"], ("auto, cpu, cuda or cuda:N",)),
        (["-n", "0"], ("--max-tokens", "1 or more", "0")),
        (["-n", "many"], ("whole number", "'many'")),
        (["--temp", "-1"], ("--temp", "0 or more", "-1")),
        (["--temp", "nan"], ("--temp", "nan")),
        (["--temp", "inf"], ("--temp", "inf")),
        (["--top-p", "1.5"], ("from 0 to 1", "1.5")),
        (["--min-p", "2"], ("--min-p", "from 0 to 1")),
        (["--top-k", "-1"], ("0 or more",)),
        (["--gamma", "64"], ("from 1 to 63", "64")),
        (["--budget", "0"], ("--budget",)),
        (["--method", "chimera", "--tree", "64"], ("--tree", "from 1 to 63", "64")),
        (["--tree", "7"], ("--tree", "--method chimera")),
        (["--levels", "ngram > target(full)", "--heads", "x"], ("--heads", "--method chimera")),
        (["--method", "chimera", "--tree", "7", "--rule", "rejection"], ("coupled", "--tree off")),
        (["--method", "chimera", "--offload"], ("chimera", "--offload")),
        (["--levels", "target(retrieval) > chimera > target(full)"], ("column 21", "first level")),
        (["-c", "0"], ("--ctx", "1 or more")),
        (["--seed", "-1"], ("--seed", "from 0 to 9223372036854775807")),
        (["--seed", str(2**63)], ("--seed",)),
        (["--levels", "ngram >"], ("column 8",)),
        (["--levels", "target(full)", "--method", "triforce"], ("--levels", "--method")),
        (["--raw", "-s", "x"], ("--system", "--raw")),
        (["--stop", ""], ("--stop",)),
        (["--nonsense"], ("--nonsense",)),
        (["why", "is", "it"], ("in quotes",)),
        (["-n"], ("-n", "argument")),
    ],
)
def test_usage_errors(argv: list[str], said: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    """Exit 2, one sentence with the valid values, nothing on stdout."""
    assert main(["run", *argv]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert not [word for word in said if word not in err], err
    assert not err.splitlines()[0].endswith(".")


def test_unknown_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["ruin"]) == 2
    assert "ruin" in capfd.readouterr().err


# --- help --------------------------------------------------------------------------------------------------------


def test_help_and_version(capfd: pytest.CaptureFixture[str]) -> None:
    for argv in (["--help"], [], ["-h"]):
        assert main(argv) == 0
        assert "hspec run" in capfd.readouterr().out
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"hspec {__version__}\n"


def test_help_of_run_has_every_option_under_a_heading(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    for heading in ("Prompt:", "Model:", "Speculation:", "Sampling:", "Output:", "Examples:"):
        assert f"\n{heading}" in out or f"\n  {heading}" in out
    for flag in (
        *METHODS,
        *RULES,
        *SELECTIONS,
        *DTYPES,
        *SHORT_DTYPES,
        "--levels",
        "-md, --draft-model",
        "--exact / --no-exact",
        "-n, --max-tokens",
        "HSPEC_MODEL",
    ):
        assert flag in out
    assert not [c for c in out if c in "\x1b\r" or "\u2500" <= c <= "\u259f"]


def test_completion(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("_HSPEC_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "hspec run --dra")
    monkeypatch.setenv("COMP_CWORD", "2")
    with pytest.raises(SystemExit) as done:
        main([])
    assert not done.value.code
    assert capfd.readouterr().out.split() == ["--draft-model"]


def test_help_needs_no_torch() -> None:
    """`hspec --help`, `--version` and `hspec run --help` load nothing heavy."""
    script = (
        "import sys; from hspec_cli.main import main\n"
        "for argv in (['--help'], ['--version'], ['run', '--help'], ['run', '--seed', 'x'], ['run', '']): main(argv)\n"
        "heavy = {'torch', 'transformers', 'numpy', 'rich', 'tokenizers', 'huggingface_hub', 'jinja2'}\n"
        "print(heavy & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, _roots()))},
    )
    assert done.stderr.splitlines()[-1] == "set()", done.stderr


def _roots() -> list[Path]:
    return [ROOT / name for name in (".", "decoding", "offload", "kernels", "profiles")]


# --- failures ----------------------------------------------------------------------------------------------------


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


@pytest.mark.parametrize(
    ("failure", "code", "first", "hint"),
    [
        (HspecError("no such thing", "look elsewhere"), 1, "error: no such thing", "hint: look elsewhere"),
        (UsageError("what"), 2, "error: what", None),
        (DoesNotFit("too big"), 3, "error: too big", None),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), 1, "error: no space left on device: `/x`", "XDG"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 1, "error: permission denied: `/x`", None),
        (MemoryError(), 3, "error: host memory ran out", "--ctx"),
        (OutOfMemoryError("CUDA out of memory. Tried"), 3, "error: GPU memory ran out", "--ctx"),
        (TypeError("a\nb"), 1, "error: internal: TypeError: a", "--debug"),
        (AssertionError(), 1, "error: internal: AssertionError: no message", "--debug"),
        (KeyboardInterrupt(), 130, "hspec: interrupted", None),
    ],
)
def test_failures_in_words(
    failure: BaseException, code: int, first: str, hint: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failures.report(failure, debug=False) == code
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == first
    assert lines[1:] == [] if hint is None else lines[1] == "" and hint in lines[2]


def test_broken_pipe_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    assert failures.report(BrokenPipeError(errno.EPIPE, "Broken pipe"), debug=True) == 141
    assert capsys.readouterr().err == ""


def test_debug_shows_where(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_self: Models) -> int:
        raise RuntimeError("boom [bold]")

    monkeypatch.setattr(Models, "execute", fail)
    assert main(["models"]) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert main(["models", "--debug"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "error: internal: RuntimeError: boom [bold]" in err


def test_control_characters_in_messages_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    failures.report(HspecError("no `\x1b[31mred\r`"), debug=False)
    assert capsys.readouterr().err == "error: no `\\x1b[31mred\\r`\n"


def test_parsers_take_their_defaults() -> None:
    """A parser is also shown values that are not text."""
    assert words.whole("--x", 0)("7") == 7
    assert words.real("--x", 0)("7") == 7.0
