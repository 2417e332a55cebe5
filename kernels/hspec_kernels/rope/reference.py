"""Rotation of queries and keys and the append to a cache in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from hspec_kernels.norm.reference import rms_norm_reference


def rope_append_reference(
    stacked: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    first: Tensor,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """What `rope_append` computes."""
    rows, kv_heads, dim = stacked.shape[1], keys.shape[1], keys.shape[3]
    heads = stacked.shape[2] // dim - 2 * kv_heads
    query, key, value = torch.split(stacked.view(*stacked.shape[:2], -1, dim), [heads, kv_heads, kv_heads], dim=2)
    if norms:
        query, key = rms_norm_reference(query, norms[0], norms[2]), rms_norm_reference(key, norms[1], norms[2])
    query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    for b, (slot, at) in enumerate(zip(slots.tolist(), first.tolist(), strict=True)):
        keys[slot, :, at : at + rows] = key[b].transpose(0, 1)
        values[slot, :, at : at + rows] = value[b].transpose(0, 1)
    return query


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads x [B, R, H, D] turned by the angles of cos and sin [B, R, D]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, :, None] + turned * sin[:, :, None]
