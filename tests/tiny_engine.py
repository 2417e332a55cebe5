"""Tiny decoders and engines for tests, from random weights in memory: no files, no transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hspec_decoding.batch import Take
from hspec_decoding.build import resolve
from hspec_decoding.cache import KVStore
from hspec_decoding.config import ModelConfig
from hspec_decoding.engine import Engine, Request, Settings
from hspec_decoding.events import Emitted, Event, Finished
from hspec_decoding.levels import ModelLevel
from hspec_decoding.model import Decoder
from hspec_decoding.rules import Draft
from hspec_decoding.sampling import choose
from hspec_decoding.sequence import Text
from hspec_decoding.stack import parse
from hspec_decoding.views import FullView

CPU = torch.device("cpu")
CONTEXT = 4608
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "vocab_size": 320,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 48},
    "qwen2": {"num_attention_heads": 6, "head_dim": 16},
    "qwen3": {"head_dim": 32},
}
LONG, SHORT = [1.0 + i for i in range(8)], [1.0 + i / 8 for i in range(8)]
ORIGINAL = {"original_max_position_embeddings": 64}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, **ORIGINAL},
    "yarn, its factor given": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.3, **ORIGINAL},
    "yarn, betas given": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2, **ORIGINAL},
    "yarn, mscale given": {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 0.9, **ORIGINAL},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    "longrope": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 8.0, **ORIGINAL},
}


def rope_shape(kind: str) -> dict[str, Any]:
    """Overrides of the tiny model: kinds that stretch from the model's own length have a short one."""
    positions = 64 if kind in ("linear", "dynamic") else 512
    return {"rope_parameters": {"rope_theta": 1e4, **ROPES[kind]}, "max_position_embeddings": positions}


def config(family: str = "llama", **overrides: Any) -> ModelConfig:
    """A tiny model of a family."""
    return ModelConfig.from_dict({"model_type": family, **SHAPE, **FAMILIES[family], **overrides})


def weights(shape: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random weights by name, such that attention is not flat and one token in three is foreseeable."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, size in shape.tensors().items():
        tensor = torch.randn(size, generator=generator)
        scale = 0.4 if name == "lm_head.weight" else 0.2
        made[name] = 1 + 0.2 * tensor if name.endswith("norm.weight") else scale * tensor
    return made


def contrary(made: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a model that likes best what the given one likes least."""
    return {**made, "lm_head.weight": -made["lm_head.weight"]}


def stuck(made: Mapping[str, Tensor], token: int) -> dict[str, Tensor]:
    """Weights of a model that proposes the same token whatever it is shown."""
    still = {name: torch.zeros_like(t) if "o_proj" in name or "down_proj" in name else t for name, t in made.items()}
    still["model.embed_tokens.weight"] = torch.ones_like(made["model.embed_tokens.weight"])
    still["model.norm.weight"] = torch.ones_like(made["model.norm.weight"])
    still["lm_head.weight"] = torch.zeros_like(made["lm_head.weight"])
    still["lm_head.weight"][token] = 1.0
    return still


def decoder(
    shape: ModelConfig, made: Mapping[str, Tensor], dtype: torch.dtype = torch.float32, context: int = CONTEXT
) -> Decoder:
    """The decoder with these weights."""
    return Decoder(shape, made.__getitem__, dtype=dtype, device=CPU, context=context)


@cache
def random_decoder(
    family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Decoder:
    """A decoder with random weights; made once, since nothing in it changes."""
    shape = config(family, **overrides)
    return decoder(shape, weights(shape, seed), dtype)


def engine(
    levels: str, target: Decoder, draft: Decoder | None = None, *, context: int = CONTEXT, **settings: Any
) -> Engine:
    """An engine that runs a stack as it is written."""
    options = Settings(levels=levels, **settings)
    return Engine(target, draft, [resolve(parse(levels), context, budget=None, keep=True)], options, context)


def answers(engine: Engine, *requests: Request) -> list[tuple[list[int], str]]:
    """Tokens and finish reason of each request; their `sequence`s must differ."""
    return gathered(engine.generate(*requests), requests)


def gathered(events: Iterator[Event], requests: Sequence[Request]) -> list[tuple[list[int], str]]:
    """Tokens and finish reason of each request."""
    tokens: dict[int, list[int]] = {request.sequence: [] for request in requests}
    reasons: dict[int, str] = {}
    for event in events:
        if isinstance(event, Emitted):
            assert event.sequence not in reasons, "tokens after the end"
            tokens[event.sequence] += event.tokens
        elif isinstance(event, Finished):
            reasons[event.sequence] = event.reason
    return [(tokens[request.sequence], reasons[request.sequence]) for request in requests]


def coming(requests: Sequence[Request], late: int = 0) -> Take:
    """Each is there when it was asked for `late` times before, or is waited for."""
    rest, asked = list(requests), 0

    def take(wait: bool) -> Request | None:
        nonlocal asked
        asked += 1
        if not rest or (asked <= late and not wait):
            return None
        asked = 0
        return rest.pop(0)

    return take


def answer(engine: Engine, request: Request) -> tuple[list[int], str]:
    """Tokens and finish reason of one request."""
    return answers(engine, request)[0]


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """A prompt with repetitions, so that an n-gram table finds something."""
    generator = torch.Generator().manual_seed(seed)
    fresh = torch.randint(2, 320, (length,), generator=generator).tolist()
    return tuple((fresh[: max(1, length // 3)] * 4)[:length])


def scores(model: Decoder, tokens: Sequence[int], pieces: Sequence[int], bucket: int = 1) -> Tensor:
    """Logits [T, V] after each token, the text fed in passes of the given sizes; what they leave over comes last."""
    store = KVStore(model.config, 1, len(tokens) + bucket, dtype=model.dtype, device=CPU)
    view, at, found = FullView(model.config, store, 1, bucket), 0, []
    for size in [*pieces, len(tokens) - sum(pieces)]:
        part = list(tokens[at : at + size])
        if part:
            memory = view.begin([Text(0, 0, [*tokens])], len(part))
            found.append(model.logits(model.forward(torch.tensor([part]), memory)[0]))
            view.held[0].extend(part)
            at += len(part)
    return torch.cat(found)


def chosen_from_logits(level: ModelLevel, texts: Sequence[Text], drafts: Sequence[Draft]) -> list[list[int]]:
    """`choices` of a level that has only its own `logits`."""
    return [
        choose(rows, text.sampling, [text.key] * len(rows), range(len(text), len(text) + len(rows)))
        for text, rows in zip(texts, level.logits(texts, drafts), strict=True)
    ]
