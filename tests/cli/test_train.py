"""`hspec train` from the command line: what it makes, what it says, how it goes on and what it refuses."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from hspec_cli import interrupt
from hspec_cli.main import main
from hspec_cli.train import curve
from hspec_decoding.chimera import files
from hspec_decoding.training import cost

SMALL = ["--tokens", "600", "--length", "40", "--steps", "3", "--device", "cpu", "--dtype", "fp32", "--offline"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.model(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))


def ran(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["train", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def chimera(capsys: pytest.CaptureFixture[str], target: Path, *words: str) -> tuple[int, str, str]:
    return ran(capsys, "chimera", "-m", str(target), *SMALL, *words)


def test_heads_are_made_where_run_looks_for_them(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the hen then sat on the stone " * 20)
    code, out, err = chimera(capsys, target, "--text", str(text), "--json")
    assert code == 0
    made: dict[str, Any] = json.loads(out)
    place = Path(made["directory"])
    assert place.parent == files.directory()
    assert (place / files.WEIGHTS).stat().st_size > 2 * made["weights"]
    assert made["steps"] == made["after"]["step"] == 3
    assert made["text_tokens"] == 600
    assert made["use"] == f"hspec run -m {target} --method chimera"
    assert len(made["after"]["agreement"]) == 6
    assert "a draft of 0.1M weights; on cpu it takes about" in err
    assert "step 3: held-out loss" in err
    assert f"the target is unchanged (checksum {made['target_checksum']})" in err
    assert "\x1b" not in err


def test_the_same_seed_gives_the_same_heads(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        assert chimera(capsys, target, "--out", str(tmp_path / name), "--seed", seed, "-q")[::2] == (0, "")
        found.append((tmp_path / name / files.WEIGHTS).read_bytes())
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("looks", [20, 42])
def test_ctrl_c_saves_and_the_same_command_goes_on(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    """While text is made (the 20th look at the keyboard) and between two steps (the 42nd: 39 are tokens)."""
    out = ["--out", str(tmp_path / "whole")]
    assert chimera(capsys, target, *out)[0] == 0
    left = iter(range(looks - 1, -1, -1))

    def check() -> None:
        if not next(left, 1):
            raise KeyboardInterrupt

    monkeypatch.setattr(interrupt, "check", check)
    out = ["--out", str(tmp_path / "cut")]
    code, printed, err = chimera(capsys, target, *out)
    assert (code, printed) == (130, "")
    assert not (tmp_path / "cut" / files.WEIGHTS).exists()
    assert "the same command goes on from there" in err
    code, printed, err = chimera(capsys, target, *out)
    assert (code, printed) == (0, f"{tmp_path / 'cut'}\n")
    whole, cut = ((tmp_path / name / files.WEIGHTS).read_bytes() for name in ("whole", "cut"))
    assert whole == cut
    again = chimera(capsys, target, *out)
    assert again[0] == 0
    assert "after 3 steps" in again[2]


def test_a_draft_speaks_for_its_target(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    place = tmp_path / "draft"
    code, out, err = ran(capsys, "draft", "-m", str(target), *SMALL, "--out", str(place), "--layers", "1")
    assert (code, out) == (0, f"{place}\n")
    assert f"use it: hspec run -m {target} --draft-model {place} --method triforce" in err
    words = ["run", "the hen then", "-m", str(target), "-n", "20", "--device", "cpu", "--dtype", "fp32", "--offline"]
    assert main([*words, "--method", "autoregressive"]) == 0
    plain = capsys.readouterr().out
    assert main([*words, "--draft-model", str(place), "--levels", "draft(streaming:64) > target(full)", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["text"] == plain.removesuffix("\n")
    assert said["levels"][0]["proposed"] > 0


def test_four_bits_and_variants_train_too(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = chimera(capsys, target, "--target-bits", "4", "--out", str(tmp_path / "small"), "--json")
    medusa = chimera(capsys, target, "--variant", "medusa", "--out", str(tmp_path / "medusa"), "--json")
    assert (small[0], medusa[0]) == (0, 0)
    sums = [json.loads(out)["target_checksum"] for _, out, _ in (small, medusa)]
    assert sums[0] != sums[1]
    config = json.loads((tmp_path / "medusa" / files.CONFIG).read_text())
    assert (config["with_block"], config["with_tokens"], config["rank"]) == (False, False, 64)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["chimera", "--steps", "3", "--minutes", "1"], 2, "`--steps` and `--minutes` both say how long"),
        (["chimera", "--tokens", "0"], 2, "`--tokens` must be 1 or more, got 0"),
        (["chimera", "--variant", "bare"], 2, "`--variant` must be one of whole, no-trigram"),
        (["chimera", "--target-bits", "8"], 2, "`--target-bits` must be one of 16, 4"),
        (["chimera", "--length", "4096"], 2, "`--length` asks for 4,096 tokens"),
        (["chimera", "--text", "nothing.txt"], 1, "`--text nothing.txt` cannot be read: no such file"),
        (["draft", "--length", "64"], 2, "`hspec train draft` needs a place for the draft"),
        (["heads"], 2, "no such command 'heads'"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    target: Path, words: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["-m", str(target), "--device", "cpu"] if words[0] != "heads" else []
    found, out, err = ran(capsys, *words, *model)
    assert (found, out) == (code, "")
    assert says in err


def test_what_has_no_room_is_told_before_a_weight_is_read(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "usable_ram", lambda: 1_000_000)
    code, out, err = chimera(capsys, target)
    assert (code, out) == (3, "")
    assert "training needs" in err
    assert "`--target-bits 4` keeps the frozen target in NF4" in err


def test_text_of_other_settings_is_not_taken_up(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chimera(capsys, target, "--out", str(tmp_path))[0] == 0
    code, _, err = chimera(capsys, target, "--out", str(tmp_path), "--seed", "9")
    assert code == 1
    assert "holds text that was made with other settings: seed" in err
    code, _, err = chimera(capsys, target, "--out", str(tmp_path), "--variant", "medusa")
    assert code == 1
    assert "holds a training that was begun with another kind" in err


def test_a_curve_has_a_cell_for_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert curve([]) == ""
    assert curve([2.0]) == "▁"
    assert curve([float(n) for n in range(8)]) == "▁▂▃▄▅▆▇█"
    assert len(curve([1.0] * 1000)) == 40
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert curve([float(n) for n in range(8)]) == "_.-:=+*#"
