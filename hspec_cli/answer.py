"""One answer: load, stream the text as it is verified, and tell how it went."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from hspec_cli import corrections, interrupt, show
from hspec_cli.failures import INTERRUPTED
from hspec_cli.launch import STORE
from hspec_cli.output import only_the_answer
from hspec_cli.progress import Progress
from hspec_cli.prompt import read_prompt
from hspec_cli.show import Spoken, Told
from hspec_cli.stage import Stage, staged
from hspec_cli.voice import Voice, write
from hspec_cli.words import as_text

if TYPE_CHECKING:
    from hspec_cli.prepare import Job
    from hspec_cli.run import Run
    from hspec_decoding.engine import Engine, Request
    from hspec_decoding.events import Event
    from hspec_decoding.ranks import Ranks
    from hspec_offload.plan import Plan


def answer(run: Run, ranks: Ranks | None = None) -> int:
    """Print the answer to `run` and return the exit code: 0, or 130 after Ctrl-C. With `ranks` this is the first."""
    voice = Voice(run.quiet, run.verbose)
    text = read_prompt(run.prompt, run.file or (), voice)
    calm_libraries(run)
    with only_the_answer() as output:
        started = time.perf_counter()
        with staged(run, voice, output) as stage:
            job, engine = _load(run, text, voice, stage, ranks)
            loaded = time.perf_counter() - started
            spoken = _speak(run, job, engine, stage)
        told = Told(run, job, engine, spoken, engine.report(), loaded)
        for note in (*engine.notes, *filter(None, [told.report.note])):
            voice.note(note)
        if run.json:
            output.write(show.document(told, voice.notes) + "\n")
    if told.plan:
        corrections.record(told.plan.profile, told.figures)
    stage.epilogue()
    voice.line(show.summary(told))
    if run.stats:
        write(show.table(told.report))
        if told.plan:
            write("\n" + show.predictions(told.figures))
    return INTERRUPTED if spoken.reason == "interrupted" else 0


def calm_libraries(run: Run) -> None:
    """Set what libraries read when they are imported: no telemetry, bars, threads of theirs or advice."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not run.debug:
        warnings.simplefilter("ignore")


def _load(run: Run, text: str, voice: Voice, stage: Stage, ranks: Ranks | None) -> tuple[Job, Engine]:
    """What to answer and the engine that will."""
    from hspec_cli.offload import with_plan
    from hspec_cli.prepare import prepare

    interrupt.check()
    run, made = with_plan(run)
    job = prepare(run, text, voice, stage)
    engine = load(run, job, made, voice, stage, ranks=ranks)
    voice.detail(f"prompt {len(job.prompt):,} tokens, context {job.context:,}, {show.sampling_words(job.sampling)}")
    return job, engine


def load(
    run: Run,
    job: Job,
    made: Plan | None,
    voice: Voice,
    progress: Progress,
    sequences: int | None = 1,
    ranks: Ranks | None = None,
) -> Engine:
    """The engine for a job, by the plan `made` where the run names one, with room for so many `sequences`.

    As the first of `ranks` it tells the others the job.
    """
    from hspec_cli.offload import planned
    from hspec_cli.placement import limits
    from hspec_cli.rank import Work
    from hspec_cli.tidal_notes import notes
    from hspec_decoding.engine import Engine, Settings
    from hspec_decoding.options import CORRECT

    interrupt.check()

    def loaded(done: int, total: int) -> None:
        interrupt.check()
        progress.update("layers loaded", done, total)

    settings = Settings(
        method=run.method,
        levels=run.levels,
        rule=run.rule,
        select=run.select,
        exact=run.exact,
        budget=run.budget_of(job.context),
        gamma=run.gamma,
        correct=CORRECT if run.correct is None else run.correct,
        heads=run.heads,
        tree=run.tree,
        dtype=run.dtype,
        device=run.device,
    )
    made = planned(run, job, settings, made, voice, ranks)
    interrupt.check()
    if ranks:
        ranks.tell(Work.of(job, settings, made, asked(run, job), ranks.device))
    engine = Engine.load(
        job.target,
        job.draft,
        settings,
        job.context,
        vocabulary=job.tokenizer.size,
        progress=loaded,
        plan=made,
        limits=limits(run),
        sequences=sequences,
        ranks=ranks,
    )
    if ranks and STORE in os.environ and not (run.gpus or run.ranks or run.plan):
        voice.note(f"{ranks.size} ranks share the model: `--gpus 1` uses one GPU")
    if ranks and engine.device.startswith("cuda") and not ranks.captures:
        voice.note("no CUDA graph takes what ranks exchange here: passes are launched one by one")
    voice.detail(
        f"{run.model} on {f'{ranks.size} × ' if ranks else ''}{engine.device} in {engine.dtype}: {engine.stack}"
    )
    for words in notes(engine, run.method, len(job.prompt) + job.max_tokens):
        voice.note(words)
    return engine


def _speak(run: Run, job: Job, engine: Engine, stage: Stage) -> Spoken:
    """Generate on a stage; Ctrl-C keeps what there is."""
    from hspec_cli.dashboard.stream import Ended
    from hspec_decoding.beside import Meter
    from hspec_decoding.events import Prefilled
    from hspec_decoding.text.stream import TextStream

    spoken = Spoken(TextStream(job.tokenizer, run.stop or ()), meter=Meter(engine.plan) if engine.plan else None)
    request = asked(run, job)
    try:
        _introduce(run, job, engine, stage)
        stage.tell(Prefilled(0, len(job.prompt)))
        with closing(_generator(engine, request)) as events:
            _follow(events, spoken, stage)
        stage.say(spoken.stream.finish())
    except KeyboardInterrupt:
        if not spoken.begun:
            raise
        stage.say(spoken.stream.finish())
    except Exception:
        with suppress(OSError):
            stage.end()
        raise
    if spoken.reason == "length" and job.shortened:
        spoken.reason = "context"
    stage.tell(Ended(spoken.reason))
    stage.end()
    return spoken


def asked(run: Run, job: Job) -> Request:
    """The same to the engine."""
    from hspec_cli.prepare import key
    from hspec_decoding.engine import Request

    name = None if run.id is None else as_text(run.id)
    return Request(job.prompt, job.max_tokens, job.tokenizer.eos, job.sampling, key=key(name))


def _introduce(run: Run, job: Job, engine: Engine, stage: Stage) -> None:
    """Tell the stage what is about to happen."""
    from hspec_cli.dashboard.stream import Began

    words = show.sampling_words(job.sampling)
    sizes = (len(job.prompt), job.max_tokens, job.context)
    stage.tell(Began(run.model, engine.device, engine.dtype, engine.stack, words, *sizes, approximate=run.approximate))
    if run.dashboard or run.record:
        from hspec_cli.dashboard.expect import expected

        stage.tell(expected(engine.target.config, job.context, engine.device, engine.plan))
        stage.watch(engine.in_flight)


def _follow(events: Iterator[Event], spoken: Spoken, stage: Stage) -> None:
    """Take in events until the end or a stop string."""
    from hspec_decoding.events import Emitted, Finished

    for event in events:
        interrupt.check()
        spoken.begun = True
        stage.tell(event)
        if spoken.meter:
            spoken.meter.take(event)
        match event:
            case Emitted():
                spoken.ids.extend(event.tokens)
                stage.say(spoken.stream.push(event.tokens))
                if spoken.stream.stopped:
                    spoken.reason = "stop"
                    return
            case Finished():
                spoken.reason = event.reason


def _generator(engine: Engine, request: Request) -> Generator[Event]:
    """The engine's events, closed with the block that reads them."""
    yield from engine.generate(request)
