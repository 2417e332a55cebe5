"""The loop: it learns, it is the same for the same seed, and a kill costs nothing but time."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import tiny_engine
import torch

from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.chimera import files
from hspec_decoding.chimera.config import ChimeraConfig
from hspec_decoding.model import Decoder
from hspec_decoding.training.corpus import Batch, Corpus
from hspec_decoding.training.depths import Depths
from hspec_decoding.training.sampler import Sampler
from hspec_decoding.training.session import depths, streaming
from hspec_decoding.training.target import checksum, said
from hspec_decoding.training.texts import Prompt, Turns
from hspec_decoding.training.trainer import LEAST, Course, Recipe, Trainer, schedule
from hspec_profiles.errors import HspecError

TURNS = Turns((2,), (2,), (), (2,), frozenset(), frozenset())


SIZE = 48  # of the vocabulary


@cache
def target() -> Decoder:
    """A target whose next token depends on the last one above all, so that a short training tells."""
    shape = tiny_engine.config(num_hidden_layers=2, vocab_size=SIZE)
    made = tiny_engine.weights(shape)
    scales = {"o_proj": 0.4, "down_proj": 0.4, "embed": 4.0}
    return tiny_engine.decoder(
        shape, {n: t * next((scale for part, scale in scales.items() if part in n), 1.0) for n, t in made.items()}
    )


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """160 rows that the target said, of which four are held out."""
    sampler = Sampler(target(), TURNS, 160, 40)
    temperatures = (0.0, 0.5)
    assert [*sampler.shard([Prompt((2, n % SIZE), temperatures[n % 2], True) for n in range(160)], 0)]
    return Corpus(*sampler.result(), seed=0)


class Quiet:
    """Listens, and interrupts after so many steps."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop = stop

    def stepped(self, course: Course, recipe: Recipe) -> None:  # noqa: ARG002
        if course.step == self.stop:
            raise KeyboardInterrupt

    def measured(self, course: Course) -> None:
        """Nothing to say."""


def heads(corpus: Corpus) -> Depths:
    config = ChimeraConfig.for_target(target().config, depths=3, vocabulary=40, rank=8)
    return depths(target(), corpus, config, frozenset({2}), seed=0)


def recipe(steps: int, **changes: object) -> Recipe:
    return Recipe(**{"steps": steps, "rows": 8, "parts": 1, "rate": 3e-3, "seed": 0, **changes})  # type: ignore[arg-type]


def test_training_lowers_the_held_out_loss_and_agrees_far_above_chance(corpus: Corpus, tmp_path: Path) -> None:
    before = checksum(target())
    course = Trainer(heads(corpus), target(), corpus, recipe(50, rate=1e-2), tmp_path).run(Quiet())
    first, last = course.measured[0], course.measured[-1]
    assert len(course.losses) == course.step == last.step == 50
    for depth in range(3):
        assert last.loss[depth] < first.loss[depth] - 1
        assert last.agreement[depth] > 10 / SIZE
    assert last.chain > first.chain + 0.2
    assert 4 >= last.tree > last.chain
    assert checksum(target()) == before


def trained(corpus: Corpus, directory: Path, *stops: int | None, **changes: object) -> dict[str, torch.Tensor]:
    """The weights after a training that was interrupted and begun again at each of the stops."""
    for stop in stops:
        made = heads(corpus)
        trainer = Trainer(made, target(), corpus, recipe(6, **changes), directory)
        if stop is None:
            trainer.run(Quiet())
            assert trainer.done
        else:
            with pytest.raises(KeyboardInterrupt):
                trainer.run(Quiet(stop))
    return {name: tensor.clone() for name, tensor in made.state_dict().items()}


@pytest.mark.parametrize("parts", [1, 2])
def test_an_interrupted_training_comes_to_the_same_weights(corpus: Corpus, tmp_path: Path, parts: int) -> None:
    whole = trained(corpus, tmp_path / "whole", None, parts=parts, rows=4)
    cut = trained(corpus, tmp_path / "cut", 2, 5, None, parts=parts, rows=4)
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    fresh = heads(corpus).state_dict()
    assert not torch.equal(whole["heads.down.weight"], fresh["heads.down.weight"])
    known = json.loads((tmp_path / "cut" / "training.json").read_text())
    assert known["course"]["step"] == 6
    assert [path.name for path in (tmp_path / "cut").glob("state-*")] == ["state-6"]


def test_a_kill_between_two_states_goes_on_from_the_last(corpus: Corpus, tmp_path: Path) -> None:
    """Steps after the last state are lost, and taken again."""
    whole = trained(corpus, tmp_path / "whole", None)
    trained(corpus, tmp_path / "cut", 3)
    (tmp_path / "cut" / "state-5").mkdir()  # a state that was being written
    (tmp_path / "cut" / "training.json.part").write_text("{")
    again = trained(corpus, tmp_path / "cut", None, save=0.0)  # a state after every step or so
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_halves_of_a_step_add_up_to_it(corpus: Corpus, tmp_path: Path) -> None:
    losses = []
    for rows, parts in ((8, 1), (4, 2)):
        made = Trainer(heads(corpus), target(), corpus, recipe(1, rows=rows, parts=parts), tmp_path / str(parts))
        losses += made.run(Quiet()).losses
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_another_recipe_does_not_take_up_a_training(corpus: Corpus, tmp_path: Path) -> None:
    trained(corpus, tmp_path, 1)
    with pytest.raises(HspecError, match="begun with another rate and seed"):
        Trainer(heads(corpus), target(), corpus, recipe(6, rate=1.0, seed=3), tmp_path)


def test_minutes_end_a_training(corpus: Corpus, tmp_path: Path) -> None:
    made = Trainer(heads(corpus), target(), corpus, recipe(10_000, seconds=1.0), tmp_path)
    course = made.run(Quiet())
    assert 0 < course.step < 10_000
    assert course.seconds >= 1.0
    assert course.measured[-1].step == course.step


def test_the_rate_rises_and_falls() -> None:
    shares = [n / 100 for n in range(101)]
    rates = [schedule(share) for share in shares]
    top = rates.index(max(rates))
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert 0 < rates[0] < 0.05
    assert rates[-1] == pytest.approx(LEAST)
    assert max(rates) == pytest.approx(1, abs=0.01)


def test_a_broken_loss_stops_the_training(corpus: Corpus, tmp_path: Path) -> None:
    made = heads(corpus)
    made.heads.down.weight.data[:] = float("nan")
    with pytest.raises(HspecError, match="the loss of step 0 is no number"):
        Trainer(made, target(), corpus, recipe(3), tmp_path).run(Quiet())


@pytest.mark.parametrize("tied", [False, True])
def test_a_streaming_draft_learns_and_shares_its_targets_tensors(tied: bool, tmp_path: Path) -> None:
    """The draft's files hold only its layers; with the target's tensors it is a model like any other."""
    import tiny_models

    place = tiny_models.model(tmp_path / "target", tie_word_embeddings=tied, tokenizer=False, vocab_size=SIZE)
    lender = Checkpoint.open(place)
    shape = lender.config
    target = tiny_engine.decoder(shape, {name: lender.tensor(name) for name in shape.tensors()}, context=128)
    sampler = Sampler(target, TURNS, 100, 40)
    assert [*sampler.shard([Prompt((2, n % SIZE), 0.7, True) for n in range(100)], 0)]
    text = Corpus(*sampler.result(), seed=0)
    made = streaming(target, 1, seed=0)
    course = Trainer(made, target, text, recipe(40, rate=1e-2), tmp_path / "work").run(Quiet())
    assert course.measured[-1].loss[0] < course.measured[0].loss[0] - 0.5
    assert course.measured[-1].agreement[0] > 3 / SIZE
    assert course.measured[-1].chain > course.measured[0].chain
    made.save(tmp_path / "draft", place)
    alone = Checkpoint.open(tmp_path / "draft")
    with pytest.raises(HspecError, match="lacks"):
        alone.preflight()
    borrowed = alone.lent(lender)
    borrowed.preflight()
    draft = tiny_engine.decoder(borrowed.config, {n: borrowed.tensor(n).float() for n in borrowed.config.tensors()})
    assert torch.equal(draft.embedding, target.embedding)
    tokens = text.tokens[:1].long()
    hidden = made.trunk(inputs_embeds=target.embed(tokens)).last_hidden_state
    ours = tiny_engine.scores(draft, tokens[0].tolist(), [])
    theirs = torch.nn.functional.linear(hidden, made.head)[0]
    torch.testing.assert_close(ours, theirs.detach(), rtol=0.05, atol=0.1)
    engine = tiny_engine.engine("draft(streaming:64) > target(full)", target, draft, context=120)
    request = tiny_engine.Request(tuple(tokens[0, :4].tolist()), 30)
    plain = tiny_engine.answer(tiny_engine.engine("target(full)", target, context=120), request)
    assert tiny_engine.answer(engine, request) == plain


def test_heads_that_were_trained_come_back(corpus: Corpus, tmp_path: Path) -> None:
    made = heads(corpus)
    files.save(tmp_path, made.heads)
    again = files.load(tmp_path, target())
    assert 2 in again.vocabulary.tolist()
    assert torch.equal(again.vocabulary, made.heads.vocabulary)


def test_a_streaming_draft_of_a_target_in_16_bits() -> None:
    """Its own weights stay in float32, with and without products in 16 bits."""
    shape = tiny_engine.config(vocab_size=SIZE)
    small = tiny_engine.decoder(shape, tiny_engine.weights(shape), torch.bfloat16)
    made, tokens = streaming(small, 1, seed=0), torch.randint(SIZE, (2, 20))
    batch = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool))
    heard = said(small, tokens, made.entering)
    whole = made(batch, heard, 0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = made(batch, heard, 0)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(whole.detach()), rel=0.02)
    assert {parameter.grad.dtype for parameter in made.parameters()} == {torch.float32}
    assert float(made.figures(batch, heard).loss) > 0
