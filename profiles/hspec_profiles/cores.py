"""The CPU as this process may use it: cores, name, what its instructions can do."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from hspec_profiles.cgroup import groups, number, text


def usable_cores(root: Path = Path("/")) -> int:
    """CPUs that this process may run on, or as many as the time that its cgroups grant amounts to, rounded up."""
    return min([_allowed(), *(max(1, math.ceil(share)) for share in _quotas(root))])


def cpu_name(root: Path = Path("/")) -> str:
    """The processor as its maker calls it."""
    for line in text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model") and value.strip():
            return " ".join(value.split())
    return platform.processor() or platform.machine() or "CPU"


def _allowed() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(root: Path) -> Iterator[float]:
    """CPUs' worth of time that each cgroup above this process grants, where it sets a quota."""
    for version, group in groups("cpu", root):
        if version == 2:
            quota, _, period = text(group / "cpu.max").strip().partition(" ")
            if quota.isdigit() and period.isdigit() and int(period):
                yield int(quota) / int(period)
        else:
            spent, every = number(group / "cpu.cfs_quota_us"), number(group / "cpu.cfs_period_us")
            if spent and every:  # no quota is spelled -1
                yield spent / every
