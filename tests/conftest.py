"""For all tests: Triton kernels run compiled where there is a GPU and in Triton's interpreter elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, so before any test is
os.environ.setdefault("HSPEC_TUNE", "0")  # launch shapes are a matter of speed, and kept in the user's cache
