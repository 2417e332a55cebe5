"""What views hold and feed: compared with texts kept naively, and with recomputing from scratch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import tiny_engine
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import CPU, random_decoder, scores
from torch import Tensor

from hspec_decoding.build import Parts, draft_window
from hspec_decoding.cache import KVStore
from hspec_decoding.graphs import Graphs
from hspec_decoding.levels import ModelLevel
from hspec_decoding.rules import Draft
from hspec_decoding.sequence import Held, Text
from hspec_decoding.sparse import SINKS
from hspec_decoding.stack import LONGEST, Spec
from hspec_decoding.target import Target
from hspec_decoding.views import FullView
from hspec_decoding.window import WindowView

Step = tuple[str, list[int], int]  # what happens to a text, the tokens of it, how many of them count

steps = st.lists(
    st.tuples(st.sampled_from(["speculate", "commit"]), st.lists(st.integers(0, 2), max_size=9), st.integers(0, 9)),
    max_size=30,
)


def close(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).abs().max() <= 1e-4 * wanted.abs().max())


# held tokens


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(steps=steps)
def test_held_is_what_the_text_begins_with(steps: list[Step]) -> None:
    """After every growth and taking back: what is held and what is missing are the text, and no less is missing."""
    text, held = Text(0, 0, [0]), Held()
    for kind, tokens, count in steps:
        if kind == "commit":
            text.commit(tokens)
        else:
            text.tokens += tokens
        before = list(held.tokens)
        missing = held.missing(text.tokens, text.committed)
        assert held.tokens + missing == text.tokens
        assert len(held) == min(common(before, text.tokens), len(text) - 1)
        held.extend(missing + tokens[:count])  # fed, with a draft behind it that may come to nothing
        del text.tokens[text.committed + (count if kind == "speculate" else 0) :]
        if kind == "speculate":
            del text.tokens[text.committed :]


def test_held_forgets() -> None:
    held = Held()
    held.extend([1, 2, 3])
    assert held.missing([1, 2, 3, 4], committed=4) == [4]
    held.reset()
    assert held.missing([9, 2], committed=2) == [9, 2]
    assert len(held) == 0


# the full view


@given(length=st.integers(1, 3000), drafted=st.integers(0, 63), bucket=st.sampled_from([8, 64, 256]))
def test_room_stays_in_the_bucket(length: int, drafted: int, bucket: int) -> None:
    """Any number of drafts for which there is room leaves the slots attended over as they are without drafts."""
    config = tiny_engine.config(num_hidden_layers=1)
    view = FullView(config, KVStore(config, 1, 8, dtype=torch.float32, device=CPU), 1, bucket)
    text = Text(0, 0, [0] * length)
    view.held[0].extend([0] * (length - 1))
    drafted = min(drafted, view.room(text))

    def extent(live: int) -> int:
        return view.begin([text], 8, [live]).layout.extent[None][0]

    assert extent(1 + drafted) == extent(1)
    assert extent(1) % bucket == 0
    assert length <= extent(1) < length + bucket
    assert extent(1 + view.room(text) + 1) > extent(1), "there is more room"


def recorded(view: FullView, layer: int, length: int) -> Tensor:
    """Queries [N, H, D] of the last pass's rows at positions below `length`."""
    own = view.recorded[0]
    return own.layers[layer][0][own.b, : length - own.first]


def test_queries_of_the_last_pass_are_kept() -> None:
    """Of long passes the last 64 rows; of what was drafted, those below the length asked for."""
    model = random_decoder()
    store = KVStore(model.config, 1, 300, dtype=torch.float32, device=CPU)
    view = FullView(model.config, store, 1)
    view.record = True
    target, tokens = Target(model, view, None), list(tiny_engine.prompt(200))
    text = Text(0, 0, tokens)
    for _ in target.prefill(text, 150):
        pass
    assert len(recorded(view, 0, 199)) == 49
    target.logits([text], [Draft([1, 2, 3])])
    last = recorded(view, 1, 201)
    assert last.shape == (2, 4, 16)
    again = Target(model, FullView(model.config, store, 1), None)
    again.view.record = True
    for _ in again.prefill(Text(0, 0, [*tokens, 1, 2]), 300):
        pass
    assert len(recorded(again.view, 1, 201)) == 64
    torch.testing.assert_close(recorded(again.view, 1, 201)[-2:], last, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", tiny_engine.FAMILIES)
def test_ragged_batches(family: str) -> None:
    """Texts of other lengths, fed more or fewer rows in one pass, score as each does alone."""
    model = random_decoder(family)
    store = KVStore(model.config, 3, 300, dtype=torch.float32, device=CPU)
    level = ModelLevel("model", model, FullView(model.config, store, 3))
    texts = [Text(slot, slot, list(tiny_engine.prompt(n, slot))) for slot, n in enumerate((1, 90, 33))]
    drafts = [Draft([5, 6, 7]), Draft([]), Draft([8])]
    for found, text, draft in zip(level.logits(texts, drafts), texts, drafts, strict=True):
        assert close(found, scores(model, text.tokens + draft.tokens, [])[len(text) - 1 :])
    for text, new in zip(texts, ([5, 6], [9], [8, 1, 2, 3]), strict=True):
        text.commit(new)
    order = [texts[2], texts[0]]
    for found, text in zip(level.logits(order, [Draft([4, 4]), Draft([])]), order, strict=True):
        drafted = [4, 4] if text is texts[2] else []
        assert close(found, scores(model, text.tokens + drafted, [])[len(text) - 1 :])


# the window of a draft


def window(context: int = 64, budget: int = 256) -> tuple[ModelLevel, WindowView]:
    """A draft's window as a stack builds it."""
    model = random_decoder("llama", max_position_embeddings=context)
    view = draft_window(Spec("draft", "streaming", budget), Parts(model, model), "draft", 1)
    return ModelLevel("draft", model, view), view


@pytest.mark.parametrize(("context", "longest"), [(64, 15), (100, 15), (300, 63)])
@given(grown=st.lists(st.tuples(st.integers(0, 63), st.integers(1, 20)), max_size=30))
def test_a_window_is_sinks_and_recent_tokens(context: int, longest: int, grown: list[tuple[int, int]]) -> None:
    """However the text is speculated about, taken back and grown: its last token is fed, behind a tail of the text."""
    level, view = window(context)
    assert level.decoder.config.context == context
    text, fresh = Text(0, 0, list(range(1000, 1070))), iter(range(2000, 100_000))
    for speculated, committed in grown:
        for tokens in ([next(fresh) for _ in range(min(speculated, longest))], []):
            text.tokens += tokens
            missing, held = view.missing(text), view.full.held[0].tokens
            shown = held + missing
            assert missing[-1] == text.tokens[-1]
            assert len(shown) <= context, "beyond the positions that the draft knows"
            behind = shown[SINKS:]
            assert shown[:SINKS] == text.tokens[:SINKS]
            assert behind == text.tokens[len(text) - len(behind) :]
            view.fed(text, missing)
            del text.tokens[text.committed :]
        text.commit([next(fresh) for _ in range(committed)])


def test_a_full_window_is_begun_anew() -> None:
    """With as many tokens as half of it holds, so that it lasts for as many more."""
    _, view = window(300)
    text, sizes = Text(0, 0, [0] * 10), []
    for token in range(2000):
        text.commit([token])
        missing = view.missing(text)
        view.fed(text, missing)
        sizes.append(len(missing))
    assert max(view.capacity, *sizes) <= 300
    restarts = [i for i, n in enumerate(sizes) if n > 1 and i]
    assert {sizes[i] for i in restarts} == {view.sinks + view.recent + 1}
    lasts = {later - earlier for earlier, later in itertools.pairwise(restarts)}
    assert lasts == {view.capacity - view.sinks - view.recent}


def test_a_window_scores_as_its_text_from_scratch() -> None:
    level, view = window(64)
    text = Text(0, 0, list(tiny_engine.prompt(100)))
    for step in range(60):
        found = level.logits([text], [Draft([])])[0]
        shown = view.full.held[0].tokens
        assert len(shown) <= 64
        assert close(found, scores(level.decoder, shown, [])[-1:]), step
        text.commit([step * 3 + 1])


def test_a_window_checks_a_block() -> None:
    """Rows of a draft behind a window that is all but full."""
    level, view = window(64)
    text = Text(0, 0, list(tiny_engine.prompt(64)))
    block = list(tiny_engine.prompt(LONGEST, 5))
    found = level.logits([text], [Draft(block)])[0]
    assert close(found, scores(level.decoder, text.tokens + block, [])[63:])
    assert level.logits([text], [Draft([])])[0].shape == (1, 320)
    assert len(view.full.held[0]) == 64


def test_windows_of_two_levels_are_apart() -> None:
    """A smaller window above a larger one is full when it is full, and neither writes over the other."""
    model = random_decoder("llama", max_position_embeddings=512)
    parts = Parts(model, model)
    large, small = (draft_window(Spec("draft", "streaming", size), parts, f"level {size}", 1) for size in (256, 64))
    assert (large.capacity, small.capacity) == (512, 128)
    assert large.full.store is not small.full.store


def test_graphs_go_with_the_memory_they_were_captured_over() -> None:
    """Memory that is large enough is kept, and they with it; memory that is replaced takes them along."""
    model = random_decoder()
    parts = Parts(model, None)
    parts.graphs[id(model)] = graphs = Graphs(model)
    first = parts.store("target", model, 1, 100)
    graphs.captured[first,] = None  # type: ignore[assignment]
    assert parts.store("target", model, 1, 90) is first
    assert graphs.captured
    assert parts.store("target", model, 1, 101) is not first
    assert not graphs.captured
