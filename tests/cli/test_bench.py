"""`hspec bench` on a tiny model: what it measures, prints and refuses."""

from __future__ import annotations

import csv
import io
import os
import pty
import re
import subprocess
from pathlib import Path
from typing import Any

import case_models
import pytest
from case_tools import ESCAPES, Hspec, answered, environment, program, refused

from hspec_cli.bench.ours import Ours
from hspec_cli.bench.session import Session
from hspec_cli.bench.suite import ON_CHIP
from hspec_decoding.engine import Engine
from hspec_decoding.sampling import Sampling
from hspec_profiles.profile import Host, HostProfile, host_key, save_profile

LAB = HostProfile("lab", Host("A CPU", 2, 8 * 10**9, dram=2e10, attention=1.5e10, product=1.2e10))
SMALL = ("--contexts", "128", "-n", 8, "--trials", 2, "--temps", "0", "--offline")


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host that was measured before."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    save_profile(LAB, host_key())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return case_models.endless_model(tmp_path_factory.mktemp("bench") / "tiny", max_position_embeddings=1024)


def rows_of(document: dict[str, Any], case: int = 0) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in document["outcomes"][case]["rows"]}


def test_methods_beside_plain_decoding(hspec: Hspec, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "bench.html"
    levels = "target(streaming:64) > target(full)"
    more = ("--methods", "triforce,hf", "--levels", levels, "--batch", "1,2", "--temps", "0,0.8", "--dtype", "fp32")
    result = answered(hspec("bench", "-m", tiny, *SMALL, *more, "--json", "--report", path))
    document = result.document
    cases = [(o["case"]["batch"], o["case"]["temperature"]) for o in document["outcomes"]]
    assert cases == [(1, 0.0), (1, 0.8), (2, 0.0), (2, 0.8)]
    for case in range(4):
        rows = rows_of(document, case)
        assert list(rows) == ["autoregressive", "one-row", "triforce", levels, "hf"]
        assert all(len(row["trials"]) == 2 for row in rows.values())
        assert rows["triforce"]["same"] is True
        assert rows["triforce"]["speed_up"] > 0
        assert rows[levels]["trials"][0]["levels"][0]["name"].startswith("target(streaming")
        assert rows["autoregressive"]["memory"]["weights"] > 0
        assert rows["triforce"]["predicted"] > 0
        first = [trial["first"] is not None for trial in rows["triforce"]["trials"]]
        assert first == [cases[case][1] == 0.0, False]
        assert document["outcomes"][case]["ceiling"]["rate"] == 2e10
    assert rows_of(document)["hf"]["same"] is True
    assert path.read_text("utf-8").startswith("<!DOCTYPE html>")
    assert not ESCAPES.search(result.err)


def test_retrieval_needs_more_memory_than_plain_decoding(hspec: Hspec, tiny: Path) -> None:
    levels = "ngram > target(retrieval:64) > target(full)"
    rows = rows_of(answered(hspec("bench", "-m", tiny, *SMALL, "--levels", levels, "--json")).document)
    kept = {name: row["memory"]["caches"] for name, row in rows.items()}
    assert kept[levels] > kept["autoregressive"] == kept["one-row"]
    assert len({row["memory"]["weights"] for row in rows.values()}) == 1


def test_a_text_that_differs_fails_the_bench(hspec: Hspec, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Ours.decode

    def wrong(self: Ours, *args: Any, **more: Any) -> Any:
        texts, trial = decode(self, *args, **more)
        if self.name == "triforce":
            texts = tuple((*text[:5], (text[5] + 1) % 300, *text[6:]) for text in texts)
        return texts, trial

    monkeypatch.setattr(Ours, "decode", wrong)
    result = hspec("bench", "-m", tiny, *SMALL)
    assert result.code == 1
    assert "error: triforce, 128 tokens, T 0: the text is not plain decoding's: token 5" in result.err
    line = next(line for line in result.text.splitlines() if line.startswith("triforce"))
    assert line.split()[1:4] == ["-", "-", "-"]


def test_interrupted_it_shows_what_was_measured(hspec: Hspec, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Session._case

    def second(self: Session, *args: Any) -> None:
        if self.outcomes:
            raise KeyboardInterrupt
        case(self, *args)

    monkeypatch.setattr(Session, "_case", second)
    result = hspec("bench", "-m", tiny, *SMALL, "--temps", "0,1", "--csv")
    assert result.code == 130
    assert len(list(csv.DictReader(io.StringIO(result.text)))) == 3


def test_bare_it_chooses_by_itself_and_ends_in_time(hspec: Hspec, tiny: Path) -> None:
    result = answered(hspec("bench", "-m", tiny, "-n", 8, "--trials", 2, "--text", "prose", "--json"))
    cases = [outcome["case"] for outcome in result.document["outcomes"]]
    assert [(case["context"], case["temperature"]) for case in cases] == [
        (256, 0.0),
        (256, 0.6),
        (512, 0.0),
        (512, 0.6),
    ]
    assert result.document["text"].startswith("prose")


def test_every_prompt_is_read_anew_where_its_time_is_told(
    hspec: Hspec, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    prefill = Engine._prefill

    def counted(self: Engine, run: Any) -> Any:
        read.append(len(self.parts.prompts.get(run.text.slot, [])))
        return prefill(self, run)

    monkeypatch.setattr(Engine, "_prefill", counted)
    answered(hspec("bench", "-m", tiny, *SMALL, "--methods", "autoregressive", "--fresh"))
    assert set(read) == {0}


def test_the_suite_lists_what_cannot_be_run(hspec: Hspec, tiny: Path) -> None:
    result = hspec("bench", "--suite", "triforce-paper", "-m", tiny, "--offline", "--json")
    assert result.code == 3
    published = result.document["published"]
    assert {row["speed_up"] for row in published} >= {pair[0] for pair in ON_CHIP.values()}
    assert all(row["measured"] is None and row["reason"] for row in published)
    assert any("holds 1,024" in row["reason"] for row in published)
    missing = hspec("bench", "--suite", "triforce-paper", "--offline", "--draft-model", "none")
    assert missing.code == 3
    assert "not run here" in missing.text
    assert "2.31×" in missing.text


def test_compare_reads_two_files(hspec: Hspec, tiny: Path, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("old.json", "new.json")]
    for path in paths:
        path.write_bytes(
            answered(hspec("bench", "-m", tiny, *SMALL, "--methods", "autoregressive", "--trials", 3, "--json")).out
        )
    result = answered(hspec("bench", "--compare", *paths))
    assert "within the noise" in result.text
    assert len(answered(hspec("bench", "--compare", *paths, "--json")).document["changes"]) == 2


REFUSED = {
    "two formats": (("--json", "--csv"), "--json"),
    "unknown method": (("--methods", "triforce,warp"), "warp"),
    "no context": (("--contexts", ","), "--contexts"),
    "a bad level": (("--levels", "warp > target(full)"), "column 1"),
    "suite and contexts": (("--suite", "triforce-paper", "--contexts", "9"), "--suite"),
    "too long a context": (("-c", "1020", "-n", "16"), "1,024"),
    "no such folder": (("--report", "/nowhere/at/all.html"), "folder"),
    "no such text": (("--prompt-file", "/nowhere.txt", "-c", "100"), "nowhere.txt"),
}


@pytest.mark.parametrize(("words", "told"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_meant(hspec: Hspec, tiny: Path, words: tuple[str, ...], told: str) -> None:
    refused(hspec("bench", "-m", tiny, "--offline", *words), 2, told)


def test_too_short_a_text(hspec: Hspec, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("a few words")
    refused(hspec("bench", "-m", tiny, *SMALL, "--prompt-file", path), 2, "the text has", "--prompt-file")


def test_without_matplotlib_nothing_is_measured(hspec: Hspec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    refused(hspec("bench", "--report", "x.html"), 1, "matplotlib", "hspec[report]")


def test_the_time_left_is_shown_on_a_terminal(tiny: Path, tmp_path: Path) -> None:
    """Through a pty: a bar with the method and the time left, erased at the end, the cursor visible again."""
    main, side = pty.openpty()
    command = program("bench", "-m", tiny, *SMALL, "--contexts", "512", "-n", 100)
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=side,
        env=environment(tmp_path, TERM="xterm-256color", COLUMNS="80", XDG_CONFIG_HOME=os.environ["XDG_CONFIG_HOME"]),
    ) as process:
        os.close(side)
        seen = b""
        while True:
            try:
                piece = os.read(main, 4096)
            except OSError:
                break
            if not piece:
                break
            seen += piece
        assert process.stdout is not None
        out = process.stdout.read().decode()
    os.close(main)
    assert process.returncode == 0, seen
    text = seen.decode("utf-8", "replace")
    assert re.search(r"triforce, 512 tokens, T 0.*about \d+.* left", text)
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")
    assert not ESCAPES.search(out)
    assert "512 tokens of prompt" in out


def test_sampling_is_the_papers(hspec: Hspec, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[Sampling] = set()
    begin = Engine._begin

    def noted(self: Engine, requests: Any) -> None:
        seen.update(request.sampling for request in requests)
        begin(self, requests)

    monkeypatch.setattr(Engine, "_begin", noted)
    answered(hspec("bench", "-m", tiny, *SMALL, "--methods", "autoregressive", "--temps", "0,0.6", "--seed", 3))
    assert {(one.temperature, one.top_p) for one in seen} == {(0.0, 1.0), (0.6, 0.9)}
    assert {one.seed for one in seen} == {3}
