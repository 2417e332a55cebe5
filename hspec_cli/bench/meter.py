"""How long it will take: expected seconds of every step, mended by those that were measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hspec_cli.bench.records import Case

Show = Callable[[str, float, float], None]  # what runs, seconds gone, seconds in all
Step = tuple[str, Case, bool]  # method, case, whether the prompt is read anew
OTHERS = 0.3  # s of a trial beside reading and decoding


@dataclass(frozen=True)
class Pace:
    """How fast plain decoding is here, from two short runs: reading a prompt takes a·n + b·n² seconds, a token behind
    n tokens c + d·n.
    """

    a: float
    b: float
    c: float
    d: float

    @classmethod
    def of(cls, short: tuple[int, float, float], long: tuple[int, float, float]) -> Pace:
        """From (tokens of the prompt, seconds of reading it, seconds of a token) of two runs."""
        (n, read, token), (m, later, slower) = short, long
        b = max(0.0, (later / m - read / n) / (m - n))
        d = max(0.0, (slower - token) / (m - n))
        return cls(max(1e-9, later / m - b * m), b, max(1e-9, slower - d * m), d)

    def reading(self, case: Case) -> float:
        """Seconds until all prompts are read."""
        return case.batch * (self.a * case.context + self.b * case.context**2)

    def decoding(self, case: Case) -> float:
        """Seconds of all new tokens, a pass for each."""
        return case.new * (self.c + case.batch * self.d * (case.context + case.new / 2))

    def trial(self, case: Case, *, fresh: bool) -> float:
        """Seconds of one trial of plain decoding."""
        return OTHERS + self.decoding(case) + self.reading(case) * fresh


@dataclass
class Meter:
    """Tells `show` how many seconds have gone by and how many there will be."""

    pace: Pace | None
    show: Show
    clock: Callable[[], float] = time.perf_counter
    planned: list[Step] = field(default_factory=list)
    learned: dict[Step, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.began = self.clock()

    def plan(self, methods: Sequence[str], cases: Sequence[Case], trials: int, *, fresh: bool) -> None:
        """Expect these steps."""
        for name in methods:
            seen = set()
            for case in cases:
                anew = (case.context, case.batch) not in seen
                seen.add((case.context, case.batch))
                self.planned += [(name, case, fresh or (anew and trial == 0)) for trial in range(trials)]

    def drop(self, case: Case) -> None:
        """Expect nothing more of this case."""
        self.planned = [step for step in self.planned if step[1] != case]

    @contextmanager
    def step(self, name: str, case: Case, fresh: bool) -> Iterator[Callable[[float], None]]:
        """During the block, the share of the step that is done can be told."""
        step, started, words = (name, case, fresh), self.clock(), f"{name}, {case.words}"
        expected = self.expected(step)
        rest = self.left() - (expected if step in self.planned else 0.0)

        def tick(share: float) -> None:
            now = self.clock()
            whole = (now - started) / share if share > 0.2 else expected
            self._tell(words, now, rest + max(0.0, whole - (now - started)))

        tick(0.0)
        yield tick
        self.learned[step] = self.clock() - started
        if step in self.planned:
            self.planned.remove(step)
        self._tell(words, self.clock(), self.left())

    def expected(self, step: Step) -> float:
        """Seconds of a step: as it was measured, else as the pace promises."""
        name, case, fresh = step
        if step in self.learned:
            return self.learned[step]
        other = self.learned.get((name, case, not fresh))
        if other is not None and self.pace:
            return max(0.0, other + self.pace.reading(case) * (1 if fresh else -1))
        return self.pace.trial(case, fresh=fresh) if self.pace else 1.0

    def left(self) -> float:
        """Seconds that are still expected."""
        return sum(map(self.expected, self.planned))

    def _tell(self, words: str, now: float, left: float) -> None:
        gone = now - self.began
        self.show(words, gone, gone + left)
