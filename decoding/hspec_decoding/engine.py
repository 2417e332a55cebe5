"""The engine: a loaded target with its levels. It decodes, and tells what it does in events; it prints nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from hspec_decoding.batch import Running, Take, Totals, free, nobody, waiting
from hspec_decoding.build import Parts, build_levels
from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.chimera.files import load as load_heads
from hspec_decoding.device import exact_shape, pick_device, pick_dtype
from hspec_decoding.events import (
    Emitted,
    Event,
    Finished,
    LevelReport,
    LevelRound,
    Prefilled,
    Report,
    Round,
)
from hspec_decoding.inventory import Traffic, layer_of, placed
from hspec_decoding.launches import tune_launches
from hspec_decoding.levels import ModelLevel, Tally, count
from hspec_decoding.load import choose_stacks, load_decoder, worthwhile
from hspec_decoding.model import Decoder
from hspec_decoding.ngram import NGram
from hspec_decoding.options import Request, Settings
from hspec_decoding.place import cap, fitting_stacks, kv_place, planned_shape, planned_stacks, ring_of
from hspec_decoding.retrospect import choices, fall_back, most_used
from hspec_decoding.rules import Chooser, Coupled, Draft, NonFinite, Rejection
from hspec_decoding.sampling import Sampling, SeededDraws
from hspec_decoding.sequence import Text
from hspec_decoding.stack import LONGEST, Stack, written
from hspec_decoding.tuner import Average, Plan, Tuner, Used
from hspec_offload.ask import Limits
from hspec_offload.plan import Plan as Offload
from hspec_profiles.errors import HspecError

PREFILL = {"cpu": 512, "cuda": 4096}  # tokens of a prefill chunk
BURST = 8  # tokens that plain decoding makes on a GPU before the host looks at them

__all__ = ["Engine", "Request", "Settings"]


class Engine:
    """A target and perhaps a draft in memory, and the stack of levels that they decode with."""

    def __init__(
        self,
        target: Decoder,
        draft: Decoder | None,
        stacks: Sequence[Stack],
        settings: Settings,
        context: int,
        parts: Parts | None = None,
    ) -> None:
        """`stacks`: what the engine chooses between as it measures them. `context`: tokens of a sequence, prompt and
        generated together, that there is room for.
        """
        self.target, self.draft, self.settings, self.context = target, draft, settings, context
        self.parts = parts or Parts(target, draft)
        self.stacks, self.stack = stacks, " or ".join(map(written, stacks))
        self.device, self.dtype = str(target.device), str(target.dtype).removeprefix("torch.")
        self.notes: list[str] = []
        self.plan: Offload | None = None  # where everything is, if that was planned
        for spec in {spec for stack in stacks for spec in stack}:
            self.parts.weights(spec.weights)  # so that no answer waits for it

    @classmethod
    def load(
        cls,
        target: Checkpoint,
        draft: Checkpoint | None,
        settings: Settings,
        context: int,
        vocabulary: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        plan: Offload | None = None,
        limits: Limits = Limits(),
    ) -> Engine:
        """Read the weights to where `plan` puts them, or all to one device. Raises UsageError for settings that cannot
        be meant, DoesNotFit where memory lacks.

        `vocabulary`: ids that the tokenizer knows, all that are ever produced; models whose embeddings are padded
        differently can then serve each other. `progress` is told (layers read, layers) of the target. A plan runs on
        the device of the settings, be that of its kind or not; `limits` are those it was made within.
        """
        notes: list[str] = []
        device = pick_device(settings.device, notes)
        dtype = pick_dtype(settings.dtype, device)
        configs = target.config, draft.config if draft else None
        stacks = fitting_stacks(settings, *configs, context, dtype, device, plan, limits)
        if not any(spec.name == "draft" for stack in stacks for spec in stack):
            draft = None
        cap(device, limits)
        vocabulary = min(target.config.vocab_size, vocabulary or target.config.vocab_size)
        forms = sorted({spec.weights for stack in stacks for spec in stack if spec.weights})
        tune_launches(target.config, draft.config if draft else None, forms, vocabulary, dtype, device, notes)
        load = partial(load_decoder, dtype=dtype, device=device, context=context, vocabulary=vocabulary)
        small = load(draft) if draft else None
        if plan is None or plan.resident:
            large, kv = load(target, progress=progress), None
        else:
            ring = ring_of(plan, device)
            large = load(target, progress=progress, plan=plan, ring=ring, notes=notes, exact=settings.exact)
            kv = kv_place(plan, ring)
        parts = Parts(large, small, kv=kv)
        if any(spec.name == "chimera" for stack in stacks for spec in stack):
            parts.heads = load_heads(Path(settings.heads).expanduser() if settings.heads else None, large)
        engine = cls(large, small, stacks, settings, context, parts)
        engine.notes, engine.plan = notes, plan
        return engine

    def variant(self, settings: Settings) -> Engine:
        """The same weights in the same memory run in another way. Only one of the two may be at work at a time."""
        draft = self.draft is not None
        if self.plan is not None and not self.plan.resident:
            stacks = planned_stacks(self.plan, settings, self.context, draft=draft)
        else:
            gpu = self.target.device.type == "cuda"
            stacks = choose_stacks(settings, self.context, draft=draft, gpu=gpu)
            if len(stacks) > 1:
                stacks = worthwhile(stacks, self.target.config, self.context, self.target.dtype)
        engine = Engine(self.target, self.draft, stacks, settings, self.context, self.parts)
        engine.plan = self.plan
        return engine

    def generate(self, *requests: Request) -> Iterator[Event]:
        """Decode prompts of at least one token each, until every sequence is finished.

        Closing the iterator early is fine: `report` then tells of what was done.
        """
        self._begin(requests)
        yield from self._decode(nobody)

    def serve(self, take: Take, size: int) -> Iterator[Event]:
        """Decode requests as they come, `size` at a time at most: who finishes leaves, and who waits joins. Each says
        what it says alone. `sequence` of those at work must differ.

        Where something is offloaded they are decoded one after the other, and the report is of the last one.
        """
        if self.parts.offloaded:
            while (request := take(True)) is not None:
                yield from self.generate(request)
        elif first := waiting(take, size):
            self._begin(first, size)
            yield from self._decode(take)

    def leave(self, sequence: int) -> None:
        """Decode this one no further; another may take its slot. No event tells of it."""
        for run in self.runs:
            if run.request.sequence == sequence and not run.finished:
                run.finished = "left"

    def _decode(self, take: Take) -> Iterator[Event]:
        yield placed(self.parts, self.plan)
        for run in self.runs:
            yield from self._prefill(run)
        self._rehearse()
        yield placed(self.parts, self.plan)
        while True:
            yield from self._join(take)
            active = [run for run in self.runs if not run.finished]
            if not active:
                return
            started = time.perf_counter()
            events = self._round(active)
            self.decode_seconds += time.perf_counter() - started
            yield from events

    def _join(self, take: Take) -> Iterator[Event]:
        """Fill free slots with requests that wait; where nothing is decoded, the first one is waited for."""
        for slot in free(self.runs, self.size):
            request = take(all(run.finished for run in self.runs))
            if request is None:
                return
            run = Running.of(request, slot, self.context)
            if slot < len(self.runs):
                self.totals.add(self.runs[slot])
                for level in (*self.levels.proposers, self.last):
                    level.forget(slot)
            self.runs[slot : slot + 1] = [run]
            self._seat()
            yield from self._prefill(run)

    def _seat(self) -> None:
        """Tell levels and randomness which texts there are."""
        for level in (*self.levels.proposers, self.last):
            if isinstance(level, ModelLevel):
                level.crew = [run.text for run in self.runs]
        if isinstance(self.by, Rejection):
            for run in self.runs:
                if run.text.slot not in self.by.draws or not run.generated:
                    self.by.draws[run.text.slot] = SeededDraws(run.request.sampling.seed, run.text.key)

    def in_flight(self) -> int | None:
        """The layer whose weights, keys or values are being carried to the GPU; another thread may ask."""
        key = self.target.ring.in_flight() if self.target.ring else None
        return layer_of(key) if isinstance(key, tuple) else None

    def report(self) -> Report:
        """Numbers of the running or last `generate`."""
        plain = self.tuner.target.get(0)
        several = len(self.stacks) > 1
        proposers = [level for level in self.levels.proposers if level.tally.passes or not several]
        return Report(
            prompt_tokens=self.totals.prompt + sum(len(run.request.prompt) for run in self.runs),
            generated_tokens=self.totals.generated + sum(run.generated for run in self.runs),
            prefill_seconds=self.prefill_seconds,
            setup_seconds=self.setup_seconds,
            decode_seconds=self.decode_seconds,
            levels=tuple(LevelReport(level.name, **vars(level.tally)) for level in (*proposers, self.last)),
            stack=most_used(self.tuner, self.levels) if several else self.stack,
            seed=self.runs[0].request.sampling.seed,
            note=fall_back(self.tuner),
            plain_seconds=plain.mean if plain else None,
            choices=tuple(choices(self.tuner, self.levels)) if several else (),
        )

    def _begin(self, requests: Sequence[Request], size: int = 0) -> None:
        """Fresh state: nothing of an earlier call remains but its memory. `size`: slots, if more than requests."""
        self.runs = [Running.of(request, slot, self.context) for slot, request in enumerate(requests)]
        self.size, self.totals = max(size, len(requests)), Totals()
        self.parts.make_room()
        exact = self.settings.exact
        shape = exact_shape(self.target.device, self.target.dtype, self.size)
        self.shape = planned_shape(self.plan, shape) if exact else None
        self.levels = build_levels(
            self.stacks,
            self.parts,
            context=self.context,
            sequences=self.size,
            select=self.settings.select,
            shape=self.shape,
            gamma=self.settings.gamma,
            correct=self.settings.correct,
            tree=self.settings.tree,
        )
        self.last = self.levels.last
        self.traffic = Traffic([*self.levels.proposers, self.last], self.target.device)
        self.by: Chooser = Coupled(Sampling())  # each text has its own
        if self.settings.rule == "rejection":
            self.by = Rejection(Sampling(), {})
        self.tuner = Tuner(
            sequential=[level.sequential for level in self.levels.proposers],
            fixed=self.levels.fixed,
            block=self.shape.rows - 1 if self.shape else LONGEST,
            adapt=self.settings.adapt,
            chains=self.levels.chains,
            guesses=[level.guess for level in self.levels.proposers],
            trees=self.levels.trees if self.settings.rule == "coupled" else {},
            rows=self.last.rows or 1,
        )
        self._seat()
        self.prefill_seconds = self.setup_seconds = self.decode_seconds = 0.0

    def _prefill(self, run: Running) -> Iterator[Event]:
        total, chunk = len(run.request.prompt), PREFILL[self.target.device.type]
        started = time.perf_counter()
        self._recall(run.text, chunk)
        for done in self.last.prefill(run.text, chunk):
            self.prefill_seconds += time.perf_counter() - started
            yield Prefilled(done, total, run.request.sequence)
            started = time.perf_counter()
        self.parts.prompts[run.text.slot] = list(run.text.tokens)
        for level in self.levels.proposers:
            level.read(run.text)
        self.target.finish()
        self.parts.give_back()
        self.prefill_seconds += time.perf_counter() - started
        yield Prefilled(total, total, run.request.sequence)

    def _recall(self, text: Text, chunk: int) -> None:
        """Count as cached what an earlier request left of the same beginning: whole chunks of its prompt, so that
        what is computed anew is computed in the same shapes; and never the last one, which selections look at.
        """
        known = self.parts.prompts.pop(text.slot, [])
        if self.parts.kv or self.last.notes:  # what is in host memory is not read again; notes are taken of all tokens
            known = []
        same = next((i for i, (a, b) in enumerate(zip(known, text.tokens, strict=False)) if a != b), len(known))
        kept = max(0, min(same, len(known) - 1, len(text) - 2) // chunk * chunk)
        self.last.view.fed(text, text.tokens[:kept])

    def _rehearse(self) -> None:
        """Capture the passes that decoding will mostly replay, and tell the tuner how long they take."""
        started = time.perf_counter()
        self.parts.complete()
        texts = [run.text for run in self.runs]
        asked = dict(self.last.view.recorded)  # the prompt's own queries, by which levels are about to select
        for rows in (1, 4, 16, 32) if self.levels.proposers and not self.last.rows else (1,):
            seconds = self.last.rehearse(texts, rows)
            if seconds is not None:
                self.tuner.target[rows - 1] = Average(seconds, 1)
        self.last.view.recorded = asked
        for n, level in enumerate(self.levels.proposers):
            if isinstance(level, ModelLevel):
                first = any(chain[:1] == (n,) for chain in self.levels.chains)
                for rows in (16, 4, 1) if first else (1, 32, 16, 4):
                    seconds = level.rehearse(texts, rows)
                if seconds is not None:
                    self.tuner.cost[n] = Average(seconds, 1)
            elif self.last.graphs and isinstance(level, NGram):
                self.tuner.cost[n] = Average(0.0, 1)
        self.setup_seconds = time.perf_counter() - started

    def _round(self, active: Sequence[Running]) -> list[Event]:
        """One pass of the target over what the levels below it propose, or several of its own."""
        plan = self.tuner.plan()
        try:
            if not plan.levels and self.last.graphs and isinstance(self.by, Coupled):
                return self._burst(active)
            return self._speculate(active, plan)
        except NonFinite:
            raise self._non_finite() from None

    def _burst(self, active: Sequence[Running]) -> list[Event]:
        """Plain decoding without waiting for each token."""
        started = time.perf_counter()
        length = min(BURST, *(run.limit - run.generated for run in active))
        texts = [run.text for run in active]
        drafts = self.last.propose(texts, [length] * len(active), [length], self.by)
        drafts[0].wait()
        events = [event for run, draft in zip(active, drafts, strict=True) for event in self._emit(run, draft)]
        seconds = (time.perf_counter() - started) / length
        for _ in range(length):
            self.tuner.learn(Plan(), [], 0, seconds)
        did = (LevelRound(self.last.name, len(active), len(active), 0, 1, seconds),)
        return [*events, *[self._told(Round(0, 0, (), seconds, did), active, self.tuner.promise(Plan()))] * length]

    def _speculate(self, active: Sequence[Running], plan: Plan) -> list[Event]:
        started = time.perf_counter()
        texts = [run.text for run in active]
        proposers = [self.levels.proposers[n] for n in plan.levels]
        before = [replace(level.tally) for level in proposers]
        limits = [min(self.last.room(run.text), run.limit - run.generated - 1) for run in active]
        drafts = [Draft([]) for _ in active]
        if proposers:
            drafts = self.levels.stacked(plan).propose(texts, limits, plan.widths, self.by)
        checked, target_seconds = self._verify(texts, drafts)
        if proposers:
            count(proposers[-1].tally, drafts, checked)
        events = [event for run, result in zip(active, checked, strict=True) for event in self._emit(run, result)]
        used = [_used(old, level.tally) for old, level in zip(before, proposers, strict=True)]
        drafted = max(draft.rows for draft in drafts)
        if growth := self.tuner.trees.get(plan.levels[0]) if plan.levels else None:
            growth.learn(plan.widths[0], [len(result.tokens) - 1 for result in checked])
        emitted = sum(len(event.tokens) for event in events if isinstance(event, Emitted))
        did = [LevelRound(level.name, **vars(u)) for level, u in zip(proposers, used, strict=True)]
        did.append(LevelRound(self.last.name, emitted, emitted, 0, 1, target_seconds))
        promised = self.tuner.promise(plan)
        self.tuner.learn(plan, used, drafted, target_seconds)
        proposed, kept = sum(len(draft.tokens) for draft in drafts), sum(len(result.tokens) - 1 for result in checked)
        seconds = time.perf_counter() - started
        return [*events, self._told(Round(proposed, kept, plan.widths, seconds, tuple(did)), active, promised)]

    def _told(self, done: Round, active: Sequence[Running], promised: float | None) -> Round:
        """A round with what was measured of plain decoding, what was promised of it, and the bytes that it read."""
        lengths = [len(run.text) for run in active]
        return replace(self.traffic.told(done, lengths), plain=self.tuner.promise(Plan()), promised=promised)

    def _verify(self, texts: Sequence[Text], drafts: list[Draft]) -> tuple[list[Draft], float]:
        """What the target makes of the drafts, and its seconds. Raises NonFinite."""
        before = self.last.tally.seconds
        try:
            checked = self.by.check(texts, drafts, self.last)
        except NonFinite:
            # A drafted token may be one whose weights are broken, and no part of the text.
            drafts[:] = [Draft([]) for _ in drafts]
            checked = self.by.check(texts, drafts, self.last)
        return checked, self.last.tally.seconds - before

    def _emit(self, run: Running, result: Draft) -> Iterator[Event]:
        tokens = run.take(result.tokens)
        self.last.tally.proposed += len(tokens)
        self.last.tally.kept += len(tokens)
        yield Emitted(tokens, run.request.sequence)
        if run.finished and run.finished != "left":
            yield Finished(run.finished, run.request.sequence)

    def _non_finite(self) -> HspecError:
        """What to say of logits that are no numbers. The caches hold such values now: nothing of them is kept."""
        self.parts.forget()
        culprit = self.target.non_finite()
        return HspecError(
            f"non-finite logits after {len(self.runs[0].text):,} tokens"
            + (f": {culprit} holds NaN or infinite weights" if culprit else f" in {self.dtype}"),
            "check the checkpoint" if culprit else "try `--dtype float32`",
        )


def _used(before: Tally, after: Tally) -> Used:
    return Used(**{name: value - getattr(before, name) for name, value in vars(after).items()})
