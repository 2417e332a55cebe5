"""What a bench measures, as records. Times in seconds, sizes in bytes, lengths in tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

REFERENCE, PLAIN, METHOD, OTHER = "reference", "plain", "method", "other implementation"
LOSSY = "approximate"  # a method whose text is only nearly plain decoding's


@dataclass(frozen=True)
class Case:
    """What every method is asked for: `batch` prompts of `context` tokens, `new` tokens after each."""

    context: int
    new: int
    temperature: float = 0.0
    batch: int = 1

    @property
    def words(self) -> str:
        """The case for people."""
        several = f"{self.batch} × " if self.batch > 1 else ""
        return f"{several}{self.context:,} tokens, T {self.temperature:g}"


@dataclass(frozen=True)
class Level:
    """One level's work in a trial."""

    name: str
    proposed: int
    kept: int
    refused: int
    passes: int
    seconds: float

    @property
    def acceptance(self) -> float | None:
        """Share of its tokens, of those the next level looked at, that were kept; None where nobody looked."""
        seen = self.kept + self.refused
        return self.kept / seen if seen else None


@dataclass(frozen=True)
class Trial:
    """One timed run. `first`: from the request to the first token, where the prompt was read anew."""

    seconds_per_token: float  # of each sequence, after the prompt
    passes: int  # of the target
    tokens: int  # of each sequence
    first: float | None = None
    joules: float | None = None  # of the GPU, for a token of each sequence
    levels: tuple[Level, ...] = ()
    stack: str = ""
    note: str | None = None

    @property
    def tokens_per_pass(self) -> float | None:
        """Tokens that one pass of the target brought to a sequence; None where passes are not told."""
        return self.tokens / self.passes if self.passes else None


@dataclass(frozen=True)
class Memory:
    """Bytes that a method needs: its weights, its keys and values; `peak` as the GPU or the process counted it."""

    weights: int
    caches: int
    peak: int | None = None

    @property
    def total(self) -> int:
        """Weights, keys and values."""
        return self.weights + self.caches


@dataclass(frozen=True)
class Difference:
    """Where a text first differs from plain decoding's: texts of the tokens from there on."""

    sequence: int
    token: int  # tokens before it are equal
    wanted: str
    got: str

    @property
    def words(self) -> str:
        """The place for people."""
        where = f"sequence {self.sequence}, " if self.sequence else ""
        return f"{where}token {self.token:,}: {self.wanted!r} became {self.got!r}"


@dataclass(frozen=True)
class Row:
    """One method in one case. Without trials, `reason` says why."""

    method: str
    role: str
    trials: tuple[Trial, ...] = ()
    memory: Memory | None = None
    difference: Difference | None = None
    predicted: float | None = None  # seconds a token
    reason: str | None = None
    speed_up: float | None = None  # over the fastest plain decoding; None where that must not be told
    same: bool | None = None  # whether the text is plain decoding's; None where that was not looked at

    @cached_property
    def times(self) -> tuple[float, ...]:
        """Seconds a token of every trial, fastest first."""
        return tuple(sorted(trial.seconds_per_token for trial in self.trials))

    @property
    def seconds(self) -> float | None:
        """Median seconds a token."""
        return median(self.times) if self.times else None

    @property
    def first(self) -> float | None:
        """Median seconds to the first token."""
        return _median(trial.first for trial in self.trials)

    @property
    def joules(self) -> float | None:
        """Median joules of a token."""
        return _median(trial.joules for trial in self.trials)

    @property
    def tokens_per_pass(self) -> float | None:
        """Median tokens of a pass."""
        return _median(trial.tokens_per_pass for trial in self.trials)

    @property
    def typical(self) -> Trial | None:
        """The trial with the median time, or the slower of the two around it."""
        ordered = sorted(self.trials, key=lambda trial: trial.seconds_per_token)
        return ordered[len(ordered) // 2] if ordered else None

    @property
    def withheld(self) -> bool:
        """Whether no speed may be told, since the text should be plain decoding's and is not."""
        return self.same is False and self.role in (REFERENCE, METHOD)


def _median(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


@dataclass(frozen=True)
class Ceiling:
    """What plain decoding must read for one token, and how fast this host reads."""

    nbytes: int
    rate: float  # bytes a second
    source: str

    @property
    def seconds(self) -> float:
        """Of one pass."""
        return self.nbytes / self.rate


@dataclass(frozen=True)
class Outcome:
    """One case, all methods."""

    case: Case
    rows: tuple[Row, ...]
    ceiling: Ceiling | None = None

    @property
    def plain(self) -> Row | None:
        """The fastest plain decoding: what speed-ups are over."""
        measured = [row for row in self.rows if row.role in (REFERENCE, PLAIN) and row.trials and not row.withheld]
        return min(measured, key=lambda row: row.seconds or 0.0, default=None)


@dataclass(frozen=True)
class Published:
    """A figure from a paper beside what was measured here, or the reason why it was not."""

    table: str
    setting: str
    method: str
    speed_up: float
    acceptance: float | None = None
    measured: float | None = None  # speed-up
    measured_acceptance: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Result:
    """A whole bench."""

    version: str
    model: str
    draft: str | None
    device: str
    dtype: str
    host: str
    text: str  # what the prompts are from
    seed: int
    trials: int
    outcomes: tuple[Outcome, ...] = ()
    published: tuple[Published, ...] = ()
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict, hash=False)
    began: str = ""  # ISO 8601
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def differing(self) -> list[tuple[Case, Row]]:
        """Rows whose text should be plain decoding's and is not."""
        return [(outcome.case, row) for outcome in self.outcomes for row in outcome.rows if row.withheld]
