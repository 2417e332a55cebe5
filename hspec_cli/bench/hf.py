"""Another implementation beside ours: transformers with accelerate, which is what many people run today."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hspec_cli import interrupt
from hspec_cli.bench.energy import Energy
from hspec_cli.bench.records import OTHER, Case, Memory, Trial
from hspec_cli.bench.runner import Prompts, Texts, Tick
from hspec_profiles.errors import UsageError

HF, HF_OFFLOADED = "hf", "hf-offloaded"
SPARE = 2 << 30  # bytes of a GPU left to activations
WARM, SHORT = 8, 64


@dataclass
class Transformers:
    """A model that is loaded when first used. `offloaded`: keys and values in RAM, copied layer by layer."""

    name: str
    directory: Path
    device: str
    dtype: str
    caches: int  # bytes of keys and values of the largest case
    offloaded: bool = False
    seed: int = 0
    top_p: float = 0.9
    role: str = OTHER
    shared: dict[str, Any] = field(default_factory=dict)  # between methods that only differ in their cache

    def prepare(self, case: Case, prompts: Prompts) -> None:
        """Load the model if need be, and warm up."""
        if self.offloaded and not self.device.startswith("cuda"):
            raise UsageError("an offloaded cache needs a GPU")
        if "model" not in self.shared:
            self.shared["model"] = self._load()
            self.shared["energy"] = Energy(self.device)
        short = [prompt[:SHORT] for prompt in prompts]
        self.decode(Case(SHORT, WARM, case.temperature, case.batch), short, fresh=True, tick=lambda _share: None)

    def _load(self) -> Any:
        """The whole model on the device, or as accelerate spreads it where it does not fit beside its cache."""
        import torch
        from transformers import AutoModelForCausalLM

        placed: dict[str, Any] = {}
        if self.device.startswith("cuda"):
            index = int(self.device.partition(":")[2] or 0)
            free = torch.cuda.mem_get_info(index)[0] - SPARE - (0 if self.offloaded else self.caches)
            placed = {"device_map": "auto", "max_memory": {index: max(1, free), "cpu": 1 << 40}}
        made = AutoModelForCausalLM.from_pretrained(
            self.directory, dtype=getattr(torch, self.dtype), local_files_only=True, **placed
        )
        return made.eval()

    def decode(self, case: Case, prompts: Prompts, *, fresh: bool, tick: Tick) -> tuple[Texts, Trial]:
        """`generate` with a clock on its tokens; the prompt is read anew every time, timed if `fresh`."""
        import torch

        model, clock = self.shared["model"], _clock(case, tick)
        ids = torch.tensor(prompts, device=model.device)
        sampled = {"do_sample": True, "temperature": case.temperature, "top_p": self.top_p, "top_k": 0}
        torch.manual_seed(self.seed)
        if self.device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
        started, before = time.perf_counter(), self.shared["energy"].joules()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=case.new,
                min_new_tokens=case.new,
                pad_token_id=0,
                stopping_criteria=[clock],
                **({"cache_implementation": "offloaded"} if self.offloaded else {}),
                **(sampled if case.temperature else {"do_sample": False}),
            )
        after = self.shared["energy"].joules()
        first, last = clock.at[0], clock.at[-1]
        per_token = (last - first) / max(1, case.new - 1)
        share = (last - first) / (last - started)  # of the energy, which was counted from the start
        joules = None if before is None or after is None else share * (after - before) / (case.new * case.batch)
        texts = tuple(tuple(row[len(prompts[0]) :].tolist()) for row in out)
        return texts, Trial(per_token, case.new, case.new, first - started if fresh else None, joules)

    def memory(self) -> Memory | None:
        """Weights as loaded; keys and values of the largest case."""
        import torch

        model = self.shared["model"]
        weights = sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values())
        peak = torch.cuda.max_memory_allocated() if self.device.startswith("cuda") else None
        return Memory(weights, self.caches, peak)

    def predicted(self, case: Case) -> float | None:  # noqa: ARG002
        """Nobody foretells it."""
        return None


def _clock(case: Case, tick: Tick) -> Any:
    """A stopping criterion that never stops and notes when each token is there."""
    import torch
    from transformers import StoppingCriteria

    class Clock(StoppingCriteria):  # type: ignore[misc]
        def __init__(self) -> None:
            self.at: list[float] = []

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:  # noqa: ARG002
            interrupt.check()
            if input_ids.is_cuda:
                torch.cuda.synchronize()
            self.at.append(time.perf_counter())
            tick(len(self.at) / case.new)
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    return Clock()
