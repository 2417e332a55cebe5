"""Rotary position embedding (Su et al., arXiv 2104.09864), half-split as in the Hugging Face checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hspec_decoding.config import ModelConfig


def frequencies(config: ModelConfig, context: int) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] in float32, and the factor that cos and sin are multiplied by.

    Types whose frequencies depend on the length (dynamic NTK, longrope) are frozen at `context`, the run's length in
    tokens: a base that moves while decoding would no longer match the keys already cached.
    """
    dim, theta = config.head_dim, float(config.rope["rope_theta"])
    if config.rope["rope_type"] == "default":
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return 1.0 / theta**exponents, 1.0
    from transformers import PreTrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    shim: Any = PreTrainedConfig(
        rope_parameters=dict(config.rope),
        head_dim=dim,
        hidden_size=config.hidden_size,
        num_attention_heads=config.heads,
        max_position_embeddings=config.max_positions,
    )
    inverse, factor = ROPE_INIT_FUNCTIONS[config.rope["rope_type"]](shim, torch.device("cpu"), seq_len=context)
    return inverse.float(), float(factor)


def rotation(inverse: Tensor, factor: float, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B, R, head_dim] of token positions [B, R], computed in float32; both halves are the same."""
    angles = positions[..., None].float() * inverse
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
