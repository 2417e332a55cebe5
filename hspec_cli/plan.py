"""`hspec plan`: where everything goes and how fast it will be, before anything loads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

from typer import Option

from hspec_cli.placement import GpuLayers, KvDevice, Ram, Reserve, Vram, roughly
from hspec_cli.words import Command, choice, whole
from hspec_profiles.errors import HspecError

if TYPE_CHECKING:
    from hspec_cli.voice import Voice
    from hspec_offload.ask import Limits, Workload
    from hspec_offload.shape import ModelShape
    from hspec_profiles.profile import HostProfile

TEXTS = ("prose", "code")

model_option, host_option, output_option = (
    partial(Option, rich_help_panel=heading) for heading in ("Model", "Host", "Output")
)

EXAMPLES = """\
Examples:
  hspec plan -m llama2-7b-128k --profile 2x-rtx-4090
  hspec plan -m qwen2.5-32b -c 8192 --profile 1x-h200 --vram 24GiB
  hspec plan -m ./my-model -c 32768 --json > plan.json

No weights are needed, only the model's config. Without --profile the plan is for this host, as
`hspec profile` measured it. Exit codes: 0 done, 1 failed, 2 usage, 3 does not fit."""


@dataclass(frozen=True)
class Plan(Command):
    """Show where a model's weights and context go on a host, and how fast it will be."""

    model: Annotated[
        str,
        model_option("--model", "-m", metavar="MODEL", envvar="HSPEC_MODEL", help="As for `hspec run`."),
    ] = "smollm2-135m"
    ctx: Annotated[
        int | None,
        model_option(
            "--ctx",
            "-c",
            parser=whole("--ctx", 1),
            metavar="TOKENS",
            help="Context to make room for.  [default: all that the model holds]",
        ),
    ] = None
    batch: Annotated[
        int,
        model_option("--batch", parser=whole("--batch", 1, 1024), metavar="N", help="Sequences decoded together."),
    ] = 1
    draft_model: Annotated[
        str | None,
        model_option("--draft-model", "-md", metavar="MODEL", envvar="HSPEC_DRAFT_MODEL", help="Small model, or none."),
    ] = None
    text: Annotated[
        str,
        model_option(
            "--text",
            parser=choice("--text", TEXTS),
            metavar="KIND",
            help="What the levels are chosen for: prose, of which drafts guess less, or code.",
        ),
    ] = "prose"
    offline: Annotated[bool, model_option("--offline", envvar="HSPEC_OFFLINE", help="Never use the network.")] = False
    profile: Annotated[
        str | None,
        host_option("--profile", metavar="NAME", help="A shipped or saved profile, or a file, instead of this host."),
    ] = None
    gpus: Annotated[
        int | None,
        host_option(
            "--gpus",
            parser=whole("--gpus", 1, 64),
            metavar="N",
            help="Share the model among the first N GPUs.  [default: what is fastest]",
        ),
    ] = None
    vram: Vram = None
    ram: Ram = None
    reserve: Reserve = None
    gpu_layers: GpuLayers = None
    kv_device: KvDevice = None
    json: Annotated[bool, output_option("--json", help="Print one JSON document, as --plan takes it.")] = False
    quiet: Annotated[bool, output_option("--quiet", "-q", help="Say nothing but errors on stderr.")] = False
    debug: Annotated[bool, output_option("--debug", help="Show tracebacks.")] = False

    def execute(self) -> int:
        """Print the plan; 0. Raises HspecError, DoesNotFit among them."""
        from hspec_cli.corrections import remarks
        from hspec_cli.plan_text import text
        from hspec_cli.show import written
        from hspec_cli.voice import Voice
        from hspec_offload.hints import hints
        from hspec_offload.plan import plan
        from hspec_offload.plan_file import document

        voice = Voice(self.quiet)
        model, work = self._work(voice)
        profile, limits = self._host(voice), self._limits()
        made = plan(profile, model, work, limits)
        if self.profile is None:
            made = replace(made, notes=(*made.notes, *remarks(made.profile)))
        advice = hints(profile, model, work, limits, made)
        print(written(document(made, advice)) if self.json else text(made, model, advice), flush=True)
        return 0

    def _host(self, voice: Voice) -> HostProfile:
        """The profile that was asked for, or this host's; a note where it had to be measured at once."""
        from hspec_profiles.profile import load_profile, saved_profile

        return load_profile(self.profile) if self.profile is not None else saved_profile() or roughly(voice)

    def _limits(self) -> Limits:
        from hspec_offload.ask import Limits

        limits = Limits(self.vram, self.ram, self.reserve, self.gpu_layers, self.kv_device)
        return limits if self.gpus is None else replace(limits, gpus=tuple(range(self.gpus)), ranks=self.gpus)

    def _work(self, voice: Voice) -> tuple[ModelShape, Workload]:
        """The model and what it is to do."""
        from hspec_offload.ask import Workload

        model = self._shape(self.model, voice)
        return model, Workload(self.ctx or model.context, self.batch, self.text, self._draft(voice))

    def _draft(self, voice: Voice) -> ModelShape | None:
        """The draft model that was asked for, else the alias's own, else None."""
        from hspec_decoding.checkpoints import hub

        known = hub.alias(self.model)
        name = self.draft_model or (known.draft if known else None)
        if name is None or name == "none":
            return None
        try:
            return self._shape(name, voice)
        except HspecError as failure:
            if self.draft_model:
                raise
            voice.note(f"no draft model: {failure.message}")
            return None

    def _shape(self, name: str, voice: Voice) -> ModelShape:
        """The sizes of a model, from its config alone."""
        from hspec_decoding.checkpoints import hub
        from hspec_decoding.config import ModelConfig
        from hspec_offload.shape import ModelShape

        return ModelShape.of(ModelConfig.from_dict(hub.read_config(name, offline=self.offline, say=voice.note)), name)
