"""Trees: what they are made of, and that a pass over one says of every branch what passes over the branch say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import tiny_engine
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import CPU, answers, random_decoder

from hspec_decoding.engine import Engine
from hspec_decoding.levels import Tally
from hspec_decoding.options import Request
from hspec_decoding.rules import Chooser, Coupled, Draft
from hspec_decoding.sampling import Sampling
from hspec_decoding.sequence import Text
from hspec_decoding.target import Target
from hspec_decoding.tree import NOWHERE, Tree, best, depths, grafted, row_masks, signed


@st.composite
def trees(draw: st.DrawFn, most: int = 63, tokens: int = 4) -> Tree:
    """Siblings may be the same token."""
    size = draw(st.integers(0, most))
    parents = [draw(st.integers(0, i)) for i in range(size)]
    return Tree(draw(st.lists(st.integers(0, tokens), min_size=size, max_size=size)), parents)


def branch(tree: Tree, row: int) -> list[int]:
    """Tokens from the root to a row."""
    return [*branch(tree, tree.parents[row - 1]), tree.tokens[row - 1]] if row else []


@given(trees())
def test_masks_are_ancestors(tree: Tree) -> None:
    masks = torch.tensor([list(map(signed, tree.masks))])
    assert depths(masks)[0].tolist() == tree.depths == [len(branch(tree, row)) for row in range(len(tree.tokens) + 1)]
    assert Tree.of([NOWHERE, *tree.tokens], tree.masks) == tree
    assert Tree.of([NOWHERE, *tree.tokens], masks[0].tolist()) == tree


@given(trees(), st.integers(0, 9))
def test_walk_follows_the_text(tree: Tree, seed: int) -> None:
    """Where the target says a token of its own after every branch, the path is the text as far as it was drafted."""

    def says(before: list[int]) -> int:
        return random.Random(str((seed, before))).randrange(4)

    path = tree.walk([says(branch(tree, row)) for row in range(len(tree.tokens) + 1)])
    text: list[int] = []
    drafted = {tuple(branch(tree, row)) for row in range(len(tree.tokens) + 1)}
    while (*text, says(text)) in drafted:
        text.append(says(text))
    if len({*zip(tree.parents, tree.tokens, strict=True)}) == len(tree.tokens):
        assert [tree.tokens[row - 1] for row in path] == text
    else:  # of siblings of one token one is followed
        assert [tree.tokens[row - 1] for row in path] == text[: len(path)]
    assert path == sorted(path)


@given(trees(), st.integers(0, 5))
def test_cut(tree: Tree, depth: int) -> None:
    cut = tree.cut(depth)
    wanted = [branch(tree, row) for row in range(len(tree.tokens) + 1)]
    assert [branch(cut, row) for row in range(len(cut.tokens) + 1)] == [b for b in wanted if len(b) <= depth]


@given(trees(most=20), st.integers(0, 30), st.data())
def test_best_are_connected(tree: Tree, seed: int, data: st.DataObject) -> None:
    if not tree.tokens:
        return
    nodes = data.draw(st.integers(1, len(tree.tokens)))
    chance = random.Random(seed)
    scores: list[float] = []
    for parent in tree.parents:
        scores.append((scores[parent - 1] if parent else 0.0) - chance.random() - 1e-3)
    parents = torch.tensor([[parent - 1 for parent in tree.parents]])
    tokens, masks = best(torch.tensor([scores]), torch.tensor([tree.tokens]), parents, nodes, 20)
    kept = Tree.of(tokens[0].tolist(), masks[0].tolist())
    rows = sorted(sorted(range(len(scores)), key=scores.__getitem__)[-nodes:])
    assert [branch(kept, n + 1) for n in range(nodes)] == [branch(tree, row + 1) for row in rows]


@given(trees(most=12), st.lists(st.integers(0, 4), max_size=8), st.integers(1, 4))
def test_grafted(tree: Tree, continuation: list[int], nodes: int) -> None:
    if len({*zip(tree.parents, tree.tokens, strict=True)}) < len(tree.tokens):
        return
    padded = torch.tensor([[*continuation, *[NOWHERE] * (9 - len(continuation))]])
    before = torch.tensor([[NOWHERE, *tree.tokens]]), torch.tensor([list(map(signed, tree.masks))])
    tokens, masks = grafted(*before, padded, nodes)
    made = Tree.of(tokens[0].tolist(), masks[0].tolist())
    known = [branch(tree, row) for row in range(len(tree.tokens) + 1)]
    foreseen = max(n for n in range(len(continuation) + 1) if continuation[:n] in known)
    fresh = [continuation[: n + 1] for n in range(foreseen, min(len(continuation), foreseen + nodes))]
    rows = range(len(tree.tokens) + 1, len(made.tokens) + 1)
    assert [branch(made, row) for row in range(len(tree.tokens) + 1)] == known
    assert [branch(made, row) for row in rows if made.tokens[row - 1] >= 0] == fresh


@given(trees(most=30), st.integers(0, 3), st.integers(0, 30))
def test_rows_see_their_branch(tree: Tree, root: int, more: int) -> None:
    rows = root + len(tree.tokens) + 1 + more
    masks = row_masks([tree, None], [root, root], rows)
    for row, (own, chain) in enumerate(zip(*masks, strict=True)):
        sees = {n for n in range(rows) if own >> n & 1}
        assert {n for n in range(rows) if chain >> n & 1} == set(range(row + 1))
        if row < root:
            assert sees == set(range(row + 1))
        else:
            inside = row - root if row - root <= len(tree.tokens) else 0
            branch = {root + n for n in range(len(tree.tokens) + 1) if tree.masks[inside] >> n & 1}
            assert sees == {*range(root), *branch, row}


# checked by the target


class Guess:
    """Proposes trees that know the text, as far as `truth` goes and chance wants it, among other branches."""

    name, sequential, guess = "guess", False, 0.5

    def __init__(self, truth: dict[int, Sequence[int]], seed: int, nodes: int) -> None:
        self.truth, self.chance, self.nodes, self.tally = truth, random.Random(seed), nodes, Tally()

    def read(self, text: Text) -> None:
        pass

    def forget(self, slot: int) -> None:
        pass

    def propose(self, texts: Sequence[Text], limits: Sequence[int], _: Sequence[int], __: Chooser) -> list[Draft]:
        return [self._draft(text, limit) for text, limit in zip(texts, limits, strict=True)]

    def _draft(self, text: Text, limit: int) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        at, rest = 0, list(self.truth[text.key][len(text) - text.prompt :])[:limit]
        for _ in range(self.chance.randint(0, self.nodes)):
            if rest and self.chance.random() < 0.5:
                parents.append(at)
                tokens.append(rest.pop(0))
                at = len(tokens)
            else:
                parents.append(self.chance.randint(0, len(tokens)))
                tokens.append(self.chance.randrange(2, 320))
        tree = Tree(tokens, parents).cut(limit)
        return Draft(list(tree.tokens), tree=tree) if tree.tokens else Draft([])


def guessing(engine: Engine, guess: Guess, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr("hspec_decoding.build._level", lambda *_: guess)
    return engine


@pytest.mark.parametrize("nodes", [5, 60])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("family", tiny_engine.FAMILIES)
def test_trees_say_what_plain_decoding_says(
    family: str, temperature: float, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = random_decoder(family)
    sampling = Sampling(temperature, 0.9 if temperature else 1.0, seed=3)
    asked = [Request(tiny_engine.prompt(n, n), 30 + n % 7, sampling=sampling, sequence=n) for n in (1, 40, 250)]
    plain = answers(tiny_engine.engine("target(full)", target), *asked)
    stop = plain[1][0][17]
    asked[1] = Request(asked[1].prompt, 37, frozenset({stop}), sampling, asked[1].sequence)
    wanted = [plain[0], (plain[1][0][: plain[1][0].index(stop) + 1], "eos"), plain[2]]
    guess = Guess({r.sequence: said for r, (said, _) in zip(asked, plain, strict=True)}, 7, nodes)
    run = guessing(tiny_engine.engine("ngram > target(full)", target, adapt=False), guess, monkeypatch)
    assert answers(run, *asked) == wanted
    assert guess.tally.kept > 15


def test_context_nearly_full(monkeypatch: pytest.MonkeyPatch) -> None:
    target = random_decoder()
    asked = Request(tiny_engine.prompt(40), 100)
    wanted = answers(tiny_engine.engine("target(full)", target, context=70), asked)
    assert wanted[0][1] == "context"
    guess = Guess({0: wanted[0][0]}, 1, 60)
    run = guessing(tiny_engine.engine("ngram > target(full)", target, context=70, adapt=False), guess, monkeypatch)
    assert answers(run, asked) == wanted


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_compaction(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every round keys and values are those of the text fed from the start."""
    target = random_decoder(family)
    asked = Request(tiny_engine.prompt(60), 40)
    guess = Guess({0: answers(tiny_engine.engine("target(full)", target), asked)[0][0]}, 3, 40)
    run = guessing(tiny_engine.engine("ngram > target(full)", target, adapt=False), guess, monkeypatch)
    moved, choices = [], Target.choices

    def compared(self: Target, texts: Sequence[Text], *rest: Any) -> list[list[int]]:
        found = choices(self, texts, *rest)
        text, held = texts[0], self.view.held[0].tokens
        again = tiny_engine.engine("target(full)", target)
        again._begin([Request(tuple(held), 1)])
        again.last._read(Text(0, 0, held), list(held))
        for own, wanted in zip(self._caches, again.last._caches, strict=True):
            torch.testing.assert_close(own[0, :, : len(held)], wanted[0, :, : len(held)], rtol=1e-4, atol=1e-4)
        assert len(held) >= len(text)
        moved.append(len(held) - len(text))
        return found

    monkeypatch.setattr(Target, "choices", compared)
    answers(run, asked)
    assert sum(moved) > 10


def test_a_tree_of_one_branch_is_a_chain() -> None:
    """Logits of the same tokens, as a chain and as a tree, are equal up to rounding."""
    target = random_decoder()
    run = tiny_engine.engine("target(full)", target, exact=False)
    run._begin([Request(tiny_engine.prompt(50), 20)])
    text = run.runs[0].text
    list(run.last.prefill(text, 16))
    tokens = [5, 9, 200]
    chain = run.last.logits([text], [Draft(tokens)])[0]
    tree = run.last.logits([text], [Draft(tokens, tree=Tree(tokens, [0, 1, 2]))])[0]
    torch.testing.assert_close(chain, tree, rtol=1e-4, atol=1e-4)
    assert Coupled().check([text], [Draft([*tokens], tree=Tree(tokens, [0, 1, 2]))], run.last)
    assert run.target.device == CPU
