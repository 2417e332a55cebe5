"""What the command-line cases share: `hspec` run in this process or another, and the judging of what it gave."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

ROOT = Path(__file__).resolve().parent.parent
PROMPT = b"def area(width, height):\n    return width * height\n\n\ndef area(width, depth):\n    return width"
LONG_PROMPT = PROMPT * 8  # some 660 tokens
SAMPLED = ("--temp", 0.8, "--top-p", 0.9)
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 2590000000\n"
METHODS = ("autoregressive", "triforce")
ESCAPES = re.compile(r"[\x1b\r\u2500-\u259f\u2800-\u28ff]")  # escape codes, box drawing, blocks, spinners


@dataclass(frozen=True)
class Result:
    """What one command gave: exit code, stdout as bytes, stderr as text."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        """The answer as a pipe receives it, without the one line end after it."""
        return self.out.decode("utf-8").removesuffix("\n")

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document of a run with `--json`."""
        document = json.loads(self.out)
        assert isinstance(document, dict)
        return document


class Stdin(io.TextIOWrapper):
    """Standard input over bytes, or a terminal on which nobody has typed."""

    def __init__(self, data: bytes, terminal: bool) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


Hspec = Callable[..., Result]


def program(*argv: str | Path | float) -> list[str]:
    """The command as another process runs it."""
    return [sys.executable, "-c", "from hspec_cli.main import entry; entry()", *map(str, argv)]


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """Environment of another process: our source roots, no GPU, no network, a cache of its own."""
    roots = [ROOT / name for name in (".", "decoding", "offload", "kernels", "profiles")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, roots)),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def answered(result: Result) -> Result:
    """The same result, which must be a success without a traceback."""
    assert result.code == 0, result.err
    assert "Traceback" not in result.err
    return result


def refused(result: Result, code: int | Iterable[int], *words: str) -> None:
    """Exit code, nothing on stdout, one `error:` sentence and these words (any case) on stderr, no traceback."""
    codes = {code} if isinstance(code, int) else set(code)
    assert result.code in codes, f"exit {result.code}: {result.err}"
    assert result.out == b""
    assert "Traceback" not in result.err, result.err
    sentences = [line for line in result.err.splitlines() if line.startswith("error:")]
    assert len(sentences) == 1, result.err
    missing = [word for word in words if word.casefold() not in result.err.casefold()]
    assert not missing, f"{missing} not in: {result.err}"


@contextmanager
def pretending(monkeypatch: pytest.MonkeyPatch, beyond: int = 600, width: int | None = None) -> Iterator[None]:
    """A pretend computer on which only reading many keys takes time.

    Attention over more than `beyond` keys, of heads `width` wide if given, costs a millisecond of its clock, all
    else nothing. So speculation pays, however slow drafts are on the real computer, and a run does what it does
    because of its input, not because of the load.
    """
    now, attention = [0.0], functional.scaled_dot_product_attention

    def attend(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        costs = key.shape[-2] > beyond and key.shape[-1] == (width or key.shape[-1])
        now[0] += 1e-3 if costs else 1e-9
        return attention(query, key, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(functional, "scaled_dot_product_attention", attend)
        patched.setattr(time, "perf_counter", lambda: now[0])
        yield
    assert now[0] > 1e-3, "the pretend computer saw no attention over many keys"


def speculated(answer: dict[str, Any], proposals: int = 20) -> None:
    """Speculation must have been at work in this answer, not plain decoding in its place."""
    *drafting, target = answer["levels"]
    assert target["name"] == "target(full)"
    assert max(level["proposed"] for level in drafting) >= proposals, answer["levels"]


def document(hspec: Hspec, model: str | Path, *more: str | Path | float, stdin: bytes = PROMPT) -> dict[str, Any]:
    """The JSON document of one raw run that works."""
    return answered(hspec("run", "-m", model, "--raw", "--json", *more, stdin=stdin)).document


def short_run(hspec: Hspec, model: str | Path, *more: str | Path | float) -> Result:
    """A raw run of six tokens on the prompt `hello`, offline."""
    return hspec("run", "-m", model, "--raw", "-n", 6, "--offline", *more, "hello")


def shards(model: Path) -> list[Path]:
    """Weight files of a sharded model, in order."""
    found = sorted(model.glob("model-*.safetensors"))
    assert len(found) >= 3
    return found
