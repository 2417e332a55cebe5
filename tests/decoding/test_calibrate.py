"""Calibration: a planted selector is found, the search is the best there is, and trying leaves keys as they were."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import tiny_engine
import torch
from tiny_engine import CPU
from torch import Tensor

from hspec_decoding.cache import KVStore
from hspec_decoding.calibrate import Search, calibrate
from hspec_decoding.calibration import Calibration, by_rule, directory, find, fingerprint, save, whole_layers
from hspec_decoding.captured import Captured, Table, chains, neighbours
from hspec_decoding.model import Decoder
from hspec_decoding.sequence import Text
from hspec_decoding.tidal import Tidal
from hspec_decoding.views import FullView
from hspec_profiles.errors import HspecError, UsageError

BUDGET = 64


def planted() -> Decoder:
    """Layers 1 to 3 attend alike, and so do 4 to 7, which have their heads the other way round from 5 on."""
    config = tiny_engine.config(num_hidden_layers=8)
    made = tiny_engine.weights(config)

    def name(layer: int, what: str) -> str:
        return f"model.layers.{layer}.{what}.weight"

    for layer in range(8):
        like = 0 if layer == 0 else 1 if layer < 4 else 4
        for part in ("q_proj", "k_proj", "v_proj"):
            tensor = made[name(like, f"self_attn.{part}")]
            rows = tensor.shape[0] // 2
            turned = torch.cat((tensor[rows:], tensor[:rows]))
            made[name(layer, f"self_attn.{part}")] = turned if layer > 4 else tensor
        made[name(layer, "input_layernorm")] = torch.ones(64)
        for part in ("self_attn.o_proj", "mlp.down_proj"):
            made[name(layer, part)] = 0.02 * made[name(layer, part)]
    return tiny_engine.decoder(config, made)


def texts(*lengths: int) -> list[list[int]]:
    made = torch.Generator().manual_seed(0)
    return [torch.randint(2, 320, (length,), generator=made).tolist() for length in lengths]


def untold(what: str, done: int, total: int) -> None:
    assert 0 < done <= total, what


@pytest.fixture(scope="module")
def search() -> Search:
    return Search(planted(), texts(520, 400), BUDGET, untold)


@pytest.fixture(scope="module")
def table(search: Search) -> Table:
    return search.read()


def test_a_planted_selector_is_found(table: Table) -> None:
    assert chains(table, "heads", range(8), 3, 1) == [(0, 1, 4)]
    assert table.nearest((0, 1, 4))[2:4] == ((0, 1),) * 2
    assert table.nearest((0, 1, 4))[5:] == ((1, 0),) * 3
    within = [table.shares["heads"][i, j] for i, j in ((1, 2), (1, 3), (4, 5), (4, 7), (5, 6))]
    across = [table.shares["heads"][i, j] for i, j in ((0, 1), (1, 4), (3, 5), (2, 7))]
    assert min(within) > 1.5 * max(across)


def test_the_whole_of_calibration_finds_it() -> None:
    told: list[tuple[str, int, int]] = []
    found = calibrate(planted(), texts(520, 400), size=3, budget=BUDGET, tell=lambda *how: told.append(how))
    assert found.best.full == (0, 1, 4)
    assert found.best.heads is None or found.best.heads[6] == (1, 0)
    assert [tried.heard.kl for tried in found.tried] == sorted(tried.heard.kl for tried in found.tried)
    assert {what for what, _, _ in told} == {"tokens read", "places decoded"}
    assert all(done <= total for _, done, total in told)


@pytest.mark.parametrize("way", ["heads", "pooled"])
def test_the_table_is_the_mass_that_lists_hold(way: str) -> None:
    """One row of one chunk, against softmax written out."""
    decoder = tiny_engine.random_decoder(num_hidden_layers=4)
    config, (tokens,) = decoder.config, texts(301)
    captured = Captured(decoder, BUDGET)
    store = KVStore(config, 1, 301, dtype=torch.float32, device=CPU)
    view = FullView(config, store, 1)
    queries: dict[int, Tensor] = {}
    look = Captured._chunk

    def chunk(self: Captured, view: FullView, text: Text, part: list[int]) -> None:
        view.record = True
        memory = view.begin([text], len(part))
        decoder.forward(torch.tensor([part]), memory)
        assert memory.recorded is not None
        queries.update({layer: query[0, -1] for layer, (query, _) in enumerate(memory.recorded)})
        look(self, view, text, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Captured, "_chunk", chunk)
        patch.setattr("hspec_decoding.captured.PROBES", 1)
        list(captured.read(view, Text(0, 0, tokens), 300))
    assert captured.count == 1
    tidal = Tidal(config, Calibration((0,)), BUDGET, way)
    mass, lists = {}, {}
    for layer, query in queries.items():
        scores = torch.einsum("hgd,hnd->hgn", query.view(2, 2, -1), store.keys[layer][0, :, :300]) / 4
        mass[layer] = scores.softmax(-1).sum(1)
        open_ = mass[layer].clone()
        open_[:, :4] = open_[:, 299 - tidal.recent :] = float("-inf")
        lists[layer] = tidal.lists(open_[None])[0].long()
        own = Tidal(config, Calibration((0,)), BUDGET, "heads").lists(open_[None])[0].long()
        recent = mass[layer][:, 299 - tidal.recent :].sum(1)
        whole = recent + mass[layer].gather(1, own).sum(1)
        for before in range(layer):
            ways = lists[before] if way == "heads" else lists[before][:1]
            got = torch.stack([recent + mass[layer][:, one].sum(1) for one in ways], 1) / whole[:, None]
            wanted = got.amax(1).mean()
            torch.testing.assert_close(captured.table().shares[way][before, layer], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_no_set_of_layers_holds_more(size: int) -> None:
    made = torch.Generator().manual_seed(size)
    shares, weights = torch.rand(7, 7, generator=made), torch.rand(7, generator=made)
    table = Table(torch.zeros(7, 7, 1, 1), {"pooled": shares}, weights)
    layers = [0, 1, 3, 4, 5, 6]  # layer 2 has a sliding window

    def held(full: tuple[int, ...]) -> float:
        others = (j for j in layers if j not in full)
        kept = sum(weights[j] * shares[max(i for i in full if i < j), j] for j in others)
        return float(kept + sum(weights[j] for j in full))

    sets = [(0, *rest) for rest in itertools.combinations(layers[1:], size - 1)]
    assert chains(table, "pooled", layers, size, 3) == sorted(sets, key=held, reverse=True)[:3]


def test_neighbours() -> None:
    near = set(neighbours((0, 1, 4), [0, 1, 2, 4, 6]))
    assert near == {(0, 2, 4), (0, 1, 2), (0, 1, 6)} | {(0, 2, 4), (0, 1, 6)}
    assert all(full[0] == 0 for full in near)


def test_trying_leaves_keys_as_they_were(search: Search, table: Table) -> None:
    assert len(table.weights) == 8
    before = [keys.clone() for keys in (*search.view.store.keys, *search.view.store.values)]
    for way in ("heads", "pooled", "fed"):
        heard = search.trial.heard(Tidal(search.decoder.config, Calibration((0, 2)), BUDGET, way), search.places)
        assert heard.kl > 0
    for old, new in zip(before, (*search.view.store.keys, *search.view.store.values), strict=True):
        torch.testing.assert_close(old, new, rtol=1e-3, atol=1e-4)


def test_with_all_layers_dense_nothing_diverges(search: Search, table: Table) -> None:
    assert table.shares
    heard = search.trial.heard(Tidal(search.decoder.config, Calibration(tuple(range(8))), BUDGET), search.places)
    assert heard.kl < 1e-6
    assert heard.agreement == 1
    assert heard.perplexity == pytest.approx(1, abs=1e-4)
    assert heard.tokens == len(search.places) * search.trial.steps


def test_what_cannot_be_calibrated() -> None:
    with pytest.raises(UsageError, match="too short"):
        calibrate(planted(), texts(100), size=3, budget=BUDGET, tell=untold)
    with pytest.raises(HspecError, match="8 layers"):
        calibrate(planted(), texts(400), size=8, budget=BUDGET, tell=untold)


# kept


@pytest.fixture
def at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("at_home")
def test_what_is_kept_is_found() -> None:
    config = tiny_engine.config(num_hidden_layers=4)
    assert find(config) == by_rule(config)
    found = Calibration((0, 2), "heads", ((1, 0),) * 4, "a test")
    path = save(config, found, {"kl": 0.5})
    assert path == directory() / f"{fingerprint(config)}.json"
    assert find(config) == Calibration((0, 2), "heads", ((1, 0),) * 4, f"a test; {path}")
    assert find(tiny_engine.config(num_hidden_layers=5)) != find(config)
    assert find(tiny_engine.config(num_hidden_layers=4, rope_theta=1e6)) == find(config)


@pytest.mark.usefixtures("at_home")
@pytest.mark.parametrize(
    "text", ["", "{}", '{"full": [1], "way": "heads", "source": ""}', '{"full": [0, 9], "way": "pooled", "source": ""}']
)
def test_what_is_no_calibration_is_refused(text: str) -> None:
    config = tiny_engine.config(num_hidden_layers=4)
    save(config, by_rule(config), {}).write_text(text)
    with pytest.raises(HspecError, match="is no calibration"):
        find(config)


@pytest.mark.usefixtures("at_home")
@pytest.mark.parametrize(
    ("alias", "last"),
    [("llama2-7b-128k", 7), ("llama3.1-8b", 13), ("smollm2-135m", None), ("qwen2.5-coder-1.5b", None)],
)
def test_shipped_calibrations(alias: str, last: int | None) -> None:
    from hspec_decoding.checkpoints import hub
    from hspec_decoding.config import ModelConfig

    config = ModelConfig.from_dict(hub.read_config(alias, offline=True, say=print))
    shipped = find(config)
    assert shipped.source.endswith("shipped")
    assert set(shipped.full) <= set(whole_layers(config))
    assert len(shipped.full) == 4
    assert last is None or shipped.full == (0, 1, 2, last)
