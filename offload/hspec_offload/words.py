"""What is not on the GPU, in a few words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hspec_offload.placed import Layers
from hspec_offload.plan import Plan

WEIGHTS = {"stream": "in host memory", "cpu": "multiplied by the CPU", "disk": "on the disk"}
KEYS = {
    "stream": "in host memory",
    "cpu": "in host memory, attended by the CPU",
    "split": "in host memory, {:.0%} attended by the CPU",
}


def elsewhere(plan: Plan) -> str:
    """What the plan keeps outside the GPU, or on the disk of a host without one: `weights of 24 layers in host memory`;
    empty where that is nothing.
    """
    gpu, parts = bool(plan.gpus), []
    for place, words in WEIGHTS.items():
        count = _layers(run for run in plan.layers if run.weights == place and (gpu or place == "disk"))
        if count:
            parts.append((f"weights of {_share(count, plan)}", words))
    for place, words in KEYS.items():
        count = _layers(run for run in plan.layers if run.keys == place and gpu)
        if count:
            what = "all KV" if count == _layers(plan.layers) else f"KV of {_share(count, plan)}"
            parts.append((what, words.format(plan.cpu_share)))
    return " and ".join(f"{what} {words}" for what, words in _joined(parts))


def _joined(parts: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Neighbours that are in the same place as one."""
    made: list[tuple[str, str]] = []
    for what, words in parts:
        if made and made[-1][1] == words:
            made[-1] = (f"{made[-1][0]} and {what}", words)
        else:
            made.append((what, words))
    return made


def _layers(runs: Iterable[Layers]) -> int:
    return sum(run.count for run in runs)


def _share(count: int, plan: Plan) -> str:
    everything = _layers(plan.layers)
    return f"all {count} layers" if count == everything else f"{count} layer{'s' * (count != 1)}"
