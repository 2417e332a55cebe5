"""From checkpoints and settings to what an engine runs: the stack, the memory it needs, the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from hspec_decoding.build import resolve
from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.config import ModelConfig
from hspec_decoding.model import Decoder
from hspec_decoding.options import RULES, Settings
from hspec_decoding.sparse import CHUNK, SELECT
from hspec_decoding.stack import LONGEST, Spec, Stack, candidates, method, parse
from hspec_offload.sizes import human, kv_bytes, tensor_bytes
from hspec_profiles.errors import DoesNotFit, UsageError
from hspec_profiles.memory import usable_ram

HEADROOM = 0.05  # share of the memory left for activations
SHARE = {"nf4": 0.29, "int4": 0.28, "int8": 0.53}  # bytes of a copy, of those in 16 bits, scales among them
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


def check_memory(configs: Sequence[ModelConfig], context: int, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes that are left when the weights of all models and the target's (first) keys and values have their place.

    Raises DoesNotFit.
    """
    element = dtype.itemsize
    weights = sum(tensor_bytes(config.tensors().values(), element) for config in configs)
    target = configs[0]
    token = kv_bytes(target.layers, target.kv_heads, target.head_dim, 1, element)
    room, where = _available(device)
    room = int(room * (1 - HEADROOM))
    if weights + token * context <= room:
        return room - weights - token * context
    longest = (room - weights) // token
    hint = f"the longest context that fits is {longest:,} tokens: `--ctx {longest}`" if longest > 0 else None
    raise DoesNotFit(
        f"{where} has {human(room)} to use, the weights need {human(weights)} and the KV cache of {context:,} tokens "
        f"{human(token * context)}",
        hint or "a smaller model, or `--device cpu` where the host has more memory",
    )


def _available(device: torch.device) -> tuple[int, str]:
    """Free bytes of the device's memory, and its name."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0], f"GPU {device.index} ({torch.cuda.get_device_name(device)})"
    return usable_ram(), "this host"


def load_decoder(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    *,
    context: int,
    vocabulary: int | None,
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """The model of a checkpoint whose tensors are all there: that is checked before the first is read."""
    checkpoint.preflight()
    return Decoder(
        checkpoint.config,
        checkpoint.tensor,
        dtype=dtype,
        device=device,
        context=context,
        vocabulary=vocabulary,
        release=checkpoint.release,
        progress=progress,
    )
