"""One answer: load, stream the text as it is verified, and tell how it went."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from hspec_cli import interrupt, show
from hspec_cli.failures import INTERRUPTED
from hspec_cli.output import Output, only_the_answer
from hspec_cli.progress import Progress, progress
from hspec_cli.prompt import read_prompt
from hspec_cli.show import Spoken, Told
from hspec_cli.voice import Voice, write

if TYPE_CHECKING:
    from hspec_cli.prepare import Job
    from hspec_cli.run import Run
    from hspec_decoding.engine import Engine, Request
    from hspec_decoding.events import Event

Say = Callable[[str], None]


def answer(run: Run) -> int:
    """Print the answer to `run` and return the exit code: 0, or 130 after Ctrl-C."""
    voice = Voice(run.quiet, run.verbose)
    text = read_prompt(run.prompt, run.file or (), voice)
    calm_libraries(run)
    with only_the_answer() as output:
        started = time.perf_counter()
        with progress(voice) as shown:
            job, engine = _load(run, text, voice, shown)
            loaded = time.perf_counter() - started
            spoken = _speak(run, job, engine, output, shown)
        told = Told(run, job, engine, spoken, engine.report(), loaded)
        for note in (*engine.notes, *filter(None, [told.report.note])):
            voice.note(note)
        if run.json:
            output.write(show.document(told, voice.notes) + "\n")
    voice.line(show.summary(told))
    if run.stats:
        write(show.table(told.report))
    return INTERRUPTED if spoken.reason == "interrupted" else 0


def calm_libraries(run: Run) -> None:
    """Set what libraries read when they are imported: no telemetry, bars, threads of theirs or advice."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not run.debug:
        warnings.simplefilter("ignore")


def _load(run: Run, text: str, voice: Voice, shown: Progress) -> tuple[Job, Engine]:
    """What to answer and the engine that will."""
    from hspec_cli.prepare import prepare
    from hspec_decoding.engine import Engine, Settings

    interrupt.check()
    job = prepare(run, text, voice, shown)
    interrupt.check()

    def loaded(done: int, total: int) -> None:
        interrupt.check()
        shown.update("layers loaded", done, total)

    settings = Settings(
        method=run.method,
        levels=run.levels,
        rule=run.rule,
        select=run.select,
        exact=run.exact,
        budget=run.budget,
        gamma=run.gamma,
        dtype=run.dtype,
        device=run.device,
    )
    engine = Engine.load(
        job.target,
        job.draft,
        settings,
        job.context,
        vocabulary=job.tokenizer.size,
        progress=loaded,
    )
    voice.detail(f"{run.model} on {engine.device} in {engine.dtype}: {engine.stack}")
    voice.detail(f"prompt {len(job.prompt):,} tokens, context {job.context:,}, {show.sampling_words(job.sampling)}")
    return job, engine


def _speak(run: Run, job: Job, engine: Engine, output: Output, shown: Progress) -> Spoken:
    """Generate, streaming to `output` unless JSON is wanted; Ctrl-C keeps what there is."""
    from hspec_decoding.engine import Request
    from hspec_decoding.text.stream import TextStream

    spoken = Spoken(TextStream(job.tokenizer, run.stop or ()))
    request = Request(job.prompt, job.max_tokens, job.tokenizer.eos, job.sampling)
    say = _nothing if run.json else output.write
    try:
        shown.update("prompt tokens read", 0, len(job.prompt))
        with closing(_generator(engine, request)) as events:
            _follow(events, spoken, say, shown, job.max_tokens)
        say(spoken.stream.finish())
    except KeyboardInterrupt:
        if not spoken.begun:
            raise
        say(spoken.stream.finish())
    except Exception:
        with suppress(OSError):
            output.end_line()
        raise
    output.end_line()
    if spoken.reason == "length" and job.shortened:
        spoken.reason = "context"
    return spoken


def _follow(events: Iterator[Event], spoken: Spoken, say: Say, shown: Progress, most: int) -> None:
    """Take in events until the end or a stop string."""
    from hspec_decoding.events import Emitted, Finished, Prefilled

    for event in events:
        interrupt.check()
        spoken.begun = True
        match event:
            case Prefilled():
                shown.update("prompt tokens read", event.done, event.total)
            case Emitted():
                if say is _nothing:
                    shown.update("tokens written", len(spoken.ids), most)
                else:
                    shown.pause()
                spoken.ids.extend(event.tokens)
                say(spoken.stream.push(event.tokens))
                if spoken.stream.stopped:
                    spoken.reason = "stop"
                    return
            case Finished():
                spoken.reason = event.reason


def _nothing(_text: str) -> None:
    """Where the text goes when JSON is wanted."""


def _generator(engine: Engine, request: Request) -> Generator[Event]:
    """The engine's events, closed with the block that reads them."""
    yield from engine.generate(request)
