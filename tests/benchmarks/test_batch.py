"""The benchmark of batches, rehearsed with a tiny model: what it prints, and when it tells no speed."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny_models
from case_tools import ROOT


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = importlib.import_module("batch")
    monkeypatch.setattr(module, "sources", lambda: "the fox and the hen " * 40)
    return module


def printed(batch: ModuleType, model: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, list[dict[str, Any]]]:
    numbers = ("--prompts", 2, "--tokens", 60, "--sequences", 3, "--short", 20, "--new", 9, "--trials", 2)
    words = ("--target", model, "--shape", "none", "--device", "cpu", "--dtype", "float32", "--methods", "triforce")
    batch.main(list(map(str, (*words, *numbers))))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("ceiling: copies at")
    found = json.loads(lines[-1])
    assert isinstance(found, dict)
    return found


def test_figures(batch: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(batch, tiny_models.model(tmp_path / "model"), capsys)
    assert list(found["prompts"][0]) == ["batch", "bytes of a plain pass, ms"]
    for row in (found["prompts"][1], found["turns"][0]):
        assert row["speed-up"] == pytest.approx(row["plain"] / row["ms a token"])
        assert row["stack"].endswith("target(full)")
    floor, row = found["plain"]
    assert row["share of bytes / bandwidth"] == pytest.approx(floor["bytes of a pass, ms"] / row["ms a pass"])


def test_no_speed_of_another_text(
    batch: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = batch.Bench.run

    def wrong(self: Any, method: str, *args: Any) -> Any:
        ran = run(self, method, *args)
        if method == "triforce":
            ran.texts[1][-1] += 1
        return ran

    monkeypatch.setattr(batch.Bench, "run", wrong)
    found = printed(batch, tiny_models.model(tmp_path / "model"), capsys)
    for row in (found["prompts"][1], found["turns"][0]):
        assert list(row) == ["batch", "method", "DIFFERS"]
