"""The repository behind `llama2-7b-128k`, in small: what the first command of a user has to cope with."""

from __future__ import annotations

from pathlib import Path

import tiny_models
from case_tools import Hspec, answered

DOCUMENT = b"A report about nothing in particular, as long as a prompt may be here. " * 6


def test_it_runs_as_it_is(hspec: Hspec, tmp_path: Path) -> None:
    """Sharded `.bin`, `tokenizer.model`, `auto_map`, yarn: triforce gives plain decoding's text; no code of it runs."""
    model = tiny_models.yarn_llama(tmp_path / "model")
    plain, triforce = (
        answered(hspec("run", "-m", model, "--method", method, "--json", "-n", 40, stdin=DOCUMENT)).document
        for method in ("autoregressive", "triforce")
    )
    assert len(plain["tokens"]) > 0
    assert triforce["tokens"] == plain["tokens"]
    assert not (model / tiny_models.MARKER).exists()
    assert any("auto_map" in note for note in triforce["notes"])
