"""Energy of a GPU, where it tells."""

from __future__ import annotations

from typing import Any


class Energy:
    """A GPU's counter. `joules` is None where there is none."""

    def __init__(self, device: str) -> None:
        """`device` as torch names it."""
        self._handle: Any = None
        if not device.startswith("cuda"):
            return
        try:
            import pynvml

            from hspec_profiles.probes import gpu

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{gpu.uuid(int(device.partition(':')[2] or 0))}")
        except Exception:  # a driver, a card or a virtual machine that does not tell
            self._handle = None

    def joules(self) -> float | None:
        """Since the driver was loaded."""
        if self._handle is None:
            return None
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3
        except Exception:
            self._handle = None
            return None
