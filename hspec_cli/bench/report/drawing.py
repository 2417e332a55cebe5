"""What all plots of a report share: the record, the style, axes that become SVG, bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hspec_cli.bench.records import Case, Outcome, Row
from hspec_cli.bench.report.colours import HATCHES, INK, PAPER, RULE
from hspec_cli.bench.report.svg import inline
from hspec_profiles.errors import HspecError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT, BAR = 7.6, 3.6, 0.42  # inches
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hspec",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": RULE,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "hatch.color": PAPER,
    "hatch.linewidth": 0.6,
}

Pair = tuple[Outcome, Row]


@dataclass(frozen=True)
class Plot:
    """One figure of the page."""

    name: str
    title: str
    caption: str
    alt: str
    svg: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def check() -> None:
    """Raise HspecError where there is nothing to draw with."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise HspecError(
            "`--report` draws with matplotlib, which is not installed", "`pip install 'hspec[report]'` brings it"
        ) from None


def name_of(case: Case, *, context: bool = True) -> str:
    """A case as a label."""
    several = f"{case.batch} × " if case.batch > 1 else ""
    return (f"{several}{case.context:,}, " if context else several) + f"T {case.temperature:g}"


@contextmanager
def drawn(name: str, height: float) -> Iterator[tuple[Axes, list[str], Any]]:
    """Axes to draw on, a list that takes the finished SVG, and what finishes it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    made: list[str] = []

    def finish(title: str, alt: str) -> None:
        made.append(inline(figure, name, title, alt))

    yield figure.add_subplot(), made, finish


def bars(
    axes: Axes,
    labels: Sequence[str],
    stacked: dict[str, list[float]],
    colours: Sequence[str],
    ends: Sequence[tuple[float, float]] = (),
) -> None:
    """Horizontal bars, one for each label, first on top."""
    places = list(range(len(labels)))
    left = [0.0] * len(labels)
    for number, (name, values) in enumerate(stacked.items()):
        axes.barh(
            places,
            values,
            left=left,
            height=0.62,
            label=name,
            color=colours[number % len(colours)],
            hatch=HATCHES[number % len(HATCHES)],
            edgecolor=PAPER,
            xerr=list(zip(*ends, strict=True)) if ends else None,
            error_kw={"ecolor": INK, "capsize": 3, "elinewidth": 1},
        )
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    if len(stacked) > 1:
        axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=4)
    axes.grid(axis="x", color=RULE, linewidth=0.4, alpha=0.5)
    axes.set_axisbelow(True)
