"""Records to words: the summary, the table of levels, the JSON document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hspec_cli import __version__
from hspec_cli.tidal_notes import APPROXIMATE

if TYPE_CHECKING:
    from hspec_cli.prepare import Job
    from hspec_cli.run import Run
    from hspec_decoding.beside import Beside, Meter
    from hspec_decoding.engine import Engine
    from hspec_decoding.events import LevelReport, Report
    from hspec_decoding.sampling import Sampling
    from hspec_decoding.text.stream import TextStream
    from hspec_offload.plan import Plan

ENDED = {
    "length": " (cut at -n)",
    "context": " (cut at the context's end)",
    "stop": " (ended by --stop)",
    "interrupted": " (interrupted)",
}


@dataclass
class Spoken:
    """What was said so far, and why it ended; `begun` once the engine gave an event."""

    stream: TextStream
    begun: bool = False
    ids: list[int] = field(default_factory=list)
    reason: str = "interrupted"
    meter: Meter | None = None  # where there is a plan to compare with

    @property
    def tokens(self) -> list[int]:
        """Ids of the answer, without a stop string and what came after it."""
        return self.ids[: self.stream.consumed] if self.stream.stopped else self.ids


@dataclass(frozen=True)
class Told:
    """A run that ended."""

    run: Run
    job: Job
    engine: Engine
    spoken: Spoken
    report: Report
    load_seconds: float

    @property
    def plan(self) -> Plan | None:
        """Where everything was, if that was planned."""
        return self.spoken.meter.plan if self.spoken.meter else None

    @property
    def figures(self) -> Sequence[Beside]:
        """What was predicted beside what was measured."""
        return self.spoken.meter.figures_of(self.report) if self.spoken.meter else ()


def summary(told: Told) -> str:
    """One line: how much, how fast, by what."""
    from hspec_offload.words import elsewhere

    report, count = told.report, len(told.spoken.ids)
    method = "levels" if told.run.levels else told.run.method
    parts = [f"{method}: {report.stack}"]
    passes = report.levels[-1].passes if report.levels else 0
    if len(report.levels) > 1 and passes:
        parts.append(f"{count / passes:.1f} tokens per pass")
    gain = speed_up(report)
    if gain is not None:
        parts.append(f"{gain:.2f} times plain decoding")
    spent = f"in {seconds(report.decode_seconds)} ({rate(report):.1f} tokens/s"
    before = f"prompt {report.prompt_tokens:,} tokens in {seconds(report.prefill_seconds)})"
    if told.plan and not told.plan.resident:
        parts.append(elsewhere(told.plan))
    parts.append(sampling_words(told.job.sampling))
    labelled, ended = f"{APPROXIMATE}: " * told.run.approximate, ENDED.get(told.spoken.reason, "")
    return f"{labelled}{count:,} token{'s' * (count != 1)}{ended} {spent}; {before}, {', '.join(parts)}"


def seconds(time: float) -> str:
    """A duration for people."""
    return f"{time:.1f} s" if time >= 1 else f"{time:.2f} s"


def rate(report: Report) -> float:
    """Tokens per second of decoding."""
    return report.generated_tokens / report.decode_seconds if report.decode_seconds > 0 else 0.0


def speed_up(report: Report) -> float | None:
    """How many times faster than decoding without speculation, where both were measured."""
    if report.plain_seconds is None or len(report.levels) < 2:
        return None
    return report.plain_seconds * rate(report)


def sampling_words(sampling: Sampling) -> str:
    """How tokens are chosen; what filters nothing is left out."""
    if sampling.temperature == 0:
        return f"greedy, seed {sampling.seed}"
    words = [f"temperature {sampling.temperature:g}"]
    if sampling.top_p < 1:
        words.append(f"top-p {sampling.top_p:g}")
    if sampling.top_k:
        words.append(f"top-k {sampling.top_k}")
    if sampling.min_p:
        words.append(f"min-p {sampling.min_p:g}")
    return ", ".join([*words, f"seed {sampling.seed}"])


def table(report: Report) -> str:
    """One row per level, cheapest first; acceptance is the share of its tokens that the next level kept."""
    rows: list[tuple[str, ...]] = [("level", "proposed", "kept", "acceptance", "passes", "seconds")]
    for level in report.levels:
        accepted = acceptance(level, report)
        share = "-" if accepted is None else f"{accepted:.1%}"
        counts = (f"{number:,}" for number in (level.proposed, level.kept))
        rows.append((level.name, *counts, share, f"{level.passes:,}", f"{level.seconds:.2f}"))
    return "\n\n".join([_aligned(rows), *([choices(report)] if report.choices else [])])


def choices(report: Report) -> str:
    """What there was to choose from, best first, at the widths and speeds that the run's measurements promise."""
    rows: list[tuple[str, ...]] = [("levels to choose from", "widths", "ms/token", "rounds")]
    for choice in report.choices:
        widths = " ".join(map(str, choice.widths)) or "-"
        rows.append((choice.stack, widths, f"{1e3 * choice.seconds:.2f}", f"{choice.rounds:,}"))
    return _aligned(rows)


def predictions(figures: Sequence[Beside]) -> str:
    """What the plan promised beside what was measured."""
    rows: list[tuple[str, ...]] = [("seconds", "predicted", "measured", "measured / predicted")]
    for figure in figures:
        predicted = "-" if figure.predicted is None else f"{figure.predicted:.4g}"
        ratio = "-" if figure.ratio is None else f"{figure.ratio:.2f}"
        rows.append((figure.name, predicted, f"{figure.measured:.4g}", ratio))
    return _aligned(rows)


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """A table whose first column is words and whose others are numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


def acceptance(level: LevelReport, report: Report) -> float | None:
    """Share of the proposed tokens that were kept; None for the target, whose tokens nobody checks."""
    if level is report.levels[-1] or not level.proposed:
        return None
    return level.kept / level.proposed


def document(told: Told, notes: Sequence[str]) -> str:
    """The JSON document of a run."""
    run, job, spoken, report = told.run, told.job, told.spoken, told.report
    made: dict[str, Any] = {
        "text": spoken.stream.text,
        "tokens": spoken.tokens,
        "finish_reason": spoken.reason,
        "truncated": False,  # a prompt is answered whole or refused
        "prompt_tokens": report.prompt_tokens,
        "generated_tokens": report.generated_tokens,
        "context": job.context,
        "model": run.model,
        "draft_model": job.draft_name,
        "method": run.method,
        "approximate": run.approximate,
        "stack": report.stack,
        "rule": run.rule,
        "select": run.select,
        "exact": run.exact,
        "seed": report.seed,
        "sampling": {
            "temperature": job.sampling.temperature,
            "top_p": job.sampling.top_p,
            "top_k": job.sampling.top_k,
            "min_p": job.sampling.min_p,
        },
        "levels": [_level(level, report) for level in report.levels],
        "choices": [vars(choice) for choice in report.choices],
        "timings": _timings(told),
        "placement": _placement(told),
        "dtype": told.engine.dtype,
        "device": told.engine.device,
        "ranks": told.engine.ranks.size if told.engine.ranks else 1,
        "notes": list(notes),
        "version": __version__,
    }
    return written(made)


def _placement(told: Told) -> dict[str, Any] | None:
    """Where everything was, and times predicted and measured, in seconds; None where nothing was planned."""
    from hspec_offload.words import elsewhere

    if told.plan is None:
        return None
    return {
        "resident": told.plan.resident,
        "elsewhere": elsewhere(told.plan),
        "planned_levels": told.plan.levels,
        "figures": {
            figure.name: {"predicted": figure.predicted, "measured": figure.measured} for figure in told.figures
        },
    }


def written(made: dict[str, Any]) -> str:
    """JSON with one line per key of the outermost object, so that long lists stay readable."""
    lines = (f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False, allow_nan=False)}" for k, v in made.items())
    return "{\n" + ",\n".join(lines) + "\n}"


def _level(level: LevelReport, report: Report) -> dict[str, Any]:
    return {
        "name": level.name,
        "proposed": level.proposed,
        "kept": level.kept,
        "acceptance": acceptance(level, report),
        "passes": level.passes,
        "seconds": level.seconds,
    }


def _timings(told: Told) -> dict[str, float | None]:
    """Seconds of each phase, and what they make."""
    report = told.report
    return {
        "load_seconds": told.load_seconds,
        "prefill_seconds": report.prefill_seconds,
        "setup_seconds": report.setup_seconds,
        "decode_seconds": report.decode_seconds,
        "tokens_per_second": rate(report),
        "plain_seconds_per_token": report.plain_seconds,
        "speed_up": speed_up(report),
    }
