"""Text and training on a real GPU: captured steps, products in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_engine
import torch
from torch import Tensor

from hspec_decoding.chimera.config import ChimeraConfig
from hspec_decoding.model import Decoder
from hspec_decoding.training.corpus import Corpus
from hspec_decoding.training.sampler import Sampler
from hspec_decoding.training.session import depths, streaming
from hspec_decoding.training.target import SmallTarget, checksum
from hspec_decoding.training.texts import Prompt, Turns
from hspec_decoding.training.trainer import Course, Recipe, Trainer

pytestmark = pytest.mark.gpu
SIZE, ROWS, LENGTH = 320, 600, 300  # more rows than the kernels of few rows take; more tokens than one graph's
TURNS = Turns((2,), (2, 3), (5, 6), (7,), frozenset({8, 9}), frozenset({9}))


class Quiet:
    """Listens."""

    def stepped(self, course: Course, recipe: Recipe) -> None:
        """Nothing to say."""

    def measured(self, course: Course) -> None:
        """Nothing to say."""


@pytest.fixture(params=[Decoder, SmallTarget])
def target(request: pytest.FixtureRequest) -> Decoder:
    shape = tiny_engine.config()
    made = tiny_engine.weights(shape)
    found: Decoder = request.param(
        shape, made.__getitem__, dtype=torch.bfloat16, device=torch.device("cuda"), context=512
    )
    return found


def prompts() -> list[Prompt]:
    return [Prompt((2, 3, n % SIZE), (0.0, 0.7, 1.0)[n % 3], n % 2 == 0) for n in range(ROWS)]


def sampled(sampler: Sampler, seed: int) -> tuple[Tensor, Tensor]:
    steps: Iterator[int] = sampler.shard(prompts(), seed)
    assert [*steps][-1] == LENGTH - 1
    return sampler.result()


def test_captured_steps_are_the_steps(target: Decoder) -> None:
    """Replayed graphs write the same rows as steps that are launched one by one, for shard after shard."""
    captured, launched = (Sampler(target, TURNS, ROWS, LENGTH) for _ in range(2))
    launched._step = torch.inference_mode()(launched._advance)  # type: ignore[method-assign]
    for seed in (0, 1):
        pairs = zip(sampled(captured, seed), sampled(launched, seed), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    assert len(captured.graphs) == 3
    assert not torch.equal(sampled(captured, 0)[0], sampled(captured, 1)[0])


@pytest.mark.parametrize("kind", ["chimera", "draft"])
def test_training_learns_and_leaves_the_target_alone(target: Decoder, tmp_path: Path, kind: str) -> None:
    corpus = Corpus(*sampled(Sampler(target, TURNS, ROWS, LENGTH), 0), seed=0)
    before = checksum(target)
    config = ChimeraConfig.for_target(target.config, vocabulary=300)
    made = depths(target, corpus, config, TURNS.control, 0) if kind == "chimera" else streaming(target, 2, 0)
    course = Trainer(made, target, corpus, Recipe(150, 16, 2, 3e-3, 0), tmp_path).run(Quiet())
    first, last = course.measured[0], course.measured[-1]
    assert last.loss[0] < first.loss[0] - 0.3
    assert last.chain > first.chain
    assert checksum(target) == before
    assert {parameter.dtype for parameter in made.parameters()} == {torch.float32}
    again = Trainer(made, target, corpus, Recipe(150, 16, 2, 3e-3, 0), tmp_path)
    assert again.done
