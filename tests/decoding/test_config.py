"""What is read from a `config.json`, compared with what transformers makes of it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch

from hspec_decoding.config import FAMILIES, ModelConfig
from hspec_profiles.errors import HspecError

PLAIN: dict[str, Any] = {"model_type": "llama", **tiny_models.SHAPE}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "every bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "one kv head": ("llama", {"num_key_value_heads": 1}),
    "wide heads": ("llama", {"head_dim": 48}),
    "mistral": ("mistral", {}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 with a window": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}),
    "qwen2 with an unused window": ("qwen2", {"use_sliding_window": False, "sliding_window": 16}),
    "qwen3": ("qwen3", {}),
    "qwen3 with bias": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_shape_is_that_of_transformers(kind: str) -> None:
    """Names and shapes of all tensors, and the windows of the layers, agree with the module transformers builds."""
    family, overrides = KINDS[kind]
    made = tiny_models.build(family, 0, torch.float32, overrides)
    config = ModelConfig.from_dict(made.config.to_dict())
    theirs = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
    if made.config.tie_word_embeddings:
        theirs.pop("lm_head.weight")
    assert config.tensors() == theirs
    types = getattr(made.config, "layer_types", None)
    window = None if family == "llama" else made.config.sliding_window
    sliding = [kind == "sliding_attention" for kind in types] if types else [family == "mistral"] * config.layers
    assert list(config.windows) == [window if slides else None for slides in sliding]


@pytest.mark.parametrize("family", FAMILIES)
def test_optional_keys_default_as_in_transformers(family: str) -> None:
    from transformers import AutoConfig

    sizes = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 99}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    theirs, ours = AutoConfig.for_model(family, **sizes), ModelConfig.from_dict({"model_type": family, **sizes})
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tied == theirs.tie_word_embeddings
    assert ours.rope == theirs.rope_parameters
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 128)


def test_layers_slide_as_layer_types_say() -> None:
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    raw = PLAIN | {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 9, "layer_types": types}
    assert ModelConfig.from_dict(raw).windows == (9, None, None, 9)
    raw |= {"layer_types": None, "max_window_layers": 1}
    assert ModelConfig.from_dict(raw).windows == (None, 9, 9, 9)


def test_llama_ignores_a_window() -> None:
    assert set(ModelConfig.from_dict(PLAIN | {"sliding_window": 16}).windows) == {None}


@pytest.mark.parametrize(
    ("rope", "positions", "context"),
    [
        ({}, 512, 512),
        ({"rope_type": "linear", "factor": 4.0}, 512, 2048),
        ({"type": "dynamic", "factor": 2.0}, 512, 1024),
        ({"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 128}, 512, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512, 512),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 131072, 131072),
        ({"rope_type": "longrope", "original_max_position_embeddings": 4096}, 131072, 131072),
    ],
)
def test_context(rope: dict[str, Any], positions: int, context: int) -> None:
    raw = PLAIN | {"rope_scaling": rope, "max_position_embeddings": positions}
    assert ModelConfig.from_dict(raw).context == context


@pytest.mark.parametrize("spelling", ["rope_scaling type", "rope_scaling rope_type", "rope_parameters"])
def test_rope_spellings(spelling: str) -> None:
    own = {"factor": 8.0, "original_max_position_embeddings": 64}
    raw = dict(PLAIN)
    if spelling == "rope_parameters":
        raw["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 5e5, **own}
    else:
        raw |= {"rope_theta": 5e5, "rope_scaling": {spelling.split()[1]: "yarn", **own}}
    assert ModelConfig.from_dict(raw).rope == {"rope_type": "yarn", "rope_theta": 5e5, **own}


@pytest.mark.parametrize("kind", ["su", "longrope"])
def test_longrope_has_two_names_and_its_length_outside(kind: str) -> None:
    raw = PLAIN | {"rope_scaling": {"type": kind}, "original_max_position_embeddings": 32}
    rope = ModelConfig.from_dict(raw).rope
    assert (rope["rope_type"], rope["original_max_position_embeddings"]) == ("longrope", 32)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "'gpt2' (GPT2LMHeadModel)"),
        ({"model_type": None}, "no architecture named"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptqmodel"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized with fp8"),
        ({"rope_scaling": {"type": "alibi"}}, "'alibi'"),
        ({"num_key_value_heads": 3}, "4 and 3"),
        (
            {"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True, "layer_types": ["chunked"] * 4},
            "chunked",
        ),
    ],
)
def test_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(HspecError, match=says.replace("(", r"\(").replace(")", r"\)")):
        ModelConfig.from_dict(PLAIN | change)


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"])
def test_a_missing_size_is_named(key: str) -> None:
    with pytest.raises(HspecError, match=key):
        ModelConfig.from_dict({name: value for name, value in PLAIN.items() if name != key})
