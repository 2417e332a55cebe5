"""Methods of our own: one loaded engine runs all of them, on the same weights in the same memory."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hspec_cli import interrupt
from hspec_cli.bench import memory
from hspec_cli.bench.energy import Energy
from hspec_cli.bench.forecast import Forecast
from hspec_cli.bench.records import LOSSY, METHOD, PLAIN, REFERENCE, Case, Level, Memory, Trial
from hspec_cli.bench.runner import Prompts, Texts, Tick
from hspec_cli.tidal_notes import APPROXIMATE
from hspec_profiles.errors import DoesNotFit, UsageError

if TYPE_CHECKING:
    from hspec_decoding.engine import Engine, Settings
    from hspec_decoding.events import Report

AUTOREGRESSIVE, ONE_ROW = "autoregressive", "one-row"
WARM = 16  # tokens of a warm-up
SHORT = 64  # tokens of a warm-up's prompt on a CPU, where nothing is captured
TOP_P = 0.9  # where a temperature is set, as in the papers


@dataclass
class Rig:
    """A loaded engine, with room for one case at a time."""

    engine: Engine
    forecast: Forecast | None = None
    seed: int = 0
    top_p: float = TOP_P
    running: dict[str, Engine] = field(default_factory=dict)  # by method, of the present case

    def __post_init__(self) -> None:
        self.device, self.context = self.engine.device, self.engine.context
        self.gpu, self.dtype = self.device.startswith("cuda"), self.engine.dtype
        self.has_draft = self.engine.draft is not None
        self.offloaded = self.engine.plan is not None and not self.engine.plan.resident
        self.energy = Energy(self.device)
        self._size: tuple[int, int] | None = None

    @property
    def padded(self) -> bool:
        """Whether blocks of a fixed number of rows make plain decoding slower than it could be."""
        from hspec_decoding.device import exact_shape

        return exact_shape(self.engine.target.device, self.engine.target.dtype).padded

    def sized(self, case: Case) -> Engine:
        """The engine with room for just this case, which decides its methods' budgets too."""
        size = (case.context + case.new, case.batch)
        if size != self._size:
            from hspec_decoding.engine import Engine

            old = self.engine
            self._clear()
            self._check_ram(case)
            self.engine = Engine(old.target, old.draft, old.stacks, old.settings, size[0], old.parts)
            self.engine.plan = old.plan
            self._size = size
        return self.engine

    def _clear(self) -> None:
        """Give back the memory of keys and values; methods hold some of it too."""
        self.running.clear()
        self.engine.parts.forget()
        self._empty()

    def _empty(self) -> None:
        gc.collect()
        if self.gpu:
            import torch

            torch.cuda.empty_cache()

    def _check_ram(self, case: Case) -> None:
        """Raise DoesNotFit before the host runs out of memory; a GPU says so itself."""
        if self.gpu:
            return
        from hspec_offload.sizes import human
        from hspec_profiles.memory import usable_ram

        needed, room = int(1.2 * keys_bytes(self.engine, case.context + case.new) * case.batch), usable_ram()
        if needed > room:
            raise DoesNotFit(f"keys and values need {human(needed)}, this host has {human(room)} to use")

    def free(self) -> None:
        """Let go of all memory; nothing can be run any more."""
        self._clear()
        del self.engine
        self._empty()

    def contestant(self, name: str, settings: Settings, role: str | None = None) -> Ours:
        """A method under its name, to which is added that it is approximate where it is."""
        from hspec_decoding.stack import approximate, method, parse

        known = {AUTOREGRESSIVE: REFERENCE, ONE_ROW: PLAIN}
        if approximate(parse(settings.levels) if settings.levels else method(settings.method, draft=False)):
            return Ours(f"{name} {APPROXIMATE}", LOSSY, self, settings)
        return Ours(name, role or known.get(name, METHOD), self, settings)


def keys_bytes(engine: Engine, tokens: int) -> int:
    """Bytes of the target's keys and values of one sequence."""
    from hspec_offload.sizes import kv_bytes

    config = engine.target.config
    return kv_bytes(config.layers, config.kv_heads, config.head_dim, tokens, engine.target.dtype.itemsize)


def settings_of(name: str, base: Settings) -> Settings:
    """The engine's settings of a method by its name, or of a level stack."""
    if name == ONE_ROW:
        return replace(base, method=AUTOREGRESSIVE, exact=False)
    return replace(base, levels=name) if ">" in name or "(" in name else replace(base, method=name)


@dataclass
class Ours:
    """One method of the engine."""

    name: str
    role: str
    rig: Rig
    settings: Settings
    peak: int | None = None  # bytes that the GPU's allocator gave out at most in the last run

    def prepare(self, case: Case, prompts: Prompts) -> None:
        """A short run on the same prompts, so that graphs are captured; on a CPU, on their beginnings."""
        engine = self.rig.sized(case)
        if self.settings.levels and "draft" in self.settings.levels and engine.draft is None:
            raise UsageError("there is no draft model")
        self.rig.running[self.name] = engine.variant(self.settings)
        few = prompts if self.rig.gpu else [prompt[:SHORT] for prompt in prompts]
        self.decode(replace(case, new=min(case.new, WARM)), few, fresh=True, tick=lambda _share: None)

    def decode(self, case: Case, prompts: Prompts, *, fresh: bool, tick: Tick) -> tuple[Texts, Trial]:
        """Decode whatever ends a text."""
        from hspec_decoding.engine import Request
        from hspec_decoding.sampling import Sampling

        rig, engine = self.rig, self.rig.running[self.name]
        if fresh:
            engine.parts.prompts.clear()
        self._watch_peak()
        sampling = Sampling(case.temperature, rig.top_p if case.temperature else 1.0, seed=rig.seed)
        asked = [Request(prompt, case.new, sampling=sampling, sequence=n) for n, prompt in enumerate(prompts)]
        texts, first, before, started = self._run(engine, asked, case, tick)
        report = engine.report()
        joules, self.peak = rig.energy.joules(), self._peak()
        spent = None if before is None or joules is None else (joules - before) / (case.new * case.batch)
        return texts, trial(report, case, first - started if fresh else None, spent)

    def _run(self, engine: Engine, asked: Any, case: Case, tick: Tick) -> tuple[Texts, float, float | None, float]:
        """(texts, time of the first token, energy before decoding, time of the start)"""
        from hspec_decoding.events import Emitted, Prefilled

        texts: list[list[int]] = [[] for _ in asked]
        first, before = None, self.rig.energy.joules()
        total, done = case.batch * (case.context + case.new), 0
        started = time.perf_counter()
        for event in engine.generate(*asked):
            interrupt.check()
            if isinstance(event, Emitted):
                first = first or time.perf_counter()
                texts[event.sequence] += event.tokens
                done += len(event.tokens)
            elif isinstance(event, Prefilled):
                done = case.context * event.sequence + event.done
                before = self.rig.energy.joules()
            tick(min(1.0, done / total))
        return tuple(map(tuple, texts)), first or time.perf_counter(), before, started

    def _watch_peak(self) -> None:
        if self.rig.gpu:
            import torch

            torch.cuda.reset_peak_memory_stats(self.rig.device)

    def _peak(self) -> int | None:
        if not self.rig.gpu:
            return None
        import torch

        return torch.cuda.max_memory_allocated(self.rig.device)

    def memory(self) -> Memory | None:
        """Of the levels that the last run could use."""
        engine = self.rig.running[self.name]
        return memory.held([*engine.levels.proposers, engine.last], self.peak)

    def predicted(self, case: Case) -> float | None:
        """By the planner, on what the host's profile says."""
        engine = self.rig.running.get(self.name)
        if self.rig.forecast is None or engine is None:
            return None
        return self.rig.forecast.seconds(case, self.role, engine.stacks)


def trial(report: Report, case: Case, first: float | None, joules: float | None) -> Trial:
    """The engine's report as a trial."""
    levels = tuple(
        Level(level.name, level.proposed, level.kept, level.refused, level.passes, level.seconds)
        for level in report.levels
    )
    tokens = report.generated_tokens / case.batch
    return Trial(
        report.decode_seconds / tokens,
        report.target_passes,
        round(tokens),
        first,
        joules,
        levels,
        report.stack,
        report.note,
    )
