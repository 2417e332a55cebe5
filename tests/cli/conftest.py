"""Fixtures of the command-line cases."""

from __future__ import annotations

import sys
from pathlib import Path

import case_models
import pytest
import tiny_models
import torch
from case_tools import Hspec, Result, Stdin


@pytest.fixture
def hspec(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> Hspec:
    """`hspec(*argv, stdin=b"", terminal=False) -> Result`: the command in this process, with its own cache."""
    from hspec_cli.main import main

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    torch.set_num_threads(1)  # tiny models gain nothing from more, and lose much where the cores are shared

    def run(*argv: str | Path | float, stdin: bytes = b"", terminal: bool = False) -> Result:
        monkeypatch.setattr(sys, "stdin", Stdin(stdin, terminal))
        capfdbinary.readouterr()
        code = main([str(word) for word in argv])
        out, err = capfdbinary.readouterr()
        return Result(code, out, err.decode("utf-8"))

    return run


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Addresses that the code under test tried to reach; every attempt fails."""
    import socket

    tried: list[object] = []

    def refuse(_socket: object, address: object) -> None:
        tried.append(address)
        raise OSError(101, "Network is unreachable")

    def unresolved(host: object, *_: object, **__: object) -> None:
        tried.append(host)
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    return tried


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A random tiny model in one file, free to be damaged."""
    return tiny_models.model(tmp_path / "model")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A random tiny model in several files with an index, free to be damaged."""
    return tiny_models.model(tmp_path / "model", shards=True)


@pytest.fixture(scope="session")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The target and its drafts by name: the same model, other random weights, ones that are always wrong."""
    root = tmp_path_factory.mktemp("models")
    return {
        "target": case_models.endless_model(root / "target", seed=1, max_position_embeddings=1024),
        "same": case_models.endless_model(root / "same", seed=1, max_position_embeddings=1024),
        "random": case_models.endless_model(root / "random", seed=2, head_dim=8),
        "short": case_models.endless_model(root / "short", seed=1, max_position_embeddings=64),
        "stuck": case_models.chain_model(root / "stuck", {}),
        "ending": case_models.chain_model(root / "ending", {}, otherwise=1),
    }
