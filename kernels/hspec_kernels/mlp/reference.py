"""The gate of a SwiGLU layer in torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul_reference(stacked: Tensor) -> Tensor:
    """What `silu_mul` computes."""
    gate, up = stacked.chunk(2, dim=-1)
    return F.silu(gate) * up
