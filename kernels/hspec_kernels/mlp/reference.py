"""The gate of a SwiGLU layer in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Threads share the work from this many elements on, cut anywhere; the last few elements of each share are not computed
# by vector instructions and may round differently. Row by row every row is cut alike, as the fixed-shape rule needs.
SHARED = 32_768
BLOCK = 64  # rows of a decoding block; more are a prefill, whose shape is the same for every method


def silu_mul_reference(stacked: Tensor) -> Tensor:
    """What `silu_mul` computes."""
    rows = stacked.view(-1, stacked.shape[-1])
    if rows.numel() < SHARED or len(rows) > BLOCK:
        return _silu_mul(stacked)
    return torch.cat([_silu_mul(row[None]) for row in rows]).view(*stacked.shape[:-1], -1)


def _silu_mul(stacked: Tensor) -> Tensor:
    gate, up = stacked.chunk(2, dim=-1)
    return F.silu(gate) * up
