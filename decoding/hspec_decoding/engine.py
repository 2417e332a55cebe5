"""The engine: a loaded target with its levels. It decodes, and tells what it does in events; it prints nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hspec_decoding.build import Parts, build_levels, fixed_widths
from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.device import CPU_SHAPE, GPU_SHAPE, pick_device, pick_dtype
from hspec_decoding.events import Emitted, Event, Finished, LevelReport, Prefilled, Reason, Report, Round
from hspec_decoding.levels import Chooser, Coupled, Draft, Rejection, Tally, count
from hspec_decoding.load import check_memory, choose_stack, load_decoder
from hspec_decoding.model import Decoder
from hspec_decoding.options import Request, Settings
from hspec_decoding.sampling import SeededDraws
from hspec_decoding.sequence import Text
from hspec_decoding.stack import LONGEST, Stack, written
from hspec_decoding.tuner import Tuner, Used
from hspec_profiles.errors import HspecError, UsageError

PREFILL = 512  # tokens of a prefill chunk

__all__ = ["Engine", "Request", "Settings"]


@dataclass
class _Run:
    """One sequence on its way."""

    request: Request
    text: Text
    limit: int  # tokens to generate, cut to the context
    generated: int = 0
    finished: Reason | None = None

    def take(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Commit tokens up to the first end of sequence or the limit; what was taken."""
        taken: list[int] = []
        for token in tokens:
            taken.append(token)
            if token in self.request.eos:
                self.finished = "eos"
            elif self.generated + len(taken) == self.limit:
                self.finished = "length" if self.limit == self.request.max_tokens else "context"
            if self.finished:
                break
        self.text.commit(taken)
        self.generated += len(taken)
        return tuple(taken)


class Engine:
    """A target and perhaps a draft in memory, and the stack of levels that they decode with."""

    def __init__(self, target: Decoder, draft: Decoder | None, stack: Stack, settings: Settings, context: int) -> None:
        """`context`: tokens of a sequence, prompt and generated together, that there is room for."""
        self.target, self.draft, self.settings, self.context = target, draft, settings, context
        self.parts = Parts(target, draft)
        self.specs, self.stack = stack, written(stack)
        self.device, self.dtype = str(target.device), str(target.dtype).removeprefix("torch.")
        self.notes: list[str] = []
        shape = GPU_SHAPE if target.device.type == "cuda" else CPU_SHAPE
        self.shape = shape if settings.exact else None

    @classmethod
    def load(
        cls,
        target: Checkpoint,
        draft: Checkpoint | None,
        settings: Settings,
        context: int,
        vocabulary: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Engine:
        """Read the weights. Raises UsageError for settings that cannot be meant, DoesNotFit where memory lacks.

        `vocabulary`: ids that the tokenizer knows, all that are ever produced; models whose embeddings are padded
        differently can then serve each other. `progress` is told (layers read, layers) of the target.
        """
        stack = choose_stack(settings, context, draft=draft is not None)
        notes: list[str] = []
        device = pick_device(settings.device, notes)
        dtype = pick_dtype(settings.dtype, device)
        if not any(spec.name == "draft" for spec in stack):
            draft = None
        check_memory([c.config for c in (target, draft) if c], context, dtype, device)
        vocabulary = min(target.config.vocab_size, vocabulary or target.config.vocab_size)
        load = partial(load_decoder, dtype=dtype, device=device, context=context, vocabulary=vocabulary)
        small, large = load(draft) if draft else None, load(target, progress=progress)
        engine = cls(large, small, stack, settings, context)
        engine.notes = notes
        return engine

    def generate(self, *requests: Request) -> Iterator[Event]:
        """Decode prompts of at least one token each, until every sequence is finished.

        Closing the iterator early is fine: `report` then tells of what was done.
        """
        self._begin(requests)
        for run in self.runs:
            yield from self._prefill(run)
        while active := [run for run in self.runs if not run.finished]:
            started = time.perf_counter()
            events = self._round(active)
            self.decode_seconds += time.perf_counter() - started
            yield from events

    def report(self) -> Report:
        """Numbers of the running or last `generate`."""
        plain = self.tuner.target.get(0)
        return Report(
            prompt_tokens=sum(len(run.request.prompt) for run in self.runs),
            generated_tokens=sum(run.generated for run in self.runs),
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            levels=tuple(LevelReport(level.name, **vars(level.tally)) for level in (*self.proposers, self.last)),
            stack=self.stack,
            seed=self.runs[0].request.sampling.seed,
            note=self._note(),
            plain_seconds=plain.mean if plain else None,
        )

    def _note(self) -> str | None:
        """Whether plain decoding took over, in one sentence."""
        tuner = self.tuner
        if not self.proposers or not tuner.fell_back:
            return None
        return (
            f"speculation measured slower than plain decoding ({1e3 * tuner.plain_seconds:.1f} ms a token): "
            f"{tuner.plain_rounds} of {tuner.rounds} rounds were plain"
        )

    def _begin(self, requests: Sequence[Request]) -> None:
        """Fresh state: nothing of an earlier call remains but its memory."""
        self.runs = [self._run(slot, request) for slot, request in enumerate(requests)]
        sampling = requests[0].sampling
        if any(request.sampling != sampling for request in requests):
            raise UsageError("the sequences of one batch must share their sampling options")
        self.last, self.proposers = build_levels(
            self.specs,
            self.parts,
            context=self.context,
            sequences=len(requests),
            select=self.settings.select,
            shape=self.shape,
        )
        self.by: Chooser = Coupled(sampling)
        if self.settings.rule == "rejection":
            self.by = Rejection(sampling, {r.text.slot: SeededDraws(sampling.seed, r.text.key) for r in self.runs})
        self.tuner = Tuner(
            sequential=[level.sequential for level in self.proposers],
            fixed=fixed_widths(self.specs, self.settings.gamma),
            block=self.shape.rows - 1 if self.shape else LONGEST,
            adapt=self.settings.adapt,
        )
        self.prefill_seconds = self.decode_seconds = 0.0

    def _run(self, slot: int, request: Request) -> _Run:
        room = self.context - len(request.prompt)
        if not request.prompt or room < 1:
            raise UsageError(f"a prompt must have from 1 to {self.context - 1:,} tokens: {len(request.prompt):,}")
        if request.max_tokens < 1:
            raise UsageError(f"tokens to generate must be 1 or more: {request.max_tokens}")
        text = Text(slot, request.sequence, list(request.prompt))
        return _Run(request, text, min(request.max_tokens, room))

    def _prefill(self, run: _Run) -> Iterator[Event]:
        total = len(run.request.prompt)
        started = time.perf_counter()
        for done in self.last.prefill(run.text, PREFILL):
            self.prefill_seconds += time.perf_counter() - started
            yield Prefilled(done, total, run.request.sequence)
            started = time.perf_counter()
        yield Prefilled(total, total, run.request.sequence)

    def _round(self, active: Sequence[_Run]) -> list[Event]:
        """One pass of the target over what the levels below it propose."""
        started = time.perf_counter()
        texts = [run.text for run in active]
        widths = self.tuner.plan()
        proposers = self.proposers[: len(widths)]
        before = [replace(level.tally) for level in proposers]
        limits = [min(self.last.room(run.text), run.limit - run.generated - 1) for run in active]
        drafts = [Draft([]) for _ in active]
        if proposers:
            drafts = proposers[-1].propose(texts, limits, widths, self.by)
        checked, target_seconds = self._verify(texts, drafts)
        if proposers:
            count(proposers[-1].tally, drafts, checked)
        events = [event for run, result in zip(active, checked, strict=True) for event in self._emit(run, result)]
        used = [_used(old, level.tally) for old, level in zip(before, proposers, strict=True)]
        drafted = 0 if self.shape else max(len(draft.tokens) for draft in drafts)
        self.tuner.learn(widths, used, drafted, target_seconds)
        proposed, kept = sum(len(draft.tokens) for draft in drafts), sum(len(result.tokens) - 1 for result in checked)
        return [*events, Round(proposed, kept, widths, time.perf_counter() - started)]

    def _verify(self, texts: Sequence[Text], drafts: list[Draft]) -> tuple[list[Draft], float]:
        """What the target makes of the drafts, and its seconds."""
        before = self.last.tally.seconds
        logits = self.last.logits(texts, drafts)
        with self.last.tally.timed():
            if any(draft.tokens for draft in drafts) and not _finite(logits):
                # A drafted token may be one whose weights are broken, and no part of the text.
                drafts[:] = [Draft([]) for _ in drafts]
                logits = self.last.logits(texts, drafts)
            if not _finite(logits):
                raise self._non_finite()
            checked = self.by.check(texts, drafts, logits)
        return checked, self.last.tally.seconds - before

    def _emit(self, run: _Run, result: Draft) -> Iterator[Event]:
        tokens = run.take(result.tokens)
        self.last.tally.proposed += len(tokens)
        self.last.tally.kept += len(tokens)
        yield Emitted(tokens, run.request.sequence)
        if run.finished:
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


def _finite(logits: Sequence[Tensor]) -> bool:
    return all(bool(torch.isfinite(rows.sum())) for rows in logits)


def _used(before: Tally, after: Tally) -> Used:
    return Used(**{name: value - getattr(before, name) for name, value in vars(after).items()})
