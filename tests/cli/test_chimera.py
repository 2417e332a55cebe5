"""`hspec run --method chimera`."""

from __future__ import annotations

from pathlib import Path

import case_tools as cases
import pytest
import torch
from case_tools import Hspec, document, refused

from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.chimera.config import ChimeraConfig
from hspec_decoding.chimera.files import made, save
from hspec_decoding.load import load_decoder


@pytest.fixture(scope="module")
def heads(drafts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads for the target that were not trained."""
    checkpoint = Checkpoint.open(drafts["target"])
    target = load_decoder(checkpoint, torch.float32, torch.device("cpu"), context=64, vocabulary=None)
    config = ChimeraConfig.for_target(checkpoint.config, vocabulary=64)
    directory = tmp_path_factory.mktemp("heads")
    save(directory, made(config, torch.arange(config.vocabulary), target))
    return directory


@pytest.mark.parametrize("sampling", [("--temp", 0), cases.SAMPLED])
def test_same_text(hspec: Hspec, drafts: dict[str, Path], heads: Path, sampling: tuple[str | float, ...]) -> None:
    """Trees, chains, and a level in between say what plain decoding says; the document tells of every level."""
    run = [drafts["target"], "-n", 40, "--seed", 5, "--dtype", "float32", *sampling]
    plain = document(hspec, *run, "--method", "autoregressive", stdin=cases.LONG_PROMPT)
    for more in (
        ["--method", "chimera"],
        ["--method", "chimera", "--tree", 12],
        ["--method", "chimera", "--tree", "off"],
        ["--method", "chimera", "--rule", "coupled", "--no-exact"],
        ["--levels", "chimera > target(retrieval:64) > target(full)"],
    ):
        got = document(hspec, *run, "--heads", heads, *more, stdin=cases.LONG_PROMPT)
        assert got["tokens"] == plain["tokens"]
        assert got["levels"][0]["name"] == "chimera"


def test_no_heads(hspec: Hspec, drafts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 1, and the command that makes some, before a weight is read."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    run = ["run", "-m", drafts["target"], "--method", "chimera", "hello"]
    refused(hspec(*run), (1,), "no draft model", f"hspec train chimera -m {drafts['target']}")
    refused(hspec(*run, "--heads", tmp_path), (1,), str(tmp_path), "hspec train chimera")
