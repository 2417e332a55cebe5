"""Moving accepted rows together, in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def compact_reference(caches: Sequence[Tensor], slots: Tensor, first: Tensor, source: Tensor) -> None:
    """What `compact` does; rows are read before any is written."""
    to = first[:, None] + torch.arange(source.shape[1], device=first.device)
    at = slots[:, None]
    for cache in caches:
        cache[at, :, to] = cache[at, :, first[:, None] + source]
