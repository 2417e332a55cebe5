"""What is asked of the planner: the work, what it may use, and what a stack of levels needs beside the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from hspec_offload.machine import Machine
from hspec_offload.shape import ModelShape
from hspec_offload.speculation import SMALL, TARGET, TEXTS, Level, Levels
from hspec_profiles.errors import UsageError

LEAST_BUDGET, MOST_BUDGET, BUDGET_SHARE, CHUNK = 256, 4096, 8, 8  # of a retrieval view, as the engine chooses it
WINDOW = 256  # tokens of a streaming view
BARE = (0, 1, 2, 3, 4, 6)  # eighths of the layers that may go without a 4-bit copy
OFFLOAD = ("auto", "none", "weights", "kv", "both")


@dataclass(frozen=True)
class Workload:
    """Tokens to make room for in each of `batch` sequences, and the levels to choose from (None for all).

    `prompt`: tokens that are read before the first is written, None for the whole context. `acceptance`: measured
    shares of kept tokens by kind of level, in place of those assumed for `text`.
    """

    context: int
    batch: int = 1
    text: str = "prose"
    draft: ModelShape | None = None
    stacks: tuple[Levels, ...] | None = None
    acceptance: Mapping[str, float] = field(default_factory=dict)
    prompt: int | None = None

    def accepted(self, model: ModelShape, text: str) -> dict[str, float]:
        """Shares of kept tokens on a text, by kind of level."""
        table = dict(TEXTS[text])
        if self.draft and self.draft.weight_bytes < SMALL * model.weight_bytes:
            table["draft"] = table["small draft"]
        return {**table, **self.acceptance}


@dataclass(frozen=True)
class Limits:
    """What the plan may use. Bytes of each GPU and of RAM; layers whose weights stay on the GPU; where KV lives; the
    GPUs, by their numbers in the profile.
    """

    vram: int | None = None
    ram: int | None = None
    reserve: int | None = None
    gpu_layers: int | None = None
    kv_device: str | None = None  # "gpu", "cpu"
    offload: str = "auto"  # what may live outside the GPU
    gpus: tuple[int, ...] | None = None  # None for all
    ranks: int | None = None  # of these GPUs, how many share a pass; None for what is fastest


@dataclass(frozen=True)
class Ask:
    """One question: this model, on these GPUs, for this work, within these limits."""

    machine: Machine
    model: ModelShape
    work: Workload
    limits: Limits


@dataclass(frozen=True)
class Copies:
    """What levels keep on the GPU beside the model, and what of the model they need there themselves."""

    small: int = 0  # layers with a copy of their weights in 4 bits; where some have one, the rest stay in 16
    keys: str = ""  # "int4", "int8": all keys and values in fewer bits
    budget: int = 0  # tokens of sparse copies
    scored: bool = False  # a mean key for every chunk, to select by
    draft: bool = False
    needs_weights: bool = False  # a middle level reads all 16-bit weights,
    needs_keys: bool = False  # or all 16-bit keys and values


def retrieval_budget(context: int) -> int:
    """Tokens of a retrieval view whose budget nobody set."""
    return min(MOST_BUDGET, max(LEAST_BUDGET, context // BUDGET_SHARE // CHUNK * CHUNK))


def stacks(work: Workload, *, gpu: bool) -> list[Levels]:
    """The stacks to choose from: any proposer under any partial copy of the target, fewer keys or fewer bits.

    Raises UsageError for a draft level without a draft model.
    """
    if work.stacks is not None:
        if not work.draft and any(level.name == "draft" for stack in work.stacks for level in stack):
            raise UsageError("these levels have a `draft` and there is no draft model", "name one: `--draft-model`")
        return [tuple(_filled(level, work.context) for level in levels) for levels in work.stacks]
    first: list[Levels] = [(Level("ngram"),), *[(Level("draft", "streaming", WINDOW),)] * (work.draft is not None)]
    budget = retrieval_budget(work.context)
    middles = [Level("target", "retrieval", budget)]
    if gpu:
        middles += [
            Level("target", "retrieval", budget, weights="int4"),
            Level("target", "full", weights="int4"),
            Level("target", "full", kv="int4"),
            Level("target", "full", kv="int4", weights="int4"),
        ]
    below = [*first, *((*proposer, middle) for middle in middles for proposer in [*first, ()])]
    return [(TARGET,), *((*levels, TARGET) for levels in below)]


def _filled(level: Level, context: int) -> Level:
    """The level with the budget that the engine would give it."""
    if level.budget or level.view not in ("retrieval", "streaming"):
        return level
    return replace(level, budget=retrieval_budget(context) if level.view == "retrieval" else WINDOW)


def grouped(chosen: Iterable[Levels], layers: int, *, gpu: bool) -> dict[Copies, list[Levels]]:
    """Stacks by what they keep on the GPU, which fixes where everything can go."""
    groups: dict[Copies, list[Levels]] = {}
    for levels in chosen:
        for copies in _copies(levels, layers, gpu=gpu):
            groups.setdefault(copies, []).append(levels)
    return groups


def _copies(levels: Levels, layers: int, *, gpu: bool) -> list[Copies]:
    """What a stack keeps; with 4-bit weights it may do so of all layers, or only of a part."""
    middles = [level for level in levels[:-1] if level.name == "target"]
    parts = [layers - layers * eighths // 8 for eighths in BARE] if any(level.weights for level in middles) else [0]
    return [
        Copies(
            small=small,
            keys=next((level.kv for level in middles if level.kv), ""),
            budget=sum(level.budget or 0 for level in middles if level.view != "full"),
            scored=any(level.view == "retrieval" for level in middles),
            draft=any(level.name == "draft" for level in levels),
            needs_weights=gpu and any(not level.weights for level in middles),
            needs_keys=gpu and any(level.view == "full" and not level.kv for level in middles),
        )
        for small in dict.fromkeys(parts)
    ]
