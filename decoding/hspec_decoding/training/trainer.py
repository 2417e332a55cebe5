"""The loop: accelerate's precision, accumulation and states around a module that gives a loss."""

from __future__ import annotations

import json
import math
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from hspec_decoding.chimera.files import replace
from hspec_decoding.model import Decoder
from hspec_decoding.training.corpus import Batch, Corpus
from hspec_decoding.training.depths import Figures
from hspec_decoding.training.target import Said, said
from hspec_profiles.errors import HspecError

MARK = "training.json"
WARM, LEAST = 0.06, 0.05  # share of the steps in which the rate rises, and of the rate that is left at the end
BETAS, CLIP = (0.9, 0.95), 0.5


class Student(Protocol):
    """What is trained: a module that gives a loss, with figures of how well it would draft."""

    @property
    def entering(self) -> tuple[int, ...]:
        """Layers of the target whose input it is shown."""
        ...

    def __call__(self, batch: Batch, said: Said, step: int) -> Tensor: ...

    def figures(self, batch: Batch, said: Said) -> Figures:
        """How well it does on a batch."""
        ...


@dataclass(frozen=True)
class Recipe:
    """How to train: `steps` of `rows * parts` rows each, `rows` at a time; or for so many `seconds` at most."""

    steps: int
    rows: int
    parts: int
    rate: float
    seed: int
    seconds: float | None = None  # the schedule then follows the clock
    kind: str = ""  # of student
    measure: float = 30.0  # seconds between two looks at the held-out rows
    held: int = 64  # rows of them, at most
    save: float = 60.0  # seconds between two states, and 20 times what it takes to write one


@dataclass(frozen=True)
class Measured:
    """What the held-out text says after a step. Lists are by depth."""

    step: int
    loss: list[float]
    agreement: list[float]  # share of the target's likeliest tokens that are drafted where its own text came before
    chain: float  # tokens of a simulated step
    tree: float


@dataclass
class Course:
    """How far a training is; what a state holds beside weights."""

    step: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)  # of every step
    measured: list[Measured] = field(default_factory=list)


class Listener(Protocol):
    """Is told how it goes; may raise to stop it."""

    def stepped(self, course: Course, recipe: Recipe) -> None:
        """A step was taken."""
        ...

    def measured(self, course: Course) -> None:
        """The held-out rows were looked at."""
        ...


class Trainer:
    """Trains a student against its target; everything that it needs to go on later is in a directory."""

    def __init__(self, student: Student, target: Decoder, corpus: Corpus, recipe: Recipe, directory: Path) -> None:
        """A state in the directory is taken up. Raises HspecError where it is of another recipe."""
        self.target, self.corpus, self.recipe, self.directory = target, corpus, recipe, directory
        self.course = Course()
        gpu = target.device.type == "cuda"
        self.accelerator = Accelerator(mixed_precision="bf16" if gpu else "no", cpu=not gpu, device_placement=False)
        self.module = cast(nn.Module, student)
        trained = [p for p in self.module.parameters() if p.requires_grad]
        made = torch.optim.AdamW(trained, lr=recipe.rate, betas=BETAS, weight_decay=0.0, fused=gpu)
        self.student, self.optimizer = self.accelerator.prepare(self.module, made)
        self._sound = True  # weights and course are of one step
        self._resume()

    @property
    def done(self) -> bool:
        course, recipe = self.course, self.recipe
        late = recipe.seconds is not None and course.seconds >= recipe.seconds
        return course.step >= recipe.steps or late

    def run(self, listener: Listener) -> Course:
        """Train to the end. A KeyboardInterrupt saves and goes on its way."""
        saved = looked = time.monotonic()
        pause = self.recipe.save
        try:
            if not self.course.measured:
                self._measure(listener)
            while not self.done:
                started = time.monotonic()
                self._step()
                self.course.seconds += time.monotonic() - started
                listener.stepped(self.course, self.recipe)
                if self.done or time.monotonic() - looked > self.recipe.measure:
                    self._measure(listener)
                    looked = time.monotonic()
                if time.monotonic() - saved > pause:
                    started = time.monotonic()
                    self.save()
                    saved = time.monotonic()
                    pause = max(self.recipe.save, 20 * (saved - started))
        except KeyboardInterrupt:
            if self._sound:
                self.save()
            raise
        self.save()
        return self.course

    def _step(self) -> None:
        recipe, course = self.recipe, self.course
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.rate * schedule(self._share())
        self.optimizer.zero_grad()
        batch, total = self.corpus.batch(course.step, recipe.rows * recipe.parts), 0.0
        for n in range(recipe.parts):
            part = slice(n * recipe.rows, (n + 1) * recipe.rows)
            own = Batch(batch.tokens[part], batch.own[part]).to(self.target.device)
            loss = self.student(own, said(self.target, own.tokens, self._entering), course.step) / recipe.parts
            self.accelerator.backward(loss)
            total += float(loss.detach())
        if not math.isfinite(total):
            raise HspecError(f"the loss of step {course.step} is no number", "a smaller `--rate` may help")
        self.accelerator.clip_grad_norm_(self.module.parameters(), CLIP)
        self._sound = False
        self.optimizer.step()
        course.step += 1
        course.losses.append(total)
        self._sound = True

    @property
    def _entering(self) -> tuple[int, ...]:
        return cast(Student, self.module).entering

    def _share(self) -> float:
        """How much of the training is done."""
        by_clock = self.course.seconds / self.recipe.seconds if self.recipe.seconds else 0.0
        return max(self.course.step / self.recipe.steps, by_clock)

    def _measure(self, listener: Listener) -> None:
        figures: Figures | None = None
        self.module.eval()
        for some in self.corpus.held_out(self.recipe.rows, self.recipe.held):
            batch = some.to(self.target.device)
            with self.accelerator.autocast():
                found = cast(Student, self.module).figures(batch, said(self.target, batch.tokens, self._entering))
            figures = found if figures is None else figures + found
        self.module.train()
        assert figures is not None
        self.course.measured.append(told(self.course.step, figures))
        listener.measured(self.course)

    def save(self) -> None:
        """Write a state beside the former one, then make it the one that counts."""
        name = f"state-{self.course.step}"
        self.accelerator.save_state(str(self.directory / name))
        known = {"state": name, "recipe": self._lasting, "course": asdict(self.course)}
        replace(self.directory / MARK, json.dumps(known).encode())
        for other in self.directory.glob("state-*"):
            if other.name != name:
                shutil.rmtree(other)

    @property
    def _lasting(self) -> dict[str, Any]:
        """What of a recipe must not change between two sessions."""
        return {name: getattr(self.recipe, name) for name in ("kind", "rows", "parts", "rate", "seed")}

    def _resume(self) -> None:
        mark = self.directory / MARK
        if not mark.exists():
            return
        known = json.loads(mark.read_text("utf-8"))
        other = [name for name, value in self._lasting.items() if known["recipe"].get(name) != value]
        if other:
            raise HspecError(
                f"`{self.directory}` holds a training that was begun with another {' and '.join(other)}",
                "repeat the command that began it, or give another `--out`",
            )
        self.accelerator.load_state(str(self.directory / known["state"]))
        course = known["course"]
        self.course = Course(**{**course, "measured": [Measured(**one) for one in course["measured"]]})


def begun(directory: Path) -> dict[str, Any]:
    """What a training that was begun in a directory must keep to; nothing where there is none."""
    mark = directory / MARK
    return dict(json.loads(mark.read_text("utf-8"))["recipe"]) if mark.exists() else {}


def schedule(share: float) -> float:
    """Of the rate, at a share of the training: it rises, then falls along a cosine."""
    if share < WARM:
        return (share + 1e-3) / (WARM + 1e-3)
    return LEAST + (1 - LEAST) * (1 + math.cos(math.pi * min(1.0, (share - WARM) / (1 - WARM)))) / 2


def told(step: int, figures: Figures) -> Measured:
    """Means of the sums."""

    def mean(sums: Tensor, counts: Tensor) -> list[float]:
        return [round(value, 4) for value in (sums / counts.clamp(min=1)).tolist()]

    chain, tree = (mean(sums, figures.steps)[0] for sums in (figures.chain, figures.tree))
    loss, agreement = mean(figures.loss, figures.counted), mean(figures.agreed, figures.asked)
    return Measured(step, loss, agreement, chain, tree)
