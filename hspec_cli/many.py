"""Many answers: prompts in lines of JSON are decoded together, and each is answered in a line of its own."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hspec_cli import interrupt, show
from hspec_cli.answer import calm_libraries, load
from hspec_cli.lines import Lines, fields, named, parse
from hspec_cli.output import Output, only_the_answer
from hspec_cli.progress import progress
from hspec_cli.show import Spoken
from hspec_cli.tidal_notes import APPROXIMATE
from hspec_cli.voice import Voice, write
from hspec_profiles.errors import HspecError, UsageError

if TYPE_CHECKING:
    from hspec_cli.prepare import Found
    from hspec_cli.run import Run
    from hspec_decoding.engine import Engine, Request
    from hspec_decoding.events import Emitted


def answer_lines(run: Run) -> int:
    """Answer every line of standard input and return the exit code: 0, or 1 where a line failed."""
    voice = Voice(run.quiet, run.verbose)
    lines = Lines()
    if sys.stdin is not None and sys.stdin.isatty():
        voice.line("type a JSON object a line, Ctrl-D ends them")
    calm_libraries(run)
    with only_the_answer() as output:
        run, found, engine = _load(run, voice)
        voice.line(_bound(engine))
        started = time.perf_counter()
        desk = Desk(run, found, lines, Answers(output, ordered=not run.unordered), voice)
        try:
            desk.work(engine)
        finally:
            desk.answers.flush()
        told = desk.told(engine, time.perf_counter() - started)
        if run.json:
            output.write(_written({"summary": told | {"notes": voice.notes}}))
    voice.line(_summary(told))
    if run.stats and desk.began:
        write("of the last line:\n" * engine.parts.offloaded + show.table(engine.report()))
    return 1 if desk.failed else 0


def _load(run: Run, voice: Voice) -> tuple[Run, Found, Engine]:
    """The run by its plan, its models, and the engine with room for as many lines as `--batch` or memory allow."""
    from hspec_cli.offload import with_plan
    from hspec_cli.prepare import find, room

    with progress(voice) as shown:
        interrupt.check()
        run, made = with_plan(run)
        found = find(run, voice, shown)
        usable = found.config.context
        tokens, _, shortened = room(run, 0, usable, voice)
        job = found.job(run, (), (tokens, run.ctx or usable, shortened), voice)
        engine = load(run, job, made, voice, shown, sequences=run.batch)
    for note in engine.notes:
        voice.note(note)
    return run, found, engine


def _bound(engine: Engine) -> str:
    """How many are decoded at a time, in a line."""
    room = f"{engine.context:,} tokens of a prompt and its answer"
    if engine.parts.offloaded:
        return f"lines are answered one after the other, since something is offloaded; room for {room}"
    return f"{engine.sequences} lines at a time at most, each with room for {room} (`--batch`, `--ctx`)"


class Answers:
    """Writes a line for every line, in the order of their numbers or as they are finished."""

    def __init__(self, output: Output, *, ordered: bool) -> None:
        self._output, self._ordered = output, ordered
        self._due: deque[int] = deque()  # numbers of lines that are not answered, the first ones first
        self._held: dict[int, str] = {}

    def expect(self, number: int) -> None:
        """This line will be answered."""
        if self._ordered:
            self._due.append(number)

    def put(self, number: int, made: dict[str, Any]) -> None:
        """Write the answer, or keep it until those before it are written."""
        self._held[number] = _written(made)
        if not self._ordered:
            self.flush()
        while self._due and self._due[0] in self._held:
            self._output.write(self._held.pop(self._due.popleft()))

    def flush(self) -> None:
        """Write what was kept."""
        while self._held:
            self._output.write(self._held.pop(min(self._held)))


@dataclass
class Asked:
    """A line that is being answered."""

    name: str | int
    prompt: int  # tokens
    shortened: bool
    spoken: Spoken


class Desk:
    """Takes lines as requests to the engine, and the tokens that come of them as answers."""

    def __init__(self, run: Run, found: Found, lines: Lines, answers: Answers, voice: Voice) -> None:
        self.run, self.found, self.lines, self.answers, self.voice = run, found, lines, answers, voice
        self.asked: dict[int, Asked] = {}  # by number
        self.names: set[str] = set()
        self.began = False
        self.answered = self.failed = self.prompts = self.tokens = 0

    def work(self, engine: Engine) -> None:
        """Answer all lines. Raises BrokenPipeError where nobody reads the answers."""
        from hspec_decoding.events import Emitted, Finished

        for event in engine.serve(self.take, engine.sequences):
            interrupt.check()
            match event:
                case Emitted():
                    self._emitted(event, engine)
                case Finished():
                    self._finish(event.sequence, event.reason)

    def take(self, wait: bool) -> Request | None:
        """The next line that can be decoded, as the engine asks for it; those that cannot are answered at once."""
        while (line := self.lines.take(wait)) is not None:
            interrupt.check()
            number, raw = line
            self.answers.expect(number)
            name: str | int = number
            try:
                made = fields(raw)
                name = named(made, number)
                return self._request(number, name, made)
            except HspecError as failure:
                self.failed += 1
                hint = {"hint": failure.hint} if failure.hint else {}
                self.answers.put(number, {"id": name, "line": number, "error": failure.message} | hint)
        return None

    def _request(self, number: int, name: str | int, made: dict[str, Any]) -> Request:
        """What a line asks of the engine. Raises HspecError."""
        from hspec_cli.prepare import key, room, sampling
        from hspec_decoding.engine import Request
        from hspec_decoding.text.stream import TextStream

        if str(name) in self.names:
            raise UsageError(f"an earlier line has the id {json.dumps(name)} too")
        self.names.add(str(name))
        line, target = parse(made, self.run), self.found.target
        prompt = self.found.tokens(line.run, line.prompt, self.voice)
        tokens, _, shortened = room(line.run, len(prompt), self.found.config.context, self.voice)
        drawn = sampling(line.run, target.generation, self.voice)
        stream = TextStream(target.tokenizer, line.run.stop or ())
        self.asked[number] = Asked(name, len(prompt), shortened, Spoken(stream))
        self.began = True
        return Request(prompt, tokens, target.tokenizer.eos, drawn, number, key(name))

    def _emitted(self, event: Emitted, engine: Engine) -> None:
        asked = self.asked.get(event.sequence)
        if asked is None:  # its stop string has come
            return
        asked.spoken.ids.extend(event.tokens)
        asked.spoken.stream.push(event.tokens)
        if asked.spoken.stream.stopped:
            engine.leave(event.sequence)
            self._finish(event.sequence, "stop")

    def _finish(self, number: int, reason: str) -> None:
        asked = self.asked.pop(number, None)
        if asked is None:
            return
        spoken = asked.spoken
        spoken.stream.finish()
        self.answered += 1
        self.prompts += asked.prompt
        self.tokens += len(spoken.tokens)
        self.answers.put(
            number,
            {
                "id": asked.name,
                "line": number,
                "text": spoken.stream.text,
                "tokens": spoken.tokens,
                "finish_reason": "context" if reason == "length" and asked.shortened else reason,
                "prompt_tokens": asked.prompt,
                "generated_tokens": len(spoken.tokens),
                **({"approximate": True} if self.run.approximate else {}),
            },
        )

    def told(self, engine: Engine, seconds: float) -> dict[str, Any]:
        """What all lines came to."""
        return {
            "answered": self.answered,
            "failed": self.failed,
            "prompt_tokens": self.prompts,
            "generated_tokens": self.tokens,
            "seconds": seconds,
            "tokens_per_second": self.tokens / seconds,
            "batch": engine.sequences,
            "context": engine.context,
            "model": self.run.model,
            "stack": engine.report().stack if self.began else engine.stack,
            "approximate": self.run.approximate,
            "dtype": engine.dtype,
            "device": engine.device,
        }


def _written(made: dict[str, Any]) -> str:
    """A line of JSON; half a character that an id may hold stays escaped."""
    return json.dumps(made, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace").decode() + "\n"


def _summary(told: dict[str, Any]) -> str:
    answers = f"{APPROXIMATE}: " * told["approximate"] + f"{told['answered']:,} answer{'s' * (told['answered'] != 1)}"
    refused = f", {told['failed']:,} failed" * bool(told["failed"])
    rate = f"{told['tokens_per_second']:.1f} tokens/s with prompts read"
    return (
        f"{answers}{refused}: {told['generated_tokens']:,} tokens after prompts of "
        f"{told['prompt_tokens']:,} in {show.seconds(told['seconds'])} ({rate}), {told['stack']}"
    )
