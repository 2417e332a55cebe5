"""What a bench loads: models, this host's profile, the engine, and where it is planned to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from hspec_cli import interrupt
from hspec_cli.bench import defaults, texts
from hspec_cli.bench.forecast import Forecast
from hspec_cli.bench.ours import Rig
from hspec_profiles.errors import DoesNotFit, HspecError

if TYPE_CHECKING:
    from hspec_cli.bench.command import Bench
    from hspec_cli.prepare import Files, Model
    from hspec_cli.progress import Progress
    from hspec_cli.voice import Voice
    from hspec_decoding.checkpoints.checkpoint import Checkpoint
    from hspec_decoding.engine import Settings
    from hspec_offload.ask import Limits
    from hspec_offload.plan import Plan
    from hspec_profiles.profile import HostProfile


@dataclass
class Loader:
    """Reads models and this host once, each when first asked for."""

    words: Bench
    settings: Settings
    voice: Voice
    shown: Progress
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep what the reader of the result should know, once."""
        if text not in self.notes:
            self.notes.append(text)

    @cached_property
    def target(self) -> Model:
        """The model that is measured."""
        return self._files.model(self.words.target)

    @cached_property
    def draft(self) -> Model | None:
        """Its draft: the one that was asked for, else the alias's own, if it has the same vocabulary."""
        from hspec_decoding.checkpoints import hub

        known = hub.alias(self.words.target)
        name = self.words.draft_model or (known.draft if known else None)
        if name is None or name == "none":
            return None
        try:
            self._files.config(name)
            draft = self._files.model(name)
            if different := self.target.tokenizer.difference(draft.tokenizer):
                raise HspecError(f"the draft model `{name}` has another vocabulary: {different}")
            return draft
        except HspecError as failure:
            if self.words.draft_model:
                raise
            self.note(f"no draft model: {failure.message}")
            return None

    @cached_property
    def _files(self) -> Files:
        from hspec_cli.prepare import Files

        files = Files(self.words.offline, False, self.voice, self.shown)
        files.config(self.words.target)
        return files

    @cached_property
    def profile(self) -> HostProfile | None:
        """This host as it was measured, or roughly now."""
        from hspec_profiles.measure import quick_probe, renewed
        from hspec_profiles.profile import saved_profile

        try:
            saved = saved_profile()
            return quick_probe(tell=self._telling("measurements of this host")) if saved is None else renewed(saved)
        except HspecError as failure:
            self.note(f"no ceiling and no prediction: {failure.message}")
            return None

    def _telling(self, what: str) -> Callable[[int, int], None]:
        def tell(done: int, total: int) -> None:
            interrupt.check()
            self.shown.update(what, done, total)

        return tell

    @property
    def limits(self) -> Limits:
        """What the engine may use."""
        from hspec_offload.ask import Limits

        return Limits(vram=self.words.vram, ram=self.words.ram)

    def rig(self, context: int, *, exactly: bool) -> Rig:
        """The engine with room for `context` tokens; unless `exactly`, for as many as memory allows."""
        from hspec_decoding.engine import Engine

        opened = self.target.open(), self.draft.open(self.target) if self.draft else None
        while True:
            try:
                engine = Engine.load(
                    *opened,
                    self.settings,
                    context,
                    vocabulary=self.target.tokenizer.size,
                    progress=self._telling("layers loaded"),
                    plan=self._plan(*opened, context) if self.words.offload else None,
                    limits=self.limits,
                )
                break
            except DoesNotFit:
                if exactly or context < defaults.LEAST:
                    raise
                context //= 2
        for text in engine.notes:
            self.note(text)
        rig = Rig(engine, seed=self.words.seed, top_p=self.words.top_p)
        if self.profile is not None:
            rig.forecast = self._forecast(self.profile, rig)
        return rig

    def _plan(self, target: Checkpoint, draft: Checkpoint | None, context: int) -> Plan:
        """Where everything goes, on this host as it is. Raises DoesNotFit."""
        from dataclasses import replace

        from hspec_decoding.device import pick_device, pick_dtype
        from hspec_decoding.place import Asked, placed

        if self.profile is None:
            raise HspecError("`--offload` needs this host's profile", "`hspec profile` measures it")
        device = pick_device(self.settings.device, [])
        gpus = (device.index or 0,) if device.type == "cuda" else ()
        asked = Asked(
            (target.config, self.target.name),
            (draft.config, self.draft.name) if draft and self.draft else None,
            self.settings,
            context,
            pick_dtype(self.settings.dtype, device).itemsize,
            context,
            self.kind,
        )
        return placed(self.profile, asked, replace(self.limits, gpus=gpus))

    @property
    def kind(self) -> str:
        """The kind of text, as the planner knows them."""
        return texts.PROSE if self.words.prompt_file else self.words.text

    def _forecast(self, profile: HostProfile, rig: Rig) -> Forecast:
        draft = rig.engine.draft
        return Forecast.of(
            profile,
            (rig.engine.target.config, self.target.name),
            (draft.config, self.draft.name) if draft and self.draft else None,
            element=rig.engine.target.dtype.itemsize,
            device=rig.device,
            text=self.kind,
            exact_rows=rig.padded,
            limits=self.limits,
            offloaded=rig.offloaded,
        )
