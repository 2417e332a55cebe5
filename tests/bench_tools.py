"""A pretend way to decode, and results, for tests of `hspec bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hspec_cli.bench.meter import Meter
from hspec_cli.bench.records import METHOD, REFERENCE, Case, Ceiling, Level, Memory, Outcome, Result, Row, Trial
from hspec_cli.bench.runner import Prompts, Runner, Texts, Tick

TEXT = tuple(range(100, 164))
SHORT = Case(1024, 64)


@dataclass
class Fake:
    """Says `text` (or what `others` says in a trial) at speeds that were set; notes in `log` what was asked of it."""

    name: str
    seconds: Sequence[float]
    role: str = METHOD
    text: tuple[int, ...] = TEXT
    others: dict[int, tuple[int, ...]] = field(default_factory=dict)
    failure: Exception | None = None
    log: list[str] = field(default_factory=list)
    clock: list[float] = field(default_factory=lambda: [0.0])
    done: int = 0

    def prepare(self, case: Case, prompts: Prompts) -> None:  # noqa: ARG002
        self.log.append(f"warm {self.name}")
        if self.failure is not None:
            raise self.failure

    def decode(self, case: Case, prompts: Prompts, *, fresh: bool, tick: Tick) -> tuple[Texts, Trial]:
        self.log.append(f"{self.name}{' anew' * fresh}")
        text, speed = self.others.get(self.done, self.text), self.seconds[self.done % len(self.seconds)]
        self.done += 1
        tick(0.5)
        self.clock[0] += speed * case.new
        level = Level("ngram", 60, 30, 10, 20, 0.1)
        return (text[: case.new],) * len(prompts), Trial(
            speed,
            case.new // 4 if self.role == METHOD else case.new,
            case.new,
            first=2.0 if fresh else None,
            joules=0.5,
            levels=(*[level] * (self.role == METHOD), Level("target(full)", 64, 64, 0, 16, 0.5 * speed * case.new)),
            stack="ngram > target(full)" if self.role == METHOD else "target(full)",
        )

    def memory(self) -> Memory:
        return Memory(270_000_000, 95_000_000)

    def predicted(self, case: Case) -> float:  # noqa: ARG002
        return 0.012


def runner(trials: int = 3, **options: object) -> Runner:
    """One that shows nothing and whose tokens are spelled as numbers."""
    meter = Meter(None, lambda *_: None)
    return Runner(trials, meter, lambda tokens: " ".join(map(str, tokens)), **options)  # type: ignore[arg-type]


def plain(*seconds: float) -> Fake:
    """Plain decoding."""
    return Fake("autoregressive", seconds or (0.02,), REFERENCE)


def row(method: str, *seconds: float, role: str = METHOD, speed_up: float | None = None) -> Row:
    """A row of trials at these speeds."""
    trials = tuple(Fake(method, [s], role).decode(SHORT, [(1,)], fresh=True, tick=lambda _: None)[1] for s in seconds)
    return Row(method, role, trials, Memory(1, 2), same=True, speed_up=speed_up, predicted=0.011)


def result(outcomes: Sequence[Outcome], **more: object) -> Result:
    """A bench of a made-up model."""
    words = {
        "version": "0.1.0",
        "model": "a <model> & more",
        "draft": None,
        "device": "cpu",
        "dtype": "bfloat16",
        "host": "A CPU (2 threads)",
        "text": "source code",
        "seed": 0,
        "trials": 3,
        "notes": ("a `note` of [/weight]",),
        "versions": {"torch": "2.13.0"},
        "began": "2026-11-30T20:08:49+00:00",
        "seconds": 12.0,
    }
    return Result(outcomes=tuple(outcomes), **{**words, **more})  # type: ignore[arg-type]


CEILING = Ceiling(280_000_000, 24e9, "reading RAM with all cores")
