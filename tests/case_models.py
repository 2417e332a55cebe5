"""Tiny models and tokenizers that say, or hide, exactly what a command-line case wants."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tiny
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer


def byte_ids(directory: Path, data: bytes | str) -> list[int]:
    """Id of each single byte in the byte-level vocabulary of the tokenizer in `directory`."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letter = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    vocabulary = vocabulary_of(directory)
    return [vocabulary[letter[byte]] for byte in (data.encode() if isinstance(data, str) else data)]


def vocabulary_of(directory: Path) -> dict[str, int]:
    """Text of every token, added ones too, with its id."""
    return dict(tokenizer_of(directory).get_vocab())


def tokenizer_of(directory: Path) -> Tokenizer:
    """The tokenizer as its own library reads it, which adds the BOS it wants."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def add_tokens(directory: Path, texts: Sequence[str]) -> None:
    """Append tokens to the tokenizer's vocabulary."""
    tokenizer = tokenizer_of(directory)
    tokenizer.add_tokens(list(texts))
    tokenizer.save(str(directory / "tokenizer.json"))


def edit(path: Path, **changes: Any) -> None:
    """Change top-level keys of a JSON file; None removes a key."""
    raw = json.loads(path.read_text()) if path.exists() else {}
    raw.update(changes)
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite `model.safetensors` after `change` has worked on the dictionary of its tensors."""
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def without_bos(directory: Path) -> Path:
    """Make the tokenizer add nothing, so that a raw prompt of n single-byte tokens is n tokens."""
    edit(directory / "tokenizer.json", post_processor=None)
    settings = directory / "tokenizer_config.json"
    edit(settings, add_bos_token=False)
    return directory


def chain_model(
    directory: Path,
    successor: Mapping[int, int],
    *,
    otherwise: int | None = None,
    positions: int = 512,
    size: int = 320,
    head_dim: int = 16,
    ends: int | Sequence[int] | None = None,
    **tokenizer: Any,
) -> Path:
    """A one-layer Llama that follows token i by `successor[i]`, or by `otherwise` (None: i again).

    One-hot embeddings, attention and MLP that add nothing, an untied head with logit 32 at the successor.
    `ends` goes to generation_config.json, other keywords to `tiny.tokenizer`.
    """
    follows = [successor.get(i, i if otherwise is None else otherwise) for i in range(size)]
    head = torch.zeros(size, size)
    head[follows, range(size)] = 32.0
    directory.mkdir(parents=True, exist_ok=True)
    tiny.tokenizer(directory, **tokenizer)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-12,
        "max_position_embeddings": positions,
        "vocab_size": size,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    edit(directory / "config.json", **config)
    if ends is not None:
        edit(directory / "generation_config.json", eos_token_id=ends)
    save_file(
        _inert_layer(size, head_dim) | {"lm_head.weight": head},
        directory / "model.safetensors",
        {"format": "pt"},
    )
    return directory


def _inert_layer(size: int, head_dim: int) -> dict[str, torch.Tensor]:
    """Tensors of a one-layer decoder whose last hidden state is the one-hot vector of the last token."""
    at = "model.layers.0."
    return {
        "model.embed_tokens.weight": torch.eye(size),
        f"{at}self_attn.q_proj.weight": torch.zeros(4 * head_dim, size),
        f"{at}self_attn.k_proj.weight": torch.zeros(2 * head_dim, size),
        f"{at}self_attn.v_proj.weight": torch.zeros(2 * head_dim, size),
        f"{at}self_attn.o_proj.weight": torch.zeros(size, 4 * head_dim),
        f"{at}mlp.gate_proj.weight": torch.zeros(16, size),
        f"{at}mlp.up_proj.weight": torch.zeros(16, size),
        f"{at}mlp.down_proj.weight": torch.zeros(size, 16),
        f"{at}input_layernorm.weight": torch.ones(size),
        f"{at}post_attention_layernorm.weight": torch.ones(size),
        "model.norm.weight": torch.full((size,), size**-0.5),
    }


def endless_model(directory: Path, **options: Any) -> Path:
    """A random tiny model that names no end token, so that its answers have the length asked for."""
    tiny_models.model(directory, eos_token_id=None, **options)
    tiny.tokenizer(directory, eos=None)
    return directory


def path_of(ids: Sequence[int], then: int | None = None) -> dict[int, int]:
    """Successors that walk along `ids` (all different), then to `then`, or round again."""
    assert len(set(ids)) == len(ids), "a chain cannot tell two equal tokens apart"
    return dict(zip(ids, [*ids[1:], ids[0] if then is None else then], strict=True))


def speaker(directory: Path, start: str, text: str | bytes, then: int | None = None, **options: Any) -> Path:
    """A chain model that answers a prompt ending in the byte `start` with `text`, byte by byte, then `then`."""
    directory.mkdir(parents=True, exist_ok=True)
    tiny.tokenizer(directory)
    said = byte_ids(directory, text)
    return chain_model(directory, path_of([*byte_ids(directory, start), *said], then), **options)
