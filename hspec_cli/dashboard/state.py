"""What a dashboard shows, as a fold over the stream: fold(state, seconds, record) -> state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hspec_cli.dashboard.stream import Began, Ended, Progressed, Record, Said, Timed
from hspec_decoding.events import (
    Emitted,
    Expected,
    Finished,
    InFlight,
    LevelRound,
    Placed,
    Prefilled,
    Round,
)

TAIL = 20_000  # characters of the text that are kept
SLOTS, FINEST = 240, 0.25  # slots of a history, and the seconds of one to begin with
RECENT = 24  # rounds that the present speed is taken from


@dataclass(frozen=True)
class Work:
    """A phase that says how far it is: `done` of `total`, `first` of them done at `began`, in seconds; now `at`."""

    what: str
    done: int
    total: int
    began: float
    first: int
    at: float

    @property
    def rate(self) -> float | None:
        """A second, as soon as that can be told."""
        return (self.done - self.first) / (self.at - self.began) if self.at > self.began else None

    def left(self, now: float) -> float | None:
        """Seconds until it is done."""
        rate = self.rate
        return max(0.0, (self.total - self.done) / rate - (now - self.at)) if rate else None


@dataclass(frozen=True)
class History:
    """Tokens by the time spent on rounds: `slots` of `width` seconds, made coarser before they grow too many."""

    width: float = FINEST
    slots: tuple[float, ...] = ()

    def add(self, began: float, seconds: float, tokens: int) -> History:
        """With tokens that took `seconds` from `began` on, spread evenly over them."""
        last = int((began + seconds) / self.width)
        if last >= SLOTS:
            pairs = zip(self.slots[::2], (*self.slots[1::2], 0.0), strict=False)
            return replace(self, width=2 * self.width, slots=tuple(a + b for a, b in pairs)).add(began, seconds, tokens)
        slots = [*self.slots, *[0.0] * (last + 1 - len(self.slots))]
        for place in range(int(began / self.width), last + 1):
            inside = min(began + seconds, (place + 1) * self.width) - max(began, place * self.width)
            slots[place] += tokens * inside / seconds if seconds else float(tokens)
        return replace(self, slots=tuple(slots))


@dataclass(frozen=True)
class Level:
    """One level's work so far, as `LevelRound` has it for one round."""

    name: str
    proposed: int = 0
    kept: int = 0
    refused: int = 0
    passes: int = 0
    seconds: float = 0.0

    @property
    def acceptance(self) -> float | None:
        """Share of the proposed tokens that were kept."""
        return self.kept / self.proposed if self.proposed else None

    def plus(self, did: LevelRound) -> Level:
        """With one more round."""
        return Level(
            self.name,
            self.proposed + did.proposed,
            self.kept + did.kept,
            self.refused + did.refused,
            self.passes + did.passes,
            self.seconds + did.seconds,
        )


@dataclass(frozen=True)
class State:
    """A run so far. Seconds since the start; tokens; bytes."""

    at: float = 0.0  # of the last record
    run: Began | None = None
    phase: str = "starting"
    work: Work | None = None
    text: str = ""  # its end
    tokens: int = 0
    first_token: float | None = None
    read: float | None = None  # seconds that reading the prompt took
    history: History = field(default_factory=History)
    levels: tuple[Level, ...] = ()  # proposing ones in the order of their first use, the target last
    rounds: tuple[Round, ...] = ()  # the last ones
    count: int = 0  # of rounds
    seconds: float = 0.0  # of all rounds
    plain: float | None = None  # seconds of a token of plain decoding, as measured
    placed: Placed | None = None
    expected: Expected = field(default_factory=Expected)
    in_flight: int | None = None
    ended: str | None = None  # why

    @property
    def speed(self) -> float | None:
        """Tokens a second now."""
        return sum(map(emitted, self.rounds)) / self._recent if self.rounds else None

    @property
    def average(self) -> float | None:
        """Tokens a second of all rounds."""
        return self.tokens / self.seconds if self.seconds else None

    @property
    def per_pass(self) -> float | None:
        """Tokens that a pass of the target brought."""
        return self.tokens / self.count if self.count else None

    @property
    def plain_speed(self) -> tuple[float, str] | None:
        """Tokens a second of plain decoding, and how that is known."""
        if self.plain:
            return 1 / self.plain, "measured"
        return (1 / self.expected.plain, "predicted") if self.expected.plain else None

    def recent(self, what: str) -> float | None:
        """Bytes a second of the last rounds, of `gpu_bytes`, `link_bytes` or `ram_bytes`."""
        return sum(getattr(told, what) for told in self.rounds) / self._recent if self.rounds else None

    @property
    def _recent(self) -> float:
        return sum(told.seconds for told in self.rounds) or 1e-9


def emitted(told: Round) -> int:
    """Tokens that a round brought."""
    return told.levels[-1].kept if told.levels else told.kept + 1


def fold(state: State, at: float, record: Record) -> State:
    """The state after `record`, which came at `at` seconds."""
    state = replace(state, at=at)
    match record:
        case Began():
            return replace(state, run=record)
        case Progressed():
            return replace(state, phase="loading", work=_work(state, at, record.what, record.done, record.total))
        case Prefilled():
            return _prefilled(state, at, record)
        case Emitted():
            return _emitted(state, at, record)
        case Said():
            return replace(state, text=(state.text + record.text)[-TAIL:])
        case Round():
            return _rounded(state, record)
        case Placed():
            return replace(state, placed=record)
        case Expected():
            return replace(state, expected=record)
        case InFlight():
            return replace(state, in_flight=record.layer)
        case Finished() | Ended():
            ended = record.reason if isinstance(record, Ended) else state.ended or record.reason
            return replace(state, phase="done", work=None, in_flight=None, ended=ended)
    return state


def folded(stream: Iterable[Timed], state: State | None = None) -> State:
    """The state after a stream."""
    state = state or State()
    for timed in stream:
        state = fold(state, timed.at, timed.record)
    return state


def _work(state: State, at: float, what: str, done: int, total: int) -> Work:
    old = state.work
    if old is None or old.what != what or done < old.done:
        return Work(what, done, total, at, done, at)
    return replace(old, done=done, total=total, at=at)


def _prefilled(state: State, at: float, told: Prefilled) -> State:
    work = _work(state, at, "prompt tokens read", told.done, told.total)
    took = at - work.began if told.done >= told.total else None
    return replace(state, phase="reading the prompt", work=work, read=took or state.read)


def _emitted(state: State, at: float, told: Emitted) -> State:
    tokens = state.tokens + len(told.tokens)
    first = at if state.first_token is None else state.first_token
    return replace(state, phase="decoding", work=None, tokens=tokens, first_token=first)


def _rounded(state: State, told: Round) -> State:
    levels = {level.name: level for level in state.levels}
    for did in told.levels:
        levels[did.name] = levels.get(did.name, Level(did.name)).plus(did)
    target = [levels.pop(did.name) for did in told.levels[-1:]]
    return replace(
        state,
        levels=(*levels.values(), *target),
        rounds=(*state.rounds, told)[-RECENT:],
        count=state.count + 1,
        seconds=state.seconds + told.seconds,
        history=state.history.add(state.seconds, told.seconds, emitted(told)),
        plain=told.plain or state.plain,
    )
