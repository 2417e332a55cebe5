"""A matrix product with bias and residual in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """What `linear` computes, rounded once more before the residual is added.

    Here a row's bits depend on the number of rows, so that those of each sequence of a batch [B, R, K] are multiplied
    by themselves.
    """
    parts = torch.split(x, 1) if x.dim() == 3 else [x]
    out = torch.cat([F.linear(part, weight, bias) for part in parts])
    return out if residual is None else out + residual
