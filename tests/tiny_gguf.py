"""Tiny GGUF files for tests: the weights of a random model as llama.cpp's converter lays them out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny_models
import torch
from tokenizers import pre_tokenizers

from hspec_decoding.checkpoints.gguf_file import LAYER, OUTER

Array = np.ndarray[Any, np.dtype[Any]]

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["<s>", "</s>", *BYTES, "ab", "abc", "<think>", *(f"[PAD{i}]" for i in range(59))],
    "tokenizer.ggml.token_type": [3, 3, *[1] * 258, 4, *[5] * 59],
    "tokenizer.ggml.merges": ["a b", "ab c"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}


def write(path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    """A GGUF file. Metadata without a dot in the key gets the architecture's prefix; None leaves a key out. Tensors
    are float arrays, or (array, quantization type)."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**VOCABULARY, **metadata}.items():
        if value is None:
            continue
        name = key if key.startswith(("tokenizer.", "general.", "split.")) else f"{architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            kind: dict[type, Callable[..., None]]
            kind = {str: writer.add_string, bool: writer.add_bool, float: writer.add_float32, int: writer.add_uint32}
            kind[type(value)](name, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, gguf.quantize(*tensor), raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def shape_of(config: Any) -> dict[str, Any]:
    return {
        "context_length": 512,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": 20_000.0,
    }


def interleaved(weight: Array, heads: int) -> Array:
    """Rows as llama.cpp's converter orders them: the two halves of a head alternate."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def tensors_of(made: Any, permute: bool) -> dict[str, Array]:
    """The weights of a transformers model by GGUF's names."""
    names = {hf: ours for ours, hf in {**OUTER, **LAYER}.items()}
    heads = {"attn_q": made.config.num_attention_heads, "attn_k": made.config.num_key_value_heads}
    tied = made.config.tie_word_embeddings
    found = {}
    for name, tensor in made.state_dict().items():
        stem, kind = name.rsplit(".", 1)
        layer = stem.split(".")[2] if stem.startswith("model.layers.") else None
        ours = names[stem.split(".", 3)[3] if layer else stem]
        if tied and ours == "output":
            continue
        value = tensor.numpy()
        if permute and ours in heads:
            value = interleaved(value, heads[ours])
        found[f"blk.{layer}.{ours}.{kind}" if layer else f"{ours}.{kind}"] = value
    return found


def model(path: Path, family: str = "llama", *, metadata: Mapping[str, Any] | None = None, **overrides: Any) -> Any:
    """Write a random model as GGUF and return the transformers model whose weights it holds."""
    made = tiny_models.build(family, 1, torch.float32, {"sliding_window": None, **overrides})
    head_dim = made.config.head_dim if family == "qwen3" else None
    shape = shape_of(made.config) | {"attention.key_length": head_dim} | dict(metadata or {})
    write(path, family, shape, tensors_of(made, permute=family == "llama"))
    return made
