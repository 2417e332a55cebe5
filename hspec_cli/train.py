"""`hspec train`: draft models for a target, distilled from its own text."""

from __future__ import annotations

import dataclasses
import sys
import time
from abc import abstractmethod
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from hspec_cli.run import DTYPES, SHORT_DTYPES, device_name
from hspec_cli.show import written
from hspec_cli.words import Command, choice, real, whole
from hspec_offload.sizes import human
from hspec_profiles.errors import HspecError, UsageError

if TYPE_CHECKING:
    import torch

    from hspec_cli.prepare import Model
    from hspec_cli.progress import Progress
    from hspec_cli.voice import Voice
    from hspec_decoding.config import ModelConfig
    from hspec_decoding.model import Decoder
    from hspec_decoding.training.corpus import Corpus
    from hspec_decoding.training.cost import Cost, Student
    from hspec_decoding.training.depths import Depths
    from hspec_decoding.training.streaming import Streaming
    from hspec_decoding.training.trainer import Course, Recipe

WORK = "work"  # text and states, in the output's directory
CURVE, PLAIN = "▁▂▃▄▅▆▇█", "_.-:=+*#"
CELLS = 40

CHIMERA_EXAMPLES = """\
Examples:
  hspec train chimera -m qwen2.5-coder-1.5b --minutes 10
  hspec train chimera -m smollm2-135m --out heads --text book.txt --tokens 20000000
  hspec train chimera -m llama2-7b-128k --target-bits 4

The same command again goes on where it was interrupted."""
DRAFT_EXAMPLES = """\
Examples:
  hspec train draft -m smollm2-135m --out draft --minutes 5
  hspec run -m smollm2-135m --draft-model draft --method triforce < report.txt"""


@dataclass(frozen=True)
class Train(Command):
    """What all trainings have in common."""

    model: Annotated[
        str,
        Option(
            "--model",
            "-m",
            metavar="MODEL",
            envvar="HSPEC_MODEL",
            help="The target: as for `hspec run`; it is not changed.",
        ),
    ] = "smollm2-135m"
    out: Annotated[
        Path | None, Option("--out", "-o", metavar="DIR", help="Where the result goes.  [default: where `run` looks]")
    ] = None
    text: Annotated[
        list[Path] | None,
        Option("--text", metavar="FILE", help="Text to cut beginnings from, so that long prompts occur (repeatable)."),
    ] = None
    tokens: Annotated[
        int,
        Option(
            "--tokens", parser=whole("--tokens", 1), metavar="N", help="Tokens that the target says, to learn from."
        ),
    ] = 5_000_000
    length: Annotated[
        int, Option("--length", parser=whole("--length", 32), metavar="TOKENS", help="Tokens of a row of text.")
    ] = 1024
    steps: Annotated[
        int | None,
        Option("--steps", parser=whole("--steps", 1), metavar="N", help="Steps.  [default: 5 times over the text]"),
    ] = None
    minutes: Annotated[
        float | None,
        Option("--minutes", parser=real("--minutes", 0.01), metavar="M", help="Train for so long, once there is text."),
    ] = None
    rate: Annotated[
        float | None,
        Option("--rate", parser=real("--rate", 0), metavar="R", help="Learning rate.  [default: by the model's size]"),
    ] = None
    seed: Annotated[
        int, Option("--seed", parser=whole("--seed", 0, 2**31), metavar="N", help="The same seed, the same result.")
    ] = 0
    target_bits: Annotated[
        str,
        Option(
            "--target-bits",
            parser=choice("--target-bits", ("16", "4")),
            metavar="BITS",
            help="16, or 4: the frozen target in NF4, for a card that has no room for it.",
        ),
    ] = "16"
    dtype: Annotated[
        str, Option("--dtype", parser=choice("--dtype", DTYPES, SHORT_DTYPES), metavar="TYPE", help="As for `run`.")
    ] = "auto"
    device: Annotated[
        str, Option("--device", parser=device_name, metavar="DEVICE", envvar="HSPEC_DEVICE", help="auto, cpu, cuda:N.")
    ] = "auto"
    offline: Annotated[bool, Option("--offline", envvar="HSPEC_OFFLINE", help="Never use the network.")] = False
    json: Annotated[bool, Option("--json", help="Print one JSON document at the end.")] = False
    quiet: Annotated[bool, Option("--quiet", "-q", help="Say nothing on stderr but errors.")] = False
    debug: Annotated[bool, Option("--debug", help="Show tracebacks.")] = False

    def execute(self) -> int:
        """Train, and print where the result is; 0. Raises HspecError, and KeyboardInterrupt once all is saved."""
        if self.steps is not None and self.minutes is not None:
            raise UsageError("`--steps` and `--minutes` both say how long to train", "drop one of them")
        from hspec_cli.progress import progress
        from hspec_cli.voice import Voice

        voice = Voice(self.quiet)
        with progress(voice) as shown:
            return _Training(self, voice, shown).run()

    @property
    @abstractmethod
    def kind(self) -> str:
        """What is trained, in a word that another training must share to be taken up."""

    @abstractmethod
    def place(self, target: ModelConfig) -> Path:
        """Where the result goes. Raises UsageError where that must be said."""

    @abstractmethod
    def numbers(self, target: ModelConfig) -> Student:
        """What is trained, in numbers."""

    @abstractmethod
    def student(self, target: Decoder, corpus: Corpus, always: frozenset[int]) -> Depths | Streaming:
        """What is trained."""

    @abstractmethod
    def keep(self, student: Any, place: Path, target: Model) -> str:
        """Write the result; how it is used."""


@dataclass(frozen=True)
class Chimera(Train):
    """Train Chimera's heads for a model, from text that the model makes itself."""

    variant: Annotated[
        str,
        Option(
            "--variant",
            parser=choice("--variant", ("whole", "no-trigram", "no-block", "no-residual", "medusa")),
            metavar="NAME",
            help="whole; or for comparison no-trigram, no-block, no-residual, medusa (independent heads).",
        ),
    ] = "whole"

    @property
    def kind(self) -> str:
        return self.variant

    def place(self, target: ModelConfig) -> Path:
        """The directory that was given, else where `hspec run` looks."""
        from hspec_decoding.calibration import fingerprint
        from hspec_decoding.chimera.files import directory

        return self.out or directory() / fingerprint(target)

    def numbers(self, target: ModelConfig) -> Student:
        from hspec_decoding.training.session import chimera_student

        return chimera_student(self._config(target))

    def student(self, target: Decoder, corpus: Corpus, always: frozenset[int]) -> Depths:
        from hspec_decoding.training.session import depths

        return depths(target, corpus, self._config(target.config), always, self.seed)

    def keep(self, student: Any, place: Path, target: Model) -> str:
        from hspec_decoding.chimera.files import save

        save(place, student.heads)
        heads = f" --heads {place}" if self.out else ""
        return f"hspec run -m {target.name} --method chimera{heads}"

    def _config(self, target: ModelConfig) -> Any:
        from hspec_decoding.chimera.config import VARIANTS, ChimeraConfig

        return ChimeraConfig.for_target(target, **VARIANTS[self.variant](target))


@dataclass(frozen=True)
class Draft(Train):
    """Train a small draft model for TriForce: a Llama of few layers over the model's own embedding and head."""

    layers: Annotated[
        int, Option("--layers", parser=whole("--layers", 1, 16), metavar="N", help="Layers of the draft.")
    ] = 2

    @property
    def kind(self) -> str:
        return f"draft of {self.layers}"

    def place(self, target: ModelConfig) -> Path:  # noqa: ARG002
        """The directory that was given."""
        if self.out is None:
            raise UsageError("`hspec train draft` needs a place for the draft", "`--out DIR`")
        return self.out

    def numbers(self, target: ModelConfig) -> Student:
        from hspec_decoding.training.session import streaming_student

        return streaming_student(target, self.layers)

    def student(self, target: Decoder, corpus: Corpus, always: frozenset[int]) -> Streaming:  # noqa: ARG002
        from hspec_decoding.training.session import streaming

        return streaming(target, self.layers, self.seed)

    def keep(self, student: Any, place: Path, target: Model) -> str:
        student.save(place, target.directory)
        return f"hspec run -m {target.name} --draft-model {place} --method triforce"


@dataclass
class _Training:
    """One training on its way, and what is told of it."""

    ask: Train
    voice: Voice
    shown: Progress
    began: float = field(default_factory=time.monotonic)

    def run(self) -> int:
        from hspec_cli.prepare import Files
        from hspec_decoding.device import pick_device, pick_dtype
        from hspec_decoding.training.cost import cost
        from hspec_decoding.training.session import Ask, load, text_of, train
        from hspec_decoding.training.texts import Turns

        ask = self.ask
        notes: list[str] = []
        device = pick_device(ask.device, notes)
        for note in notes:
            self.voice.note(note)
        dtype = pick_dtype(ask.dtype, device)
        texts = [_read(path) for path in ask.text or ()]
        files = Files(ask.offline, False, self.voice, self.shown)
        config = files.config(ask.model)
        if ask.length > config.context:
            raise UsageError(f"`--length` asks for {ask.length:,} tokens, `{ask.model}` holds {config.context:,}")
        place, student = ask.place(config), ask.numbers(config)
        bits = int(ask.target_bits)
        wanted = Ask(
            place / WORK, ask.tokens, ask.length, ask.seed, ask.steps, _seconds(ask.minutes), ask.rate, bits, ask.kind
        )
        cut = cost(config, student, ask.length, bits, dtype, device)
        recipe = wanted.recipe(config.hidden_size, cut)
        self._foretell(student, cut, recipe, device)
        model = files.model(ask.model)
        checkpoint = model.open()
        target = load(checkpoint, wanted, dtype, device, model.tokenizer.size)
        try:
            corpus = text_of(target, model.tokenizer, texts, wanted, self._made)
            made = ask.student(target, corpus, Turns.of(model.tokenizer).control)
            course, checksum = train(made, target, corpus, recipe, wanted, self)
        except KeyboardInterrupt:
            self.shown.pause()
            self.voice.line(f"what was made is in {place / WORK}; the same command goes on from there")
            raise
        use = ask.keep(made, place, model)
        self._tell_end(place, use, course, checksum, corpus, student)
        return 0

    def _foretell(self, student: Student, cut: Cost, recipe: Recipe, device: torch.device) -> None:
        ask = self.ask
        making = ask.tokens / cut.making
        step = cut.rows * cut.parts * ask.length
        learning = recipe.seconds or recipe.steps * step / cut.learning
        self.voice.line(
            f"a draft of {student.weights / 1e6:.1f}M weights; on {device} it takes about {human(cut.memory)} of "
            f"memory, {_time(making)} for {ask.tokens:,} tokens of text and {_time(learning)} of training"
        )

    def _made(self, done: int, total: int) -> None:
        from hspec_cli.interrupt import check

        check()
        self.shown.update("tokens of text made", done, total)

    def stepped(self, course: Course, recipe: Recipe) -> None:
        from hspec_cli.interrupt import check

        check()
        if recipe.seconds:
            self.shown.update("seconds of training", min(int(course.seconds), int(recipe.seconds)), int(recipe.seconds))
        else:
            self.shown.update("training steps", course.step, recipe.steps)

    def measured(self, course: Course) -> None:
        found = course.measured[-1]
        self.shown.pause()
        agreement = " ".join(f"{share:.2f}" for share in found.agreement)
        self.voice.line(
            f"step {found.step:,}: held-out loss {found.loss[0]:.2f}, agreement by depth {agreement}, tokens a step "
            f"{found.chain:.2f} in a chain, {found.tree:.2f} in a tree  {curve([m.tree for m in course.measured])}"
        )

    def _tell_end(self, place: Path, use: str, course: Course, checksum: str, corpus: Corpus, student: Student) -> None:
        first, last = course.measured[0], course.measured[-1]
        self.voice.line(f"the target is unchanged (checksum {checksum}); {place / WORK} may be deleted")
        self.voice.line(f"loss {curve(course.losses)} after {course.step:,} steps; use it: {use}")
        if not self.ask.json:
            print(place, flush=True)
            return
        made: dict[str, Any] = {
            "directory": str(place),
            "weights": student.weights,
            "steps": course.step,
            "training_seconds": round(course.seconds, 1),
            "seconds": round(time.monotonic() - self.began, 1),
            "text_tokens": corpus.tokens.numel(),
            "target_checksum": checksum,
            "before": dataclasses.asdict(first),
            "after": dataclasses.asdict(last),
            "use": use,
            "notes": self.voice.notes,
        }
        print(written(made), flush=True)


def curve(values: list[float], cells: int = CELLS) -> str:
    """Means of as many parts as there are cells, drawn between the least and the largest."""
    cells = min(cells, len(values))
    cut = [n * len(values) // cells for n in range(cells + 1)] if cells else [0]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cut)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    span = (high - low) or 1.0
    signs = PLAIN if sys.stderr is None or _lacks(CURVE, sys.stderr.encoding) else CURVE
    return "".join(signs[round((value - low) / span * (len(signs) - 1))] for value in means)


def _lacks(text: str, encoding: str | None) -> bool:
    """Whether an encoding cannot write a text."""
    try:
        text.encode(encoding or "ascii")
    except UnicodeEncodeError:
        return True
    return False


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError as why:
        raise HspecError(f"`--text {path}` cannot be read: {(why.strerror or str(why)).lower()}") from None


def _seconds(minutes: float | None) -> float | None:
    return None if minutes is None else 60 * minutes


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
