"""What the planner foretells for this host, and the ceiling that no plain decoding can pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hspec_cli.bench.records import PLAIN, REFERENCE, Case, Ceiling
from hspec_profiles.errors import HspecError

if TYPE_CHECKING:
    from hspec_decoding.config import ModelConfig
    from hspec_offload.ask import Limits
    from hspec_offload.shape import ModelShape
    from hspec_profiles.profile import HostProfile


@dataclass(frozen=True)
class Forecast:
    """A host's profile and the shapes of the models as they are run. `gpu`: its number, None for the CPU."""

    profile: HostProfile
    target: ModelShape
    draft: ModelShape | None
    text: str  # "code", "prose"
    gpu: int | None
    exact_rows: bool  # whether plain decoding runs blocks as long as verify passes
    limits: Limits
    offloaded: bool  # whether some of it is not where it is computed

    @classmethod
    def of(
        cls,
        profile: HostProfile,
        target: tuple[ModelConfig, str],
        draft: tuple[ModelConfig, str] | None,
        *,
        element: int,
        device: str,
        text: str,
        exact_rows: bool,
        limits: Limits,
        offloaded: bool,
    ) -> Forecast:
        """`element`: bytes of a weight; `device` as torch names it."""
        from hspec_offload.shape import ModelShape

        def shape(config: ModelConfig, name: str) -> ModelShape:
            return ModelShape.of(config, name, element)

        gpu = int(device.partition(":")[2] or 0) if device.startswith("cuda") else None
        one = profile if gpu is not None else replace(profile, gpus=())
        if gpu is not None:
            one = replace(profile, gpus=profile.gpus[gpu : gpu + 1])
        small = shape(*draft) if draft else None
        return cls(one, shape(*target), small, text, gpu, exact_rows, limits, offloaded)

    def ceiling(self, case: Case) -> Ceiling | None:
        """Weights once, keys and values of all sequences at their mean length, at the measured rate of reading."""
        gpus, host = self.profile.gpus, self.profile.host
        rate = gpus[0].copy if gpus else host.dram
        if not rate or self.offloaded:
            return None  # of what is offloaded, the prediction tells
        model = self.target
        keys = model.attended(case.context + case.new // 2) * model.key_bytes * model.layers * case.batch
        source = "copies within the GPU's memory" if gpus else "reading RAM with all cores"
        return Ceiling(round(model.layers * model.layer_bytes + model.head_bytes + keys), rate, source)

    def seconds(self, case: Case, role: str, stacks: Sequence[Any]) -> float | None:
        """Of a token of each sequence by the best of `stacks`; None where the planner has no answer."""
        from hspec_offload.ask import Workload
        from hspec_offload.plan import plan
        from hspec_offload.speculation import Level

        if any(spec.tidal for stack in stacks for spec in stack):
            return None  # the planner does not know how often layers read everything
        padded = role == REFERENCE and self.exact_rows
        chosen = ((Level("ngram"), Level("target", "full")),) if padded or role == PLAIN else tuple(map(tuple, stacks))
        work = Workload(case.context + case.new, case.batch, self.text, self.draft, chosen)
        try:
            told = plan(self.profile, self.target, work, self.limits).prediction
        except (HspecError, KeyError, ValueError):
            return None
        if padded:
            return told.verify.seconds
        return told.plain.seconds if role in (PLAIN, REFERENCE) else told.seconds_per_token
