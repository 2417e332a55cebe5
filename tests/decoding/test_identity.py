"""Under the coupled rule every stack says what plain decoding says, token for token, whatever its levels propose.

The cases are a covering design: every pair of values of two options occurs, every triple in the long grid.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import tiny_engine
import torch
from tiny_engine import answer, config, contrary, decoder, stuck, weights
from torch import Tensor

from hspec_decoding.engine import Engine
from hspec_decoding.levels import ModelLevel
from hspec_decoding.model import Decoder
from hspec_decoding.options import Request
from hspec_decoding.rules import Coupled, Draft
from hspec_decoding.sampling import Sampling, filtered
from hspec_decoding.sequence import Text
from hspec_decoding.tuner import Plan, Tuner
from hspec_kernels.sample import gumbel, stream
from hspec_profiles.errors import HspecError

BUCKET = 256  # slots that attention is rounded up to on a CPU
STACKS = {
    "triforce": "draft > target(retrieval:64) > target(full)",
    "n-grams": "ngram > target(retrieval:64) > target(full)",
    "streaming": "target(streaming:64) > target(full)",
    "checked draft": "ngram > draft > target(full)",
    "draft": "draft > target(full)",
    "4-bit weights": "ngram > target(retrieval:64, w=int4) > target(full)",
    "4-bit copy": "draft > target(full, kv=int4, w=nf4) > target(full)",
}
OPTIONS: dict[str, Sequence[Any]] = {
    "stack": tuple(STACKS),
    "length": (1, 7, 8, 9, 63, 64, 65, 250, 255, 256, 257, 511, 700, 4000),
    "family": tuple(tiny_engine.FAMILIES),
    "dtype": ("float32", "bfloat16"),
    "temperature": (0.0, 0.3, 0.8, 1.2),
    "draft": ("good", "random", "contrary", "stuck"),
    "select": ("verify-fed", "paper"),
    "widths": ("fixed", "random"),
}


@dataclass(frozen=True)
class Case:
    """One stack on one prompt."""

    stack: str
    length: int
    family: str
    dtype: str
    temperature: float
    draft: str
    select: str
    widths: str
    seed: int = 0


def covering(strength: int) -> list[Case]:
    """Cases, found greedily, in which every `strength` options take every combination of their values."""
    chance = random.Random(0)
    names = list(OPTIONS)
    groups = list(itertools.combinations(names, strength))
    missing = {(group, values) for group in groups for values in itertools.product(*(OPTIONS[n] for n in group))}

    def covered(case: dict[str, Any]) -> set[Any]:
        return {(group, tuple(case[name] for name in group)) for group in groups} & missing

    cases = []
    while missing:
        fixed = dict(zip(*min(missing, key=str), strict=True))
        tries = [{name: fixed.get(name, chance.choice(OPTIONS[name])) for name in names} for _ in range(30)]
        best = max(tries, key=lambda case: len(covered(case)))
        missing -= covered(best)
        cases.append(Case(**best, seed=len(cases) % 20))
    return cases


@cache
def model(family: str, dtype: str, draft: str | None = None) -> Decoder:
    """A target, or a draft for it that is as good as the target, or bad in one of several ways."""
    shape = config(family)
    own = weights(shape, seed=1)
    made = {
        None: lambda: own,
        "good": lambda: own,
        "random": lambda: weights(shape, seed=2),
        "contrary": lambda: contrary(own),
        "stuck": lambda: stuck(own, 3),
    }[draft]()
    return decoder(shape, made, getattr(torch, dtype))


def engine(case: Case, levels: str | None = None, **settings: Any) -> Engine:
    target = model(case.family, case.dtype)
    draft = model(case.family, case.dtype, case.draft)
    options = {"adapt": False, "select": case.select, **settings}
    return tiny_engine.engine(levels or STACKS[case.stack], target, draft, **options)


def request(case: Case, tokens: int = 40, eos: frozenset[int] = frozenset()) -> Request:
    sampling = Sampling(case.temperature, top_p=0.9 if case.temperature else 1.0, seed=case.seed)
    return Request(tiny_engine.prompt(case.length, case.seed), tokens, eos, sampling)


@cache
def plain(case: Case, tokens: int = 40, eos: frozenset[int] = frozenset()) -> tuple[list[int], str]:
    """What the target says alone."""
    return answer(engine(case, "target(full)"), request(case, tokens, eos))


def said_alone(case: Case, tokens: int = 40, eos: frozenset[int] = frozenset()) -> tuple[list[int], str]:
    """`plain`, kept for all cases that differ in what must not matter."""
    same = replace(case, stack="draft", draft="good", select="paper", widths="fixed")
    return plain(same, tokens, eos)


@pytest.fixture
def random_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another depth and other widths in every round."""
    chance = random.Random(7)

    def plan(self: Tuner) -> Plan:
        levels = range(chance.randint(0, len(self.sequential)))
        return Plan(tuple(levels), tuple(chance.randint(1, self.block) for _ in levels))

    monkeypatch.setattr(Tuner, "plan", plan)


@pytest.fixture
def widths(request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["case"].widths == "random":
        request.getfixturevalue("random_widths")


def named(case: Case) -> str:
    return "-".join(str(value) for value in vars(case).values())


@pytest.mark.usefixtures("widths")
@pytest.mark.parametrize("case", covering(2), ids=named)
def test_same_text(case: Case) -> None:
    assert answer(engine(case), request(case)) == said_alone(case)


@pytest.mark.long
@pytest.mark.usefixtures("widths")
@pytest.mark.parametrize("case", covering(3), ids=named)
def test_same_long_text(case: Case) -> None:
    assert answer(engine(case), request(case, 120)) == said_alone(case, 120)


BASE = Case("triforce", 200, "llama", "float32", 0.8, "good", "verify-fed", "fixed")


def test_drafts_are_what_their_names_say() -> None:
    """Else the cases above would prove little: good drafts are kept, contrary and stuck ones are not."""
    kept = {}
    for draft in OPTIONS["draft"]:
        run = engine(replace(BASE, draft=draft), "draft > target(full)")
        answer(run, request(BASE, 100))
        kept[draft] = run.report().levels[0].kept / run.report().levels[0].proposed
    assert kept["good"] > 0.9
    assert kept["random"] < 0.3
    assert kept["contrary"] < 0.05
    assert kept["stuck"] < 0.05


@pytest.mark.parametrize("levels", ["target(streaming:64)", "draft(streaming:64)"])
def test_two_levels_of_one_kind(levels: str) -> None:
    """Each with its own memory: what the lower one proposes is what the upper one says, until a window is full."""
    case = replace(BASE, temperature=0.0, length=40)
    run = engine(case, f"{levels} > {levels} > target(full)")
    assert answer(run, request(case, 60)) == said_alone(case, 60)
    lowest = run.report().levels[0]
    assert lowest.kept >= 0.95 * lowest.proposed > 0


# to the bit


class Recording(Coupled):
    """The coupled rule, noting the target's logits of every position that became text."""

    rows: dict[int, Tensor]

    def check(self, texts: Sequence[Text], drafts: Sequence[Draft], model: ModelLevel) -> list[Draft]:
        logits: list[Tensor] = []
        score = model._score

        def recording(*how: Any) -> list[Tensor]:
            logits[:] = score(*how)
            return logits

        model._score = recording  # type: ignore[method-assign]
        checked = super().check(texts, drafts, model)
        del model._score
        for text, result, rows in zip(texts, checked, logits, strict=True):
            if len(text) == text.committed:  # not a check of one level by another
                self.rows |= {len(text) + i: rows[i].clone() for i in range(len(result.tokens))}
        return checked


def recorded(monkeypatch: pytest.MonkeyPatch, run: Engine, asked: Request) -> dict[int, Tensor]:
    rows: dict[int, Tensor] = {}
    monkeypatch.setattr("hspec_decoding.engine.Coupled", Recording)
    monkeypatch.setattr(Recording, "rows", rows, raising=False)
    answer(run, asked)
    return rows


@pytest.mark.usefixtures("random_widths")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", tiny_engine.FAMILIES)
def test_same_logits_to_the_bit(family: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the tokens: nothing about a position depends on what was drafted around it."""
    case = replace(BASE, family=family, dtype=dtype, length=230, draft="good")
    asked = request(case, 120)
    wanted = recorded(monkeypatch, engine(case, "target(full)"), asked)
    found = recorded(monkeypatch, engine(case), asked)
    assert set(range(230, 350)) <= found.keys() & wanted.keys()
    for position in range(230, 350):
        assert torch.equal(found[position], wanted[position]), position


# ends


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("draft", ["good", "stuck"])
def test_end_of_sequence_anywhere_in_a_block(stack: str, draft: str) -> None:
    """Every token of the text in turn is the end; the text stops at its first place and is told why."""
    case = replace(BASE, stack=stack, draft=draft, length=40)
    whole, _ = said_alone(case)
    run = engine(case)
    for token in dict.fromkeys([*whole[:16], 3]):
        end = frozenset({token, 319})
        found, reason = answer(run, request(case, eos=end))
        assert (found, reason) == said_alone(case, eos=end)
        if reason == "eos":
            assert found == whole[: whole.index(token) + 1]


@pytest.mark.parametrize("stack", STACKS)
def test_length_anywhere_in_a_block(stack: str) -> None:
    case = replace(BASE, stack=stack, length=40)
    whole, _ = said_alone(case)
    run = engine(case)
    for tokens in range(1, 18):
        assert answer(run, request(case, tokens)) == (whole[:tokens], "length")


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("room", [1, 2, 7, 8, 9])
def test_the_context_ends(stack: str, room: int) -> None:
    case = replace(BASE, stack=stack, length=40)
    whole, _ = said_alone(case)
    target, draft = model("llama", "float32"), model("llama", "float32", "good")
    run = tiny_engine.engine(STACKS[stack], target, draft, context=40 + room, adapt=False)
    assert answer(run, request(case)) == (whole[:room], "context")


@pytest.mark.usefixtures("random_widths")
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("length", [10, 245])
def test_outputs_over_buckets_and_beyond_budgets(stack: str, length: int) -> None:
    """300 tokens: over the edges at 256 and 512, several times the budget, and the draft's window begun anew."""
    family, select = ("llama", "paper") if length == 10 else ("mistral", "verify-fed")
    case = replace(BASE, stack=stack, length=length, family=family, select=select, dtype="bfloat16")
    assert answer(engine(case), request(case, 300)) == said_alone(case, 300)


def test_windows_of_drafts_begun_anew() -> None:
    """A draft with a context of 64 tokens, far shorter than the text."""
    target = model("llama", "float32")
    shape = config("llama", max_position_embeddings=64)
    short = decoder(shape, weights(shape, seed=1))
    for levels in ("draft > target(full)", "ngram > draft > target(full)"):
        run = tiny_engine.engine(levels, target, short, adapt=False)
        assert answer(run, request(BASE, 300)) == said_alone(BASE, 300)


# while widths adapt


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("length", [249, 254, 255, 256, 257, 511, 512])
def test_adaptive_widths_at_the_edges_of_buckets(stack: str, length: int) -> None:
    """As a user runs it. At an edge there is no room to draft: nothing is measured then, and nothing breaks."""
    case = replace(BASE, stack=stack, length=length)
    assert answer(engine(case, adapt=True), request(case, 20)) == said_alone(case, 20)


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_adaptive_widths_of_short_answers(stack: str, tokens: int) -> None:
    case = replace(BASE, stack=stack)
    assert answer(engine(case, adapt=True), request(case, tokens)) == said_alone(case, tokens)


# one engine, many requests


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("select", ["paper", "verify-fed"])
def test_no_state_outlives_a_request(stack: str, select: str) -> None:
    """A long request, a short one, the long one again; after ends in a block and a generator closed early."""
    run = engine(replace(BASE, stack=stack, select=select))
    cases = [replace(BASE, length=length, seed=seed) for length, seed in ((300, 1), (20, 2), (300, 1), (5, 3))]
    for case in cases:
        assert answer(run, request(case)) == said_alone(case)
        opened = run.generate(request(replace(case, seed=9)))
        for _ in range(case.seed * 2):
            next(opened)
        opened.close()


def broken_at(token: int) -> Decoder:
    """The target with an embedding that is infinite for one token, as an entry that was never trained may be."""
    shape = config()
    made = weights(shape, seed=1)
    made["model.embed_tokens.weight"][token] = float("inf")
    return decoder(shape, made)


@pytest.mark.parametrize("levels", ["target(full)", "draft > target(full)"])
def test_a_request_that_failed_leaves_nothing_behind(levels: str) -> None:
    """Keys that are not finite stay in the memory; the next request must not read what it did not write."""
    run = tiny_engine.engine(levels, broken_at(300), model("llama", "float32", "good"), adapt=False)
    fine = request(BASE)
    failing = replace(fine, prompt=(*fine.prompt[:-1], 300, *fine.prompt))
    assert 300 not in fine.prompt + tuple(said_alone(BASE)[0])
    with pytest.raises(HspecError, match="the embedding holds NaN or infinite weights"):
        answer(run, failing)
    assert answer(run, fine) == said_alone(BASE)


def test_what_fills_up_a_block_does_not_matter() -> None:
    """Whatever stands in rows that no token needs: here any token but those of the text would be broken."""
    text = {*request(BASE).prompt, *said_alone(BASE)[0]}
    made = broken_at(min(set(range(config().vocab_size)) - text))
    made.embedding[[token for token in range(len(made.embedding)) if token not in text]] = float("inf")
    run = tiny_engine.engine("target(full)", made)
    assert answer(run, request(BASE)) == said_alone(BASE)


def test_what_was_proposed_in_vain_does_not_matter() -> None:
    """The draft proposes a token after which the target's logits are not finite; the target never says it."""
    run = tiny_engine.engine("draft > target(full)", broken_at(3), model("llama", "float32", "stuck"), adapt=False)
    assert 3 not in said_alone(BASE)[0]
    assert answer(run, request(BASE)) == said_alone(BASE)


def test_a_closed_generator_reports_what_was_done() -> None:
    run = engine(BASE)
    opened = run.generate(request(BASE))
    while run_tokens(opened) == 0:
        pass
    opened.close()
    report = run.report()
    assert report.prompt_tokens == 200
    assert 1 <= report.generated_tokens <= 8
    assert report.levels[-1].passes == 1


def run_tokens(events: Iterator[Any]) -> int:
    return len(getattr(next(events), "tokens", ()))


# without the fixed shape


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("family", tiny_engine.FAMILIES)
def test_inexact_differs_at_ties_only(stack: str, family: str) -> None:
    """Blocks as long as they are: a text may leave the other where two tokens score the same but for rounding."""
    case = replace(BASE, stack=stack, family=family, length=100)
    asked = request(case, 100)
    wanted, _ = answer(engine(case, "target(full)", exact=False), asked)
    found, _ = answer(engine(case, exact=False), asked)
    if found != wanted:
        at = next(i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
        text = [*asked.prompt, *wanted[:at]]
        noisy = with_noise(tiny_engine.scores(model(family, "float32"), text, [])[-1:], asked, len(text))
        assert abs(float(noisy[found[at]] - noisy[wanted[at]])) < 1e-3, "more than a tie"


def with_noise(logits: Tensor, asked: Request, position: int) -> Tensor:
    """What the coupled rule takes the largest of."""
    noise = gumbel(stream(asked.sampling.seed, asked.sequence), position, logits.shape[-1], logits.device)
    return filtered(logits, asked.sampling)[0] + noise


# batches


@pytest.mark.parametrize("stack", STACKS)
def test_each_of_a_batch_says_what_it_says_alone(stack: str) -> None:
    cases = [replace(BASE, stack=stack, length=length, seed=3) for length in (250, 1, 70)]
    asked = [replace(request(case, n), sequence=i) for i, (case, n) in enumerate(zip(cases, (30, 80, 50), strict=True))]
    alone = [answer(engine(cases[0], "target(full)"), one) for one in asked]
    assert tiny_engine.answers(engine(cases[0]), *asked) == alone


@pytest.mark.parametrize("stack", ["draft", "checked draft", "triforce"])
def test_a_window_of_a_batch_is_begun_anew(stack: str) -> None:
    """One draft's window is full while another's is not."""
    cases = [replace(BASE, stack=stack, length=length, seed=3) for length in (500, 505)]
    asked = [replace(request(case, 20), sequence=i) for i, case in enumerate(cases)]
    alone = [answer(engine(cases[0], "target(full)"), one) for one in asked]
    assert tiny_engine.answers(engine(cases[0]), *asked) == alone
