"""What a plan predicted beside what a run measured.

A prediction is from the plan alone. All that a run puts into it is how many passes the levels made for how many tokens,
which follows from what was accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hspec_decoding.events import Event, LevelRound, Report, Round
from hspec_decoding.stack import parse
from hspec_offload.cost import NGRAM
from hspec_offload.plan import Plan

LEAST = 0.5  # share of the tokens that predicted rounds must have brought, to speak for the run


@dataclass(frozen=True)
class Beside:
    """One figure in seconds, predicted and measured; None where one of the two is not known."""

    name: str
    predicted: float | None
    measured: float

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return self.measured / self.predicted if self.predicted else None


@dataclass
class Meter:
    """Sums over the rounds of a run that a plan has a prediction for."""

    plan: Plan
    tokens: int = 0
    predicted: float = 0.0  # seconds of these rounds
    seconds: float = 0.0
    passes: dict[str, int] = field(default_factory=dict)  # by figure
    spent: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        told, levels = self.plan.prediction, parse(self.plan.levels)
        self.figures = {"ngram": ("look-up", NGRAM)}
        for spec in levels[:-1]:
            name = str(replace(spec, width=None))
            if spec.name == "draft":
                self.figures[name] = ("draft step", told.draft)
            elif spec.name == "target" and told.middle:
                self.figures[name] = ("middle step", told.middle.seconds)
        self.verify = "verify pass", told.verify.seconds + told.refresh
        self.plain = len(levels) == 1

    def take(self, event: Event) -> None:
        """Enter a round: one of the plan's kind of levels, at whatever widths."""
        if not isinstance(event, Round) or not event.levels or bool(event.widths) == self.plain:
            return
        *proposers, target = event.levels
        known = [self.figures.get(level.name) for level in proposers]
        for level, figure in [*zip(proposers, known, strict=True), (target, self.verify)]:
            if figure:
                self._enter(level, figure[0])
        if all(known):
            did = [*zip(proposers, known, strict=True), (target, self.verify)]
            self.predicted += sum(level.passes * figure[1] for level, figure in did if figure)
            self.seconds += event.seconds
            self.tokens += target.kept

    def _enter(self, level: LevelRound, figure: str) -> None:
        self.passes[figure] = self.passes.get(figure, 0) + level.passes
        self.spent[figure] = self.spent.get(figure, 0.0) + level.seconds

    def figures_of(self, report: Report) -> tuple[Beside, ...]:
        """Time of a token, of the steps, of reading the prompt: those that were measured."""
        if not report.generated_tokens:
            return ()
        prefill = self.plan.prediction.prefill
        enough = self.tokens > LEAST * report.generated_tokens
        token = self.seconds if enough else report.decode_seconds
        tokens = self.tokens if enough else report.generated_tokens
        predicted = dict([*self.figures.values(), self.verify])
        known = prefill.seconds if prefill.tokens == report.prompt_tokens else None
        return (
            Beside("token", self.predicted / tokens if enough else None, token / tokens),
            *(
                Beside(name, predicted[name], self.spent[name] / self.passes[name])
                for name in ("draft step", "middle step", "verify pass")
                if self.passes.get(name)
            ),
            Beside("prefill", known, report.prefill_seconds),
        )
