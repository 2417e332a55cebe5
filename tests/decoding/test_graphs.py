"""Captured passes: what is replayed with other inputs says what is computed anew. Without a GPU a graph is imitated
by a function that is called again and writes to the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import tiny_engine
import tiny_heads
import torch
from tiny_engine import CPU, answers, contrary, random_decoder, stuck
from torch import Tensor

from hspec_decoding import graphs
from hspec_decoding.build import resolve
from hspec_decoding.calibration import Calibration
from hspec_decoding.chimera.level import Chimera
from hspec_decoding.device import GPU_SHAPE
from hspec_decoding.engine import BURST, Engine
from hspec_decoding.events import Emitted, Round
from hspec_decoding.graphs import Graph, Graphs, Mark, Results
from hspec_decoding.levels import ModelLevel
from hspec_decoding.model import Decoder
from hspec_decoding.options import Request, Settings
from hspec_decoding.sampling import Sampling, agree
from hspec_decoding.sparse import SELECT, Asked, VerifyFed
from hspec_decoding.stack import parse
from hspec_decoding.tidal import Tidal
from hspec_decoding.tuner import Plan, Tuner
from hspec_profiles.errors import HspecError


class Far(Tensor):
    """What is on a device, imitated: a host that looks at it, or at what follows from it, waits."""

    waits = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Far.waits += func in (Tensor.tolist, Tensor.item, Tensor.cpu, Tensor.__bool__, Tensor.__int__, Tensor.__index__)
        return super().__torch_function__(func, types, args, kwargs or {})


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
        if self.results.features is not None:
            self.results.features.copy_(again.features)


def recorded(run: Callable[[], Results], device: torch.device) -> tuple[Graph, Results]:
    assert device == CPU
    with torch.inference_mode():
        results = run()
    results = replace(results, chosen=results.chosen.as_subclass(Far))
    return Again(run, results), results


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that capture their passes, on any device."""
    monkeypatch.setattr(graphs, "_recorded", recorded)
    monkeypatch.setattr("hspec_decoding.engine.exact_shape", lambda *_: GPU_SHAPE)
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


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("stack", ["target(full)", "draft > target(retrieval:64, w=int4) > target(full)"])
def test_replays_of_a_batch_that_changes(stack: str, request: pytest.FixtureRequest) -> None:
    """It grows, and slots change hands; options differ by sequence, in passes that were captured with others."""
    by = [Sampling(), Sampling(1.2, top_k=9, seed=8), Sampling(0.8, seed=1), Sampling(1.0, min_p=0.2), Sampling(2.0)]
    asked = [
        Request(tiny_engine.prompt(n, n), 20 + n % 19, sampling=sampling, sequence=i, key=i % 2)
        for i, (n, sampling) in enumerate(zip((300, 1, 40, 120, 77), by, strict=True))
    ]
    plain = tiny_engine.engine("target(full)", random_decoder())
    wanted = [answers(plain, one)[0] for one in asked]
    request.getfixturevalue("graphed")
    run = tiny_engine.engine(stack, random_decoder(), random_decoder(seed=1))
    assert tiny_engine.gathered(run.serve(tiny_engine.coming(asked, late=2), 3), asked) == wanted
    assert {key[1] for made in run.parts.graphs.values() for key in made.captured} == {1, 2, 3}


@pytest.mark.parametrize("levels", ["target(tidal:64)", "target(tidal-pooled:64)", "TIDAL", "ngram > TIDAL", "FED"])
def test_tidal_passes_are_replayed(levels: str, request: pytest.FixtureRequest) -> None:
    """Two texts at once, with corrections between bursts of tokens, and what is left of them when one has ended."""
    levels = levels.replace("FED", "target(tidal-fed:64) > target(full)")
    levels = levels.replace("TIDAL", "target(tidal:64) > target(full)")
    sampling = Sampling(0.8, seed=3)
    prompts = enumerate((tiny_engine.prompt(300), tiny_engine.prompt(140, 1)))
    asked = [Request(prompt, 30 + 11 * i, sampling=sampling, sequence=i) for i, prompt in prompts]

    def engine() -> Engine:
        made = tiny_engine.engine(levels, random_decoder(num_hidden_layers=6), context=400, correct=3 * BURST)
        made.parts.calibration = Calibration((0, 1, 3), "heads", ((1, 0),) * 6)
        return made

    wanted = answers(engine(), *asked)
    request.getfixturevalue("graphed")
    run = engine()
    assert answers(run, *asked) == wanted
    captured = [key for made in run.parts.graphs.values() for key in made.captured]
    assert any(isinstance(part, Tidal) for memory, *_ in captured for part in memory)
    if len(run.stacks[0]) == 1:
        assert min(run.last.view.exact) > 160  # type: ignore[attr-defined]


def engines(stacks: list[str], made: Decoder, context: int = 500, **options: Any) -> Engine:
    written = [resolve(parse(stack), context, budget=None, keep=True) for stack in stacks]
    return Engine(made, None, written, Settings(**options), context)


@pytest.mark.usefixtures("graphed", "restless")
@pytest.mark.parametrize("select", SELECT)
def test_selection_follows_a_chain(select: str) -> None:
    """A text that grows beyond the budget as plain decoding feeds itself: the queries are those of its last token."""
    target = random_decoder()
    plain, run = (
        tiny_engine.engine(stack, target, context=400, select=select)
        for stack in ("target(full)", "target(retrieval:64) > target(full)")
    )
    asked = Request(tiny_engine.prompt(50, 1), 90)
    assert answers(run, asked) == answers(plain, asked)


@pytest.mark.usefixtures("graphed")
def test_rehearsing_leaves_the_prompts_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first selection is by the prompt's last rows, and not by those of a pass that was only rehearsed."""
    seen: list[list[int]] = []
    score = VerifyFed.scores

    def scores(self: VerifyFed, asked: Asked, *rest: Any) -> Tensor:
        seen.append([asked.queries.shape[1], int(asked.live[0])])
        return score(self, asked, *rest)

    monkeypatch.setattr(VerifyFed, "scores", scores)
    run = tiny_engine.engine("target(retrieval:64) > target(full)", random_decoder())
    answers(run, Request(tiny_engine.prompt(300), 3))
    assert seen[0] == [64, 64]


@pytest.mark.usefixtures("graphed")
def test_what_follows_an_end_is_no_failure() -> None:
    """Plain decoding looks beyond an end of sequence on its way; a token that must never be fed does no harm there."""
    shape = tiny_engine.config()
    made = tiny_engine.weights(shape)
    asked = Request(tiny_engine.prompt(40), 30)
    said = answers(tiny_engine.engine("target(full)", tiny_engine.decoder(shape, made)), asked)[0][0]
    made["model.embed_tokens.weight"][said[1]] = float("nan")
    broken = tiny_engine.engine("target(full)", tiny_engine.decoder(shape, made))
    assert answers(broken, replace(asked, eos=frozenset({said[1]}))) == [(said[:2], "eos")]
    events = tiny_engine.engine("target(full)", tiny_engine.decoder(shape, made)).generate(asked)
    tokens = next(event.tokens for event in events if isinstance(event, Emitted))
    assert list(tokens) == said[:2]
    with pytest.raises(HspecError, match="non-finite logits after 42 tokens"):
        list(events)


@pytest.mark.usefixtures("graphed")
def test_plain_decoding_may_be_among_the_stacks() -> None:
    target = random_decoder()
    asked = Request(tiny_engine.prompt(60), 40)
    wanted = answers(tiny_engine.engine("target(full)", target), asked)
    assert answers(engines(["ngram > target(full)", "target(full)"], target), asked) == wanted


# drafts that are handed over on the device


HANDED = [
    "draft > target(retrieval:64) > target(full)",
    "draft > target(full, kv=int4) > target(full)",
    "draft > target(full)",
]
WIDTHS = ((2, 6), (1, 3), (5, 5), (3, 9))


@pytest.fixture
def turning(monkeypatch: pytest.MonkeyPatch) -> None:
    """All levels in every round, of widths that change; now and then the middle one alone, so that the draft has to
    be fed what was said without it.
    """

    def plan(self: Tuner) -> Plan:
        depth, widths = len(self.sequential), WIDTHS[self.rounds % len(WIDTHS)]
        levels = (1,) if depth > 1 and self.rounds % 5 == 4 else tuple(range(depth))
        return Plan(levels, tuple(min(self.block, width) for width in widths[: len(levels)]))

    monkeypatch.setattr(Tuner, "plan", plan)


def broken(made: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a model that has nothing to say after every third token."""
    embedding = made["model.embed_tokens.weight"].clone()
    embedding[::3] = float("nan")
    return {**made, "model.embed_tokens.weight": embedding}


def drafting(kind: str) -> Decoder:
    shape = tiny_engine.config()
    made = tiny_engine.weights(shape)
    nearly = {**made, "lm_head.weight": made["lm_head.weight"] + 0.1 * tiny_engine.weights(shape, 1)["lm_head.weight"]}
    kinds = {"good": nearly, "contrary": contrary(made), "stuck": stuck(made, 3), "broken": broken(nearly)}
    return tiny_engine.decoder(shape, kinds[kind])


def followed(stack: str, draft: Decoder, *asked: Request, captured: bool = True) -> list[Any]:
    """What an engine says and, after every round, what its levels counted, hold and select by."""
    run = tiny_engine.engine(stack, random_decoder(), draft, context=600)
    if not captured:
        del run.parts.graphs[id(run.target)]
    told: list[Any] = []
    for event in run.generate(*asked):
        if isinstance(event, Emitted):
            told.append(event)
        elif isinstance(event, Round):
            levels = [level for level in (*run.levels.proposers, run.last) if isinstance(level, ModelLevel)]
            views = [getattr(level.view, "full", level.view) for level in levels]
            told.append([replace(level.tally, seconds=0) for level in levels])
            told.append([[list(held.tokens) for held in view.held] for view in views])
            told.append({slot: (own.b, own.first) for slot, own in run.last.view.recorded.items()})
    return told


def waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the host wait for every chain of tokens before it goes on."""
    chain = ModelLevel._chain

    def waited(*args: Any) -> Any:
        drafts = chain(*args)
        for draft in drafts:
            draft.wait()
        return drafts

    monkeypatch.setattr(ModelLevel, "_chain", waited)


@pytest.mark.usefixtures("graphed", "turning")
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kind", ["good", "contrary", "stuck", "broken"])
@pytest.mark.parametrize(
    ("stack", "captured"), [*((stack, True) for stack in HANDED), (HANDED[0], False)], ids=[*HANDED, "offloaded"]
)
def test_what_is_handed_over_is_what_was_waited_for(
    stack: str, captured: bool, kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two texts whose limits differ, so that one runs out of room, and out of the batch, before the other. Where the
    target is offloaded its passes are not captured.
    """

    def checked(draft: list[int], chosen: list[int]) -> list[int]:
        assert len(chosen) == len(draft) + 1
        return agree(draft, chosen)

    monkeypatch.setattr("hspec_decoding.rules.agree", checked)
    sampling = Sampling(temperature, 0.9 if temperature else 1.0, seed=3)
    prompts = enumerate((tiny_engine.prompt(90, 1), tiny_engine.prompt(40)))
    asked = [Request(prompt, 9 + 11 * i, sampling=sampling, sequence=i) for i, prompt in prompts]
    found = followed(stack, drafting(kind), *asked, captured=captured)
    waiting(monkeypatch)
    assert found == followed(stack, drafting(kind), *asked, captured=captured)


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same widths in every round."""

    def plan(self: Tuner) -> Plan:
        levels = tuple(range(len(self.sequential)))
        return Plan(levels, (2, 6)[: len(levels)])

    monkeypatch.setattr(Tuner, "plan", plan)


@pytest.mark.usefixtures("graphed", "steady")
@pytest.mark.parametrize("stack", HANDED)
def test_one_wait_a_pass(stack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a level that checks; what proposes to it is not waited for."""
    run = tiny_engine.engine(stack, random_decoder(), drafting("good"), context=600)
    speculate, counts = Engine._speculate, []

    def speculating(*args: Any) -> Any:
        before = Far.waits, sum(level.tally.passes for level in checking)
        events = speculate(*args)
        counts.append((Far.waits - before[0], sum(level.tally.passes for level in checking) - before[1]))
        return events

    monkeypatch.setattr(Engine, "_speculate", speculating)
    opened = run.generate(Request(tiny_engine.prompt(90, 1), 40))
    next(opened)
    checking = [*run.levels.proposers[1:], run.last]
    list(opened)
    assert len(counts) > 4
    assert all(waits == passes for waits, passes in counts)


@pytest.mark.usefixtures("graphed", "steady")
def test_seconds_go_to_the_level_that_spent_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that comes to the end of each chain a minute after the host has gone on."""
    monkeypatch.setattr(Mark, "until", lambda self, later: later.host - self.host - 60)
    run = tiny_engine.engine(HANDED[0], random_decoder(), drafting("good"), context=600)
    answers(run, Request(tiny_engine.prompt(90, 1), 20))
    draft, middle = (level.tally for level in run.levels.proposers)
    assert round(draft.seconds / 60) == -round(middle.seconds / 60) > 2
    assert 0 < draft.seconds + middle.seconds < 60


# heads that draft trees


def trees(levels: str, target: Decoder, **settings: Any) -> Engine:
    run = tiny_engine.engine(levels, target, context=600, **settings)
    run.parts.heads = tiny_heads.heads(target)
    return run


@pytest.fixture
def growing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees and chains of sizes that change, plain rounds among them."""

    def plan(self: Tuner) -> Plan:
        levels = tuple(range(len(self.sequential))) if self.rounds % 6 < 5 else ()
        width = (15, 3, 31, 7, 20)[self.rounds % 5]
        return Plan(levels, tuple(width if n in self.trees else min(width, 6) for n in levels))

    monkeypatch.setattr(Tuner, "plan", plan)


@pytest.mark.usefixtures("growing")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("levels", "tree"),
    [
        ("chimera > target(full)", None),
        ("chimera > target(full)", 0),
        ("chimera > target(retrieval:64) > target(full)", 0),
    ],
)
def test_captured_heads(
    levels: str, tree: int | None, temperature: float, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they draft is what is drafted without graphs, and the text is the target's."""
    target = random_decoder()
    asked = requests(temperature, 30)
    tiny_heads.learnt(tiny_heads.knowing(monkeypatch), target, asked)
    plain = tiny_engine.engine("target(full)", target, context=600)
    wanted = answers(plain, asked[0]), answers(plain, *asked)
    eager = trees(levels, target, tree=tree, exact=False)
    assert (answers(eager, asked[0]), answers(eager, *asked)) == wanted
    request.getfixturevalue("graphed")
    run = trees(levels, target, tree=tree)
    assert (answers(run, asked[0]), answers(run, *asked)) == wanted
    assert run.report().levels[0].kept > 5
    level = run.levels.proposers[0]
    assert isinstance(level, Chimera)
    assert level.drafting.captured


@pytest.mark.usefixtures("graphed", "growing")
def test_one_wait_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    run = trees("chimera > target(full)", random_decoder())
    speculate, waits = Engine._speculate, []

    def speculating(*args: Any) -> Any:
        before = Far.waits
        events = speculate(*args)
        waits.append(Far.waits - before)
        return events

    monkeypatch.setattr(Engine, "_speculate", speculating)
    list(run.generate(Request(tiny_engine.prompt(90, 1), 40)))
    assert len(waits) > 10
    assert set(waits) == {1}
