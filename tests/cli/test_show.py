"""Records to words: the summary, the table, the JSON document, the list of models."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hspec_cli import models, show
from hspec_cli.main import main
from hspec_cli.run import Run
from hspec_decoding.checkpoints.hub import Alias, CachedModel
from hspec_decoding.events import LevelReport, Report
from hspec_decoding.sampling import Sampling

LEVELS = (
    LevelReport("ngram", 1200, 900, 400, 0.25),
    LevelReport("target(retrieval:4096)", 500, 84, 130, 1.5),
    LevelReport("target(full)", 128, 128, 44, 4.0),
)


def report(levels: tuple[LevelReport, ...] = LEVELS, **changes: Any) -> Report:
    numbers: dict[str, Any] = {
        "prompt_tokens": 4012,
        "generated_tokens": 128,
        "prefill_seconds": 7.2,
        "decode_seconds": 6.1,
        "stack": " > ".join(level.name for level in levels),
        "seed": 0,
    }
    return Report(levels=levels, **(numbers | changes))


def told(made: Report, reason: str = "eos", run: Run | None = None, **sampling: Any) -> show.Told:
    ids = list(range(128))
    stream = SimpleNamespace(stopped=reason == "stop", consumed=100, text="[bold]é\u2028")
    job = SimpleNamespace(sampling=Sampling(**sampling), context=5000, draft_name=None)
    engine = SimpleNamespace(dtype="bfloat16", device="cpu", ranks=None)
    spoken = show.Spoken(cast(Any, stream), True, ids, reason)
    run = run or Run(method="triforce")
    return show.Told(run, cast(Any, job), cast(Any, engine), spoken, made, 0.5)


def test_summary() -> None:
    assert show.summary(told(report())) == (
        "128 tokens in 6.1 s (21.0 tokens/s; prompt 4,012 tokens in 7.2 s), "
        "triforce: ngram > target(retrieval:4096) > target(full), 2.9 tokens per pass, greedy, seed 0"
    )


@pytest.mark.parametrize(
    ("reason", "said"),
    [("length", "(cut at -n)"), ("context", "context's end"), ("stop", "--stop"), ("interrupted", "interrupted")],
)
def test_summary_says_why_it_ended(reason: str, said: str) -> None:
    assert said in show.summary(told(report(), reason)).split(" in ")[0]


def test_summary_compares_with_plain_decoding() -> None:
    line = show.summary(told(report(plain_seconds=0.1), temperature=0.7, top_p=0.9, top_k=20, min_p=0.05, seed=3))
    assert "2.10 times plain decoding" in line
    assert line.endswith("temperature 0.7, top-p 0.9, top-k 20, min-p 0.05, seed 3")


def test_summary_of_plain_decoding() -> None:
    plain = report(LEVELS[-1:], decode_seconds=0.0, plain_seconds=0.1)
    line = show.summary(told(plain, run=Run(method="autoregressive")))
    assert "0.0 tokens/s" in line
    assert "per pass" not in line
    assert "times plain" not in line


def test_table() -> None:
    assert show.table(report()).splitlines() == [
        "level                   proposed  kept  acceptance  passes  seconds",
        "ngram                      1,200   900       75.0%     400     0.25",
        "target(retrieval:4096)       500    84       16.8%     130     1.50",
        "target(full)                 128   128           -      44     4.00",
    ]


def test_document() -> None:
    run = Run(method="triforce", rule="rejection", model="[m]")
    text = show.document(told(report(plain_seconds=0.1), "stop", run, temperature=0.5, seed=7), ["a note"])
    made = json.loads(text)
    assert made["text"] == "[bold]é\u2028"
    assert made["tokens"] == list(range(100))
    assert made["finish_reason"] == "stop"
    assert made["truncated"] is False
    assert (made["prompt_tokens"], made["generated_tokens"], made["context"]) == (4012, 128, 5000)
    assert (made["model"], made["draft_model"], made["rule"]) == ("[m]", None, "rejection")
    assert made["sampling"] == {"temperature": 0.5, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    assert [level["acceptance"] for level in made["levels"]] == [0.75, 0.168, None]
    assert made["levels"][1]["proposed"] == 500
    assert made["timings"]["speed_up"] == pytest.approx(12.8 / 6.1)
    assert made["notes"] == ["a note"]
    assert (made["dtype"], made["device"]) == ("bfloat16", "cpu")


def test_list_of_models() -> None:
    known = [
        Alias(name="big", repo="org/Big", draft="org/small", about="a model"),
        Alias(name="tiny", repo="org/Tiny", draft=None, about="[another]"),
        Alias(name="inside", repo="org/Inside", draft=None, about="a third"),
    ]
    here = [
        CachedModel("org/Big", 13_500_000_000, Path("/cache/big")),
        CachedModel("org/Tiny", 1_000_000, Path("/cache/tiny"), complete=False),
        CachedModel("inside", 98_000_000, Path("/lib/inside.gguf")),
    ]
    assert models.listing(known, here).splitlines() == [
        "ALIAS   REPOSITORY  DRAFT      HERE  ABOUT",
        "big     org/Big     org/small  yes   a model",
        "tiny    org/Tiny    -          -     [another]",
        "inside  org/Inside  -          yes   a third",
        "",
        "ON THIS MACHINE  SIZE                PLACE",
        "org/Big          13.5 GB             /cache/big",
        "org/Tiny         1.0 MB, incomplete  /cache/tiny",
        "inside           98.0 MB             /lib/inside.gguf",
    ]
    assert "hspec run -m" in models.listing(known, [])
    made = json.loads(models.document(known, here))
    assert made["cached"][1] == {
        "name": "org/Tiny",
        "bytes": 1_000_000,
        "path": "/cache/tiny",
        "complete": False,
    }
    assert made["aliases"][0]["draft"] == "org/small"


def test_models_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert "llama2-7b-128k" in capfd.readouterr().out
    assert main(["models", "--json"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert {"smollm2-135m", "llama2-7b-128k"} <= {alias["name"] for alias in json.loads(out)["aliases"]}
