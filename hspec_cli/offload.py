"""Where a run keeps everything: the plan in a file, or the one that this host and the flags lead to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hspec_cli.placement import about_gpus, limits, roughly
from hspec_cli.voice import Voice
from hspec_decoding.device import pick_device, pick_dtype
from hspec_offload.plan_file import read_plan
from hspec_offload.speculation import milliseconds
from hspec_offload.words import elsewhere
from hspec_profiles.errors import DoesNotFit, UsageError

if TYPE_CHECKING:
    import torch

    from hspec_cli.prepare import Job
    from hspec_cli.run import Run
    from hspec_decoding.options import Settings
    from hspec_decoding.ranks import Ranks
    from hspec_offload.plan import Plan
    from hspec_profiles.profile import HostProfile

SLOW = ("read from the disk", "pinned")  # in notes of a plan that a user should see


def with_plan(run: Run) -> tuple[Run, Plan | None]:
    """The run with the context and the GPU of the plan that it names, and that plan. Raises HspecError."""
    if run.plan is None:
        return run, None
    made = read_plan(Path(run.plan).expanduser())
    device = f"cuda:{made.gpus[0]}" if made.gpus and run.device == "auto" else run.device
    _check_host(made, pick_device(run.device if device == run.device else "auto", []))
    return replace(run, ctx=run.ctx or made.context, device=device), made


def _check_host(made: Plan, device: torch.device) -> None:
    """Raise UsageError where the plan is for other devices than this host's."""
    import torch

    *gpus, _ = made.devices
    if not gpus and device.type == "cuda":
        raise UsageError("the plan uses no GPU", "`--device cpu` does not either")
    if gpus and device.type != "cuda":
        raise UsageError(f"the plan is for {gpus[0].name}, and this run is on the CPU", "make a plan for this host")
    for number, gpu in zip(made.gpus, gpus, strict=True):
        here = torch.cuda.device_count()
        name = torch.cuda.get_device_name(number) if number < here else None
        if name is None or f"({name})" not in gpu.name:
            has = f"GPU {number} ({name})" if name else f"{here} GPU{'s' * (here != 1)}"
            raise UsageError(f"the plan is for {gpu.name}, this host has {has}", "make a plan for this host")


def planned(
    run: Run, job: Job, settings: Settings, made: Plan | None, voice: Voice, ranks: Ranks | None = None
) -> Plan | None:
    """The plan to run by: the given one if it is for this run, else the best one where `--offload` asks for it, or
    where GPUs that differ have to share the model.

    Raises DoesNotFit, UsageError.
    """
    from hspec_decoding.place import Asked, check_plan, placed

    device = pick_device(run.device, [])
    about = [flag for flag in about_gpus(run) if device.type == "cpu"]
    if about:
        raise UsageError(f"`{about[0]}` is about a GPU, and this run uses none", "drop it")
    if made is None and not run.offload and not (ranks and _unlike(ranks)):
        return None
    asked = Asked(
        (job.target.config, run.model),
        (job.draft.config, job.draft_name or "draft") if job.draft else None,
        settings,
        job.context,
        pick_dtype(run.dtype, device).itemsize,
        len(job.prompt) or None,
    )
    count = ranks.size if ranks and device.type == "cuda" else 1
    if made is not None:
        check_plan(replace(made, model=run.model) if _same(made.model, run.model) else made, asked, count)
    else:
        first = device.index or 0 if count == 1 else 0
        gpus = tuple(range(first, first + count)) if device.type == "cuda" else ()
        offload = limits(run).offload if run.offload else "none"
        made = placed(_host(voice), asked, replace(limits(run), gpus=gpus, ranks=count, offload=offload))
    if count > 1 and made.gpus != tuple(range(count)):
        raise UsageError(f"the plan is for GPUs {made.gpus}", "CUDA_VISIBLE_DEVICES says which ones come first")
    if ranks and any(part.weights == "disk" for part in made.layers):
        raise DoesNotFit("the plan reads layers from the disk, which ranks cannot share", "one GPU alone can")
    _tell(run, made, voice)
    return made


def _unlike(ranks: Ranks) -> bool:
    """Whether GPUs share a model that are not all of one kind, so that equal parts may not be best."""
    import torch

    if ranks.device.type != "cuda":
        return False
    own = torch.cuda.get_device_properties(ranks.device)
    here = range(min(ranks.size, torch.cuda.device_count()))
    others = [torch.cuda.get_device_properties(n) for n in here]
    return any((one.name, one.total_memory) != (own.name, own.total_memory) for one in others)


def _same(one: str, other: str) -> bool:
    """Whether two names mean one model."""
    from hspec_decoding.checkpoints import hub

    def place(name: str) -> str:
        known = hub.alias(name)
        return known.repo if known else str(Path(name).expanduser().resolve()) if Path(name).exists() else name

    return place(one) == place(other)


def _host(voice: Voice) -> HostProfile:
    """This host as it is now."""
    from hspec_profiles.measure import renewed
    from hspec_profiles.profile import saved_profile

    saved = saved_profile()
    return roughly(voice) if saved is None else renewed(saved)


def _tell(run: Run, made: Plan, voice: Voice) -> None:
    """Say in a line where everything goes, and what is slow."""
    told = made.prediction
    if made.resident:
        voice.note(f"everything fits {'the GPU' if made.gpus else 'RAM'}: nothing is offloaded")
    else:
        plain = f", {milliseconds(told.plain.seconds)} by plain decoding" * (told.tokens_per_pass > 1)
        each = f"predicted {milliseconds(told.seconds_per_token)} ms a token{plain}"
        voice.note(f"{elsewhere(made)}; {each}")
    for note in made.notes:
        (voice.note if any(slow in note for slow in SLOW) else voice.detail)(note)
    if run.method == "triforce" and "w=" in made.levels and not made.resident:
        voice.note("the middle level reads a copy of the weights in 4 bits: in 16 bits they are not all on the GPU")
