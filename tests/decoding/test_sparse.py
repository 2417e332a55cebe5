"""What sparse views take of the cache: which positions, by which scores, and when anew."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import tiny_engine
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engine import CPU, random_decoder, scores
from torch import Tensor

from hspec_decoding.cache import KVStore
from hspec_decoding.config import ModelConfig
from hspec_decoding.device import CPU_SHAPE
from hspec_decoding.levels import ModelLevel
from hspec_decoding.model import Decoder
from hspec_decoding.rules import Draft
from hspec_decoding.sequence import Text
from hspec_decoding.sparse import (
    CHUNK,
    SELECT,
    SINKS,
    ChunkMeans,
    Paper,
    Rule,
    SparseView,
    Streaming,
    VerifyFed,
    replaced,
)
from hspec_decoding.stack import LONGEST
from hspec_decoding.target import Target
from hspec_decoding.views import FullView, Verified

TAIL = 3 * LONGEST  # what a stack leaves room for
RULES: dict[str, type[Rule]] = {"streaming": Streaming, **SELECT}


def sparse_view(config: ModelConfig, source: FullView, sequences: int, budget: int, rule: Rule) -> SparseView:
    """A view with memory of its own."""
    like = source.store.keys[0]
    copy = KVStore(config, sequences, budget + CHUNK + TAIL, dtype=like.dtype, device=like.device)
    return SparseView(config, source, copy, sequences, budget, rule)


@dataclass
class Cache:
    """A target's cache over a text, and a sparse view of it."""

    text: Text
    target: Target
    view: SparseView

    @classmethod
    def of(cls, model: Decoder, length: int, budget: int, rule: Rule) -> Cache:
        """After the prefill of a prompt of `length` tokens."""
        store = KVStore(model.config, 1, 2048, dtype=model.dtype, device=CPU)
        full = FullView(model.config, store, 1, 256)
        view = sparse_view(model.config, full, 1, budget, rule)
        cache = cls(Text(0, 0, list(tiny_engine.prompt(length))), Target(model, full, CPU_SHAPE), view)
        for _ in cache.target.prefill(cache.text, 512):
            pass
        return cache

    def verify(self, tokens: list[int]) -> None:
        """A pass of the target over the last token and some drafts, all of them kept, and one token more."""
        self.target.logits([self.text], [Draft(tokens[:-1])])
        self.text.commit(tokens)

    def taken(self, layer: int = 0, head: int = 0) -> list[int]:
        """Positions copied, slot by slot, found by their keys."""
        view, window = self.view, self.view.config.windows[layer]
        count = view.filled[0][window]
        where = {tuple(row): i for i, row in enumerate(self.keys(layer, head).tolist())}
        values = self.target.view.store.values[layer][0, head]
        found = [where[tuple(row)] for row in view.copy.keys[layer][0, head, :count].tolist()]
        assert torch.equal(view.copy.values[layer][0, head, :count], values[found])
        return found

    def missing(self) -> list[int]:
        """What the view lacks, after it was brought up to date."""
        self.view.prepare([self.text])
        return self.view.missing(self.text)

    def queries(self, layer: int, length: int) -> Tensor:
        """Those of the last pass's rows at positions below `length`, [N, H, D]."""
        own = self.target.view.recorded[0]
        return own.layers[layer][0][own.b, : length - own.first]

    def keys(self, layer: int, head: int) -> Tensor:
        """Final keys of the text but its last token."""
        return self.target.view.store.keys[layer][0, head, : self.text.committed - 1]


# which positions


@given(
    length=st.integers(1, 400),
    prompt=st.integers(1, 400),
    budget=st.integers(SINKS + CHUNK, 200),
    rule=st.sampled_from(list(RULES)),
)
@settings(max_examples=300)
def test_positions(length: int, prompt: int, budget: int, rule: str) -> None:
    """Never one twice, none that is not cached, sinks and the last ones always, and no more than the budget."""
    config = tiny_engine.config(num_hidden_layers=1)
    store = KVStore(config, 1, 416, dtype=torch.float32, device=CPU)
    store.keys[0][0] = torch.arange(416.0)[:, None]  # every key says where it stands
    source = FullView(config, store, 1)
    view = sparse_view(config, source, 1, budget, RULES[rule]())
    source.recorded[0] = Verified([(torch.randn(1, 1, 4, 16), None)], 0, length - 1)
    text = Text(0, 0, [0] * (length + 1))
    text.prompt = min(prompt, length + 1)
    view.prepare([text])
    assert view.missing(text) == [0]
    count = view.filled[0][None]
    for head in range(2):
        taken = view.copy.keys[0][0, head, :count, 0].long().tolist()
        assert len(set(taken)) == len(taken)
        assert all(0 <= position < length for position in taken)
        if length <= budget:
            assert taken == list(range(length))
            continue
        assert taken[:SINKS] == list(range(SINKS))
        assert rule == "paper" or taken[-1] == length - 1
        assert budget - 2 * CHUNK < len(taken) <= budget + CHUNK, "there is no room for more"


@pytest.mark.parametrize(("budget", "length"), [(24, 300), (64, 65), (64, 300), (65, 300), (200, 204)])
def test_streaming_takes_sinks_and_a_window(budget: int, length: int) -> None:
    cache = Cache.of(random_decoder(), length + 1, budget, Streaming())
    cache.missing()
    recent = budget - SINKS + (length - budget + SINKS) % CHUNK
    for layer in range(3):
        for head in range(2):
            assert cache.taken(layer, head) == [*range(SINKS), *range(length - recent, length)]


@pytest.mark.parametrize("length", [100, 203, 301])
def test_verify_fed_takes_what_the_last_rows_attend_to(length: int) -> None:
    """Compared with softmax attention to the chunks' mean keys, summed over rows and heads."""
    cache = Cache.of(random_decoder(), length + 1, 80, VerifyFed())
    cache.verify([11, 12, 13])
    assert cache.missing() == [13]
    cached = length + 3
    recent = 40 + (cached - 40) % CHUNK
    for layer in range(3):
        rows = cache.queries(layer, cached)
        assert len(rows) == 3
        for head in range(2):
            means = cache.keys(layer, head)[: cached - recent].view(-1, CHUNK, 16).mean(1)
            wanted = torch.zeros(len(means))
            for row in rows:
                for query in row[2 * head : 2 * head + 2]:
                    wanted += (means @ query / 4).softmax(-1)
            wanted[: SINKS // CHUNK] = -1
            best = wanted.topk((80 - SINKS - recent) // CHUNK).indices.tolist()
            chunks = [position for chunk in best for position in range(chunk * CHUNK, chunk * CHUNK + CHUNK)]
            assert cache.taken(layer, head) == [*range(SINKS), *chunks, *range(cached - recent, cached)]


@given(st.permutations(range(12)), st.permutations(range(12)), st.integers(1, 12), st.sets(st.integers(0, 11)))
def test_what_stays_stays_where_it_is(held: list[int], wanted: list[int], count: int, empty: set[int]) -> None:
    held, wanted = [-1 if n in empty else n for n in held[:count]], wanted[:count]
    put = replaced(torch.tensor([[held, wanted]]), torch.tensor([[wanted, wanted]]), 12)[0].tolist()
    assert put[1] == [-1] * count
    now = [new if new >= 0 else old for new, old in zip(put[0], held, strict=True)]
    assert sorted(now) == sorted(wanted)
    assert {*put[0]} - {-1} == {*wanted} - {*held}


@pytest.mark.parametrize("select", SELECT)
def test_nothing_of_another_text_stays(select: str) -> None:
    cache = Cache.of(random_decoder("qwen2"), 301, 160, SELECT[select]())
    cache.missing()
    for forgetful in (cache.target, cache.view):
        forgetful.forget(0)
    other = replace(cache, text=Text(0, 0, list(tiny_engine.prompt(280, 3))))
    for _ in other.target.prefill(other.text, 512):
        pass
    other.missing()
    anew = replace(other, view=sparse_view(cache.view.config, cache.target.view, 1, 160, cache.view.rule))
    anew.missing()
    for layer, head in itertools.product(range(3), range(cache.view.config.kv_heads)):
        assert sorted(other.taken(layer, head)) == sorted(anew.taken(layer, head))


@pytest.mark.parametrize("select", SELECT)
def test_what_a_copy_has_is_not_copied_again(select: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round after round it holds what a copy made anew does, in whatever order."""
    model, index = random_decoder("qwen2"), list[Tensor]()
    cache = Cache.of(model, 301, 160, SELECT[select]())
    store, view = cache.target.view.store, cache.view
    gather = store.gather
    monkeypatch.setattr(store, "gather", lambda n, chosen, *how: (index.append(chosen), gather(n, chosen, *how)))
    for n in range(20):
        cache.verify([7 + n, 100 + n, 200 + n][: 1 + n % 3])
        before = view.chosen.get((0, None))
        index.clear()
        cache.missing()
        anew = replace(cache, view=sparse_view(model.config, cache.target.view, 1, 160, view.rule))
        anew.view.ranked = dict(view.ranked)
        anew.missing()
        chosen = view.chosen[0, None]
        end = SINKS // CHUNK + chosen.shape[-1]
        for layer, head in itertools.product(range(3), range(model.config.kv_heads)):
            taken = cache.taken(layer, head)
            assert sorted(taken) == sorted(anew.taken(layer, head))
            assert taken[end * CHUNK :] == sorted(taken)[end * CHUNK :]
            if before is not None:
                put = {*index[layer][0, head, SINKS // CHUNK : end].tolist()} - {-1}
                assert put == {*chosen[layer, head].tolist()} - {*before[layer, head, : chosen.shape[-1]].tolist()}


@pytest.mark.parametrize("length", [200, 203, 207])
def test_paper_takes_by_the_last_query_of_the_prompt_and_keeps_its_ranking(length: int) -> None:
    """What is generated comes on top, in the place of the chunks that scored least."""
    cache = Cache.of(random_decoder(), length, 80, Paper())
    cache.missing()
    ranked = {}
    for layer, head in ((0, 0), (1, 1), (2, 0)):
        query = cache.queries(layer, length - 1)[-1][2 * head : 2 * head + 2].sum(0)
        whole = (length - 1) // CHUNK  # the last token is not cached when the prompt is scored
        dots = cache.keys(layer, head)[: whole * CHUNK].view(-1, CHUNK, 16).mean(1) @ query
        dots[: SINKS // CHUNK] = float("-inf")
        ranked[layer, head] = dots.topk((80 - SINKS) // CHUNK).indices.tolist()
    for generated in (0, 1, 2, 9, 30, 60, 200):
        while (more := generated - (len(cache.text) - length)) > 0:
            cache.verify(list(range(20, 20 + min(8, more))))
        cache.missing()
        cached = length + generated - 1
        for (layer, head), best in ranked.items():
            taken = cache.taken(layer, head)
            recent = [position for position in taken if position >= (length - 1) // CHUNK * CHUNK]
            if generated <= 80 - SINKS - CHUNK:
                assert recent == list(range((length - 1) // CHUNK * CHUNK, cached))
            chunks = [position // CHUNK for position in taken[SINKS : len(taken) - len(recent) : CHUNK]]
            assert taken[:SINKS] == list(range(SINKS))
            if generated <= 30:
                assert chunks == best[: len(chunks)]
                assert len(chunks) == (80 - SINKS - len(recent)) // CHUNK
            if generated == 200:
                assert taken[SINKS:] == list(range(cached - len(taken) + SINKS, cached))


# means of chunks


@pytest.mark.parametrize("select", SELECT)
@pytest.mark.parametrize("length", [128, 129, 135, 136])
def test_means_are_those_of_final_keys(select: str, length: int) -> None:
    """However the text grew: a mean is never taken of a chunk before its last key is there."""
    cache = Cache.of(random_decoder(), length, 64, SELECT[select]())
    for step in range(6):
        cache.missing()
        cache.verify([step, step + 1, step + 2])
    means = cache.view.means
    assert means is not None
    for layer in range(3):
        done = means.done[0]
        assert done > SINKS // CHUNK
        for head in range(2):
            wanted = cache.keys(layer, head)[: done * CHUNK].view(-1, CHUNK, 16).mean(1)
            torch.testing.assert_close(means.means[layer][0, head, :done], wanted)


def test_means_grow() -> None:
    config = tiny_engine.config(num_hidden_layers=1)
    store = KVStore(config, 2, 64, dtype=torch.float32, device=CPU)
    store.keys[0].normal_(generator=torch.Generator().manual_seed(0))
    means = ChunkMeans(store, 2)
    for chunks in (1, 3, 2, 8):
        wanted = store.keys[0][1, :, : chunks * CHUNK].view(2, chunks, CHUNK, 16).mean(2)
        means.upto([1], [chunks])
        torch.testing.assert_close(means.means[0][1, :, :chunks], wanted)
    assert means.done == [0, 8]


# when


def test_renewed_when_the_text_has_grown_and_only_then() -> None:
    cache = Cache.of(random_decoder(), 200, 64, VerifyFed())
    level = ModelLevel("sparse", random_decoder(), cache.view)
    level.logits([cache.text], [Draft([])])
    copied = [tensor.clone() for tensor in cache.view.copy.keys]
    cache.text.tokens += [5, 6]
    assert cache.missing() == [5, 6]
    level.logits([cache.text], [Draft([7])])
    del cache.text.tokens[-2:]
    for before, after in zip(copied, cache.view.copy.keys, strict=True):
        assert torch.equal(before[:, :, :64], after[:, :, :64])
    cache.verify([5, 9])
    cache.text.tokens += [6]
    assert cache.missing() == [9, 6]
    assert cache.view.base == [201]


# what it computes


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [1, 7, 8, 9, 63, 100])
def test_a_view_of_everything_scores_as_the_full_view(family: str, rule: str, length: int) -> None:
    """Positions, order and rotation of the rows behind the copy are right: nothing but what is left out differs."""
    model = random_decoder(family)
    cache = Cache.of(model, length, 128, RULES[rule]())
    level = ModelLevel("sparse", model, cache.view)
    for _ in range(3):
        found = level.logits([cache.text], [Draft([5, 6, 7])])[0]
        wanted = scores(model, [*cache.text.tokens, 5, 6, 7], [])[-4:]
        assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()
        cache.text.tokens += [5, 6]
        found = level.logits([cache.text], [Draft([8])])[0]
        wanted = scores(model, [*cache.text.tokens, 8], [])[-2:]
        assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()
        del cache.text.tokens[-2:]
        cache.verify([3, 4])


@pytest.mark.parametrize("length", [20, 47, 48, 49, 100])
def test_sliding_layers_see_their_window(length: int) -> None:
    """The next token's scores are those of the full view where the budget holds the window."""
    model = random_decoder("mistral")
    cache = Cache.of(model, length, 128, VerifyFed())
    found = ModelLevel("sparse", model, cache.view).logits([cache.text], [Draft([])])[0]
    wanted = scores(model, cache.text.tokens, [])[-1:]
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("rule", RULES)
def test_a_sparse_view_is_attention_over_what_it_took(rule: str) -> None:
    """One layer against attention written out, over other positions for each KV head."""
    model = random_decoder("llama", num_hidden_layers=1)
    cache = Cache.of(model, 300, 64, RULES[rule]())
    assert cache.missing() == cache.text.tokens[-1:]
    memory = cache.view.begin([cache.text], 1)
    assert memory.positions.tolist() == [[299]]
    query, key, value = (torch.randn(1, 1, heads, 16) for heads in (4, 2, 2))
    stacked = torch.cat((query, key, value), dim=2).flatten(2)
    out = memory.attend(0, stacked, torch.ones(1, 1, 16), torch.zeros(1, 1, 16), None)
    for head in range(4):
        taken = cache.taken(0, head // 2)
        store = cache.target.view.store
        keys = torch.cat((store.keys[0][0, head // 2, taken], key[0, :, head // 2]))
        values = torch.cat((store.values[0][0, head // 2, taken], value[0, :, head // 2]))
        wanted = (keys @ query[0, 0, head] / 4).softmax(0) @ values
        torch.testing.assert_close(out[0, 0, head], wanted, rtol=1e-4, atol=1e-5)


def test_texts_of_a_batch_stand_at_different_places_of_their_tails() -> None:
    """One has added a block already, the other adds a block now: both are within what each may add."""
    model = random_decoder()
    store = KVStore(model.config, 2, 512, dtype=torch.float32, device=CPU)
    full = FullView(model.config, store, 2)
    level = ModelLevel("sparse", model, sparse_view(model.config, full, 2, 64, VerifyFed()))
    target, texts = Target(model, full, None), [Text(slot, slot, list(tiny_engine.prompt(201))) for slot in (0, 1)]
    for text in texts:
        for _ in target.prefill(text, 512):
            pass
    block = list(tiny_engine.prompt(40, 3))
    level.logits(texts, [Draft(block), Draft([])])
    texts[0].tokens += block
    found = level.logits(texts, [Draft([1]), Draft(block)])
    assert [len(rows) for rows in found] == [2, 41]
