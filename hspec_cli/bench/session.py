"""A bench from its words to its result."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from hspec_cli import __version__
from hspec_cli.bench import defaults, suite, texts
from hspec_cli.bench.defaults import Work
from hspec_cli.bench.eta import Eta
from hspec_cli.bench.hf import HF, HF_OFFLOADED, Transformers
from hspec_cli.bench.loading import Loader
from hspec_cli.bench.meter import Meter, Pace
from hspec_cli.bench.ours import AUTOREGRESSIVE, ONE_ROW, Rig, keys_bytes, settings_of
from hspec_cli.bench.records import METHOD, REFERENCE, Case, Outcome, Result
from hspec_cli.bench.runner import Contestant, Runner, judged, skipped
from hspec_profiles.errors import HspecError, UsageError

if TYPE_CHECKING:
    from hspec_cli.bench.command import Bench
    from hspec_cli.progress import Progress
    from hspec_cli.voice import Voice
    from hspec_decoding.engine import Settings

PROBES = (192, 768)  # tokens of the prompts that the pace is measured with
PROBED = 8  # tokens
OWN = {False: ("triforce",), True: ("auto", "triforce")}  # methods that nobody named, on a CPU and on a GPU


@dataclass
class Session:
    """One bench. Times count from `began`."""

    words: Bench
    voice: Voice
    shown: Progress
    began: float = field(default_factory=time.perf_counter)
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    outcomes: list[Outcome] = field(default_factory=list)
    interrupted: bool = False
    about: str = ""  # the text
    trials: int = 0

    def __post_init__(self) -> None:
        self.base = _base(self.words)
        self.loader = Loader(self.words, self.base, self.voice, self.shown)
        self.eta = Eta(self.shown, self.words.quiet)

    def run(self) -> Result:
        """Measure. Raises HspecError for what cannot be asked; what fails on its way is told in its row, and of a
        suite all that cannot be run here.
        """
        try:
            rig = self._measured()
        except HspecError as failure:
            if not self.words.suite or self.outcomes:
                raise
            return self._result(None, failure.message)
        finally:
            self.eta.close()
        return self._result(rig)

    def _measured(self) -> Rig:
        contests = suite.contests(self.words.offload) if self.words.suite else []
        longest = self.loader.target.open().config.context
        rig = self.loader.rig(self._room(contests, longest), exactly=bool(self.words.contexts))
        document = self._document(rig, contests)
        try:
            if contests:
                self._suite(rig, contests, document)
            else:
                self._grid(rig, document, min(rig.context, len(document) - max(self.words.asked.batches)))
        except KeyboardInterrupt:
            if not self.outcomes:
                raise
            self.interrupted = True
        return rig

    def _room(self, contests: Sequence[suite.Contest], longest: int) -> int:
        """Tokens of a sequence that the engine must hold; of a bare bench, all that the model holds."""
        asked = self.words.asked
        if contests:
            needed = [contest.case.context + contest.case.new for contest in contests]
            return max((tokens for tokens in needed if tokens <= longest), default=min(longest, 4096))
        if asked.contexts is None:
            return min(longest, defaults.CONTEXTS[0])
        most, new = max(asked.contexts), asked.new or defaults.EFFORTS[0][0]
        if most + new > longest:
            raise UsageError(
                f"{most:,} tokens and {new:,} new ones are asked for, `{self.words.target}` holds {longest:,}",
                f"`--contexts {longest - new}` is the most" if longest > new else "a smaller `-n` helps",
            )
        return most + new

    def _document(self, rig: Rig, contests: Sequence[suite.Contest]) -> list[int]:
        """Tokens of the text, as many as the largest case needs."""
        text, self.about = texts.read(self.words.text, self.words.prompt_file)
        fitting = [one.case for one in contests if one.case.context < rig.context]
        batches = rig.context * max(self.words.asked.batches)
        wanted = max((case.context * case.batch for case in fitting), default=batches)
        document = texts.tokens_of(text, wanted, self.loader.target.tokenizer.encode)
        if len(document) < texts.LEAST:
            raise UsageError(f"the text has {len(document)} tokens", "give a longer `--prompt-file`")
        for context in self.words.contexts or ():
            texts.prompts(document, context, max(self.words.asked.batches))
        return document

    # methods × contexts × temperatures × batches

    def _grid(self, rig: Rig, document: Sequence[int], longest: int) -> None:
        names = self._names(rig)
        pace, asked = self._pace(rig, document, longest), self.words.asked
        bound = self._limit(rig)
        work = defaults.chosen(asked, longest, pace, len(names), bound - self._gone())
        self.trials = work.trials
        meter = Meter(pace, self.eta)
        meter.plan(names, work.cases, work.trials, fresh=self.words.fresh)
        deadline = self.began + defaults.ENDING * bound if asked.bare else float("inf")
        decode = self.loader.target.tokenizer.decode
        runner = Runner(work.trials, meter, decode, self.words.fresh, deadline)
        ours = [name for name in names if name not in (HF, HF_OFFLOADED)]
        contestants: list[Contestant] = [rig.contestant(name, settings_of(name, self.base)) for name in ours]
        others = self._others(rig, work, [name for name in names if name not in ours])
        for case in work.cases:
            self._case(rig, runner, case, contestants if rig.gpu else [*contestants, *others], document)
        if rig.gpu and others:
            self._afterwards(rig, runner, others, document)
        if runner.late:
            self.loader.note(
                f"the time of {bound:.0f} s was up: some methods had fewer trials than {work.trials}, or none"
            )

    def _names(self, rig: Rig) -> list[str]:
        """Methods in the order of their rows: plain decoding always, in one row where that is another program."""
        named = self.words.methods or OWN[rig.gpu]
        return list(dict.fromkeys([*self._plain(rig), *named, *(self.words.levels or ())]))

    def _plain(self, rig: Rig) -> list[str]:
        return [AUTOREGRESSIVE, *[ONE_ROW] * rig.padded]

    def _limit(self, rig: Rig) -> float:
        from hspec_profiles.cores import usable_cores

        return defaults.limit(usable_cores(), rig.gpu)

    def _gone(self) -> float:
        return time.perf_counter() - self.began

    def _pace(self, rig: Rig, document: Sequence[int], longest: int) -> Pace:
        """Two short runs of plain decoding."""
        runs = []
        for number, most in enumerate(PROBES):
            tokens = max(1, min(most, longest // (4 - 2 * number) - PROBED))
            case, prompts = Case(tokens, PROBED), [tuple(document[:tokens])]
            plain = rig.contestant(AUTOREGRESSIVE, settings_of(AUTOREGRESSIVE, self.base))
            self.shown.update("short runs, for the pace", number, len(PROBES))
            plain.prepare(case, prompts)
            _, trial = plain.decode(case, prompts, fresh=True, tick=lambda _share: None)
            reading = max(1e-6, (trial.first or 0.0) - trial.seconds_per_token)
            runs.append((tokens, reading, trial.seconds_per_token))
        (short, reading, token), long = runs
        return Pace.of((short, reading, token) if short < long[0] else (long[0] // 2, long[1] / 2, long[2]), long)

    def _case(
        self, rig: Rig, runner: Runner, case: Case, contestants: Sequence[Contestant], document: Sequence[int]
    ) -> None:
        """One case, or why it was not run."""
        who = [(one.name, one.role) for one in contestants]
        ahead = sum(runner.meter.expected((name, case, False)) for name, _ in who) if self.outcomes else 0.0
        if time.perf_counter() + ahead > runner.deadline:
            runner.late = True
            runner.meter.drop(case)
            self.outcomes.append(skipped(case, who, "the time was up"))
            return
        rows = runner.case(case, texts.prompts(document, case.context, case.batch), contestants)
        self.outcomes.append(judged(case, rows, rig.forecast.ceiling(case) if rig.forecast else None))

    def _others(self, rig: Rig, work: Work, names: Sequence[str]) -> list[Contestant]:
        """transformers, as often as asked for, with one model in memory."""
        caches = max(keys_bytes(rig.engine, case.context + case.new) * case.batch for case in work.cases)
        shared: dict[str, Any] = {}
        return [
            Transformers(
                name,
                self.loader.target.directory,
                rig.device,
                rig.engine.dtype,
                caches,
                offloaded=name == HF_OFFLOADED,
                seed=self.words.seed,
                top_p=self.words.top_p,
                shared=shared,
            )
            for name in names
        ]

    def _afterwards(self, rig: Rig, runner: Runner, others: Sequence[Contestant], document: Sequence[int]) -> None:
        """On a GPU another implementation has the memory to itself, after ours."""
        self.loader.note("transformers was measured after all else, with the GPU's memory to itself")
        rig.free()
        for number, outcome in enumerate(self.outcomes):
            case = outcome.case
            rows = runner.case(case, texts.prompts(document, case.context, case.batch), others)
            self.outcomes[number] = judged(case, (*outcome.rows, *rows), outcome.ceiling)

    # the paper's settings

    def _suite(self, rig: Rig, contests: Sequence[suite.Contest], document: Sequence[int]) -> None:
        """As far as model and memory allow."""
        self.trials = self.words.trials or 3
        pace = self._pace(rig, document, rig.context)
        meter = Meter(pace, self.eta)
        runner = Runner(self.trials, meter, self.loader.target.tokenizer.decode, self.words.fresh)
        plain = self._plain(rig)
        for contest in contests:
            if contest.case.context + contest.case.new <= rig.context:
                meter.plan([*plain, *contest.methods], [contest.case], self.trials, fresh=self.words.fresh)
        for contest in contests:
            case = contest.case
            who: list[Contestant] = [rig.contestant(name, settings_of(name, self.base)) for name in plain]
            who += [rig.contestant(name, self._papers(levels)) for name, levels in contest.methods.items()]
            if case.context + case.new <= rig.context:
                self._case(rig, runner, case, who, document)
            else:
                self.outcomes.append(skipped(case, [(one.name, one.role) for one in who], self._short(rig, case)))

    def _short(self, rig: Rig, case: Case) -> str:
        """Why a case is too long."""
        model = self.loader.target.open().config.context
        needed = case.context + case.new
        holder = f"`{self.words.target}` holds {model:,}" if model < needed else f"memory has room for {rig.context:,}"
        return f"{needed:,} tokens are needed, {holder}"

    def _papers(self, levels: str) -> Settings:
        """Fixed widths and the paper's selection, for what is not a method of ours."""
        base = settings_of(levels, self.base)
        return replace(base, adapt=False, select="paper") if base.levels else base

    # what is kept

    def _result(self, rig: Rig | None, reason: str | None = None) -> Result:
        """The record; without an engine, a suite of which nothing was run, for this reason."""
        if self.words.suite:
            self.loader.note(suite.ABOUT)
            if rig is None:
                self.outcomes = [_unrun(contest, reason or "") for contest in suite.contests(self.words.offload)]
        draft = self.loader.draft if rig is not None and rig.has_draft else None
        beside = suite.published(self.outcomes, self.words.offload) if self.words.suite else []
        return Result(
            version=__version__,
            model=self.words.target,
            draft=draft.name if draft else None,
            device=rig.device if rig else "",
            dtype=rig.dtype if rig else "",
            host=host_name(rig.device if rig else "cpu"),
            text=self.about,
            seed=self.words.seed,
            trials=self.trials,
            outcomes=tuple(self.outcomes),
            published=tuple(beside),
            notes=tuple(self.loader.notes),
            versions=versions(),
            began=self.started,
            seconds=self._gone(),
            interrupted=self.interrupted,
        )


def _base(words: Bench) -> Settings:
    """The engine's settings; the draft and copies are only loaded where some method has a use for them."""
    from hspec_decoding.engine import Settings

    named = set(words.methods or ("auto",))
    plain = named <= {AUTOREGRESSIVE, ONE_ROW, HF, HF_OFFLOADED} and not (words.suite or words.levels)
    return Settings(method=AUTOREGRESSIVE if plain else "auto", dtype=words.dtype, device=words.device)


def _unrun(contest: suite.Contest, reason: str) -> Outcome:
    who = [(AUTOREGRESSIVE, REFERENCE), *((name, METHOD) for name in contest.methods)]
    return skipped(contest.case, who, reason)


def host_name(device: str) -> str:
    """The device that the methods ran on."""
    import torch

    from hspec_profiles.cores import cpu_name

    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"{cpu_name()} ({threads} thread{'s' * (threads > 1)})"


def versions() -> dict[str, str]:
    """Of what decides the speed."""
    from importlib.metadata import version

    names = ("torch", "transformers", "accelerate")
    return {"python": platform.python_version(), "linux": platform.release(), **{n: version(n) for n in names}}
