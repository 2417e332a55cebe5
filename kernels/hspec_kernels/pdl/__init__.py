"""Programmatic dependent launch: a kernel begins while the one before it ends, and waits for it before it reads.

Every kernel of a pass does this, and each lets the next begin only once it has itself waited, so that whatever was
launched two kernels ago is over when a kernel begins, and all else when it has waited.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

__all__ = ["NO_PDL", "pdl_options"]

NO_PDL: dict[str, Any] = {"PDL": False}


@cache
def pdl_options(device: torch.device) -> dict[str, Any]:
    """What the launch of a kernel that begins with `await_earlier` takes beside its own arguments."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if able else NO_PDL
