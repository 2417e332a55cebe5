"""TidalDecode from the command line: what is approximate says so in every place, and calibrations are taken up."""

from __future__ import annotations

import json
import os
from pathlib import Path

import case_models
import pytest
from case_tools import Hspec, Result
from dashboard_tools import resident

from hspec_cli.dashboard import parts, view
from hspec_cli.dashboard.state import folded
from hspec_cli.dashboard.stream import Began, Timed

PROMPT = "She sells sea shells by the sea shore, and the shells that she sells are sea shells for sure. " * 4
ENOUGH = 2048


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    return case_models.endless_model(root / "deep", num_hidden_layers=6, max_position_embeddings=ENOUGH)


def run(hspec: Hspec, model: Path, *words: str | float, prompt: str = PROMPT) -> Result:
    return hspec("run", "--raw", "-m", model, "-n", 24, "--budget", 64, *words, prompt)


def test_it_is_approximate_and_says_so(hspec: Hspec, model: Path) -> None:
    made = run(hspec, model, "--method", "tidal")
    assert made.code == 0, made.err
    note, *_, summary = made.err.splitlines()
    assert note.startswith("note: APPROXIMATE: `target(tidal:64)` leaves keys out")
    assert "`--lossless`" in note
    assert summary.startswith("hspec: APPROXIMATE: 24 tokens")
    assert "not calibrated" in made.err
    written = run(hspec, model, "--method", "tidal", "--json")
    document = written.document
    assert document["approximate"] is True
    assert document["stack"] == "target(tidal:64)"
    assert any("APPROXIMATE" in note for note in document["notes"])
    line = json.dumps({"prompt": PROMPT}).encode()
    many = hspec("run", "--raw", "-m", model, "-n", 24, "--budget", 64, "--method", "tidal", "--jsonl", stdin=line)
    assert json.loads(many.out)["approximate"] is True
    assert many.err.splitlines()[-1].startswith("hspec: APPROXIMATE: 1 answer")
    assert "APPROXIMATE" in hspec("run", "--help").out.decode()
    assert "APPROXIMATE" in hspec("bench", "--help").out.decode()


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize(
    "words", [("--method", "tidal", "--lossless"), ("--levels", "target(tidal:64) > target(full)")]
)
def test_lossless_it_says_what_plain_decoding_says(
    hspec: Hspec, model: Path, words: tuple[str, ...], temperature: float
) -> None:
    how = ("--temp", temperature, "--json")
    plain = run(hspec, model, "--method", "autoregressive", *how).document
    made = run(hspec, model, *words, *how)
    document = made.document
    assert document["tokens"] == plain["tokens"]
    assert document["approximate"] is plain["approximate"] is False
    assert "APPROXIMATE" not in made.err
    assert document["stack"] == "target(tidal:64) > target(full)"


def test_budgets_are_tokens_or_shares(hspec: Hspec, model: Path) -> None:
    document = run(hspec, model, "--method", "tidal", "--budget", "20%", "--json").document
    assert document["stack"] == f"target(tidal:{round(0.2 * document['context'])})"
    for word, problem in (("0%", "more than 0%"), ("101%", "from 0 to 100"), ("x", "whole number"), ("0", "1 or more")):
        refused = run(hspec, model, "--budget", word)
        assert refused.code == 2
        assert problem in refused.err
    assert "at least 24 tokens: 10" in run(hspec, model, "--method", "tidal", "--budget", 10).err


def test_short_texts_are_read_whole_and_it_is_said(hspec: Hspec, model: Path) -> None:
    words = ("--method", "tidal", "--budget", 400)
    short = run(hspec, model, *words)
    assert "pays from 800 tokens on with a budget of 400: these " in short.err
    assert short.out == run(hspec, model, "--method", "autoregressive").out
    assert "pays from" not in run(hspec, model, "--method", "tidal").err
    plain = run(hspec, model, *words, "--lossless")
    assert plain.out == short.out
    assert "are decoded plainly" in plain.err


def test_corrections(hspec: Hspec, model: Path) -> None:
    said = {run(hspec, model, "--method", "tidal", "--correct", n).out for n in (0, 1, 8)}
    assert len(said) > 1, "keys that are computed again change what is said"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--method", "triforce", "--correct", 8), "`--correct` is for approximate levels"),
        (("--method", "tidal", "--lossless", "--correct", 8), "`--correct` is for approximate levels"),
        (("--method", "tidal", "--rule", "rejection"), "here nothing is"),
        (("--levels", "target(tidal)", "--lossless"), "a last level that decides"),
        (("--levels", "target(tidal-fed)"), "made by the passes of a level behind it"),
        (("--levels", "ngram > target(tidal)"), "must be `target(full)`"),
    ],
)
def test_what_cannot_be_meant(hspec: Hspec, model: Path, words: tuple[str | float, ...], problem: str) -> None:
    refused = run(hspec, model, *words)
    assert refused.code == 2
    assert problem in refused.err


def test_beside_offloading(hspec: Hspec, model: Path) -> None:
    """It goes with a plan that keeps all on the device, and says what helps where there is none."""
    made = run(hspec, model, "--method", "tidal", "--offload")
    assert made.code == 0, made.err
    assert made.out == run(hspec, model, "--method", "tidal").out


def test_calibrations_are_taken_up(hspec: Hspec, model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n * 7919 % 1000:03} tears, {n} rows. " for n in range(100)))
    made = hspec("calibrate", "-m", model, "--text", text, "--tokens", 1100, "--layers", 3)
    assert made.code == 0, made.err
    assert "layers that read all keys" in made.out.decode()
    assert "fed" in made.out.decode()
    again = hspec("calibrate", "-m", model, "--text", text, "--tokens", 1100, "--layers", 3, "--json")
    document = again.document
    (kept,) = (Path(os.environ["XDG_CONFIG_HOME"]) / "hspec" / "calibrations").iterdir()
    assert json.loads(kept.read_text()) == document
    assert str(kept) in again.err
    assert len(document["full"]) == 3
    assert document["tried"][0]["full"] == document["full"]
    assert document["texts"] == {str(text): 1100}
    assert len(document["captured"]["heads"]) == len(document["importance"]) == 6
    said = run(hspec, model, "--method", "tidal").err
    assert f"layers {', '.join(map(str, document['full']))} read all keys (hspec calibrate on 1 text" in said
    assert "not calibrated" not in said
    kept.write_text("{}")
    refused = run(hspec, model, "--method", "tidal")
    assert refused.code == 1
    assert "run `hspec calibrate` again" in refused.err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--tokens", 4096), "holds 2,048"),
        (("--layers", 6), "6 layers of the model read all keys"),
        (("--text", "no such file"), "cannot read"),
    ],
)
def test_what_cannot_be_calibrated(hspec: Hspec, model: Path, words: tuple[str | float, ...], problem: str) -> None:
    refused = hspec("calibrate", "-m", model, *words)
    assert refused.code in (1, 2)
    assert problem in refused.err


def test_status_line_and_dashboard_say_it() -> None:
    began = Timed(0.0, Began("m", "cpu", "float32", "target(tidal:64)", "greedy", 300, 24, 324, approximate=True))
    exact = folded(resident())
    nearly = folded([*resident(), began])
    assert parts.status(nearly) == f"APPROXIMATE: {parts.status(exact)}"
    for width in (30, 60, 120):
        assert "APPROXIMATE" in view.render(nearly, width, 30, 9.0)[0].plain
        assert "APPROXIMATE" not in view.render(exact, width, 30, 9.0)[0].plain


def test_the_bench_labels_its_rows(hspec: Hspec, model: Path) -> None:
    words = ("bench", "-m", model, "--methods", "tidal,tidal-lossless", "--contexts", 600, "-n", 12, "--trials", 1)
    document = hspec(*words, "--temps", 0, "--json").document
    (case,) = document["outcomes"]
    rows = {row["method"]: row for row in case["rows"]}
    assert rows["tidal APPROXIMATE"]["role"] == "approximate"
    assert rows["tidal APPROXIMATE"]["speed_up"] > 0
    assert rows["tidal-lossless"]["role"] == "method"
    assert rows["tidal-lossless"]["same"] is True
