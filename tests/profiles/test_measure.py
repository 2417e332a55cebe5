"""A whole measurement: every probe may fail alone, time and memory are bounded."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil
import pytest

from hspec_profiles import measure as measuring
from hspec_profiles.measure import Findings, Step, here, measure, quick_probe, renewed, why
from hspec_profiles.probes import cpu, disk, gpu
from hspec_profiles.probes.timing import Effort, Figure, Unknown
from hspec_profiles.profile import HostProfile, host_key, load_profile, save_profile

MB, GB = 1 << 20, 1 << 30
PROBES = {cpu: ("dram", "attention", "product"), disk: ("disk",), gpu: ("copy", "matrix", "link", "peer", "all_links")}
Pretend = Callable[..., Any]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every probe gives 12345.67 at once; the names of those that ran."""
    ran: list[str] = []

    def instant(name: str, figures: Any = Figure(12345.67)) -> Callable[..., Any]:
        return lambda *_, **__: ran.append(name) or figures

    for module, names in PROBES.items():
        for name in names:
            monkeypatch.setattr(module, name, instant(name))
    monkeypatch.setattr(gpu, "pinning", instant("pinning", (Figure(2e9), Figure(7.0, "refused"))))
    monkeypatch.setattr(gpu, "slot", instant("slot", (Figure(4, "read"), Figure(8, "read"))))
    return ran


# --- what a profile holds ----------------------------------------------------------------------------------------


def test_everything_is_measured(gpus: Pretend, figures: list[str]) -> None:
    gpus(count=2)
    told: list[tuple[int, int]] = []
    profile = measure("lab", tell=lambda *how: told.append(how))
    assert profile.name == "lab"
    assert (profile.peer, profile.both_links) == (12350.0, 12350.0)  # four digits
    assert (profile.host.dram, profile.host.disk, profile.host.pin, profile.host.pinnable) == (12350.0, 12350.0, 2e9, 7)
    first, second = profile.gpus
    assert first.name == "Pretend 9000"
    assert (first.memory, first.free, first.capability) == (2 * GB, GB, (9, 0))
    assert (first.identity, second.identity) == ("0000-0, driver 580.1", "0000-1, driver 580.1")
    assert (first.pcie_generation, first.pcie_width) == (4, 8)
    assert type(first.pcie_width) is type(profile.host.pinnable) is int
    assert None not in vars(first).values()
    assert None not in vars(profile.host).values()
    assert profile.sources["gpus.1.pcie_width"] == "read"
    assert profile.sources["host.pinnable"] == "refused"
    assert set(profile.sources.values()) == {"measured", "read", "refused"}
    assert told == [(done, len(figures)) for done in range(len(figures) + 1)]
    assert profile.measured_at.startswith("20")


def test_it_survives_being_saved(gpus: Pretend, figures: list[str]) -> None:
    gpus(count=2)
    profile = measure()
    assert load_profile(save_profile(profile, "x")) == profile
    assert figures


@pytest.mark.parametrize("seconds", [5.0, 1e-9])
def test_without_gpus(seconds: float, figures: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "count", lambda: fail(Unknown("none here")))
    profile = quick_probe(seconds)
    assert profile.gpus == ()
    assert profile.sources["gpus"] == "none here"
    assert "peer" not in profile.sources
    assert profile.host.cores >= 1
    assert profile.host.ram > MB
    assert (profile.host.dram == 12350.0) == bool(figures) == (seconds > 1)


def fail(failure: Exception) -> Any:
    raise failure


FAILURES = {
    "unknown": (Unknown("NVML: Not Supported"), "NVML: Not Supported"),
    "permission": (PermissionError(13, "Permission denied", "/x"), "permission denied"),
    "memory": (MemoryError(), "memory ran out"),
    "torch": (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "memory ran out"),
    "gpu": (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to"), "memory ran out"),
    "other": (RuntimeError("CUDA error: unspecified launch failure\nmore"), "RuntimeError: CUDA error: unspecified"),
}


@pytest.mark.parametrize(("failure", "said"), FAILURES.values(), ids=FAILURES.keys())
def test_failures_are_reasons(failure: Exception, said: str) -> None:
    assert why(failure).startswith(said)
    assert "\n" not in why(failure)


STEPS = [(module, name) for module, names in PROBES.items() for name in names] + [(gpu, "pinning"), (gpu, "slot")]


@pytest.mark.parametrize(("module", "name"), STEPS, ids=[name for _, name in STEPS])
def test_every_probe_may_fail_alone(
    module: Any, name: str, gpus: Pretend, figures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(count=2)
    whole = measure()
    monkeypatch.setattr(module, name, lambda *_, **__: fail(RuntimeError(f"no {name}")))
    profile = measure()
    missing = {path for path, how in profile.sources.items() if how == f"RuntimeError: no {name}"}
    assert missing
    assert set(profile.sources) == set(whole.sources)
    for path in profile.sources:
        assert (figure(profile, path) is None) == (path in missing), path
    assert figures


def figure(profile: HostProfile, path: str) -> Any:
    """The figure that `sources` calls `path`."""
    record: Any = profile
    for name in path.split("."):
        record = record[int(name)] if name.isdigit() else getattr(record, name)
    return record


def test_a_gpu_whose_memory_cannot_be_read(gpus: Pretend, figures: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(count=1)
    monkeypatch.setattr(gpu, "free", lambda _: fail(RuntimeError("CUDA error: device is busy")))
    profile = measure()
    assert profile.gpus[0].free == 0
    assert profile.sources["gpus.0.free"] == "RuntimeError: CUDA error: device is busy"
    assert figures


def test_ctrl_c_is_no_reason() -> None:
    def interrupted(_effort: Effort) -> Figure:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Findings().take(Step(("host.dram",), interrupted), Effort())


# --- time and memory ---------------------------------------------------------------------------------------------


def test_a_quick_measurement_leaves_out_what_a_plan_can_do_without(gpus: Pretend, figures: list[str]) -> None:
    gpus(count=1)
    profile = quick_probe()
    left_out = {path for path, how in profile.sources.items() if how == "left out of a quick measurement"}
    assert left_out == {"host.disk", "gpus.0.to_device_pageable", "gpus.0.to_host_pageable"}
    assert "disk" not in figures


def test_when_the_time_is_up_the_rest_is_unknown(gpus: Pretend, figures: list[str]) -> None:
    gpus(count=1)
    now = [0.0]

    def clock() -> float:
        now[0] += 1
        return now[0]

    profile = measuring._measured(None, 4.0, measuring.ROUGH, measuring.silent, clock)
    late = [path for path, how in profile.sources.items() if how == "not measured: the time was up"]
    assert len(figures) == 3
    assert late
    assert profile.host.dram == 12350.0
    assert profile.gpus[0].to_device is None


def test_many_gpus_share_the_time(gpus: Pretend, figures: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Effort] = []
    monkeypatch.setattr(cpu, "dram", lambda _free, effort: given.append(effort) or Figure(1.0))
    for count, probe in ((1, measure), (8, measure), (2, quick_probe)):
        gpus(count=count)
        figures.clear()
        probe()
    one, eight, quick = given
    assert (one.seconds, one.largest) == (1.0, GB)
    assert eight.seconds * 7 * 8 < 20
    assert quick.seconds * len(figures) < 5
    assert quick.largest < one.largest


def test_the_memory_of_a_measurement_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "usable_cores", lambda: 1)
    monkeypatch.setattr(measuring, "ROUGH", Effort(0.02, 256 * MB))
    quick_probe()  # libraries are loaded
    before = psutil.Process().memory_info().rss
    assert quick_probe().host.dram
    assert psutil.Process().memory_info().rss - before < 32 * MB


def test_five_seconds_are_kept_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "usable_cores", lambda: 1)
    began = time.monotonic()
    quick_probe(1.0)
    assert time.monotonic() - began < 10  # whatever else this machine has to do


# --- this host now -----------------------------------------------------------------------------------------------


def test_here_is_the_saved_profile_with_the_memory_of_now(gpus: Pretend, figures: list[str]) -> None:
    machine = gpus(count=1)
    saved = measure()
    saved = replace(saved, host=replace(saved.host, ram=5, cores=1000, pinnable=1 << 50))
    save_profile(saved, host_key())
    figures.clear()
    machine.free = GB // 2
    now = here()
    assert figures == []
    assert now.gpus == (replace(saved.gpus[0], free=GB // 2),)
    assert now.host.ram > MB
    assert now.host.cores < 1000
    assert now.host.pinnable == now.host.ram
    assert now == replace(saved, host=now.host, gpus=now.gpus)
    machine.driver = "590"
    here()
    assert figures  # another driver, so the saved one is of another host


def test_renewing_keeps_what_is_unknown() -> None:
    profile = load_profile("cpu-only")
    assert renewed(profile).host.pinnable is None
    assert renewed(profile).host.dram == profile.host.dram
