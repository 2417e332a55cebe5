"""Captured passes: what is replayed with other inputs says what is computed anew. Without a GPU a graph is imitated
by a function that is called again and writes to the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import tiny_engine
import torch
from tiny_engine import CPU, answers, random_decoder

from hspec_decoding import graphs
from hspec_decoding.engine import Engine
from hspec_decoding.graphs import Graph, Graphs, Results
from hspec_decoding.options import Request
from hspec_decoding.sampling import Sampling
from hspec_decoding.tuner import Plan, Tuner


@dataclass
class Again:
    """A graph that runs its function again."""

    run: Callable[[], Results]
    results: Results

    @torch.inference_mode()
    def replay(self) -> None:
        again = self.run()
        self.results.logits.copy_(again.logits)
        self.results.chosen.copy_(again.chosen)
        for old, new in zip(self.results.recorded or [], again.recorded or [], strict=True):
            old[0].copy_(new[0])


def recorded(run: Callable[[], Results], device: torch.device) -> tuple[Graph, Results]:
    assert device == CPU
    with torch.inference_mode():
        results = run()
    return Again(run, results), results


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that capture their passes, on any device."""
    monkeypatch.setattr(graphs, "_recorded", recorded)
    begin = Engine.__init__

    def init(self: Engine, *args: Any) -> None:
        begin(self, *args)
        for decoder in (self.target, self.draft, *self.parts.quantized.values()):
            if decoder is not None:
                self.parts.graphs[id(decoder)] = Graphs(decoder)

    monkeypatch.setattr(Engine, "__init__", init)


STACKS = [
    "target(full)",
    "ngram > target(full)",
    "draft > target(full)",
    "target(streaming:64) > target(full)",
    "ngram > target(retrieval:64) > target(full)",
    "draft > target(retrieval:64, w=int4) > target(full)",
    "draft > target(w=int4) > target(full)",
    "ngram > target(kv=int4) > target(full)",
]


def requests(temperature: float, new: int = 60) -> list[Request]:
    sampling = Sampling(temperature, 0.9 if temperature else 1.0, seed=3)
    prompts = [tiny_engine.prompt(n, n) for n in (300, 1, 40)]
    return [Request(p, new + i, sampling=sampling, sequence=i) for i, p in enumerate(prompts)]


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths that change every round, plain rounds among them."""

    def plans() -> Iterator[tuple[int, int]]:
        while True:
            yield from ((0, 1), (9, 3), (1, 5), (2, 2), (2, 7), (1, 1))

    chosen = plans()

    def plan(self: Tuner) -> Plan:
        depth, width = next(chosen)
        levels = tuple(range(min(depth, len(self.sequential))))
        return Plan(levels, tuple(min(self.block, width + level) for level in levels))

    monkeypatch.setattr(Tuner, "plan", plan)


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("stack", STACKS)
def test_replays_say_what_passes_say(stack: str, temperature: float, request: pytest.FixtureRequest) -> None:
    """One text and three at once, two answers in a row, against plain decoding without graphs."""
    target, draft = random_decoder(), random_decoder(seed=1)
    asked = requests(temperature)
    plain = tiny_engine.engine("target(full)", target)
    wanted = [answers(plain, one)[0] for one in asked]
    request.getfixturevalue("graphed")
    run = tiny_engine.engine(stack, target, draft if "draft" in stack else None)
    assert answers(run, asked[0]) == wanted[:1]
    assert answers(run, *asked) == wanted
    assert any(made.captured for made in run.parts.graphs.values())
    sizes = {key[1] for made in run.parts.graphs.values() for key in made.captured}
    assert sizes == {3}, "a pass of part of a batch is one of the whole batch"
