"""The plot of speed-ups: lines over the context, or bars where there is only one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hspec_cli.bench import figures
from hspec_cli.bench.records import Row
from hspec_cli.bench.report.colours import DASHES, INK, MARKS, PAPER, RULE, SERIES
from hspec_cli.bench.report.drawing import BAR, HEIGHT, Pair, Plot, bars, drawn, name_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def speed_ups(pairs: Sequence[Pair]) -> Plot | None:
    """Speed-up over context: a line for every method and temperature."""
    series: dict[str, list[Pair]] = {}
    for outcome, row in pairs:
        if row.speed_up is not None:
            series.setdefault(f"{row.method}, {name_of(outcome.case, context=False)}", []).append((outcome, row))
    if not series:
        return None
    if len({outcome.case.context for some in series.values() for outcome, _ in some}) < 2:
        return _speedbars([pair for some in series.values() for pair in some])
    title = "Speed-up over the context"
    with drawn("speed", HEIGHT + 0.16 * len(series)) as (axes, made, finish):
        methods = list(dict.fromkeys(row.method for some in series.values() for _, row in some))
        for label, some in series.items():
            number = methods.index(some[0][1].method)
            kinds = [other for other in series if other.startswith(f"{some[0][1].method}, ")]
            _line(axes, label, some, number, kinds.index(label), 1.012 ** (list(series).index(label) - len(series) / 2))
        axes.axhline(1.0, color=INK, linewidth=1)
        axes.set_xscale("log", base=2)
        contexts = sorted({outcome.case.context for some in series.values() for outcome, _ in some})
        axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
        axes.minorticks_off()
        axes.set_xlim(contexts[0] / 1.2, contexts[-1] * 1.2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens of the prompt")
        axes.set_ylabel("times the fastest plain decoding")
        axes.grid(axis="y", color=RULE, linewidth=0.4, alpha=0.5)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2)
        best = max((pair for some in series.values() for pair in some), key=lambda pair: pair[1].speed_up or 0.0)
        alt = (
            f"Line plot of {len(series)} series over {len(contexts)} contexts. The highest is {best[1].method} with "
            f"{best[1].speed_up:.2f} times plain decoding at {best[0].case.words}."
        )
        finish(title, alt)
    return _speed_plot(title, alt, made[0], [pair for some in series.values() for pair in some])


def _speed_plot(title: str, alt: str, svg: str, pairs: Sequence[Pair]) -> Plot:
    rows = [
        (
            *(row.method, outcome.case.words, figures.SPEED_UP.text(outcome, row)),
            *(figures.MS.text(outcome, row), figures.spread(outcome, row)),
        )
        for outcome, row in pairs
    ]
    caption = (
        "How many times faster a method writes than the fastest plain decoding of the same case (the line at 1). Thin "
        "bars reach from the slowest to the fastest trial. A method whose text was not plain decoding's is left out."
    )
    return Plot("speed", title, caption, alt, svg, ("method", "case", "× plain", "ms/token", "range"), rows)


def _speedbars(pairs: Sequence[Pair]) -> Plot:
    """Of one context, a bar for every method and temperature."""
    context = f"{pairs[0][0].case.context:,} tokens"
    title = f"Speed-up at {context}"
    with drawn("speed", 1.2 + BAR * len(pairs)) as (axes, made, finish):
        bars(
            axes,
            [f"{row.method}, {name_of(outcome.case, context=False)}" for outcome, row in pairs],
            {"": [row.speed_up or 0.0 for _, row in pairs]},
            SERIES,
            [_ends([row])[0] for _, row in pairs],
        )
        axes.axvline(1.0, color=INK, linewidth=1)
        axes.set_xlabel("times the fastest plain decoding")
        best = max(pairs, key=lambda pair: pair[1].speed_up or 0.0)[1]
        alt = f"Bars of {len(pairs)} runs at {context}. The longest is {best.method}: {best.speed_up:.2f} times."
        finish(title, alt)
    return _speed_plot(title, alt, made[0], pairs)


def _ends(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """How far the slowest and the fastest trial are from each speed-up."""
    return [
        (up - up * row.seconds / row.times[-1], up * row.seconds / row.times[0] - up)
        for row in rows
        if (up := row.speed_up or 0.0) is not None and row.seconds
    ]


def _line(axes: Axes, label: str, some: Sequence[Pair], method: int, kind: int, aside: float) -> None:
    """Marks a little aside of those of other lines, so that their bars can be told apart."""
    ordered = sorted(some, key=lambda pair: pair[0].case.context)
    axes.errorbar(
        [aside * outcome.case.context for outcome, _ in ordered],
        [row.speed_up or 0.0 for _, row in ordered],
        yerr=list(zip(*_ends([row for _, row in ordered]), strict=True)),
        label=label,
        color=SERIES[method % len(SERIES)],
        marker=MARKS[method % len(MARKS)],
        linestyle=DASHES[kind % len(DASHES)],
        markerfacecolor=PAPER if kind % 2 else SERIES[method % len(SERIES)],
        capsize=3,
        linewidth=1.8,
    )
