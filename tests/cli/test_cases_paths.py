"""Paths, the Hugging Face cache and being offline: section F of the cases that users of other tools hit."""

from __future__ import annotations

from pathlib import Path

import case_tools as cases
import pytest
import tiny_models
from case_models import speaker
from case_tools import Hspec, answered, refused, short_run


@pytest.mark.parametrize("name", ["./nodir", "~/nodir", "{tmp}/nodir", "{tmp}/nodir/", "../nodir/x/y"])
def test_F12_no_such_directory(
    hspec: Hspec, tmp_path: Path, no_network: list[object], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A path that does not exist is called that, without a lecture on repository ids or a connection."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    result = hspec("run", "-m", name.format(tmp=tmp_path), "--raw", "hello")
    refused(result, (1, 2), "nodir", "no such")
    assert "alphanumeric" not in result.err
    assert not no_network


def test_F12_trailing_slash_and_home(hspec: Hspec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory is found with a trailing slash, below `~` and from `.`."""
    speaker(tmp_path / "model", "o", "abc", then=1)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "model")
    for name in (f"{tmp_path}/model/", "~/model", "."):
        assert answered(short_run(hspec, name)).text == "abc"


def test_F12_file_in_place_of_a_directory(hspec: Hspec, tmp_path: Path, no_network: list[object]) -> None:
    """A file that is no model is refused as such."""
    (tmp_path / "notes.txt").write_text("not a model")
    refused(hspec("run", "-m", tmp_path / "notes.txt", "--raw", "hello"), (1, 2), "notes.txt")
    assert not no_network


def test_F12_directory_without_a_config(hspec: Hspec, model: Path, no_network: list[object]) -> None:
    """A directory without config.json is refused with that name."""
    (model / "config.json").unlink()
    refused(hspec("run", "-m", model, "--raw", "hello"), (1, 2), "config.json", str(model))
    assert not no_network


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"model_type": "llama"}'])
def test_F12_config_that_is_none(hspec: Hspec, model: Path, content: str) -> None:
    """A config.json that is no JSON object, or lacks the numbers of a model, is refused by name."""
    (model / "config.json").write_text(content)
    refused(short_run(hspec, model), 1, "config.json")


@pytest.mark.parametrize("missing", ["tokenizer.json", "all"])
def test_F12_directory_without_a_tokenizer(hspec: Hspec, model: Path, missing: str) -> None:
    """A directory without tokenizer files is refused with the names that are looked for."""
    for path in model.glob("tokenizer*" if missing == "all" else missing):
        path.unlink()
    refused(short_run(hspec, model), 1, "tokenizer.json")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache."""
    from huggingface_hub import constants

    root = tmp_path / "hf"
    (root / "hub").mkdir(parents=True)
    monkeypatch.setenv("HF_HOME", str(root))
    monkeypatch.setenv("HF_HUB_CACHE", str(root / "hub"))
    monkeypatch.setattr(constants, "HF_HOME", str(root))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root / "hub"))
    return root / "hub"


@pytest.mark.parametrize("way", ["flag", "variable"])
def test_F11_offline_with_a_warm_cache(
    hspec: Hspec,
    tmp_path: Path,
    hub: Path,
    no_network: list[object],
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    """Offline, a cached repository runs without one attempt to connect."""
    tiny_models.hub_tree(hub, speaker(tmp_path / "model", "o", "abc", then=1), "someone/tiny")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1" if way == "variable" else "0")
    more = ["--offline"] if way == "flag" else []
    assert answered(hspec("run", "-m", "someone/tiny", "--raw", *more, "hello")).text == "abc"
    assert not no_network


@pytest.mark.parametrize("way", ["flag", "variable"])
def test_F11_offline_with_a_cold_cache(
    hspec: Hspec, hub: Path, no_network: list[object], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Offline, a repository that is not cached is refused with what forbids the download and where it was sought."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1" if way == "variable" else "0")
    more = ["--offline"] if way == "flag" else []
    result = hspec("run", "-m", "someone/tiny", "--raw", *more, "hello")
    refused(result, 1, "someone/tiny", str(hub), "--offline" if way == "flag" else "HF_HUB_OFFLINE")
    assert not no_network


def test_F9_cached_snapshot_that_lacks_a_shard(hspec: Hspec, hub: Path, sharded: Path) -> None:
    """A snapshot whose index names a file that was never finished is refused with that file."""
    gone = cases.shards(sharded)[1].name
    (tiny_models.hub_tree(hub, sharded, "someone/tiny") / gone).unlink()
    refused(short_run(hspec, "someone/tiny"), 1, gone)


def test_F10_download_that_never_ended(hspec: Hspec, hub: Path, model: Path, no_network: list[object]) -> None:
    """Offline, a repository whose weights were left half downloaded is refused with the size of what is left."""
    snapshot = tiny_models.hub_tree(hub, model, "someone/tiny")
    weights = (snapshot / "model.safetensors").resolve()
    (snapshot / "model.safetensors").unlink()
    weights.rename(weights.with_suffix(".incomplete"))
    size = weights.with_suffix(".incomplete").stat().st_size
    refused(short_run(hspec, "someone/tiny"), 1, "someone/tiny", "weights", f"{size / 1000:.0f} kB")
    assert not no_network
