"""The sum in torch."""

from __future__ import annotations

from torch import Tensor


def total_reference(parts: Tensor, residual: Tensor) -> Tensor:
    """What `total` computes."""
    found = residual.float()
    for part in parts:
        found = found + part.float()
    return found.to(residual.dtype)
