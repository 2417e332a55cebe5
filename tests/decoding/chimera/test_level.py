"""Chimera's level: what it drafts, and that the text is the target's own whatever that is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny_engine
import tiny_heads
import torch
from tiny_engine import CPU, answers, random_decoder
from tiny_heads import heads, learnt
from torch import Tensor

from hspec_decoding.chimera.drafting import Drafting, Shape
from hspec_decoding.chimera.heads import Heads
from hspec_decoding.chimera.level import Chimera
from hspec_decoding.engine import Engine
from hspec_decoding.load import choose_stacks
from hspec_decoding.model import Decoder
from hspec_decoding.options import Request, Settings
from hspec_decoding.rules import Coupled, Draft
from hspec_decoding.sampling import Sampling
from hspec_decoding.sequence import Text
from hspec_decoding.tree import Tree
from hspec_decoding.tuner import Plan, Tuner
from hspec_kernels.sample import gumbel, gumbel_of, stream
from hspec_profiles.errors import HspecError, UsageError

# what is drafted


def rows_of(level: Chimera, tokens: list[int], features: Tensor) -> Callable[[list[int]], Tensor]:
    """Logits [Vd] after a branch behind a text, everything computed anew, by the definition."""
    h, c, n = level.heads, level.heads.config, len(tokens)
    trigrams = torch.tensor([[tokens[max(0, t - 1)], tokens[t], tokens[t + 1]] for t in range(n - 1)])
    states, u = h.fused(features[: n - 1]), h.encoded(trigrams)
    query, keys, values = h.project(u, states, torch.arange(n - 1))
    seen = [t for t in range(n - 1) if t < c.sinks or t > n - 2 - c.window]

    def attended(query: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
        k = torch.cat([keys[seen], *(pair[0] for pair in own)]).repeat_interleave(c.heads // c.kv_heads, 1)
        v = torch.cat([values[seen], *(pair[1] for pair in own)]).repeat_interleave(c.heads // c.kv_heads, 1)
        chances = (torch.einsum("rhd,khd->rhk", query, k) / c.head_dim**0.5).softmax(-1)
        return torch.einsum("rhk,khd->rhd", chances, v)

    def after(branch: list[int]) -> Tensor:
        last, own = features[n - 2 : n - 1, -c.hidden :], []
        g = h.finish(u[-1:], states[-1:], attended(query[-1:], []))
        for i in range(1, len(branch) + 1):
            newest = torch.tensor([([*tokens, *branch[:i]])[-3:]])
            side = h.encoded(newest)
            q, k, v = h.project(side, g, torch.tensor([n - 2 + i]))
            own.append((k, v))
            g = h.finish(side, g, attended(q, own))
        return h.logits(g, last, len(branch))[0]

    return after


def branches(tree: Tree) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*found[parent], token))
    return set(found[1:])


def expected(level: Chimera, text: Text, shape: Shape, sampling: Sampling, features: Tensor) -> set[tuple[int, ...]]:
    """The best nodes, found branch by branch."""
    after = rows_of(level, text.tokens, features)
    told = [torch.tensor([value]) for value in (sampling.temperature, sampling.top_p)]
    noise = torch.tensor([stream(sampling.seed, text.key)])
    nodes: dict[tuple[int, ...], float] = {}
    beams: list[tuple[int, ...]] = [()]
    for depth in range(shape.depth):
        made: dict[tuple[int, ...], float] = {}
        for beam in beams:
            logits = after(list(beam))[None, None]
            at = torch.tensor([len(text) + depth])
            chances, tokens = level.drafting._children(logits, *told, noise, at, shape.beams)
            for chance, token in zip(chances.flatten().tolist(), tokens.flatten().tolist(), strict=True):
                made[*beam, token] = nodes.get(beam, 0.0) + chance
        nodes |= made
        beams = sorted(made, key=made.__getitem__)[-shape.beams :]
    return set(sorted(nodes, key=nodes.__getitem__)[-shape.nodes :])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("parts", [{}, {"with_block": False}, {"with_trigram": False, "with_residual": False}])
def test_drafts_are_the_best_nodes(parts: dict[str, bool], temperature: float) -> None:
    """Of a text that grows and is taken back in pieces of all sizes, within its window and beyond."""
    target = random_decoder()
    level = Chimera("chimera", Drafting(heads(target, "calm", **parts), 2), 320, 2, tree=True)
    sampling = Sampling(temperature, seed=1)
    torch.manual_seed(1)
    tokens, features = torch.randint(2, 320, (140,)).tolist(), torch.randn(140, 3 * 64)
    shape, text = Shape(4, 3, 12), Text(1, 5, tokens[:2], sampling)
    for size in (2, 3, 7, 40, 39, 44, 90, 95, 95, 140):
        same = next((i for i, (a, b) in enumerate(zip(text.tokens, tokens[:size], strict=False)) if a != b), 2)
        at = min(same, len(text), size) - 1
        text.tokens, text.committed = tokens[:size], 1
        level.features.take(1, at, features[at : size - 1] if size - 1 > at else features[size - 2 : size - 1])
        if size - 1 <= at:
            level.features.take(1, size - 2, features[size - 2 : size - 1])
        ready = level._ready(text, shape)
        assert ready is not None
        found = level._drafted([ready], shape)[0].tolist()
        drafted = branches(Tree.of(found[: shape.rows], found[shape.rows :]))
        assert drafted == expected(level, text, shape, sampling, features)
        if size == 40:
            tokens[38], features[38] = 7, -features[38]  # what was speculated is taken back


def test_noise_of_single_tokens() -> None:
    tokens = torch.tensor([0, 5, 99])
    for seed, position in ((3, 0), (8, 123_456)):
        said = gumbel_of(torch.tensor(stream(seed, 1)), torch.tensor(position), tokens)
        assert torch.equal(said, gumbel(stream(seed, 1), position, 100, CPU)[tokens])


@pytest.mark.parametrize("nodes", range(1, 64))
def test_shapes(nodes: int) -> None:
    for depth in range(1, 9):
        assert 2 <= Shape.tree(nodes, depth).rows <= nodes + 1
    assert Shape.tree(nodes, nodes).rows > 0.8 * nodes or nodes > 40


# whatever it drafts


@pytest.fixture
def knowing(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    return tiny_heads.knowing(monkeypatch)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other widths in every round, plain ones among them."""

    def plans() -> Iterator[int]:
        while True:
            yield from (7, 3, 15, 0, 6, 31, 1, 63)

    chosen = plans()

    def plan(self: Tuner) -> Plan:
        width = next(chosen)
        if not width:
            return Plan()
        levels = tuple(range(len(self.sequential)))
        return Plan(levels, tuple(width if n in self.trees else min(width, self.block) for n in levels))

    monkeypatch.setattr(Tuner, "plan", plan)


def chimera(target: Decoder, made: Heads, levels: str = "chimera > target(full)", **settings: Any) -> Engine:
    run = tiny_engine.engine(levels, target, **settings)
    run.parts.heads = made
    return run


def requests(temperature: float, new: int = 40) -> list[Request]:
    sampling = Sampling(temperature, 0.9 if temperature else 1.0, seed=3)
    return [Request(tiny_engine.prompt(n, n), new + n % 7, sampling=sampling, sequence=n) for n in (1, 40, 250)]


LEVELS = [
    "chimera > target(full)",
    "chimera > target(retrieval:64) > target(full)",
    "chimera > target(kv=int4) > target(full)",
]


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("tree", [None, 0])
@pytest.mark.parametrize("levels", LEVELS)
def test_same_text(levels: str, tree: int | None, temperature: float, knowing: dict[int, list[int]]) -> None:
    target = random_decoder()
    asked = requests(temperature)
    wanted = learnt(knowing, target, asked)
    run = chimera(target, heads(target), levels, tree=tree)
    assert answers(run, *asked) == wanted
    assert run.report().levels[0].kept > 30
    assert answers(run, asked[1]) == wanted[1:2], "nothing of an earlier answer is left"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["random", "nan", "huge", "few", "doubles"])
def test_adversarial_heads(kind: str, temperature: float) -> None:
    target = random_decoder()
    asked = requests(temperature, 20)
    wanted = answers(tiny_engine.engine("target(full)", target), *asked)
    for tree in (31, 0):
        assert answers(chimera(target, heads(target, kind), adapt=False, tree=tree), *asked) == wanted


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chains_are_exact_in_16_bits(temperature: float, knowing: dict[int, list[int]]) -> None:
    """To the bit: no two tokens may be so near that only chance says which is said."""
    target = random_decoder(dtype=torch.bfloat16)
    asked = requests(temperature, 60)
    wanted = learnt(knowing, target, asked)
    run = chimera(target, heads(target), tree=0)
    assert answers(run, *asked) == wanted
    assert run.report().levels[0].kept > 60


@pytest.mark.usefixtures("sizes")
def test_trees_in_16_bits_part_at_ties_only(knowing: dict[int, list[int]]) -> None:
    """Where a text parts from plain decoding's the two tokens are as likely as 16 bits can tell."""
    target, parted = random_decoder(dtype=torch.bfloat16), []
    asked = [Request(tiny_engine.prompt(n, n), 40, sequence=n) for n in range(30, 38)]
    wanted = learnt(knowing, target, asked)
    run = chimera(target, heads(target))
    for one, (plain, _) in zip(asked, wanted, strict=True):
        said = answers(run, one)[0][0]
        at = next((n for n, (a, b) in enumerate(zip(plain, said, strict=True)) if a != b), None)
        if at is not None:
            row = tiny_engine.scores(target, [*one.prompt, *plain[:at]], ())[-1]
            parted.append(abs(float(row[plain[at]] - row[said[at]])))
    assert len(parted) <= 4
    assert max(parted, default=0.0) < 0.1


@pytest.mark.usefixtures("sizes")
def test_ends(knowing: dict[int, list[int]]) -> None:
    """An end of sequence and the limit of tokens inside a branch that was accepted; a context that is full."""
    target = random_decoder()
    asked = Request(tiny_engine.prompt(40), 60)
    [(said, _)] = learnt(knowing, target, [asked])
    for n in range(20, 28):
        first = said.index(said[n])
        stopped = Request(asked.prompt, 60, frozenset({said[n]}))
        assert answers(chimera(target, heads(target)), stopped) == [(said[: first + 1], "eos")]
        assert answers(chimera(target, heads(target)), Request(asked.prompt, n)) == [(said[:n], "length")]
        full = chimera(target, heads(target), context=40 + n)
        assert answers(full, asked) == [(said[:n], "context")]


def test_n_grams_alone() -> None:
    """Heads without use: what is kept are continuations of the text itself."""
    target = tiny_engine.decoder(tiny_engine.config(), tiny_engine.stuck(tiny_engine.weights(tiny_engine.config()), 9))
    asked = Request((9,) * 12, 40)
    run = chimera(target, heads(target, "few"), adapt=False, tree=15)
    assert answers(run, asked) == answers(tiny_engine.engine("target(full)", target), asked)
    assert run.report().levels[0].kept > 20


def test_rejection_is_of_chains() -> None:
    target = random_decoder()
    run = chimera(target, heads(target), rule="rejection", adapt=False)
    tokens, reason = answers(run, Request(tiny_engine.prompt(40), 12, sampling=Sampling(0.9)))[0]
    assert (len(tokens), reason) == (12, "length")
    level = run.levels.proposers[0]
    drafts = level.propose([run.runs[0].text], [5], [4], run.by)
    assert [len(draft.laws) for draft in drafts] == [len(drafts[0].tokens)]
    assert drafts[0].tree is None
    with pytest.raises(UsageError, match="coupled"):
        choose_stacks(Settings(method="chimera", rule="rejection", tree=7), 100, draft=False, gpu=False)


def test_no_heads() -> None:
    with pytest.raises(HspecError, match="no draft model") as caught:
        answers(tiny_engine.engine("chimera > target(full)", random_decoder()), Request((5, 6), 3))
    assert "hspec train chimera" in (caught.value.hint or "")


def test_a_text_of_one_token_has_nothing_to_draft_from() -> None:
    target = random_decoder()
    level = Chimera("chimera", Drafting(heads(target), 1), 320, 1, tree=True)
    assert level.propose([Text(0, 0, [5])], [9], [7], Coupled()) == [Draft([])]
