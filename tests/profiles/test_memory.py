"""Usable RAM and cores against hand-made `/proc` and cgroup trees."""

from pathlib import Path

import pytest

from hspec_profiles.cores import cpu_name, usable_cores
from hspec_profiles.memory import usable_ram

GB = 1 << 30
V1_SENTINEL = 9223372036854771712


def tree(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def machine(cgroup: str, available: int = 64 * GB) -> dict[str, object]:
    return {
        "proc/meminfo": f"MemTotal:       {available // 512} kB\nMemAvailable:   {available // 1024} kB",
        "proc/self/cgroup": cgroup,
    }


V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"

CASES = {
    "no limit": (machine("0::/user.slice") | {f"{V2}/user.slice/memory.max": "max"}, 64 * GB),
    "no cgroup files": (machine("0::/user.slice"), 64 * GB),
    "no /proc/self/cgroup": ({"proc/meminfo": f"MemAvailable: {3 * GB // 1024} kB"}, 3 * GB),
    "own limit": (
        machine("0::/a") | {f"{V2}/a/memory.max": 2 * GB, f"{V2}/a/memory.current": GB // 2},
        2 * GB - GB // 2,
    ),
    "inactive file cache is free": (
        machine("0::/a")
        | {
            f"{V2}/a/memory.max": 2 * GB,
            f"{V2}/a/memory.current": 3 * GB // 2,
            f"{V2}/a/memory.stat": f"anon {GB // 2}\ninactive_file {GB}\nactive_file 0",
        },
        2 * GB - GB // 2,
    ),
    "page cache in use is free too": (
        machine("0::/a")
        | {
            f"{V2}/a/memory.max": 4 * GB,
            f"{V2}/a/memory.current": 4 * GB,
            f"{V2}/a/memory.stat": f"anon {GB}\ninactive_file {GB}\nactive_file {2 * GB}\nshmem 7",
        },
        3 * GB,
    ),
    "the kernel slows down beyond `high`": (
        machine("0::/a") | {f"{V2}/a/memory.max": "max", f"{V2}/a/memory.high": 3 * GB, f"{V2}/a/memory.current": GB},
        2 * GB,
    ),
    "an ancestor is tighter": (
        machine("0::/outer/inner")
        | {
            f"{V2}/outer/inner/memory.max": 8 * GB,
            f"{V2}/outer/inner/memory.current": 0,
            f"{V2}/outer/memory.max": 4 * GB,
            f"{V2}/outer/memory.current": 3 * GB,
        },
        GB,
    ),
    "container root": (machine("0::/") | {f"{V2}/memory.max": 5 * GB, f"{V2}/memory.current": 0}, 5 * GB),
    "host path inside a container": (
        machine("0::/docker/abc") | {f"{V2}/memory.max": 6 * GB, f"{V2}/memory.current": GB},
        5 * GB,
    ),
    "path outside the namespace": (
        machine("0::/../../other") | {f"{V2}/memory.max": 6 * GB, f"{V2}/memory.current": GB},
        5 * GB,
    ),
    "machine is tighter": (
        machine("0::/a", available=GB) | {f"{V2}/a/memory.max": 2 * GB, f"{V2}/a/memory.current": 0},
        GB,
    ),
    "over its limit": (
        machine("0::/a") | {f"{V2}/a/memory.max": GB, f"{V2}/a/memory.current": 2 * GB},
        0,
    ),
    "v1 limit": (
        machine("5:cpu:/x\n4:memory:/d/c")
        | {
            f"{V1}/d/c/memory.limit_in_bytes": 3 * GB,
            f"{V1}/d/c/memory.usage_in_bytes": 2 * GB,
            f"{V1}/d/c/memory.stat": f"inactive_file 7\ntotal_inactive_file {GB}",
            f"{V1}/memory.limit_in_bytes": V1_SENTINEL,
        },
        2 * GB,
    ),
    "v1 sentinel": (
        machine("4:memory:/d") | {f"{V1}/d/memory.limit_in_bytes": V1_SENTINEL, f"{V1}/d/memory.usage_in_bytes": 9},
        64 * GB,
    ),
    "v1, page cache": (
        machine("4:memory:/d")
        | {
            f"{V1}/d/memory.limit_in_bytes": 3 * GB,
            f"{V1}/d/memory.usage_in_bytes": 3 * GB,
            f"{V1}/d/memory.stat": f"active_file 7\ntotal_inactive_file {GB}\ntotal_active_file {GB}",
        },
        2 * GB,
    ),
    "v1, an ancestor that a container does not see": (
        machine("4:memory:/host/path")
        | {
            f"{V1}/memory.limit_in_bytes": V1_SENTINEL,
            f"{V1}/memory.usage_in_bytes": GB,
            f"{V1}/memory.stat": f"hierarchical_memory_limit {4 * GB}",
        },
        3 * GB,
    ),
    "hybrid": (
        machine("4:memory:/d\n0::/d")
        | {f"{V1}/d/memory.limit_in_bytes": 3 * GB, "sys/fs/cgroup/unified/d/memory.max": 2 * GB},
        2 * GB,
    ),
}


@pytest.mark.parametrize(("files", "expected"), CASES.values(), ids=CASES.keys())
def test_usable_ram(tmp_path: Path, files: dict[str, object], expected: int) -> None:
    assert usable_ram(tree(tmp_path, files)) == expected


def test_this_machine_has_some() -> None:
    assert 1 << 20 < usable_ram() < 1 << 50


def test_empty_root_falls_back_to_the_machine(tmp_path: Path) -> None:
    assert usable_ram(tmp_path) > 1 << 20


CORES = {
    "no quota": ({"proc/self/cgroup": "0::/a", f"{V2}/a/cpu.max": "max 100000"}, 8),
    "a quota": ({"proc/self/cgroup": "0::/a", f"{V2}/a/cpu.max": "250000 100000"}, 3),
    "half a core": ({"proc/self/cgroup": "0::/a", f"{V2}/a/cpu.max": "50000 100000"}, 1),
    "an ancestor's": ({"proc/self/cgroup": "0::/a/b", f"{V2}/a/cpu.max": "400000 100000"}, 4),
    "more than there are": ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "1600000 100000"}, 8),
    "v1": (
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/d",
            "sys/fs/cgroup/cpu,cpuacct/d/cpu.cfs_quota_us": 200000,
            "sys/fs/cgroup/cpu,cpuacct/d/cpu.cfs_period_us": 100000,
        },
        2,
    ),
    "v1 without": (
        {
            "proc/self/cgroup": "3:cpu:/",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": -1,
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100000,
        },
        8,
    ),
    "nothing to read": ({}, 8),
}


@pytest.mark.parametrize(("files", "expected"), CORES.values(), ids=CORES.keys())
def test_usable_cores(tmp_path: Path, files: dict[str, object], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert usable_cores(tree(tmp_path, files)) == expected


def test_cpu_name(tmp_path: Path) -> None:
    assert cpu_name(tmp_path)
    tree(tmp_path, {"proc/cpuinfo": "processor : 0\nmodel name\t: Some  CPU @ 3.00GHz\nmodel name : other"})
    assert cpu_name(tmp_path) == "Some CPU @ 3.00GHz"
