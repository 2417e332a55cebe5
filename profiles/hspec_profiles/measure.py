"""Measure this host: one probe after the other, each free to fail alone."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from hspec_profiles.cores import cpu_name, usable_cores
from hspec_profiles.memory import usable_ram
from hspec_profiles.probes.timing import Effort, Figure, Unknown, first_line
from hspec_profiles.profile import Gpu, Host, HostProfile, saved_profile

LONG = 40.0  # seconds after which a full measurement begins no further probe
THOROUGH, ROUGH = Effort(seconds=1.0, largest=1 << 30), Effort(seconds=0.2, largest=1 << 27)
WHOLE = ("pinnable", "pcie_generation", "pcie_width")  # figures that are whole numbers

Probe = Callable[[Effort], Figure | tuple[Figure, ...]]
Tell = Callable[[int, int], object]  # how many measurements are done, of how many
Clock = Callable[[], float]


@dataclass(frozen=True)
class Step:
    """A probe, the figures that it gives, by their paths in a profile, and whether a quick measurement needs it."""

    paths: tuple[str, ...]
    probe: Probe
    quick: bool = True


@dataclass
class Findings:
    """Figures by their paths, and how they are known or why they are not."""

    values: dict[str, float] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def take(self, step: Step, effort: Effort) -> None:
        """Run a probe; its failure is a finding too."""
        try:
            found = step.probe(effort)
        except Exception as failure:
            self.note(step.paths, why(failure))
            return
        for path, figure in zip(step.paths, found if isinstance(found, tuple) else (found,), strict=True):
            self.sources[path] = figure.how
            if figure.value is not None:
                self.values[path] = figure.value

    def note(self, paths: Sequence[str], how: str) -> None:
        """Note how these figures are known, or why they are not."""
        self.sources.update(dict.fromkeys(paths, how))

    def of(self, prefix: str) -> dict[str, Any]:
        """Fields of the record whose path begins with `prefix`, rates with four digits."""
        names = {path.removeprefix(prefix): value for path, value in self.values.items() if path.startswith(prefix)}
        return {
            name: int(value) if name in WHOLE else float(f"{value:.4g}")
            for name, value in names.items()
            if "." not in name
        }


def silent(_done: int, _total: int) -> None:
    """Tell nobody how far a measurement is."""


def measure(name: str | None = None, *, tell: Tell = silent) -> HostProfile:
    """A profile of this host, called `name` or as the host, in less than a minute."""
    return _measured(name, LONG, THOROUGH, tell)


def quick_probe(seconds: float = 5.0, *, name: str | None = None, tell: Tell = silent) -> HostProfile:
    """A rough profile of this host in about `seconds`: what a plan needs most, from smaller buffers."""
    return _measured(name, seconds, ROUGH, tell)


def here(seconds: float = 5.0) -> HostProfile:
    """This host as it is now: its saved profile with the memory that is free at the moment, else a quick probe."""
    saved = saved_profile()
    return quick_probe(seconds) if saved is None else renewed(saved)


def renewed(profile: HostProfile) -> HostProfile:
    """A profile of this host with the cores and the memory that this process may use now."""
    from hspec_profiles.probes import gpu

    ram = usable_ram()
    pinnable = None if profile.host.pinnable is None else min(profile.host.pinnable, ram)
    gpus = tuple(replace(card, free=min(card.memory, gpu.free(i))) for i, card in enumerate(profile.gpus))
    return replace(profile, host=replace(profile.host, ram=ram, pinnable=pinnable, cores=usable_cores()), gpus=gpus)


def _measured(
    name: str | None, seconds: float, effort: Effort, tell: Tell, clock: Clock = time.monotonic
) -> HostProfile:
    end = clock() + seconds
    from hspec_profiles.probes import cpu, gpu

    findings, devices = Findings(), range(0)
    try:
        devices = range(gpu.count())
    except Unknown as reason:
        findings.sources["gpus"] = str(reason)
    steps = [*_host_steps(), *_gpu_steps(devices)]
    steps.sort(key=lambda step: not step.quick)
    share = replace(effort, seconds=min(effort.seconds, seconds / len(steps) / 2))  # the other half: memory, warm-up
    with cpu.threads(usable_cores()):
        for done, step in enumerate(steps):
            tell(done, len(steps))
            if effort is ROUGH and not step.quick:
                findings.note(step.paths, "left out of a quick measurement")
            elif clock() >= end:
                findings.note(step.paths, "not measured: the time was up")
            else:
                findings.take(step, share)
                gpu.release()
    tell(len(steps), len(steps))
    return _profile(name, findings, devices)


def _profile(name: str | None, findings: Findings, devices: Sequence[int]) -> HostProfile:
    gpus = tuple(_card(device, findings) for device in devices)
    findings.note(("host.cores", "host.ram"), "measured")
    return HostProfile(
        name=name or platform.node() or "host",
        host=Host(cpu_name(), usable_cores(), usable_ram(), **findings.of("host.")),
        gpus=gpus,
        **findings.of(""),
        sources=findings.sources,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _card(device: int, findings: Findings) -> Gpu:
    """The record of a GPU; one whose memory cannot be read has none free."""
    import torch

    from hspec_profiles.probes import gpu

    about = torch.cuda.get_device_properties(device)
    findings.note([f"gpus.{device}.{name}" for name in ("memory", "free", "capability")], "measured")
    try:
        free = min(gpu.free(device), about.total_memory)
    except Exception as failure:
        free = 0
        findings.note([f"gpus.{device}.free"], why(failure))
    return Gpu(
        about.name,
        about.total_memory,
        free,
        capability=(about.major, about.minor),
        identity=gpu.identity(device),
        **findings.of(f"gpus.{device}."),
    )


def _host_steps() -> list[Step]:
    from hspec_profiles.probes import cpu, disk

    return [
        Step(("host.dram",), lambda effort: cpu.dram(usable_ram(), effort)),
        Step(("host.attention",), lambda effort: cpu.attention(1, usable_ram(), effort)),
        Step(("host.attention_rows",), lambda effort: cpu.attention(16, usable_ram(), effort)),
        Step(("host.product",), lambda effort: cpu.product(usable_ram(), effort)),
        Step(("host.disk",), partial(disk.disk, models_directory()), quick=False),
    ]


def _gpu_steps(devices: Sequence[int]) -> list[Step]:
    from hspec_profiles.probes import gpu

    steps = [step for device in devices for step in _one_gpu(device)]
    steps.append(Step(("host.pin", "host.pinnable"), lambda effort: gpu.pinning(len(devices), usable_ram(), effort)))
    if devices:
        steps.append(Step(("peer",), partial(gpu.peer, devices)))
        steps.append(Step(("both_links",), lambda effort: gpu.all_links(devices, usable_ram(), effort)))
    return steps


def _one_gpu(device: int) -> list[Step]:
    from hspec_profiles.probes import gpu

    def link(name: str, *, to_device: bool, pinned: bool) -> Step:
        return Step(
            (f"gpus.{device}.{name}",),
            lambda effort: gpu.link(device, usable_ram(), effort, to_device=to_device, pinned=pinned),
            quick=pinned,
        )

    slot = f"gpus.{device}.pcie_generation", f"gpus.{device}.pcie_width"
    return [
        link("to_device", to_device=True, pinned=True),
        link("to_host", to_device=False, pinned=True),
        Step((f"gpus.{device}.copy",), partial(gpu.copy, device)),
        Step((f"gpus.{device}.matrix",), partial(gpu.matrix, device)),
        Step(slot, lambda effort: gpu.slot(device, usable_ram(), effort)),
        link("to_device_pageable", to_device=True, pinned=False),
        link("to_host_pageable", to_device=False, pinned=False),
    ]


def models_directory() -> Path:
    """Where models lie, or will."""
    place = os.environ.get("HF_HUB_CACHE") or os.environ.get("HF_HOME") or os.environ.get("XDG_CACHE_HOME")
    return Path(place or "~/.cache").expanduser()


def why(failure: Exception) -> str:
    """An exception as the reason for which a figure is unknown."""
    said = first_line(failure)
    if isinstance(failure, Unknown):
        return said
    if isinstance(failure, OSError) and failure.strerror:
        return failure.strerror[0].lower() + failure.strerror[1:]
    if isinstance(failure, MemoryError) or type(failure).__name__ == "OutOfMemoryError" or "allocate memory" in said:
        return "memory ran out"
    return f"{type(failure).__name__}: {said[:160]}"
