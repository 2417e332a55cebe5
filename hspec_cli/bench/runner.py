"""The runner: methods take turns within a trial, and no speed-up is told of a text that is another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from hspec_cli.bench.meter import Meter
from hspec_cli.bench.records import METHOD, OTHER, REFERENCE, Case, Ceiling, Difference, Memory, Outcome, Row, Trial
from hspec_profiles.errors import HspecError

Texts = tuple[tuple[int, ...], ...]  # new tokens of each sequence
Prompts = Sequence[tuple[int, ...]]
Tick = Callable[[float], None]  # told what share of a run is done
SHOWN = 6  # tokens shown of a difference


class Contestant(Protocol):
    """A way to decode. `role`: of what its text and its speed mean for the others (records.py)."""

    name: str
    role: str

    def prepare(self, case: Case, prompts: Prompts) -> None:
        """Make room and warm up. Raises HspecError for what cannot run here."""
        ...

    def decode(self, case: Case, prompts: Prompts, *, fresh: bool, tick: Tick) -> tuple[Texts, Trial]:
        """`case.new` tokens after every prompt, whatever they say; `fresh`: read the prompts anew."""
        ...

    def memory(self) -> Memory | None:
        """What the last run needs."""
        ...

    def predicted(self, case: Case) -> float | None:
        """Seconds a token, as the planner foretells."""
        ...


@dataclass
class Lane:
    """One contestant's way through a case."""

    who: Contestant
    trials: list[Trial] = field(default_factory=list)
    texts: list[Texts] = field(default_factory=list)
    reason: str | None = None

    def run(self, case: Case, prompts: Prompts, *, fresh: bool, tick: Tick) -> None:
        """One trial; a failure ends the lane."""
        with self._failing():
            texts, trial = self.who.decode(case, prompts, fresh=fresh, tick=tick)
            self.texts.append(texts)
            self.trials.append(trial)

    def prepare(self, case: Case, prompts: Prompts) -> None:
        """Warm up; a failure ends the lane."""
        with self._failing():
            self.who.prepare(case, prompts)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Keep the reason of a failure that belongs to this method: what hspec refuses, memory, all of another's."""
        try:
            yield
        except Exception as failure:
            ours = isinstance(failure, (HspecError, MemoryError)) or type(failure).__name__ == "OutOfMemoryError"
            if not ours and self.who.role != OTHER:
                raise
            self.reason = why(failure)


def why(failure: BaseException) -> str:
    """A failure as the reason of a row."""
    if isinstance(failure, HspecError):
        return failure.message
    if type(failure).__name__ == "OutOfMemoryError":
        return "GPU memory ran out"
    if isinstance(failure, MemoryError):
        return "host memory ran out"
    first = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
    return first[:200]


@dataclass
class Runner:
    """Runs cases. `words` gives the text of tokens; `deadline` is a time of `clock` after which no further trial
    begins, but for the first of every method in a case that was begun.
    """

    trials: int
    meter: Meter
    words: Callable[[Sequence[int]], str]
    fresh: bool = False  # read the prompt anew in every trial
    deadline: float = float("inf")
    clock: Callable[[], float] = time.perf_counter
    read: set[tuple[str, int, int]] = field(default_factory=set)  # method, context, batch: timed from the prompt on
    late: bool = False
    references: dict[Case, Texts] = field(default_factory=dict)

    def case(self, case: Case, prompts: Prompts, contestants: Sequence[Contestant]) -> tuple[Row, ...]:
        """All rows of one case; `judged` then says what may be told of them."""
        lanes = [Lane(who) for who in contestants]
        for lane in lanes:
            lane.prepare(case, prompts)
        for number in range(self.trials):
            turn = number % len(lanes)
            for lane in (*lanes[turn:], *lanes[:turn]):
                if lane.reason is None and not self._over(lane):
                    self._trial(lane, case, prompts)
        reference = next((lane.texts[0] for lane in lanes if lane.who.role == REFERENCE and lane.texts), None)
        if reference is not None:
            self.references[case] = reference
        return tuple(self._row(lane, case) for lane in lanes)

    def _over(self, lane: Lane) -> bool:
        """Whether the time is up for this lane, which has something to show."""
        last = lane.trials[-1] if lane.trials else None
        over = last is not None and self.clock() + last.seconds_per_token * last.tokens > self.deadline
        self.late |= over
        return over

    def _trial(self, lane: Lane, case: Case, prompts: Prompts) -> None:
        key = (lane.who.name, case.context, case.batch)
        fresh = self.fresh or key not in self.read
        with self.meter.step(lane.who.name, case, fresh) as tick:
            lane.run(case, prompts, fresh=fresh, tick=tick)
        self.read.add(key)

    def _row(self, lane: Lane, case: Case) -> Row:
        who = lane.who
        if not lane.trials:
            return Row(who.name, who.role, reason=lane.reason or "the time was up")
        wanted = self.references.get(case)
        compared = wanted is not None and not (who.role == OTHER and case.temperature > 0)
        found = None
        if compared and wanted is not None:
            found = next((d for texts in lane.texts if (d := self._difference(wanted, texts))), None)
        return Row(
            who.name,
            who.role,
            tuple(lane.trials),
            who.memory(),
            found,
            who.predicted(case),
            lane.reason,
            same=found is None if compared else None,
        )

    def _difference(self, wanted: Texts, got: Texts) -> Difference | None:
        """Where the texts part for the first time."""
        for sequence, (a, b) in enumerate(zip(wanted, got, strict=True)):
            if a != b:
                at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
                return Difference(sequence, at, self.words(a[at : at + SHOWN]), self.words(b[at : at + SHOWN]))
        return None


def judged(case: Case, rows: Sequence[Row], ceiling: Ceiling | None = None) -> Outcome:
    """The case with speed-ups over the fastest plain decoding, for texts that are plain decoding's.

    If plain decoding's own text changed from trial to trial, no method has one.
    """
    outcome = Outcome(case, tuple(rows), ceiling)
    plain = outcome.plain
    sound = all(row.same for row in rows if row.role == REFERENCE and row.trials)
    if plain is None or plain.seconds is None or not sound:
        return outcome

    def told(row: Row) -> Row:
        same = row.same if row.role in (METHOD, OTHER) else not row.withheld
        return replace(row, speed_up=plain.seconds / row.seconds) if row.seconds and same else row  # type: ignore[operator]

    return replace(outcome, rows=tuple(map(told, rows)))


def skipped(case: Case, contestants: Sequence[tuple[str, str]], reason: str) -> Outcome:
    """A case that was not run: names and roles of its methods, and why."""
    return Outcome(case, tuple(Row(name, role, reason=reason) for name, role in contestants))


def cases(contexts: Sequence[int], new: int, temperatures: Sequence[float], batches: Sequence[int]) -> Iterator[Case]:
    """Every combination, short and small ones first, temperatures next to each other."""
    for batch in sorted(set(batches)):
        for context in sorted(set(contexts)):
            for temperature in dict.fromkeys(temperatures):
                yield Case(context, new, temperature, batch)
