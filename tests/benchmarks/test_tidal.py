"""The benchmarks of TidalDecode run anywhere: here on a tiny model, whose figures mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import case_models
import pytest

pytestmark = pytest.mark.long  # programs of their own, each of which imports everything anew

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    return case_models.endless_model(root / "deep", num_hidden_layers=6, max_position_embeddings=1024)


def results(script: str, *words: str | Path) -> dict[str, Any]:
    """What a benchmark printed last."""
    paths = [str(ROOT / part) for part in ("", "decoding", "offload", "kernels", "profiles")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HSPEC_TUNE": "0"}
    run = [sys.executable, str(ROOT / "benchmarks" / script), *map(str, words), "--device", "cpu"]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return made


def test_speed(model: Path) -> None:
    sizes = ("--tokens", 400, "--long", 300, "--new", 12, "--budgets", "64,128", "--trials", 1, "--full", "0,1,3")
    made = results("tidal.py", "--target", model, *map(str, sizes))
    assert made["full"] == [0, 1, 3]
    dense, *sparse = made["attention"]
    assert dense["ms"] > 0
    assert [round(row["bytes allow"], 2) for row in sparse] == [1.72, 1.52]
    assert all("APPROXIMATE" in row["decode"] for row in made["decode"][1:])
    assert len(made["lossless"]) == 9
    assert all("DIFFERS" not in row and row["times dense"] > 0 for row in made["lossless"][1:])


def test_quality(model: Path, tmp_path: Path) -> None:
    prose = tmp_path / "prose.txt"
    prose.write_text("It was the best of times, it was the worst of times. " * 60)
    sizes = ("--lengths", "400", "--depths", "0.3,0.8", "--cases", "1", "--budgets", "64,500", "--steps", "8")
    made = results("tidal_quality.py", "--model", model, "--prose", prose, *sizes, "--windows", "2")
    row, whole = made["needles"]
    assert row["dense"].endswith("of 4")
    assert "TOO FEW" in whole
    assert all("APPROXIMATE" in row for row in made["forced"])
    few, all_ = (next(r for r in made["forced"] if r["APPROXIMATE"] == f"tidal:{n}") for n in (64, 500))
    assert few["KL"] > all_["KL"] == pytest.approx(0, abs=1e-5)
    assert few["tokens"] == all_["tokens"] == 16
