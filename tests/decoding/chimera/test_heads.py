"""The draft model's parts: shapes, what a row may depend on, what goes to disk and what is refused from there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import tiny_engine
import torch
from tiny_engine import CPU

from hspec_decoding.cache import KVStore
from hspec_decoding.chimera import files, heads
from hspec_decoding.chimera.config import ChimeraConfig
from hspec_decoding.chimera.heads import Heads
from hspec_decoding.config import ModelConfig
from hspec_decoding.model import Decoder
from hspec_decoding.sequence import Text
from hspec_decoding.views import FullView
from hspec_profiles.errors import HspecError

DRAFTED = 48


def made(target: Decoder, **changes: object) -> Heads:
    """Heads whose every part does something."""
    torch.manual_seed(5)
    config = ChimeraConfig.for_target(target.config, vocabulary=DRAFTED, **changes)
    found = files.made(config, torch.randperm(target.vocabulary)[:DRAFTED].sort().values, target)
    for parameter in found.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return found


@pytest.fixture
def target() -> Decoder:
    return tiny_engine.random_decoder()


def test_sizes_suit_their_targets() -> None:
    """What the package ships, and what a GPU trains in minutes."""
    small = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    middle = {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
    for shape, vocabulary, most in ((small, 49_152, 16e6), (middle, 151_936, 60e6)):
        target = tiny_engine.config(**{**shape, "num_hidden_layers": 28, "vocab_size": vocabulary})
        config = ChimeraConfig.for_target(target)
        with torch.device("meta"):
            empty = torch.empty(0)
            parts = Heads(config, torch.zeros(config.vocabulary, dtype=torch.int64), empty, empty)
        assert 2 * sum(p.numel() for p in parts.parameters()) + 4 * config.vocabulary < most


def test_states_of_inner_layers_come_before_the_last(target: Decoder) -> None:
    tokens = torch.arange(7)[None]

    def fed(model: Decoder, entering: tuple[int, ...]) -> torch.Tensor:
        view = FullView(model.config, KVStore(model.config, 1, 8, dtype=model.dtype, device=CPU), 1)
        return model.forward(tokens, view.begin([Text(0, 0, [*range(7)])], 7), entering)

    hidden = target.config.hidden_size
    lo, mid, final = fed(target, (2, 1)).split(hidden, -1)
    assert torch.equal(final, fed(target, ()))
    assert not torch.equal(lo, mid)
    again = fed(target, (0, 1, 2)).split(hidden, -1)
    assert torch.equal(again[0], target.embed(tokens))
    assert torch.equal(again[1], mid)
    assert torch.equal(again[2], lo)


def test_rows_have_their_shapes(target: Decoder) -> None:
    parts, d = made(target), target.config.hidden_size
    u, f = parts.encoded(torch.randint(320, (2, 5, 3))), parts.fused(torch.randn(2, 5, 3 * d))
    query, key, value = parts.project(u, f, torch.arange(5).expand(2, 5))
    assert query.shape == (2, 5, 4, 16)
    assert key.shape == value.shape == (2, 5, 2, 16)
    g = parts.finish(u, f, query)
    logits = parts.logits(g, torch.randn(2, 5, d), 3)
    assert g.shape == (2, 5, d)
    assert logits.shape == (2, 5, DRAFTED)
    assert logits.dtype == torch.float32


def test_at_first_a_row_says_what_the_target_said(target: Decoder) -> None:
    """An untrained draft repeats the distribution of the token before: a start, not noise."""
    config = ChimeraConfig.for_target(target.config)
    parts = files.made(config, torch.arange(320), target)
    last = torch.nn.functional.rms_norm(torch.randn(64, 64), (64,)) * target.norm
    states = parts.fused(torch.cat((torch.randn(64, 128), last), -1))
    said = parts.logits(states, last, 0).argmax(-1)
    assert (said == target.logits(last).argmax(-1)).float().mean() > 0.5


def test_tables_fold_the_encoder(target: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, tokens = made(target), torch.randint(320, (40, 3))
    before = parts.encoded(tokens)
    monkeypatch.setattr(heads, "FOLDED", 0)
    parts.fold()
    assert parts.tables is None
    monkeypatch.undo()
    parts.fold()
    assert parts.tables is not None
    torch.testing.assert_close(parts.encoded(tokens), before)


def test_every_token_of_the_trigram_counts_unless_it_is_off(target: Decoder) -> None:
    tokens = torch.tensor([[5, 6, 7]])
    whole, off = made(target), made(target, with_trigram=False)
    for place in range(3):
        other = tokens.clone()
        other[0, place] = 9
        assert not torch.equal(whole.encoded(tokens), whole.encoded(other))
        assert torch.equal(off.encoded(tokens), off.encoded(other)) == (place < 2)


def test_parts_that_are_off_do_nothing(target: Decoder) -> None:
    d = target.config.hidden_size
    states, attended, last, u = torch.randn(3, d), torch.randn(3, 4, 16), torch.randn(3, d), torch.randn(3, d)
    whole, bare = made(target), made(target, with_block=False, with_residual=False)
    assert not torch.equal(whole.finish(u, states, attended), whole.finish(u, states, -attended))
    assert torch.equal(bare.finish(u, states, attended), states + u)
    assert not made(target, with_tokens=False).encoded(torch.randint(320, (3, 3))).any()
    assert torch.equal(bare.logits(states, last, 0), bare.logits(states, -last, 2))
    assert not torch.equal(whole.logits(states, last, 0), whole.logits(states, last, 1))
    assert not torch.equal(whole.logits(states, last, 0), whole.logits(states, -last, 0))
    assert torch.equal(whole.logits(states, last, 5), whole.logits(states, last, 50))


def test_heads_come_back_from_disk(target: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    parts = made(target).to(torch.bfloat16).float()
    with pytest.raises(HspecError, match="no draft model is here for `tiny`") as failure:
        files.load(None, target, "tiny")
    assert "hspec train chimera -m tiny" in str(failure.value.hint)
    files.save(files.directory() / parts.config.fingerprint, parts)
    again = files.load(None, target, "tiny")
    assert again.config == parts.config
    assert torch.equal(again.vocabulary, parts.vocabulary)
    assert torch.equal(again.inverse, parts.inverse)
    states, last = torch.randn(2, 64), torch.randn(2, 64)
    assert torch.equal(again.logits(states, last, 1), parts.logits(states, last, 1))
    assert not any(parameter.requires_grad for parameter in again.parameters())


def test_embedding_and_head_are_not_stored(target: Decoder, tmp_path: Path) -> None:
    parts = made(target)
    files.save(tmp_path, parts)
    stored = 2 * sum(p.numel() for p in parts.parameters()) + 4 * DRAFTED
    assert stored <= (tmp_path / files.WEIGHTS).stat().st_size < stored + 4096


def test_what_cannot_be_right_is_refused(target: Decoder, tmp_path: Path) -> None:
    parts = made(target)
    files.save(tmp_path, parts)
    weights, config = (tmp_path / files.WEIGHTS), (tmp_path / files.CONFIG)
    data, written = weights.read_bytes(), config.read_text()

    def refused(match: str) -> None:
        with pytest.raises(HspecError, match=match) as failure:
            files.load(tmp_path, target)
        assert failure.value.exit_code == 1
        weights.write_bytes(data)
        config.write_text(written)

    weights.write_bytes(data[:-8])
    refused("holds no draft model that can be read")
    config.write_text("[]")
    refused("holds no draft model that can be read")
    config.write_text(json.dumps({"hidden": 64}))
    refused("no configuration of a draft model: depths")
    config.write_text(json.dumps(dataclasses.asdict(parts.config) | {"ffn": 64}))
    refused("not of the shape")
    parts.down.weight.data[0, 0] = float("nan")
    files.save(tmp_path, parts)
    with pytest.raises(HspecError, match=r"NaN or infinity: down\.weight"):
        files.load(tmp_path, target)
    weights.write_bytes(data)
    other: ModelConfig = tiny_engine.config(num_hidden_layers=2)
    with pytest.raises(HspecError, match="trained for another model than `MODEL`"):
        files.load(tmp_path, tiny_engine.decoder(other, tiny_engine.weights(other)))
    with pytest.raises(HspecError, match="no draft model in"):
        files.load(tmp_path / "nothing", target)
