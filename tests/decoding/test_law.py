"""The law of what is said: exactly by enumeration, and by counting over whole stacks of three different models.

The published TriForce code must fail here: where its middle level rejects a drafted token it draws from its own law
instead of the residual, and still hands that law up as the one its token was drawn from.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import cast

import pytest
import tiny_engine
import torch
from exact import Branches, chi_square, distance, law, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hspec_decoding.levels import Level, ModelLevel, Verified
from hspec_decoding.model import Decoder
from hspec_decoding.ngram import NGram
from hspec_decoding.options import Request
from hspec_decoding.rules import Chooser, Coupled, Draft, Rejection
from hspec_decoding.sampling import Draws, Sampling, SeededDraws, accept, probabilities
from hspec_decoding.sequence import Text
from hspec_decoding.views import View

Prefix = tuple[int, ...]


class Table(ModelLevel):
    """A level whose model is a function from the last tokens to the law of the next."""

    def __init__(self, laws: Callable[[Sequence[int]], Tensor]) -> None:
        super().__init__("table", cast(Decoder, None), cast(View, None))
        self.laws = laws

    def logits(self, texts: Sequence[Text], drafts: Sequence[Draft]) -> list[Tensor]:
        return [
            torch.stack([self.laws(text.tokens + draft.tokens[:n]) for n in range(len(draft.tokens) + 1)]).log()
            for text, draft in zip(texts, drafts, strict=True)
        ]

    choices = tiny_engine.chosen_from_logits


def decode(
    texts: Sequence[Text], length: int, proposer: Level, target: ModelLevel, widths: Sequence[int], by: Chooser
) -> None:
    """Rounds as the engine makes them, until every text has at least `length` tokens."""
    while active := [text for text in texts if len(text) < length]:
        drafts = proposer.propose(active, [7] * len(active), widths, by)
        for text, result in zip(active, by.check(active, drafts, target), strict=True):
            text.commit(result.tokens)


class Published(Rejection):
    """The rule of the published code's middle level: what follows a rejection is drawn from the verifier's own law."""

    def check(self, texts: Sequence[Text], drafts: Sequence[Draft], model: ModelLevel) -> list[Draft]:
        checked = []
        for text, draft, rows in zip(texts, drafts, model.logits(texts, drafts), strict=True):
            own = list(probabilities(rows, text.sampling))
            tokens = accept(draft.tokens, draft.laws, own, _WithoutResidual(self.draws[text.slot], own))
            checked.append(Draft(tokens, own[: len(tokens)]))
        return checked


class _WithoutResidual:
    """Draws for which every choice is one from the verifier's law after the tokens kept so far."""

    def __init__(self, draws: Draws, own: Sequence[Tensor]) -> None:
        self.draws, self.own, self.kept = draws, own, 0

    def coin(self, probability: float) -> bool:
        keep = self.draws.coin(probability)
        self.kept += keep
        return keep

    def choice(self, weights: Tensor) -> int:  # noqa: ARG002
        return self.draws.choice(self.own[self.kept])


class PublishedMiddle(Verified):
    """A middle level as the published code has it."""

    def propose(self, texts: Sequence[Text], limits: Sequence[int], widths: Sequence[int], by: Chooser) -> list[Draft]:
        assert isinstance(by, Rejection)
        return super().propose(texts, limits, widths, Published(by.draws))


# exactly


def weights(size: int) -> st.SearchStrategy[Tensor]:
    """Laws with zeros, point masses and, often, equal ones among them."""
    return st.lists(st.integers(0, 3), min_size=size, max_size=size).map(lambda w: normal(w if any(w) else [1] * size))


@given(q=weights(4), p=weights(4))
def test_one_token(q: Tensor, p: Tensor) -> None:
    found = law(lambda draws: accept([draws.choice(q)], [q], [p, p], draws)[0])
    assert distance(found, dict(enumerate(p.tolist()))) < 1e-6


@given(q=weights(3), middle=weights(3), p=weights(3))
def test_two_levels_composed(q: Tensor, middle: Tensor, p: Tensor) -> None:
    def program(draws: Branches) -> int:
        proposed = accept([draws.choice(q)], [q], [middle, middle], draws)[:1]
        return accept(proposed, [middle], [p, p], draws)[0]

    assert distance(law(program), dict(enumerate(p.tolist()))) < 1e-6


class Laws:
    """Laws of every prefix of up to `length` tokens, for each of some levels."""

    def __init__(self, size: int, length: int, levels: int, made: Sequence[Tensor]) -> None:
        self.size, self.length = size, length
        self.prefixes = [p for n in range(length) for p in itertools.product(range(size), repeat=n)]
        self.tables = [dict(zip(self.prefixes, made[i * len(self.prefixes) :], strict=False)) for i in range(levels)]

    def level(self, number: int, prompt: int) -> Table:
        """A level for texts with a prompt of `prompt` tokens. What lies beyond the length is always the same."""
        beyond = normal([1] + [0] * (self.size - 1))
        return Table(lambda tokens: self.tables[number].get(tuple(tokens[prompt:]), beyond))

    def wanted(self) -> dict[Prefix, float]:
        """The law of texts of the whole length under the last level alone."""
        texts = itertools.product(range(self.size), repeat=self.length)
        table = self.tables[-1]
        return {
            text: float(torch.stack([table[text[:n]][text[n]] for n in range(self.length)]).double().prod())
            for text in texts
        }


def all_laws(size: int, length: int, levels: int) -> st.SearchStrategy[Laws]:
    count = levels * sum(size**n for n in range(length))
    return st.lists(weights(size), min_size=count, max_size=count).map(lambda made: Laws(size, length, levels, made))


def texts_law(
    laws: Laws, prompt: Prefix, build: Callable[[list[Table]], Level], widths: Sequence[int]
) -> dict[Prefix, float]:
    """The law of the text that a stack makes: the last level is the target, `build` stacks the others."""

    def program(draws: Branches) -> Prefix:
        levels = [laws.level(number, len(prompt)) for number in range(len(laws.tables))]
        text = Text(0, 0, list(prompt), Sampling(1.0))
        by = Rejection({0: draws})
        decode([text], len(prompt) + laws.length, build(levels[:-1]), levels[-1], widths, by)
        return tuple(text.tokens[len(prompt) : len(prompt) + laws.length])

    return law(program)


def stacked(levels: Sequence[Level]) -> Level:
    """Each level checked by the next."""
    below, *rest = levels
    for model in rest:
        below = Verified(below, cast(ModelLevel, model))
    return below


@pytest.mark.parametrize("widths", [(1,), (2,), (7,)])
@given(laws=all_laws(2, 3, 2))
@settings(max_examples=40)
def test_two_levels(widths: tuple[int, ...], laws: Laws) -> None:
    assert distance(texts_law(laws, (0,), stacked, widths), laws.wanted()) < 1e-5


@pytest.mark.parametrize("widths", [(1, 1), (1, 2), (2, 2), (2, 1), (2, 4)])
@given(laws=all_laws(2, 3, 3))
@settings(max_examples=12)
def test_three_levels(widths: tuple[int, ...], laws: Laws) -> None:
    assert distance(texts_law(laws, (0,), stacked, widths), laws.wanted()) < 1e-5


@given(laws=all_laws(3, 2, 3))
@settings(max_examples=40)
def test_three_levels_of_three_tokens(laws: Laws) -> None:
    assert distance(texts_law(laws, (0,), stacked, (1, 2)), laws.wanted()) < 1e-5


@given(laws=all_laws(2, 2, 4))
@settings(max_examples=40)
def test_four_levels(laws: Laws) -> None:
    assert distance(texts_law(laws, (0,), stacked, (1, 1, 2)), laws.wanted()) < 1e-5


@pytest.mark.parametrize("widths", [(1, 1), (2, 2)])
@given(laws=all_laws(2, 3, 2))
@settings(max_examples=30)
def test_n_grams_below(widths: tuple[int, ...], laws: Laws) -> None:
    """A proposal that nothing was drawn for is a draw from a point mass."""
    prompt = (0, 1, 0, 0, 1, 0)
    found = texts_law(laws, prompt, lambda levels: stacked([NGram(2, 1), *levels]), widths)
    assert distance(found, laws.wanted()) < 1e-5


def test_the_published_rule_has_another_law() -> None:
    """The middle level is the target itself, so that all it says is kept: a draft of .9 and .1 turns .5 into .7."""
    laws = Laws(2, 1, 3, [normal([9, 1]), normal([1, 1]), normal([1, 1])])
    right = texts_law(laws, (0,), stacked, (1, 1))
    published = texts_law(laws, (0,), lambda levels: PublishedMiddle(*levels), (1, 1))
    assert distance(right, {(0,): 0.5, (1,): 0.5}) < 1e-6
    assert distance(published, {(0,): 0.7, (1,): 0.3}) < 1e-6


# by counting


SIZE, LENGTH, TEXTS = 6, 24, 1000


def markov(seed: int, like: Tensor | None = None, share: float = 0.0) -> Tensor:
    """Laws [V, V] of the next token by the last one, with an impossible token in each row; `share` of them `like`."""
    made = torch.rand(SIZE, SIZE, generator=torch.Generator().manual_seed(seed)) ** 3
    made[range(SIZE), [(i * 5 + 2) % SIZE for i in range(SIZE)]] = 0.0
    made /= made.sum(-1, keepdim=True)
    return made if like is None else share * like + (1 - share) * made


class Chain(ModelLevel):
    """A level whose next token depends on the last one."""

    def __init__(self, laws: Tensor) -> None:
        super().__init__("chain", cast(Decoder, None), cast(View, None))
        self.log = laws.log()

    def logits(self, texts: Sequence[Text], drafts: Sequence[Draft]) -> list[Tensor]:
        return [self.log[[text.tokens[-1], *draft.tokens]] for text, draft in zip(texts, drafts, strict=True)]

    choices = tiny_engine.chosen_from_logits


TARGET = markov(0)
DRAFT, MIDDLE = markov(1), markov(2, TARGET, 0.8)


def counted(proposer: Level, rule: str, seed: int, widths: Sequence[int] = (2, 6)) -> float:
    """Probability of a worse fit than that of 23,000 tokens, each after its last two, to the target's law."""
    texts = [Text(i, i, [i % SIZE], Sampling(1.0, seed=seed)) for i in range(TEXTS)]
    target = Chain(TARGET)
    by: Chooser = Coupled()
    if rule == "rejection":
        by = Rejection({i: SeededDraws(seed, i) for i in range(TEXTS)})
    for start in range(0, TEXTS, 8):
        decode(texts[start : start + 8], LENGTH + 1, proposer, target, widths, by)
    said = torch.tensor([text.tokens[: LENGTH + 1] for text in texts])
    triples = said.unfold(1, 3, 1).reshape(-1, 3)
    assert len(triples) == TEXTS * (LENGTH - 1) > 20_000
    place = triples @ torch.tensor([SIZE * SIZE, SIZE, 1])
    counts = torch.bincount(place, minlength=SIZE**3).view(-1, SIZE).double()
    return chi_square(counts, counts.sum(-1, keepdim=True) * TARGET.double().repeat(SIZE, 1))


STACKS: dict[str, Callable[[], Level]] = {
    "draft > middle": lambda: Verified(Chain(DRAFT), Chain(MIDDLE)),
    "draft > perfect middle": lambda: Verified(Chain(DRAFT), Chain(TARGET)),
    "ngram > middle": lambda: Verified(NGram(SIZE, TEXTS), Chain(MIDDLE)),
}


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize(
    "stack", [pytest.param(name, marks=pytest.mark.long) if "perfect" in name else name for name in STACKS]
)
def test_law_of_the_whole_stack(stack: str, rule: str) -> None:
    assert counted(STACKS[stack](), rule, seed=1) > 1e-3


def test_law_with_other_widths() -> None:
    assert counted(STACKS["draft > middle"](), "rejection", seed=2, widths=(1, 1)) > 1e-3


@pytest.mark.parametrize("middle", [MIDDLE, TARGET])
def test_the_published_rule_is_found_out(middle: Tensor) -> None:
    assert counted(PublishedMiddle(Chain(DRAFT), Chain(middle)), "rejection", seed=1) < 1e-9


# with real models


def deviation(target: Decoder, watched: Decoder, tokens: Sequence[int], start: int) -> float:
    """How many standard deviations the tokens said lean towards `watched`.

    The sum of q(token) less its mean under the target's law is a martingale, whatever came before each token.
    """
    p, q = (tiny_engine.scores(model, tokens, [])[start - 1 : -1].softmax(-1).double() for model in (target, watched))
    said = torch.tensor(tokens[start:])[:, None]
    mean = (p * q).sum(-1)
    lean = q.gather(-1, said)[:, 0] - mean
    return float(lean.sum() / ((p * q * q).sum(-1) - mean**2).sum().sqrt())


@cache
def three_models() -> tuple[Decoder, Decoder]:
    """A target and a draft that shares half of its head; the target over its last tokens only is the third."""
    shape = tiny_engine.config(vocab_size=16, num_hidden_layers=1)
    own = tiny_engine.weights(shape)
    mixed = {**own, "lm_head.weight": own["lm_head.weight"] / 2 + torch.randn(16, 64, generator=GENERATOR) / 4}
    return tiny_engine.decoder(shape, own), tiny_engine.decoder(shape, mixed)


GENERATOR = torch.Generator().manual_seed(1)


def lean_of_the_engine(rule: str) -> float:
    """How far one long text of three models leans towards the draft's law."""
    target, draft = three_models()
    stack = "draft > target(streaming:1024) > target(full)"
    engine = tiny_engine.engine(stack, target, draft, rule=rule, adapt=False, context=1400)
    prompt = tuple(token % 16 for token in tiny_engine.prompt(50))
    said, _ = tiny_engine.answer(engine, Request(prompt, 1300, sampling=Sampling(1.0, seed=5)))
    return deviation(target, draft, [*prompt, *said], len(prompt))


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_law_of_the_engine(rule: str) -> None:
    assert abs(lean_of_the_engine(rule)) < 3.5


def test_the_published_rule_leans_towards_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hspec_decoding.build.Verified", PublishedMiddle)
    assert lean_of_the_engine("rejection") > 6
