"""Figures as words: the columns that every output has, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hspec_cli.bench.records import LOSSY, OTHER, REFERENCE, Case, Ceiling, Outcome, Row
from hspec_offload.sizes import human

NONE = "-"


@dataclass(frozen=True)
class Column:
    """`head` in tables, `name` in files, the value of a row, and its words."""

    head: str
    name: str
    value: Callable[[Outcome, Row], float | None]
    words: Callable[[float], str]

    def text(self, outcome: Outcome, row: Row) -> str:
        """The figure in words."""
        value = self.value(outcome, row)
        return NONE if value is None else self.words(value)


def milliseconds(value: float) -> str:
    """Three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def duration(value: float) -> str:
    """Seconds or milliseconds with their unit."""
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s" if value >= 1 else f"{1e3 * value:.0f} ms"


def clock(seconds: float) -> str:
    """A time to wait: 45 s, 2:05, 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"


def times(value: float) -> str:
    """A speed-up."""
    return f"{value:.2f}×"


def share(value: float) -> str:
    """A percentage."""
    return f"{value:.0%}"


def _ms(row: Row, seconds: float | None) -> float | None:
    """Milliseconds, unless speed must not be told."""
    return None if seconds is None or row.withheld else 1e3 * seconds


def of_ceiling(outcome: Outcome, row: Row) -> float | None:
    """How much of the speed that plain decoding could have at most; above 1 for methods that save passes."""
    if outcome.ceiling is None or not row.seconds or row.withheld:
        return None
    return outcome.ceiling.seconds / row.seconds


MS = Column("ms/token", "ms_per_token", lambda _, row: _ms(row, row.seconds), milliseconds)
FASTEST = Column("fastest", "fastest_ms", lambda _, row: _ms(row, row.times[0]) if row.times else None, milliseconds)
SLOWEST = Column("slowest", "slowest_ms", lambda _, row: _ms(row, row.times[-1]) if row.times else None, milliseconds)
SPEED_UP = Column("× plain", "speed_up", lambda _, row: row.speed_up, times)
PER_PASS = Column("tok/pass", "tokens_per_pass", lambda _, row: row.tokens_per_pass, lambda value: f"{value:.1f}")
FIRST = Column("first", "first_token_s", lambda _, row: row.first, duration)
CEILING = Column("ceiling", "of_ceiling", of_ceiling, share)
MEMORY = Column("memory", "memory_bytes", lambda _, row: row.memory.total if row.memory else None, human)
WEIGHTS = Column("weights", "weight_bytes", lambda _, row: row.memory.weights if row.memory else None, human)
CACHES = Column("caches", "cache_bytes", lambda _, row: row.memory.caches if row.memory else None, human)
PEAK = Column("peak", "peak_bytes", lambda _, row: row.memory.peak if row.memory else None, human)
JOULES = Column("J/token", "joules_per_token", lambda _, row: row.joules, lambda value: f"{value:.2f}")
PREDICTED = Column("predicted", "predicted_ms", lambda _, row: _ms(row, row.predicted), milliseconds)

ALL = (
    MS,
    FASTEST,
    SLOWEST,
    SPEED_UP,
    PER_PASS,
    FIRST,
    CEILING,
    PREDICTED,
    WEIGHTS,
    CACHES,
    PEAK,
    JOULES,
)


def spread(outcome: Outcome, row: Row) -> str:
    """From the fastest trial to the slowest."""
    low, high = FASTEST.text(outcome, row), SLOWEST.text(outcome, row)
    return NONE if NONE in (low, high) or len(row.trials) < 2 else low if low == high else f"{low}-{high}"


def accepted(row: Row) -> str:
    """Shares kept by each level but the last, cheapest first, in the median trial; of unused ones nothing."""
    typical = row.typical
    if typical is None:
        return NONE
    shares = [level.acceptance for level in typical.levels[:-1]]
    return " ".join(f"{value:.2f}".removeprefix("0") for value in shares if value is not None) or NONE


def remarks(outcome: Outcome) -> Iterator[str]:
    """What must be said of single rows: no speed-up told, other text, not run, plain decoding taking over."""
    reference = next((row for row in outcome.rows if row.role == REFERENCE), None)
    if reference is not None and reference.withheld and reference.difference:
        yield (
            f"{reference.method}: its own text changed between trials ({reference.difference.words}): "
            "no speed-up is told of any method"
        )
    for row in outcome.rows:
        if row is reference and row.withheld:
            continue
        if row.withheld and row.difference:
            yield f"{row.method}: the text is not plain decoding's: {row.difference.words}; no speed is told"
        elif row.difference:
            own = "approximate" if row.role == LOSSY else "its own rounding"
            what = "another implementation, with its own rounding" if row.role == OTHER else own
            untold = ", so no speed-up is told" if row.role == OTHER else ""
            yield f"{row.method}: {what}: the text differs from {row.difference.words}{untold}"
        elif row.role == OTHER and row.trials:
            found = "not compared (other random numbers), so no speed-up is told" if row.same is None else "the same"
            yield f"{row.method}: another implementation; its text is {found}"
        if row.reason:
            yield f"{row.method}: {'stopped' if row.trials else 'not run'}: {row.reason}"
        if row.typical and row.typical.note:
            yield f"{row.method}: {row.typical.note}"


def ceiling_words(ceiling: Ceiling) -> str:
    """The ceiling, and where it comes from."""
    return (
        f"ceiling {milliseconds(1e3 * ceiling.seconds)} ms: {human(ceiling.nbytes)} at {human(ceiling.rate)}/s "
        f"({ceiling.source})"
    )


def heading(case: Case) -> str:
    """A case as the heading of its table."""
    several = f"{case.batch} × " if case.batch > 1 else ""
    how = "greedy" if not case.temperature else f"temperature {case.temperature:g}"
    return f"{several}{case.context:,} tokens of prompt, {case.new:,} new, {how}"
