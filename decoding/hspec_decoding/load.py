"""From checkpoints and settings to what an engine runs: the stack, the memory it needs, the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from hspec_decoding.build import WINDOW, resolve
from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.config import ModelConfig
from hspec_decoding.host_weights import HostDecoder, WeightPlace
from hspec_decoding.model import Decoder
from hspec_decoding.options import RULES, Settings
from hspec_decoding.ranks import Ranks
from hspec_decoding.shares import Shard, share_out
from hspec_decoding.sparse import CHUNK, SELECT
from hspec_decoding.stack import LONGEST, Spec, Stack, candidates, method, parse
from hspec_offload.ask import Limits, Workload
from hspec_offload.fit import largest_context
from hspec_offload.plan import Plan
from hspec_offload.ring import Ring
from hspec_offload.shape import ModelShape
from hspec_offload.sizes import human, kv_bytes, tensor_bytes
from hspec_profiles.cores import usable_cores
from hspec_profiles.errors import DoesNotFit, UsageError
from hspec_profiles.memory import usable_ram
from hspec_profiles.profile import Gpu, Host, HostProfile

HEADROOM = 0.05  # share of the memory left for activations
SHARE = {"nf4": 0.29, "int4": 0.28, "int8": 0.53}  # bytes of a copy, of those in 16 bits, scales among them
BEYOND = 8 * LONGEST  # tokens that a sequence's memory has room for behind its context, at most
TOGETHER = 32  # sequences of a batch that nobody set a number for
LEAST, CLEARLY = 2e9, 0.8  # bytes of a target's pass, and the share of them, that make a middle level worth a try


def choose_stacks(settings: Settings, context: int, *, draft: bool, gpu: bool) -> list[Stack]:
    """The stack that the settings name, or several to choose between, with budgets for `context` tokens.

    Raises UsageError for what cannot be.
    """
    for name, value, valid in (("--rule", settings.rule, RULES), ("--select", settings.select, tuple(SELECT))):
        if value not in valid:
            raise UsageError(f"unknown {name}: {value!r}", "valid are " + ", ".join(valid))
    if settings.gamma is not None and not 1 <= settings.gamma <= LONGEST:
        raise UsageError(f"--gamma must be from 1 to {LONGEST}: {settings.gamma}")
    if settings.tree is not None and not 0 <= settings.tree <= LONGEST:
        raise UsageError(f"--tree must be off or from 1 to {LONGEST} nodes: {settings.tree}")
    if settings.tree and settings.rule == "rejection":
        raise UsageError("`--tree` needs the coupled rule: under `--rule rejection` Chimera proposes chains")
    several = settings.method == "auto" and gpu and not settings.levels
    stack = parse(settings.levels) if settings.levels else method(settings.method, draft=draft)
    if not draft and any(spec.name == "draft" for spec in stack):
        raise UsageError("this stack has a `draft` level and there is no draft model", "name one: `--draft-model`")
    stacks = candidates(draft=draft) if several else [stack]
    filled = [resolve(stack, context, budget=settings.budget, keep=settings.levels is not None) for stack in stacks]
    return [stack for stack in dict.fromkeys(filled) if len(stack) > 1 or not several]


def worthwhile(stacks: Sequence[Stack], target: ModelConfig, context: int, dtype: torch.dtype) -> list[Stack]:
    """The stacks whose middle level has clearly less to read than the target itself; the others stand for themselves.

    Where a pass of the target takes no time worth speaking of, that is none.
    """
    weights = tensor_bytes(target.tensors().values(), dtype.itemsize)
    keys = kv_bytes(target.layers, target.kv_heads, target.head_dim, context, dtype.itemsize)

    def reads(spec: Spec) -> float:
        tokens = min(context, spec.budget) if spec.view == "retrieval" and spec.budget else context
        return weights * SHARE.get(spec.weights or "", 1.0) + keys * tokens / context * SHARE.get(spec.kv or "", 1.0)

    def clearly(stack: Stack) -> bool:
        middle = next((spec for spec in stack[:-1] if spec.name == "target"), None)
        if middle is None:
            return True
        if weights + keys < LEAST or (middle.kv and keys < (1 - CLEARLY) / 2 * weights):
            return False
        return reads(middle) <= CLEARLY * (weights + keys)

    return [stack for stack in stacks if clearly(stack)]


def affordable(
    stacks: Sequence[Stack], target: ModelConfig, context: int, dtype: torch.dtype, room: int
) -> list[Stack]:
    """The stacks whose copies of weights, keys and values find place in `room` bytes, the first ones first."""
    weights = tensor_bytes(target.tensors().values(), dtype.itemsize)
    keys = kv_bytes(target.layers, target.kv_heads, target.head_dim, context, dtype.itemsize)
    kept: list[Stack] = []
    made: dict[str, float] = {}
    for stack in stacks:
        wanted = {name: size for spec in stack for name, size in _copies(spec, weights, keys, context)}
        cost = sum(size for name, size in wanted.items() if name not in made)
        if cost <= room:
            room -= round(cost)
            made |= wanted
            kept.append(stack)
    return kept


def _copies(spec: Spec, weights: float, keys: float, context: int) -> Iterator[tuple[str, float]]:
    """What a level keeps beside the target's own weights and keys, by name, in bytes of the latter."""
    if spec.weights:
        yield f"w={spec.weights}", SHARE[spec.weights] * weights
    if spec.kv:
        yield f"kv={spec.kv}", SHARE[spec.kv] * keys
    if spec.view == "retrieval":
        yield "chunk means", keys / 2 / CHUNK
        yield str(spec), keys * min(1.0, ((spec.budget or 0) + 4 * LONGEST) / context)


def together(
    asked: int | None,
    stacks: Sequence[Stack],
    configs: Sequence[ModelConfig],
    context: int,
    dtype: torch.dtype,
    device: torch.device,
    limits: Limits = Limits(),
) -> int:
    """Sequences of `context` tokens each to decode at a time: as many as are asked for, else as have room for their
    keys and values and for what levels keep of these, TOGETHER at most.

    `configs`: of the target, then of a draft. Raises DoesNotFit.
    """
    weights = tensor_bytes(configs[0].tensors().values(), dtype.itemsize)
    keys, *windows = (
        kv_bytes(config.layers, config.kv_heads, config.head_dim, tokens, dtype.itemsize)
        for config, tokens in zip(configs, (context + BEYOND, 2 * WINDOW + BEYOND), strict=False)
    )
    specs = {spec for stack in stacks for spec in stack}
    once = sum(dict(copy for spec in specs for copy in _copies(spec, weights, 0, context)).values())
    each = keys + sum(windows) + sum(dict(copy for spec in specs for copy in _copies(spec, 0, keys, context)).values())
    room = room_left(configs, 0, dtype, device, limits)
    most = max(1, int((room - once) / each))  # that one has room was checked before
    if asked is not None and asked > most:
        raise DoesNotFit(
            f"{asked} sequences of {context:,} tokens need {human(asked * each)}, and {human(room - once)} are left "
            "beside the weights",
            f"`--batch {most}`, or a shorter context: `--ctx`",
        )
    return asked or min(most, TOGETHER)


def check_memory(
    configs: Sequence[ModelConfig],
    context: int,
    dtype: torch.dtype,
    device: torch.device,
    limits: Limits = Limits(),
) -> int:
    """Bytes that are left when the weights of all models and the target's (first) keys and values have their place.

    Raises DoesNotFit.
    """
    room = room_left(configs, context, dtype, device, limits)
    if room >= 0:
        return room
    element, target = dtype.itemsize, configs[0]
    weights = sum(tensor_bytes(config.tensors().values(), element) for config in configs)
    token = kv_bytes(target.layers, target.kv_heads, target.head_dim, 1, element)
    usable, where = _available(device, limits)
    raise DoesNotFit(
        f"{where} has {human(usable)} to use, the weights need {human(weights)} and the KV cache of {context:,} tokens "
        f"{human(token * context)}",
        _helps(target, context, element, device, limits, room // token + context),
    )


def room_left(
    configs: Sequence[ModelConfig], context: int, dtype: torch.dtype, device: torch.device, limits: Limits
) -> int:
    """The same, less than 0 where it does not fit."""
    element, target = dtype.itemsize, configs[0]
    weights = sum(tensor_bytes(config.tensors().values(), element) for config in configs)
    keys = kv_bytes(target.layers, target.kv_heads, target.head_dim, context, element)
    return _available(device, limits)[0] - weights - keys


def _helps(target: ModelConfig, context: int, element: int, device: torch.device, limits: Limits, longest: int) -> str:
    """What would help, `longest` tokens being the context that has room without offloading."""
    offloaded = _longest_offloaded(target, context, element, device, limits)
    if offloaded >= context:
        how = "keeps in RAM what" if device.type == "cuda" else "reads from the disk, in every pass, what"
        hint = f"`--offload` {how} has no room there"
        return f"{hint}; the longest context without is {longest:,} tokens: `--ctx {longest}`" if longest > 0 else hint
    if longest > 0:
        return f"the longest context that fits is {longest:,} tokens: `--ctx {longest}`"
    if offloaded:
        return f"with `--offload` {offloaded:,} tokens would fit: `--offload --ctx {offloaded}`"
    cap = "--vram" if limits.vram else "--ram" if limits.ram else None
    return f"a larger `{cap}`, or a smaller model" if cap else "a smaller model needs less"


def _longest_offloaded(target: ModelConfig, context: int, element: int, device: torch.device, limits: Limits) -> int:
    """Tokens of the longest context that has a plan here, of which memory alone decides."""
    gpus: tuple[Gpu, ...] = ()
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        gpus = (Gpu(torch.cuda.get_device_name(device), total, free),)
    host = HostProfile("this host", Host("", usable_cores(), usable_ram()), gpus)
    return largest_context(host, ModelShape.of(target, "", element), Workload(context), replace(limits, gpus=None))


def _available(device: torch.device, limits: Limits) -> tuple[int, str]:
    """Bytes of the device's memory that weights and keys may take, and its name."""
    if device.type == "cuda":
        free, most = torch.cuda.mem_get_info(device)[0], limits.vram
        where = f"GPU {device.index} ({torch.cuda.get_device_name(device)})"
    else:
        free, most, where = usable_ram(), limits.ram, "this host"
    room = free if most is None else min(free, most)
    return int(room * (1 - HEADROOM)) if limits.reserve is None else room - limits.reserve, where


def load_decoder(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    *,
    context: int,
    vocabulary: int | None,
    progress: Callable[[int, int], None] | None = None,
    plan: Plan | None = None,
    ring: Ring | None = None,
    notes: list[str] | None = None,
    exact: bool = True,
    ranks: Ranks | None = None,
) -> Decoder:
    """The model of a checkpoint whose tensors are all there: that is checked before the first is read.

    With a plan its layers are where that says; what is on the host comes through `ring`. `exact`: on a CPU beside a GPU
    too a row's bits do not depend on how many there are. Of a Shard it is what `ranks` share, of another checkpoint
    each of them has it whole.
    """
    checkpoint.preflight()
    make: Callable[..., Decoder] = Decoder
    if plan is not None:
        place = WeightPlace.of(plan, ring, checkpoint.expect, [] if notes is None else notes, exact)
        make = partial(HostDecoder, place=place)
    decoder = make(
        checkpoint.config,
        checkpoint.tensor,
        dtype=dtype,
        device=device,
        context=context,
        vocabulary=vocabulary,
        release=checkpoint.release,
        progress=progress,
    )
    decoder.ranks = ranks
    return share_out(decoder, ranks, checkpoint.share) if ranks and isinstance(checkpoint, Shard) else decoder
