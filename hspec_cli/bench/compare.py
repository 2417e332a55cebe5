"""Two benches: what changed beyond the noise.

The rule: a time has changed when the trials of the two benches do not overlap at all, the medians are more than 2 %
apart, and there are enough trials for that to be no accident: of n and m trials of the same speed, all of one bench lie
on one side of all of the other by chance in 2 of C(n + m, n) cases, and that must be less than one in nine (3 and 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb

from hspec_cli.bench import figures
from hspec_cli.bench.records import Case, Result, Row

LEAST = 0.02  # of the time: what is less matters to nobody
CHANCE = 1 / 9
RULE = (
    "Faster or slower: the ranges of all trials do not overlap, and the medians are more than 2 % apart. By chance "
    "alone that happens in 2 of C(n + m, n) rows with n and m trials (1 in 10 for 3 and 3, 1 in 126 for 5 and 5); "
    "with fewer than 3 and 3, no change is told."
)


@dataclass(frozen=True)
class Change:
    """One method in one case. Seconds a token; `verdict` in words."""

    method: str
    case: Case
    old: float | None
    new: float | None
    verdict: str
    remark: str = ""

    @property
    def ratio(self) -> float | None:
        """Old time over new: above 1 is faster."""
        return self.old / self.new if self.old and self.new else None


def changes(old: Result, new: Result) -> list[Change]:
    """A row for every method and case of either."""
    before, after = _rows(old), _rows(new)
    return [_change(*key, before.get(key), after.get(key)) for key in {**before, **after}]


def _rows(result: Result) -> dict[tuple[str, Case], Row]:
    return {(row.method, outcome.case): row for outcome in result.outcomes for row in outcome.rows}


def _change(method: str, case: Case, old: Row | None, new: Row | None) -> Change:
    a, b = _told(old), _told(new)
    if a is None or b is None:
        verdict = "in neither" if a is b else "only in the old" if b is None else "only in the new"
        reasons = [_untold(row) for row in (old, new) if row is not None and _told(row) is None]
        return Change(method, case, a, b, verdict, "; ".join(reasons))
    assert old is not None
    assert new is not None
    return Change(method, case, a, b, verdict_of(old.times, new.times), _remark(old, new))


def _told(row: Row | None) -> float | None:
    return None if row is None or row.withheld else row.seconds


def _untold(row: Row) -> str:
    return "its text is not plain decoding's" if row.withheld else row.reason or "not run"


def verdict_of(old: Sequence[float], new: Sequence[float]) -> str:
    """`faster`, `slower`, `as fast`, or why that cannot be said; from seconds of all trials, fastest first."""
    if 2 / comb(len(old) + len(new), len(old)) >= CHANCE:
        return "too few trials"
    middle = [values[len(values) // 2] / 2 + values[(len(values) - 1) // 2] / 2 for values in (old, new)]
    if abs(middle[1] / middle[0] - 1) <= LEAST:
        return "as fast"
    if new[-1] < old[0]:
        return "faster"
    return "slower" if new[0] > old[-1] else "as fast"


def _remark(old: Row, new: Row) -> str:
    """What else is not as it was."""
    a, b = old.typical, new.typical
    assert a is not None
    assert b is not None
    parts = []
    if a.stack != b.stack:
        parts.append(f"levels were {a.stack}, are {b.stack}")
    if figures.accepted(old) != figures.accepted(new):
        parts.append(f"kept {figures.accepted(old)}, now {figures.accepted(new)}")
    return "; ".join(parts)


def warnings(old: Result, new: Result) -> Iterator[str]:
    """What makes the two hard to compare."""
    for name in ("host", "model", "draft", "device", "dtype", "text", "seed"):
        a, b = getattr(old, name), getattr(new, name)
        if a != b:
            yield f"the {name} is another: {a} before, {b} now"
    for name in sorted({*old.versions, *new.versions}):
        versions = [result.versions.get(name, "none") for result in (old, new)]
        if versions[0] != versions[1]:
            yield f"{name} was {versions[0]} and is {versions[1]}"


HEADS = ("method", "case", "old ms", "new ms", "times", "verdict")


def cells(change: Change) -> tuple[str, ...]:
    """A change as cells of a table."""
    ratio = change.ratio
    old, new = (figures.NONE if v is None else figures.milliseconds(1e3 * v) for v in (change.old, change.new))
    return (
        change.method,
        change.case.words,
        old,
        new,
        figures.NONE if ratio is None else f"{ratio:.2f}",
        change.verdict,
    )


def summary(made: Sequence[Change]) -> str:
    """Counts of the verdicts that matter."""
    counts = {word: sum(change.verdict == word for change in made) for word in ("faster", "slower", "as fast")}
    rest = len(made) - sum(counts.values())
    return f"{counts['faster']} faster, {counts['slower']} slower, {counts['as fast']} within the noise" + (
        f", {rest} not to compare" if rest else ""
    )
