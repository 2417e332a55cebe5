"""What to change for more, found by planning again with that changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from hspec_offload.ask import Limits, Workload
from hspec_offload.fit import largest_context
from hspec_offload.plan import Plan, plan
from hspec_offload.shape import ModelShape
from hspec_offload.speculation import milliseconds

if TYPE_CHECKING:
    from hspec_profiles.profile import HostProfile

GAIN = 1.25  # times faster, to be worth a hint
MORE = (4, 8, 16, 32)  # GB of memory
GB = 1_000_000_000


def hints(profile: HostProfile, model: ModelShape, work: Workload, limits: Limits, made: Plan) -> tuple[str, ...]:
    """Sentences, each of them true of the planner."""
    return (*_memory(profile, model, work, limits, made), *_context(profile, model, work, limits, made))


def _memory(profile: HostProfile, model: ModelShape, work: Workload, limits: Limits, made: Plan) -> Iterator[str]:
    """The least of more memory that makes it faster."""
    if made.resident and "disk" not in {run.weights for run in made.layers}:
        return
    for what in ("GPU memory", "RAM"):
        for more in MORE if what == "RAM" or profile.gpus else ():
            larger, allowed = _larger(profile, limits, what, more * GB)
            seconds = plan(larger, model, work, allowed).prediction.seconds_per_token
            if seconds * GAIN <= made.prediction.seconds_per_token:
                each = " on each GPU" if what == "GPU memory" and len(made.kv_heads) > 1 else ""
                yield f"with {more} GB more {what}{each}: {_instead(seconds, made)}"
                break


def _larger(profile: HostProfile, limits: Limits, what: str, more: int) -> tuple[HostProfile, Limits]:
    """The host with more memory, and limits that allow it."""
    if what == "RAM":
        pinnable = profile.host.pinnable and profile.host.pinnable + more
        host = replace(profile.host, ram=profile.host.ram + more, pinnable=pinnable)
        return replace(profile, host=host), replace(limits, ram=limits.ram and limits.ram + more)
    gpus = tuple(replace(gpu, memory=gpu.memory + more, free=gpu.free + more) for gpu in profile.gpus)
    return replace(profile, gpus=gpus), replace(limits, vram=limits.vram and limits.vram + more)


def _context(profile: HostProfile, model: ModelShape, work: Workload, limits: Limits, made: Plan) -> Iterator[str]:
    """What half the context would bring, and how much there could be."""
    half = work.context // 2
    if half:
        seconds = plan(profile, model, replace(work, context=half), limits).prediction.seconds_per_token
        if seconds * GAIN <= made.prediction.seconds_per_token:
            yield f"`--ctx {half}`: {_instead(seconds, made)}"
    longest = largest_context(profile, model, work, limits)
    if longest > work.context:
        end = ", all that the model holds" if longest == model.context else ""
        yield f"a context of up to {longest:,} tokens would fit{end}"


def _instead(seconds: float, made: Plan) -> str:
    return f"{milliseconds(seconds)} ms a token instead of {milliseconds(made.prediction.seconds_per_token)}"
