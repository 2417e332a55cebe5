"""TidalDecode: what its sparse layers read, when it is dense, and that verified it changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_engine
import torch
from tiny_engine import answer, answers, prompt, random_decoder

from hspec_decoding.build import resolve
from hspec_decoding.cache import KVStore
from hspec_decoding.calibration import Calibration
from hspec_decoding.engine import Engine, Request, Settings
from hspec_decoding.sampling import Sampling
from hspec_decoding.sequence import Text
from hspec_decoding.stack import approximate, method, parse
from hspec_decoding.tidal import SINKS, Tidal, TidalPass, TidalView
from hspec_decoding.views import FullView
from hspec_profiles.errors import UsageError

DEEP: dict[str, Any] = {"num_hidden_layers": 6}
WAYS = ("tidal-heads", "tidal-pooled", "tidal-fed")
CROSSED = Calibration((0, 1, 3), "heads", tuple((1, 0) for _ in range(6)))


def engine(levels: str, calibration: Calibration | None = None, seed: int = 0, **settings: Any) -> Engine:
    made = tiny_engine.engine(levels, random_decoder(seed=seed, **DEEP), context=600, **settings)
    made.parts.calibration = calibration
    return made


# lossless


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("way", WAYS)
def test_verified_it_says_what_the_target_says(way: str, temperature: float) -> None:
    asked = Request(prompt(300), 60, sampling=Sampling(temperature, seed=3))
    alone = answer(engine("target(full)"), asked)
    for levels in (f"target({way}:64) > target(full)", f"ngram > target({way}:64) > target(full)"):
        assert answer(engine(levels, CROSSED, adapt=False, gamma=5), asked) == alone


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("full", [(0,), (0, 5), (0, 2, 4), (0, 1, 2, 3, 4, 5)])
def test_whatever_the_selector_layers(full: tuple[int, ...], rule: str) -> None:
    asked = Request(prompt(200, 1), 40, sampling=Sampling(0.0 if rule == "rejection" else 0.7, seed=1))
    alone = answer(engine("target(full)", rule=rule), asked)
    made = engine("target(tidal:64) > target(full)", Calibration(full, "heads"), adapt=False, gamma=4, rule=rule)
    assert answer(made, asked) == alone


def test_whatever_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of random tokens cost acceptance and nothing else."""
    generator = torch.Generator().manual_seed(0)

    def anything(self: Tidal, mass: torch.Tensor) -> torch.Tensor:
        size = (*mass.shape[:2], SINKS + self.most)
        return torch.randint(0, 100, size, generator=generator, dtype=torch.int32)

    asked = Request(prompt(300), 60, sampling=Sampling(0.7, seed=2))
    alone = answer(engine("target(full)"), asked)
    monkeypatch.setattr(Tidal, "lists", anything)
    assert answer(engine("target(tidal:64) > target(full)", adapt=False, gamma=6), asked) == alone


def test_sequences_of_a_batch_do_not_meet() -> None:
    asked = [Request(prompt(length, seed), 40, sequence=seed) for seed, length in enumerate((180, 301))]
    for levels in ("target(tidal:64)", "target(tidal:64) > target(full)"):
        together = answers(engine(levels, adapt=False, gamma=3), *asked)
        assert together == [answer(engine(levels, adapt=False, gamma=3), one) for one in asked]


# approximate


def test_a_budget_beyond_the_context_is_dense_to_the_bit() -> None:
    asked = Request(prompt(300), 80, sampling=Sampling(0.7, seed=3))
    dense, tidal = engine("target(full)"), engine("target(tidal:600)")
    assert answer(tidal, asked) == answer(dense, asked)
    ours, theirs = tidal.parts.stores["target"], dense.parts.stores["target"]
    assert all(torch.equal(a, b) for a, b in zip(ours.keys, theirs.keys, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(ours.values, theirs.values, strict=True))


def test_two_prompts_back_to_back_leak_nothing() -> None:
    made = engine("target(tidal:64)", correct=16)
    first, second = (Request(prompt(length, seed), 60) for length, seed in ((310, 0), (200, 5)))
    alone = [answer(engine("target(tidal:64)", correct=16), asked) for asked in (first, second)]
    assert [answer(made, asked) for asked in (first, second, first)] == [*alone, alone[0]]


def test_prompts_are_read_densely_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hspec_decoding.engine.PREFILL", {"cpu": 100})
    asked = Request(prompt(350), 1)
    dense, tidal = engine("target(full)"), engine("target(tidal:64)")
    answer(dense, asked), answer(tidal, asked)
    for ours, theirs in zip(tidal.parts.stores["target"].keys, dense.parts.stores["target"].keys, strict=True):
        assert torch.equal(ours[:, :, :349], theirs[:, :, :349])


@pytest.mark.parametrize("every", [8, 24])
def test_decoded_tokens_are_computed_again(every: int) -> None:
    """Keys are those of a dense pass over the same tokens, up to the last correction."""
    made = engine("target(tidal:64)", correct=every)
    said, _ = answer(made, Request(prompt(200), 60))
    tokens, exact = [*prompt(200), *said], made.last.view.exact[0]  # type: ignore[attr-defined]
    assert 200 + 60 - 2 * every <= exact < 260
    decoder = made.target
    store = KVStore(decoder.config, 1, 300, dtype=torch.float32, device=tiny_engine.CPU)
    decoder.forward(
        torch.tensor([tokens[:exact]]), FullView(decoder.config, store, 1).begin([Text(0, 0, tokens)], exact)
    )
    for ours, dense in zip(made.parts.stores["target"].keys, store.keys, strict=True):
        torch.testing.assert_close(ours[0, :, :exact], dense[0, :, :exact], rtol=1e-4, atol=1e-4)


# one pass


class Masked(TidalPass):
    """The same with all scores computed, and those of tokens that are not chosen set aside."""

    def attend(self, layer: int, stacked: Any, cos: Any, sin: Any, norms: Any) -> torch.Tensor:
        attended = super().attend(layer, stacked, cos, sin, norms)
        if layer in self.tidal.full:
            return attended
        config, at = self.config, int(self.numbers[1, 0])
        heads, dim, keys = config.heads, config.head_dim, self.store.keys[layer][0, :, : at + 1]
        query = stacked[0, :, : heads * dim].view(-1, heads, dim)
        rotated = torch.cat((-query[..., dim // 2 :], query[..., : dim // 2]), -1)
        query = (query * cos[0, :, None] + rotated * sin[0, :, None])[0].view(config.kv_heads, -1, dim)
        seen = torch.zeros(config.kv_heads, at + 1, dtype=torch.bool)
        seen.scatter_(1, self._lists(layer)[0].long(), True)
        seen[:, at - self.tidal.recent :] = True
        scores = torch.einsum("hgd,hnd->hgn", query, keys) * dim**-0.5
        scores = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        out = torch.einsum("hgn,hnd->hgd", scores, self.store.values[layer][0, :, : at + 1])
        torch.testing.assert_close(attended, out.reshape(1, 1, heads, dim), rtol=1e-4, atol=1e-5)
        self.compared = getattr(self, "compared", 0) + 1
        return attended


@pytest.mark.parametrize("way", ["heads", "pooled"])
def test_sparse_output_is_that_of_masked_dense(way: str) -> None:
    decoder = random_decoder(**DEEP)
    store = KVStore(decoder.config, 1, 400, dtype=torch.float32, device=tiny_engine.CPU)
    text = Text(0, 0, [*prompt(301)])
    view = FullView(decoder.config, store, 1)
    decoder.forward(torch.tensor([text.tokens[:300]]), view.begin([text], 300))
    view.fed(text, text.tokens[:300])
    layout = view.begin([text], 1).layout
    memory = Masked(decoder.config, store, layout, Tidal(decoder.config, CROSSED, 64, way))
    decoder.forward(torch.tensor([text.tokens[300:]]), memory)
    assert memory.compared == 3


def test_lists_hold_the_tokens_of_most_mass() -> None:
    tidal = Tidal(tiny_engine.config(**DEEP), CROSSED, 64, "heads")
    mass = torch.full((1, 2, 200), 0.1)
    mass[..., :SINKS] = mass[..., 150:] = float("-inf")
    mass[0, 0, 60:100] += 1
    mass[0, 1, 10:50] += 1
    lists = tidal.lists(mass)
    assert lists.shape == (1, 2, 64 - tidal.recent)
    assert lists[0, :, :SINKS].tolist() == [[*range(SINKS)]] * 2
    assert {*range(60, 100)} <= {*lists[0, 0].tolist()}
    assert {*range(10, 50)} <= {*lists[0, 1].tolist()}
    pooled = Tidal(tiny_engine.config(**DEEP), CROSSED, 64, "pooled").lists(mass)
    assert torch.equal(pooled[0, 0], pooled[0, 1])


def test_windows_are_left_to_themselves() -> None:
    """Layers with a sliding window neither select nor are they cut."""
    windowed = random_decoder("mistral", num_hidden_layers=4)
    made = tiny_engine.engine("target(tidal:64)", windowed, context=600)
    asked = Request(prompt(300), 30)
    assert answer(made, asked)[0] == answer(tiny_engine.engine("target(full)", windowed, context=600), asked)[0]


# words


def test_methods() -> None:
    assert approximate(method("tidal", draft=False))
    assert not approximate(method("tidal-lossless", draft=True))
    filled = resolve(method("tidal-lossless", draft=False), 32_768, budget=None, keep=False)
    assert [str(spec) for spec in filled] == ["target(tidal:2048)", "target(full)"]
    assert len(resolve(method("tidal-lossless", draft=False), 300, budget=None, keep=False)) == 1


@pytest.mark.parametrize("levels", ["ngram > target(tidal)", "target(tidal, w=int4)", "target(full) > target(tidal)"])
def test_what_may_not_decide(levels: str) -> None:
    with pytest.raises(UsageError):
        parse(levels)


def test_views_of_short_texts_read_everything() -> None:
    decoder = random_decoder(**DEEP)
    store = KVStore(decoder.config, 1, 400, dtype=torch.float32, device=tiny_engine.CPU)
    view = TidalView(decoder.config, FullView(decoder.config, store, 1), Tidal(decoder.config, CROSSED, 64), 1)
    for length, sparse in ((128, False), (129, True)):
        text = Text(0, 0, [*prompt(length)])
        view.prepare([text])
        assert isinstance(view.begin([text], 1), TidalPass) is sparse


def test_keys_may_stay_as_they_were_decoded() -> None:
    made = engine("target(tidal:64)", correct=0)
    answer(made, Request(prompt(200), 30))
    assert made.last.view.exact == [199]  # type: ignore[attr-defined]


def test_settings_reach_the_view() -> None:
    made = engine("target(tidal:64)", correct=12)
    assert Settings().correct == 64
    answer(made, Request(prompt(200), 2))
    assert made.last.view.every == 12  # type: ignore[attr-defined]
