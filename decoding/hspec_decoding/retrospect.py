"""What a tuner's measurements say about a run when it is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter

from hspec_decoding.build import Levels
from hspec_decoding.events import Choice
from hspec_decoding.tuner import Plan, Tuner


def fall_back(tuner: Tuner) -> str | None:
    """Whether plain decoding took over, in one sentence."""
    if not tuner.sequential or not tuner.fell_back:
        return None
    return (
        f"speculation measured slower than plain decoding ({1e3 * tuner.plain_seconds:.1f} ms a token): "
        f"{tuner.plain_rounds} of {tuner.rounds} rounds were plain"
    )


def most_used(tuner: Tuner, levels: Levels) -> str:
    """The stack of most rounds."""
    return _written(levels, max(tuner.used.items(), key=itemgetter(1), default=((), 0))[0])


def choices(tuner: Tuner, levels: Levels) -> Iterator[Choice]:
    """What the measurements promise of every stack, best first; nothing while plain decoding was not measured."""
    if 0 not in tuner.target:
        return
    for plan in sorted([Plan(), *tuner.choices()], key=tuner.rate, reverse=True):
        written = _written(levels, plan.levels)
        yield Choice(written, plan.widths, 1 / tuner.rate(plan), tuner.used.get(plan.levels, 0))


def _written(levels: Levels, chain: Sequence[int]) -> str:
    return " > ".join(level.name for level in (*(levels.proposers[n] for n in chain), levels.last))
