"""What a person should know about a plan beside its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hspec_offload.ask import Ask
from hspec_offload.machine import Machine
from hspec_offload.memory import PINNED, Placement, in_ram
from hspec_offload.sizes import human
from hspec_offload.speculation import milliseconds

Way = tuple[Machine, bool, float]  # the GPUs of something tried, whether all was on them, and its seconds a token


def notes(ask: Ask, place: Placement, ways: Sequence[Way]) -> tuple[str, ...]:
    """Sentences about a placement, among all the ways that were tried."""
    return (*_memory(ask, place), *_others(ask, place, ways), *_assumed(ask, place))


def _memory(ask: Ask, place: Placement) -> Iterable[str]:
    model, machine, limits = ask.model, ask.machine, ask.limits
    if limits.vram and limits.vram > max(machine.memory):
        yield f"`--vram` allows {human(limits.vram)}, more than the {human(max(machine.memory))} that are free"
    if limits.ram and limits.ram > machine.ram:
        yield f"`--ram` allows {human(limits.ram)}, more than the {human(machine.ram)} that can be used"
    if machine.gpus and place.resident(model):
        yield "everything is on the GPU, nothing is offloaded"
    if place.disk:
        size = human(place.disk * model.layer_bytes)
        yield f"{place.disk} layers ({size}) do not fit RAM and are read from the disk in every pass, which is slow"
    kept = sum(term.nbytes for term in in_ram(ask, place) if term.name in PINNED)
    if machine.gpus and kept > machine.pinnable:
        yield f"only {human(machine.pinnable)} of {human(kept)} in RAM can be pinned, the rest crosses the bus slower"
    if machine.gpus and machine.pin and kept:
        size = human(min(kept, machine.pinnable))
        yield f"allocating {size} of pinned RAM takes {kept / machine.pin:.0f} s at the start"


def _others(ask: Ask, place: Placement, ways: Sequence[Way]) -> Iterable[str]:
    """How the plan compares with one GPU, or with nothing offloaded."""
    alone = min((seconds for machine, _, seconds in ways if machine.ranks == 1), default=None)
    together = min((seconds for machine, _, seconds in ways if machine.ranks > 1), default=None)
    if together:
        one = "does not fit" if alone is None else f"{milliseconds(alone)} ms a token"
        yield f"all GPUs together: {milliseconds(together)} ms a token; the best one alone: {one}"
    resident = min((seconds for _, whole, seconds in ways if whole), default=None)
    if ask.machine.gpus and resident and not place.resident(ask.model):
        yield f"the model would fit the GPU whole, at {milliseconds(resident)} ms a token"


def _assumed(ask: Ask, place: Placement) -> Iterable[str]:
    lacking = [figure for figure in ask.machine.assumed if figure != "disk" or place.disk]
    if lacking:
        yield "rates that the profile lacks are guessed: " + ", ".join(lacking)
    if not ask.work.acceptance:
        yield "acceptance is assumed as measured on Qwen2.5-Coder-1.5B; the engine adapts to what it measures"
