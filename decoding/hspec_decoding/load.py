"""From checkpoints and settings to what an engine runs: the stack, the memory it needs, the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hspec_decoding.build import resolve
from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.config import ModelConfig
from hspec_decoding.model import Decoder
from hspec_decoding.options import RULES, Settings
from hspec_decoding.sparse import SELECT
from hspec_decoding.stack import LONGEST, Stack, method, parse
from hspec_offload.sizes import human, kv_bytes, tensor_bytes
from hspec_profiles.errors import DoesNotFit, UsageError
from hspec_profiles.memory import usable_ram

HEADROOM = 0.05  # share of the memory left for activations


def choose_stack(settings: Settings, context: int, *, draft: bool) -> Stack:
    """The stack that the settings name, with budgets for `context` tokens. Raises UsageError for what cannot be."""
    for name, value, valid in (("--rule", settings.rule, RULES), ("--select", settings.select, tuple(SELECT))):
        if value not in valid:
            raise UsageError(f"unknown {name}: {value!r}", "valid are " + ", ".join(valid))
    if settings.gamma is not None and not 1 <= settings.gamma <= LONGEST:
        raise UsageError(f"--gamma must be from 1 to {LONGEST}: {settings.gamma}")
    stack = parse(settings.levels) if settings.levels else method(settings.method, draft=draft)
    if not draft and any(spec.name == "draft" for spec in stack):
        raise UsageError("this stack has a `draft` level and there is no draft model", "name one: `--draft-model`")
    return resolve(stack, context, budget=settings.budget, keep=settings.levels is not None)


def check_memory(configs: Sequence[ModelConfig], context: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise DoesNotFit unless the weights of all models and the target's (first) keys and values have room."""
    element = dtype.itemsize
    weights = sum(tensor_bytes(config.tensors().values(), element) for config in configs)
    target = configs[0]
    token = kv_bytes(target.layers, target.kv_heads, target.head_dim, 1, element)
    room, where = _available(device)
    room = int(room * (1 - HEADROOM))
    if weights + token * context <= room:
        return
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
