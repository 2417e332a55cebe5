"""What a host's profile and the planner promise of a run that the engine did not plan itself."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hspec_decoding.events import Expected
from hspec_offload.ask import Limits, Workload
from hspec_offload.plan import plan
from hspec_offload.shape import ModelShape
from hspec_profiles.errors import HspecError
from hspec_profiles.profile import saved_profile

if TYPE_CHECKING:
    from hspec_decoding.config import ModelConfig
    from hspec_offload.plan import Plan
    from hspec_profiles.profile import HostProfile


def expected(model: ModelConfig, context: int, device: str, made: Plan | None = None) -> Expected:
    """Ceilings of this host, if it was measured, and the times of the plan that is carried out, or else of `hspec plan`
    there; nothing that is not known.
    """
    known = _expected(model, context, device)
    if made is None:
        return known
    told = made.prediction
    return replace(known, token=told.seconds_per_token, plain=told.plain.seconds, prefill=told.prefill.seconds)


def _expected(model: ModelConfig, context: int, device: str) -> Expected:
    try:
        profile = saved_profile()
    except HspecError:
        return Expected()
    if profile is None or (device == "cpu") != (not profile.gpus):
        return Expected(ram=profile.host.dram) if profile else Expected()
    index = int(device.partition(":")[2] or 0)
    gpu = profile.gpus[index] if index < len(profile.gpus) else None
    token, plain, prefill = _times(profile, model, context)
    return Expected(
        token=token,
        plain=plain,
        prefill=prefill,
        gpu=gpu.copy if gpu else None,
        link=gpu.to_device if gpu else None,
        ram=profile.host.dram,
    )


def _times(profile: HostProfile, model: ModelConfig, context: int) -> tuple[float | None, float | None, float | None]:
    """Seconds of a token by the plan's levels, by plain decoding, and of reading a prompt as long as the context."""
    try:
        made = plan(profile, ModelShape.of(model, "model"), Workload(context), Limits()).prediction
    except HspecError:
        return None, None, None
    return made.seconds_per_token, made.plain.seconds, made.prefill.seconds
