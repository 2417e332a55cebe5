"""The benchmark of two GPUs, rehearsed by two processes on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
from case_tools import ROOT, environment


@pytest.mark.long
def test_every_section_is_measured(tmp_path: Path) -> None:
    model = tiny_models.model(tmp_path / "model", max_position_embeddings=4096)
    words = "--shape none --device cpu --dtype float32 --profile 2x-rtx-4090 --context 600 --short 100"
    argv = [sys.executable, str(ROOT / "benchmarks/two_gpus.py"), "--target", str(model), *words.split()]
    sizes = ["--new", "16", "--plain", "8", "--prompts", "2"]
    run = subprocess.run([*argv, *sizes], capture_output=True, env=environment(tmp_path), timeout=300, check=False)
    assert run.returncode == 0, run.stderr.decode()
    found = json.loads(run.stdout.splitlines()[-1])
    assert {"link alone, GB/s", "at once"} <= found["ceiling"][0].keys()
    assert all(row["equal tokens"] == 16 for row in found["resident"])
    assert [row["what"] for row in found["offload"]][-1] == "method over plain, all GPUs"
    assert found["identity"] == [{"texts": 4, "the same": 4, "tokens": 16, "agreeing tokens": [16] * 4}]
    for row in found["killed"]:
        assert (row["exit code"], row["messages"], row["orphans"]) == (1, 1, 0), row
        assert row["seconds"] < 8
