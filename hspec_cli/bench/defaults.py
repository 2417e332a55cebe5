"""What a bench does that nobody told otherwise: as much as its time allows, at the speed that was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from hspec_cli.bench.meter import Pace
from hspec_cli.bench.records import Case
from hspec_cli.bench.runner import cases

LIMIT, LIMIT_FEW_CORES, FEW = 180.0, 300.0, 2  # seconds of a bare bench; cores
USED, ENDING = 0.75, 0.95  # of what is left of the limit, to plan with; of all, after which no trial begins
CONTEXTS = (131072, 65536, 32768, 16384, 8192, 4096, 2048, 1024, 512)
SHORTER = 4  # times, the second context
LEAST = 256  # tokens
EFFORTS = ((256, 5), (256, 3), (128, 5), (128, 3), (64, 3))  # tokens, trials; the best first
POOR = ((32, 3), (32, 2))  # where even short contexts allow no more
TEMPERATURES = (0.0, 0.6)


@dataclass(frozen=True)
class Asked:
    """What the command line says; None where it says nothing. Tokens."""

    contexts: tuple[int, ...] | None = None
    new: int | None = None
    temperatures: tuple[float, ...] | None = None
    batches: tuple[int, ...] = (1,)
    trials: int | None = None

    @property
    def bare(self) -> bool:
        """Whether the bench has to choose what it does, and so has to end in time."""
        return self.contexts is None


@dataclass(frozen=True)
class Work:
    """What will be done."""

    cases: tuple[Case, ...]
    trials: int


def limit(cores: int, gpu: bool) -> float:
    """Seconds that a bare bench may take."""
    return LIMIT if gpu or cores > FEW else LIMIT_FEW_CORES


def chosen(asked: Asked, longest: int, pace: Pace, methods: int, seconds: float) -> Work:
    """What was asked for; where no contexts were, the longest with the most tokens and trials that `methods` can do in
    `seconds`, or the least there is.

    `longest`: tokens that model and text have room for, prompt and new ones. Every method is taken to be as slow as
    plain decoding.
    """
    heats = asked.temperatures or TEMPERATURES
    if asked.contexts is not None:
        new, trials = asked.new or EFFORTS[0][0], asked.trials or EFFORTS[0][1]
        return Work(tuple(cases(asked.contexts, new, heats, asked.batches)), trials)
    new, trials = 0, 0
    for efforts in (EFFORTS, POOR):
        for contexts, effort in product(_contexts(longest - efforts[-1][0]), efforts):
            new, trials = asked.new or effort[0], asked.trials or effort[1]
            work = Work(tuple(cases(contexts, new, heats, asked.batches)), trials)
            if 1 <= contexts[-1] <= longest - new and expected(work, pace, methods) <= USED * seconds:
                return work
    only = max(1, min(LEAST, longest - new))
    return Work(tuple(cases((only,), max(1, min(new, longest - only)), heats, asked.batches)), trials)


def _contexts(most: int) -> list[tuple[int, ...]]:
    """Contexts to try, two at a time, the longest first."""
    fitting = [context for context in CONTEXTS if context <= most]
    return [*(tuple(sorted({max(LEAST, context // SHORTER), context})) for context in fitting), (min(LEAST, most),)]


def expected(work: Work, pace: Pace, methods: int) -> float:
    """Seconds of all trials: prompts are read once by every method, for all temperatures."""
    seconds = sum(pace.trial(case, fresh=False) * work.trials for case in work.cases)
    prompts: Sequence[Case] = list({(case.context, case.batch): case for case in work.cases}.values())
    return methods * (seconds + sum(map(pace.reading, prompts)))
