"""The decoder against transformers, fed whole, in pieces, and in blocks of a fixed shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny_engine
import tiny_models
import torch
from tiny_engine import CPU, scores
from torch import Tensor

from hspec_decoding.cache import KVStore
from hspec_decoding.config import ModelConfig
from hspec_decoding.model import Decoder
from hspec_decoding.sequence import Text
from hspec_decoding.views import FullView

LENGTH = 100  # tokens of the texts scored: longer than the windows below and than the RoPE kinds' original length
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama, all kv heads": ("llama", {"num_key_value_heads": 4}),
    "llama, wide heads": ("llama", {"head_dim": 48}),
    "llama, narrow heads": ("llama", {"head_dim": 8}),
    "llama, attention bias": ("llama", {"attention_bias": True}),
    "llama, mlp bias": ("llama", {"mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, large eps": ("llama", {"rms_norm_eps": 0.1}),
    "mistral, window": ("mistral", {"sliding_window": 16}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, window": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    "qwen2, window from layer 0": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "qwen3": ("qwen3", {}),
    "qwen3, attention bias": ("qwen3", {"attention_bias": True}),
    "qwen3, window": ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    **{f"rope: {kind}": ("llama", tiny_engine.rope_shape(kind)) for kind in tiny_engine.ROPES},
    "qwen2, yarn": ("qwen2", tiny_engine.rope_shape("yarn")),
    "mistral, linear": ("mistral", tiny_engine.rope_shape("linear")),
    "qwen3, wide heads and yarn": ("qwen3", {"head_dim": 16, **tiny_engine.rope_shape("yarn")}),
}


def pair(kind: str) -> tuple[Any, Decoder]:
    """transformers' model and ours, with the same random weights."""
    family, overrides = MODELS[kind]
    made = tiny_models.build(family, 3, torch.float32, overrides)
    return made, ours(made)


def ours(made: Any, context: int = LENGTH) -> Decoder:
    config = ModelConfig.from_dict(made.config.to_dict())
    return Decoder(config, made.state_dict().__getitem__, dtype=torch.float32, device=CPU, context=context)


@torch.no_grad()
def theirs(made: Any, tokens: tuple[int, ...]) -> Tensor:
    logits: Tensor = made(torch.tensor([tokens])).logits[0]
    return logits


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_transformers(kind: str) -> None:
    """In one pass, and in passes of odd sizes with a block at the end."""
    made, model = pair(kind)
    tokens = tiny_engine.prompt(LENGTH)
    wanted = theirs(made, tokens)
    for pieces in ([], [1], [37, 1, 23, 8, 1, 1, 5], [70, 3], [99]):
        assert relative_error(scores(model, tokens, pieces), wanted) <= 1e-4


def test_rows_that_are_more_than_a_block() -> None:
    """Passes of up to 64 rows and longer ones take different ways through attention."""
    made, model = pair("llama")
    tokens = tiny_engine.prompt(300)
    wanted = theirs(made, tokens)
    for pieces in ([64, 65, 63], [63, 64, 65], [299], [1, 200]):
        assert relative_error(scores(model, tokens, pieces), wanted) <= 1e-4
        assert relative_error(scores(model, tokens, pieces, bucket=256), wanted) <= 1e-4


def test_greedy_text_is_that_of_transformers() -> None:
    made, model = pair("qwen2")
    tokens = tiny_engine.prompt(40)
    wanted = made.generate(torch.tensor([tokens]), max_new_tokens=30, do_sample=False, eos_token_id=None)[0, 40:]
    found, _ = tiny_engine.answer(tiny_engine.engine("target", model, context=100), tiny_engine.Request(tokens, 30))
    assert found == wanted.tolist()


# the fixed shape


@pytest.fixture(params=[1, 3, 4])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [{}, {"intermediate_size": 11008}])
def test_a_row_of_a_block_knows_nothing_of_its_place(dtype: torch.dtype, sizes: dict[str, int]) -> None:
    """In passes of 8 rows a position has the same bits as row 0 and as row 7, however many threads share the work."""
    model = tiny_engine.random_decoder("llama", 0, dtype, num_hidden_layers=1, **sizes)
    tokens = tiny_engine.prompt(264)
    base = scores(model, tokens[:248], [128, *[8] * 15], bucket=256)[232:]
    for back in range(1, 8):
        moved = last_block(model, tokens, 240 - back)
        assert torch.equal(moved[back:], base[8 : 16 - back]), f"row {back} differs from row 0"


def last_block(model: Decoder, tokens: tuple[int, ...], start: int) -> Tensor:
    """Logits [8, V] of a block of 8 rows from `start`, over keys that were written by blocks at multiples of 8."""
    store = KVStore(model.config, 1, 272, dtype=model.dtype, device=CPU)
    view, text = FullView(model.config, store, 1, 256), Text(0, 0, [*tokens])
    for at, size in [(0, 128), *((at, 8) for at in range(128, 240, 8)), (start, 8)]:
        view.held[0].tokens[at:] = []
        model_pass = model.forward(torch.tensor([tokens[at : at + size]]), view.begin([text], size))
        view.held[0].extend(tokens[at : at + size])
    return model.logits(model_pass[0])


# what is asked of the reader of weights


def test_progress_and_vocabulary() -> None:
    shape = tiny_engine.config()
    told: list[tuple[int, int]] = []
    model = Decoder(
        shape,
        tiny_engine.weights(shape).__getitem__,
        dtype=torch.float32,
        device=CPU,
        context=64,
        vocabulary=300,
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(1, 3), (2, 3), (3, 3)]
    whole = scores(tiny_engine.random_decoder(), (5, 6, 7), [])
    assert torch.equal(scores(model, (5, 6, 7), []), whole[:, :300])


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("model.embed_tokens.weight", "the embedding"),
        ("lm_head.weight", "the head"),
        ("model.norm.weight", "the final norm"),
        ("model.layers.1.mlp.up_proj.weight", "layer 1"),
        ("model.layers.2.input_layernorm.weight", "layer 2"),
    ],
)
def test_non_finite_weights_are_found(name: str, where: str) -> None:
    shape = tiny_engine.config()
    made = tiny_engine.weights(shape)
    assert tiny_engine.decoder(shape, made).non_finite() is None
    made[name].view(-1)[3] = float("inf")
    assert tiny_engine.decoder(shape, made).non_finite() == where
