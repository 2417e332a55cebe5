"""Levels on their own: n-grams against a naive search, limits kept, texts left as they were, tallies true."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import tiny_engine
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import CPU, random_decoder
from torch import Tensor

from hspec_decoding.cache import KVStore
from hspec_decoding.device import CPU_SHAPE, Shape
from hspec_decoding.levels import Level, ModelLevel, Tally, Verified
from hspec_decoding.model import Decoder
from hspec_decoding.ngram import NGram
from hspec_decoding.rules import Chooser, Coupled, Draft, Rejection
from hspec_decoding.sampling import Sampling, SeededDraws
from hspec_decoding.sequence import Text, speculating
from hspec_decoding.stack import LONGEST
from hspec_decoding.target import Target
from hspec_decoding.views import FullView, View

GREEDY = Coupled()


# texts


def test_committed_tokens_stay() -> None:
    text = Text(0, 0, [1, 2])
    text.commit([3])
    assert (text.tokens, text.committed, text.prompt, len(text)) == ([1, 2, 3], 3, 2, 3)
    text.tokens.append(4)
    with pytest.raises(AssertionError, match="pending"):
        text.commit([5])


def test_speculation_is_taken_back() -> None:
    texts = [Text(0, 0, [1]), Text(1, 1, [2, 3])]
    with speculating(texts):
        texts[0].tokens += [4, 5]
        with speculating(texts[:1]):
            texts[0].tokens += [6]
        texts[1].tokens += [7]
        assert [text.tokens for text in texts] == [[1, 4, 5], [2, 3, 7]]
    assert [text.tokens for text in texts] == [[1], [2, 3]]


# n-grams


def looked_up(tokens: Sequence[int], committed: int, limit: int) -> list[int]:
    """What followed the last committed place of the longest n-gram that the text ends with."""
    for n in (4, 3, 2):
        for end in range(committed - 1, n - 1, -1):
            if n <= len(tokens) and list(tokens[end - n : end]) == list(tokens[-n:]):
                whole = list(tokens)
                for at in range(end, end + limit):
                    whole.append(whole[at])
                return whole[len(tokens) :]
    return []


some = st.lists(st.integers(0, 2), max_size=5)


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=2, max_size=2),
    grown=st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=5), st.lists(st.integers(0, 2), max_size=4)), max_size=8
    ),
    limit=st.integers(0, 7),
    width=st.integers(1, 7),
)
def test_n_grams_are_those_of_a_naive_search(
    prompts: list[list[int]], grown: list[tuple[list[int], list[int]]], limit: int, width: int
) -> None:
    """Two texts side by side, as they grow and are speculated about."""
    level, texts = NGram(3, 2), [Text(slot, slot, prompt) for slot, prompt in enumerate(prompts)]
    for committed, speculated in grown:
        texts[len(committed) % 2].commit(committed)
        with speculating(texts):
            texts[0].tokens += speculated
            for draft, text in zip(level.propose(texts, [limit, 3], [width], GREEDY), texts, strict=True):
                room = min(width, limit if text is texts[0] else 3)
                assert draft.tokens == looked_up(text.tokens, text.committed, room)
                assert draft.laws == []


def test_an_n_gram_is_certain_under_the_rejection_rule() -> None:
    text = Text(0, 0, [1, 2, 3, 1, 2])
    draft = NGram(5, 1).propose([text], [4], [4], Rejection({0: SeededDraws(0, 0)}))[0]
    assert draft.tokens == [3, 1, 2, 3]
    assert [law.tolist() for law in draft.laws] == [[float(i == token) for i in range(5)] for token in draft.tokens]


# limits and tallies


class Fixed(ModelLevel):
    """A model that says the same next tokens whatever comes before: at each position its own."""

    def __init__(self, tokens: Sequence[int], size: int = 4) -> None:
        super().__init__("fixed", cast(Decoder, None), cast(View, None))
        self.tokens, self.size = tokens, size

    def logits(self, texts: Sequence[Text], drafts: Sequence[Draft]) -> list[Tensor]:
        rows = []
        for text, draft in zip(texts, drafts, strict=True):
            said = torch.tensor([self.tokens[len(text) + i] for i in range(len(draft.tokens) + 1)])
            rows.append(torch.nn.functional.one_hot(said, self.size) * 9.0)
        self.tally.passes += 1
        return rows

    choices = tiny_engine.chosen_from_logits


said = st.lists(st.integers(0, 3), min_size=40, max_size=40)


@given(
    proposed=st.lists(said, min_size=3, max_size=3),
    limits=st.lists(st.integers(0, 12), min_size=2, max_size=2),
    widths=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    rule=st.sampled_from(["coupled", "rejection"]),
)
def test_a_stack_keeps_to_its_limits(
    proposed: list[list[int]], limits: list[int], widths: list[int], rule: str
) -> None:
    """At most as many tokens as asked for, at least the width where there is room, one law for each where laws count,
    and texts left as they were."""
    levels = [Fixed(tokens) for tokens in proposed]
    stack: Level = levels[0]
    for level in levels[1:]:
        stack = Verified(stack, level)
    texts = [Text(0, 0, [0, 1, 2], Sampling(0.5)), Text(1, 1, [0], Sampling(0.5))]
    by: Chooser = Coupled()
    if rule == "rejection":
        by = Rejection({slot: SeededDraws(0, slot) for slot in (0, 1)})
    drafts = stack.propose(texts, limits, widths, by)
    assert [text.tokens for text in texts] == [[0, 1, 2], [0]]
    for draft, limit in zip(drafts, limits, strict=True):
        assert min(widths[-1], limit) <= len(draft.tokens) <= limit
        assert len(draft.laws) == (len(draft.tokens) if rule == "rejection" else 0)
    for level in levels[:-1]:
        assert 0 <= level.tally.kept <= level.tally.proposed
    assert levels[-1].tally.proposed == levels[-1].tally.kept == 0  # entered by whoever checks it


def test_what_was_kept_is_counted() -> None:
    """A middle level that agrees with the first two of each three tokens drafted."""
    below, middle = Fixed([0] * 40), Fixed([0, 0, 1] * 14)
    stack = Verified(below, middle)
    draft = stack.propose([Text(0, 0, [3, 3, 3])], [20], [3, 9], GREEDY)[0]
    assert draft.tokens == [0, 0, 1] * 3
    assert (below.tally.proposed, below.tally.kept) == (9, 6)
    assert middle.tally.passes == 3
    assert below.tally.passes == 9


def test_texts_are_restored_when_a_level_fails() -> None:
    class Failing(Fixed):
        def logits(self, texts: Sequence[Text], drafts: Sequence[Draft]) -> list[Tensor]:  # noqa: ARG002
            raise RuntimeError("out of memory")

    text = Text(0, 0, [1])
    with pytest.raises(RuntimeError):
        Verified(Fixed([0] * 9), Failing([0] * 9)).propose([text], [5], [2, 4], GREEDY)
    assert text.tokens == [1]


# the target


def target(shape: Shape | None, bucket: int = 256) -> Target:
    model = random_decoder()
    store = KVStore(model.config, 2, 600, dtype=torch.float32, device=CPU)
    return Target(model, FullView(model.config, store, 2, bucket), shape)


def test_prefill_leaves_the_last_token() -> None:
    """Told in chunks; the last token is the first of the first block."""
    last, text = target(CPU_SHAPE), Text(0, 0, list(tiny_engine.prompt(300)))
    assert list(last.prefill(text, 128)) == [128, 256, 299]
    assert last.view.missing(text) == text.tokens[-1:]
    assert list(last.prefill(Text(1, 1, [5]), 128)) == []


@pytest.mark.parametrize(("length", "room"), [(1, 7), (249, 7), (250, 6), (255, 1), (256, 0), (257, 7)])
def test_room_of_the_fixed_shape(length: int, room: int) -> None:
    assert target(CPU_SHAPE).room(Text(0, 0, [0] * length)) == room
    assert target(None, bucket=1).room(Text(0, 0, [0] * length)) == LONGEST
    assert target(Shape(32, 1, padded=False), bucket=1).room(Text(0, 0, [0] * length)) == 31


def test_scores_are_of_the_last_token_and_the_draft() -> None:
    """In a batch whose texts need more and fewer rows, with the fixed shape and without."""
    texts = [Text(0, 0, list(tiny_engine.prompt(20))), Text(1, 1, [7])]
    drafts = [Draft([1, 2, 3]), Draft([])]
    for last in (target(CPU_SHAPE), target(Shape(32, 1, padded=False), bucket=1), target(None, bucket=1)):
        for text in texts:
            for _ in last.prefill(text, 64):
                pass
        for rows, text, draft in zip(last.logits(texts, drafts), texts, drafts, strict=True):
            wanted = tiny_engine.scores(last.decoder, text.tokens + draft.tokens, [])[len(text) - 1 :]
            assert (rows - wanted).abs().max() < 1e-4 * wanted.abs().max()
        assert last.tally == Tally(passes=1, seconds=last.tally.seconds)
