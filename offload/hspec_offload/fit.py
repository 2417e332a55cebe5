"""What fits, the longest context that does, and what is said where nothing does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from hspec_offload.ask import Ask, Copies, Limits, Workload
from hspec_offload.machine import machines
from hspec_offload.memory import Placement, choices, left, spans
from hspec_offload.placed import Device, devices
from hspec_offload.shape import ModelShape
from hspec_offload.sizes import human
from hspec_profiles.errors import DoesNotFit, HspecError, UsageError

if TYPE_CHECKING:
    from hspec_profiles.profile import HostProfile


def asked(profile: HostProfile, model: ModelShape, work: Workload, limits: Limits) -> list[Ask]:
    """The question for every way to use GPUs that the limits allow."""
    ways = machines(profile, model.kv_heads, limits.gpus)
    return [Ask(machine, model, work, limits) for machine in ways if limits.ranks in (None, machine.ranks)]


def fits(ask: Ask, copies: Copies) -> bool:
    """Whether there is a place for everything."""
    return next(choices(ask, copies), None) is not None


def largest_context(
    profile: HostProfile, model: ModelShape, work: Workload, limits: Limits, copies: Copies = Copies()
) -> int:
    """Tokens of the longest context that has a plan, at most what the model's positions reach; 0 where none has."""
    asks = asked(profile, model, work, limits)

    def possible(context: int) -> bool:
        return any(fits(replace(ask, work=replace(work, context=context)), copies) for ask in asks)

    low, high = 0, model.context
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if possible(middle) else (low, middle - 1)
    return low


def leanest(ask: Ask, several: Iterable[Copies]) -> Copies:
    """The copies with which the model asks least of a GPU."""

    def needed(copies: Copies) -> float:
        return -left(ask, _lean(ask, copies)) if ask.machine.gpus and all(spans(ask, copies)) else float("inf")

    return min(several, key=needed)


def _lean(ask: Ask, copies: Copies) -> Placement:
    """The placement that asks least of a GPU."""
    weights, keys = (span.start if span else ask.model.layers for span in spans(ask, copies))
    return Placement(copies, weights, keys)


def does_not_fit(
    profile: HostProfile, model: ModelShape, work: Workload, limits: Limits, copies: Copies = Copies()
) -> HspecError:
    """The failure in words: which device, what it needs, what it has, and what would help; or that what was asked for
    contradicts itself.
    """
    longest = largest_context(profile, model, work, limits, copies)
    asks = asked(profile, model, work, limits)
    if not any(all(spans(ask, copies)) for ask in asks):
        return UsageError(_contradiction(model, limits, copies), "drop one of the two")
    device = min((_shortage(ask, copies) for ask in asks), key=lambda device: device.used - device.available)
    terms = sorted(device.terms, key=lambda term: -term.nbytes)[:3]
    needs = ", ".join(f"{term.name} {human(term.nbytes)}" for term in terms)
    message = (
        f"{model.name} with {work.context:,} tokens{f' in {work.batch} sequences' if work.batch > 1 else ''} does not "
        f"fit: {device.name} needs {human(device.used)} ({needs}) and has {human(device.available)}"
    )
    return DoesNotFit(message, _helps(limits, device, longest, named=copies != Copies()))


def _contradiction(model: ModelShape, limits: Limits, copies: Copies) -> str:
    """What keeps on the GPU what the limits put elsewhere, or the other way round."""
    if copies.needs_weights or copies.needs_keys:
        why = "these levels read the GPU's memory alone"
    elif model.slides and limits.kv_device == "cpu":
        why = f"KV of the sliding windows of {model.name} stays on the GPU"
    elif limits.offload in ("weights", "kv"):
        why = f"`--offload-kind {limits.offload}` leaves all else on the GPU"
    else:
        why = "nothing may be offloaded from the GPU"
    return f"{why}, and {_asked(limits)} keeps things elsewhere"


def _shortage(ask: Ask, copies: Copies) -> Device:
    """The device that is too small for the placement that asks least of it."""
    lean = _lean(ask, copies)
    gpus = devices(ask, lean)[:-1]
    if gpus and left(ask, lean) < 0:
        return max(gpus, key=lambda device: device.used - device.available)
    while gpus and lean.keys < ask.model.layers and left(ask, replace(lean, keys=lean.keys + 1)) >= 0:
        lean = replace(lean, keys=lean.keys + 1)
    lean = replace(lean, disk=ask.model.layers - lean.weights)
    return devices(ask, lean)[-1]


def _helps(limits: Limits, device: Device, longest: int, *, named: bool) -> str:
    """The flags that help, first the one that needs least. `named`: levels that the user named do not fit."""
    ways = []
    if longest:
        ways.append(f"the longest context that fits is {longest:,} tokens: `--ctx {longest}`")
    if named:
        ways.append("other levels need less: `--method auto`")
    if limits.offload == "none":
        ways.append("`--offload` places in RAM what the GPU has no room for")
    if _asked(limits):
        ways.append(f"{_asked(limits)} leaves no choice")
    cap = limits.ram if device.name == "RAM" else limits.vram
    if cap is not None:
        ways.append(f"`{'--ram' if device.name == 'RAM' else '--vram'}` allows {human(cap)}")
    return "; ".join(ways) or "a smaller model needs less"


def _asked(limits: Limits) -> str:
    """The flags that say where things go."""
    flags = {"--gpu-layers": limits.gpu_layers, "--kv-device": limits.kv_device}
    return " and ".join(f"`{flag} {value}`" for flag, value in flags.items() if value is not None)
