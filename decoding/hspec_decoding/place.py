"""Where a run keeps its weights, keys and values: settings and limits to a plan, and a plan to what an engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hspec_decoding.build import resolve, tidal_needs_all
from hspec_decoding.config import ModelConfig
from hspec_decoding.device import Shape
from hspec_decoding.host_view import KVPlace
from hspec_decoding.load import affordable, check_memory, choose_stacks, room_left, worthwhile
from hspec_decoding.options import Settings
from hspec_decoding.ranks import Ranks
from hspec_decoding.stack import PLAIN, Spec, Stack, candidates, method, parse
from hspec_offload.ask import Limits, Workload
from hspec_offload.plan import Plan, plan
from hspec_offload.ring import Ring
from hspec_offload.shape import ModelShape
from hspec_offload.sizes import human
from hspec_offload.speculation import Level, Levels
from hspec_profiles.errors import DoesNotFit, UsageError
from hspec_profiles.memory import usable_ram
from hspec_profiles.profile import HostProfile

SPARSE = ("retrieval", "streaming")  # views of a part of the keys


@dataclass(frozen=True)
class Asked:
    """A run to find a place for: models by the names that the user gave, lengths in tokens, bytes of a weight."""

    target: tuple[ModelConfig, str]
    draft: tuple[ModelConfig, str] | None
    settings: Settings
    context: int
    element: int = 2
    prompt: int | None = None
    text: str = "prose"

    @property
    def shape(self) -> ModelShape:
        """The target's."""
        return ModelShape.of(*self.target, self.element)

    def work(self, stacks: Sequence[Stack]) -> Workload:
        """The same to the planner, with these stacks to choose from."""
        if any(spec.name == "chimera" for stack in stacks for spec in stack):
            raise UsageError("no plan is made for `chimera` levels", "run without `--offload`")
        draft = ModelShape.of(*self.draft, self.element) if self.draft else None
        chosen = tuple(_with_width(stack, self.settings.gamma) for stack in stacks)
        return Workload(self.context, 1, self.text, draft, chosen, prompt=self.prompt)


def _with_width(stack: Stack, gamma: int | None) -> Levels:
    """The planner's record of the stack, with the width that the user set for the level under the target."""
    levels = [Level(**vars(spec)) for spec in stack]
    if gamma is not None and len(levels) > 1:
        levels[-2] = replace(levels[-2], width=levels[-2].width or gamma)
    return tuple(levels)


def placed(profile: HostProfile, asked: Asked, limits: Limits) -> Plan:
    """The fastest plan that keeps everything where it is computed, and where there is none, the fastest one.

    Raises DoesNotFit, and UsageError for what cannot be meant.
    """
    gpu, draft = bool(profile.gpus) and limits.gpus != (), asked.draft is not None
    if limits.kv_device != "cpu" and (limits.gpu_layers is None or limits.gpu_layers >= asked.shape.layers):
        stacks = choose_stacks(asked.settings, asked.context, draft=draft, gpu=gpu)
        plain = [PLAIN] * (asked.settings.method == "auto" and not asked.settings.levels)
        work = asked.work([*map(_in_memory, stacks), *plain])
        try:
            return plan(profile, asked.shape, work, replace(limits, offload="none"))
        except DoesNotFit:
            pass
    work = asked.work(offered(asked.settings, asked.context, draft=draft, gpu=gpu))
    return plan(profile, asked.shape, work, limits)


def _in_memory(stack: Stack) -> Stack:
    """A stack that keeps as much in memory, and that the planner knows: tidal levels read the target's own keys."""
    copies = (replace(spec, view="full", budget=None) if spec.tidal else spec for spec in stack[:-1])
    return (*(new for old, new in zip(stack, copies, strict=False) if old.weights or not old.tidal), *PLAIN)


def offered(settings: Settings, context: int, *, draft: bool, gpu: bool) -> list[Stack]:
    """The stacks that a plan may choose between: the one that the user named, with the middle level's weights in 16 or
    in 4 bits where he named a method alone; for `auto` any proposer under any copy, and plain decoding.

    Raises UsageError for levels that need everything where they compute.
    """

    def filled(stacks: Sequence[Stack], *, keep: bool = False) -> list[Stack]:
        return list(dict.fromkeys(resolve(s, context, budget=settings.budget, keep=keep) for s in stacks))

    if settings.method == "auto" and gpu and not settings.levels:
        return [PLAIN, *filled(candidates(draft=draft, offloaded=True))]
    named = parse(settings.levels) if settings.levels else method(settings.method, draft=draft)
    if any(spec.tidal for spec in named):
        raise tidal_needs_all()
    if settings.levels:
        return filled([named], keep=True)
    return filled([named, *[_small(named)] * gpu])


def _small(stack: Stack) -> Stack:
    """The stack with middle levels whose weights are in 4 bits."""
    return tuple(replace(spec, weights="int4") if _middle(spec) else spec for spec in stack)


def _middle(spec: Spec) -> bool:
    return spec.name == "target" and not spec.decides


def fitting_stacks(
    settings: Settings,
    target: ModelConfig,
    draft: ModelConfig | None,
    context: int,
    dtype: torch.dtype,
    device: torch.device,
    plan: Plan | None,
    limits: Limits,
    ranks: Ranks | None = None,
) -> list[Stack]:
    """What an engine chooses between, all of which has room, on every rank. Raises DoesNotFit, UsageError for what
    cannot be meant.
    """
    rank = ranks.rank if ranks else 0
    if plan is not None and not plan.resident:
        check_room(plan, device, rank)
        stacks = planned_stacks(plan, settings, context, draft=draft is not None)
        return ranks.common(stacks) if ranks else stacks
    gpu = device.type == "cuda"
    stacks = choose_stacks(settings, context, draft=draft is not None, gpu=gpu)
    used = draft if any(spec.name == "draft" for stack in stacks for spec in stack) else None
    models = [config for config in (target, used) if config]
    if plan is None:
        room = check_memory(models, context, dtype, device, limits)
    else:
        check_room(plan, device, rank)
        room = room_left(models, context, dtype, device, limits)
    if len(stacks) > 1:
        stacks = affordable(worthwhile(stacks, target, context, dtype), target, context, dtype, room)
    return ranks.common(stacks) if ranks else stacks


def planned_stacks(plan: Plan, settings: Settings, context: int, *, draft: bool) -> list[Stack]:
    """The plan's levels, and for `auto` all that need no other copies on the GPU than these; or what the user named.

    Raises UsageError for levels that the plan has no copies for.
    """
    levels = _bare(parse(plan.levels))
    named = settings.levels or (settings.method != "auto" and settings.method)
    stacks = [s for s in offered(settings, context, draft=draft, gpu=bool(plan.gpus)) if serves(plan, s)]
    if not named:
        if not draft and any(spec.name == "draft" for spec in levels):
            raise UsageError("the plan's levels have a `draft` and there is no draft model", "name it: `--draft-model`")
        return list(dict.fromkeys([levels, *(stack for stack in stacks if len(stack) > 1)]))
    if not stacks:
        raise UsageError(f"the plan has no copies for `{named}`: its levels are {plan.levels}", "make another plan")
    return [next((stack for stack in stacks if _bare(stack) == levels), stacks[0])]


def planned_shape(plan: Plan | None, shape: Shape) -> Shape:
    """The shape of the last verifier's pass: where a plan wants longer blocks than add up in one order, or has the CPU
    attend, whose sums always depend on the rows, all are padded to as many rows. While bytes cross the bus that costs
    next to nothing.
    """
    if plan is None or plan.resident or shape.padded or (plan.block <= shape.rows and not plan.cpu_share):
        return shape
    return replace(shape, rows=plan.block, padded=True)


def _bare(stack: Stack) -> Stack:
    """Without widths."""
    return tuple(replace(spec, width=None) for spec in stack)


def serves(plan: Plan, stack: Stack) -> bool:
    """Whether a stack needs nothing where it is computed that the plan has not there."""
    levels = parse(plan.levels)
    kept = {spec.view for spec in levels if _middle(spec)}
    return all(
        (spec.name != "draft" or any(other.name == "draft" for other in levels))
        and (spec.view != "retrieval" or spec.view in kept)
        and (not _middle(spec) or _reads(plan, spec))
        for spec in stack
    ) and _budget(stack) <= _budget(levels)


def _budget(stack: Stack) -> int:
    """Tokens of sparse copies of the target's keys."""
    return sum(spec.budget or 0 for spec in stack if _middle(spec) and spec.view in SPARSE)


def _reads(plan: Plan, middle: Spec) -> bool:
    """Whether a middle level finds its weights and its keys where it is computed."""
    here = ("gpu",) if plan.gpus else ("cpu", "disk")
    if middle.weights and not any(run.copy for run in plan.layers):
        return False
    weights = all(run.weights in here or (middle.weights and run.copy) for run in plan.layers)
    if middle.view != "full":
        return weights
    keys = plan.key_copy == middle.kv if middle.kv else all(run.keys in here for run in plan.layers)
    return weights and keys


def check_plan(plan: Plan, asked: Asked, ranks: int = 1) -> None:
    """Raise UsageError unless the plan is for this model, context, precision and number of GPUs."""
    config, name = asked.target
    layers = sum(run.count for run in plan.layers)
    differing = []
    if plan.model != name:
        differing.append(f"the model `{plan.model}`, not `{name}`")
    elif layers != config.layers:
        differing.append(f"a model of {layers} layers, `{name}` has {config.layers}")
    if plan.context != asked.context:
        differing.append(f"a context of {plan.context:,} tokens, not {asked.context:,}")
    if plan.element != asked.element:
        differing.append(f"weights of {8 * plan.element} bits, not {8 * asked.element}")
    if plan.batch != 1:
        differing.append(f"{plan.batch} sequences, not one")
    if max(1, len(plan.gpus)) != ranks:
        differing.append(f"{len(plan.gpus)} GPUs, not {ranks}")
    if differing:
        raise UsageError(f"the plan is for {'; '.join(differing)}", "`hspec plan --json > FILE` makes another")


def check_room(plan: Plan, device: torch.device, rank: int = 0) -> None:
    """Raise DoesNotFit where less memory is free than the plan counts on, on a rank's GPU or in RAM."""
    *gpus, host = plan.devices
    found = [(host, usable_ram(), "--ram")]
    if gpus and device.type == "cuda":
        found.append((gpus[rank], torch.cuda.mem_get_info(device)[0], "--vram"))
    for place, free, flag in found:
        needed = sum(term.nbytes for term in place.terms if term.name != "reserve")
        if needed > free:
            raise DoesNotFit(
                f"the plan puts {human(needed)} into {place.name}, where {human(free)} are free now",
                f"make another plan, for less memory: `{flag}`",
            )


def ring_of(plan: Plan, device: torch.device) -> Ring | None:
    """What everything that the plan carries crosses the bus through."""
    return Ring(plan.ring_pieces * plan.piece_bytes, device) if plan.ring_pieces else None


def kv_place(plan: Plan, ring: Ring | None) -> KVPlace | None:
    """Where the plan keeps keys and values, if some are in host memory."""
    if ring is None or all(run.keys == "gpu" for run in plan.layers):
        return None
    away = tuple(run.keys != "gpu" for run in plan.layers for _ in range(run.count))
    return KVPlace(away, ring, plan.piece_bytes, plan.cpu_share)


def cap(device: torch.device, limits: Limits) -> None:
    """Hold this process to the `--vram` that it was given, where the GPU has more."""
    if device.type != "cuda" or limits.vram is None:
        return
    total = torch.cuda.get_device_properties(device).total_memory
    if limits.vram < total:
        torch.cuda.set_per_process_memory_fraction(limits.vram / total, device)
