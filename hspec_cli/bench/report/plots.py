"""The plots of a report, each with its alt text and the table that it was drawn from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hspec_cli.bench import figures
from hspec_cli.bench.records import Level, Result, Row
from hspec_cli.bench.report.colours import DASHES, FAINT, MARKS, PAPER, PARTS, RULE, SERIES
from hspec_cli.bench.report.drawing import BAR, HEIGHT, STYLE, Pair, Plot, bars, check, drawn, name_of
from hspec_cli.bench.report.speed import speed_ups
from hspec_offload.sizes import human


def plots(result: Result) -> Iterator[Plot]:
    """Every plot for which there is something to show."""
    import matplotlib

    check()
    pairs = [(o, row) for o in result.outcomes for row in o.rows if row.trials and not row.withheld]
    if not pairs:
        return
    longest = max(pairs, key=lambda pair: (pair[0].case.batch == 1, pair[0].case.context))[0].case
    there = [pair for pair in pairs if (pair[0].case.context, pair[0].case.batch) == (longest.context, longest.batch)]
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        for plot in (speed_ups(pairs), acceptance(pairs, there), breakdown(there), memory(there), foretold(pairs)):
            if plot is not None:
                yield plot


def acceptance(pairs: Sequence[Pair], there: Sequence[Pair]) -> Plot | None:
    """Acceptance of every level over temperature, at the longest context; the table has all of them."""
    series: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for outcome, row in there:
        for level, value in _shares(row):
            series.setdefault((row.method, level.name), []).append((outcome.case.temperature, value))
    if not series:
        return None
    title = "Acceptance over the temperature"
    case = there[0][0].case
    with drawn("acceptance", HEIGHT + 0.2 * len(series)) as (axes, made, finish):
        methods = list(dict.fromkeys(method for method, _ in series))
        for number, ((method, name), points) in enumerate(series.items()):
            at, shares = zip(*sorted(points), strict=True)
            colour, mark = SERIES[number % len(SERIES)], MARKS[number % len(MARKS)]
            dash = DASHES[methods.index(method) % len(DASHES)]
            axes.plot(at, shares, color=colour, marker=mark, linestyle=dash, linewidth=1.8, label=f"{method}: {name}")
        heats = sorted({outcome.case.temperature for outcome, _ in there})
        axes.set_xticks(heats, [f"{heat:g}" for heat in heats])
        pad = 0.1 + 0.1 * (heats[-1] - heats[0])
        axes.set_xlim(heats[0] - pad, heats[-1] + pad)
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("temperature")
        axes.set_ylabel("share of tokens kept")
        axes.grid(axis="y", color=RULE, linewidth=0.4, alpha=0.5)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=1)
        lowest = min((share, *key) for key, points in series.items() for _, share in points)
        alt = (
            f"Line plot of {len(series)} levels at {case.context:,} tokens over {len(heats)} temperatures. The lowest "
            f"acceptance is {lowest[0]:.2f}, of the level {lowest[2]} of {lowest[1]}."
        )
        finish(title, alt)
    rows = [
        (row.method, outcome.case.words, level.name, f"{value:.3f}", f"{level.proposed:,}", f"{level.kept:,}")
        for outcome, row in pairs
        for level, value in _shares(row)
    ]
    caption = (
        f"The share of a level's tokens, of those that were looked at, that the next level kept, at {case.context:,} "
        "tokens. Rejected tokens cost time and never change the text."
    )
    heads = ("method", "case", "level", "kept share", "proposed", "kept")
    return Plot("acceptance", title, caption, alt, made[0], heads, rows)


def _shares(row: Row) -> Iterator[tuple[Level, float]]:
    for level in row.typical.levels[:-1] if row.typical else ():
        if level.acceptance is not None:
            yield level, level.acceptance


def parts(row: Row) -> dict[str, float]:
    """Milliseconds of a token by what they were spent on, in the median trial: names of PARTS."""
    typical = row.typical
    if typical is None or not typical.levels:
        return {}
    spent = dict.fromkeys(PARTS, 0.0)
    for level in typical.levels[:-1]:
        spent["middle" if level.name.startswith("target") else "draft"] += 1e3 * level.seconds / typical.tokens
    spent["target"] = 1e3 * typical.levels[-1].seconds / typical.tokens
    spent["rest"] = max(0.0, 1e3 * typical.seconds_per_token - sum(spent.values()))
    return spent


WHAT = {"draft": "drafts and look-ups", "middle": "middle levels", "target": "the whole model", "rest": "all else"}


def breakdown(there: Sequence[Pair]) -> Plot | None:
    """Where the time of a token goes."""
    shown = [(outcome, row, parts(row)) for outcome, row in there if row.typical and row.typical.levels]
    if not shown:
        return None
    labels = [f"{row.method}, {name_of(outcome.case, context=False)}" for outcome, row, _ in shown]
    title = f"Where the time goes, at {there[0][0].case.context:,} tokens"
    with drawn("time", 1.3 + BAR * len(shown)) as (axes, made, finish):
        bars(axes, labels, {WHAT[name]: [spent[name] for *_, spent in shown] for name in PARTS}, list(PARTS.values()))
        axes.set_xlabel("milliseconds a token")
        slowest = max(zip(labels, shown, strict=True), key=lambda pair: sum(pair[1][2].values()))
        alt = (
            f"Stacked bars of {len(shown)} runs. The longest is {slowest[0]} with "
            f"{sum(slowest[1][2].values()):.1f} milliseconds a token, {slowest[1][2]['target']:.1f} of them in the "
            "whole model."
        )
        finish(title, alt)
    rows = [
        (row.method, outcome.case.words, *(f"{spent[name]:.2f}" for name in PARTS), f"{sum(spent.values()):.2f}")
        for outcome, row, spent in shown
    ]
    caption = (
        "Milliseconds of a token in the median trial: proposing levels, middle levels that check them, passes of the "
        "whole model, and all else."
    )
    return Plot("time", title, caption, alt, made[0], ("method", "case", *WHAT.values(), "together, ms"), rows)


KEPT = (figures.WEIGHTS, figures.CACHES, figures.PEAK)


def memory(there: Sequence[Pair]) -> Plot | None:
    """What every method keeps."""
    first: dict[str, Pair] = {}
    for outcome, row in there:
        if row.memory is not None:
            first.setdefault(row.method, (outcome, row))
    if not first:
        return None
    kept = [(method, row.memory) for method, (_, row) in first.items() if row.memory]
    largest = max(kept, key=lambda pair: pair[1].total)
    unit, size = ("GB", 1e9) if largest[1].total >= 1e9 else ("MB", 1e6)
    title = f"Memory, at {there[0][0].case.context:,} tokens"
    with drawn("memory", 1.3 + BAR * len(kept)) as (axes, made, finish):
        stacked = {
            "weights": [held.weights / size for _, held in kept],
            "keys and values": [held.caches / size for _, held in kept],
        }
        bars(axes, [method for method, _ in kept], stacked, (SERIES[0], SERIES[1]))
        axes.set_xlabel(unit)
        alt = (
            f"Stacked bars of {len(kept)} methods. {largest[0]} needs most: {human(largest[1].total)}, "
            f"{human(largest[1].weights)} of them weights."
        )
        finish(title, alt)
    rows = [
        (
            row.method,
            outcome.case.words,
            *(c.text(outcome, row) for c in (figures.WEIGHTS, figures.CACHES, figures.PEAK)),
        )
        for outcome, row in first.values()
    ]
    caption = "What a method keeps for itself: weights, and keys and values of all its levels with room for the answer."
    return Plot("memory", title, caption, alt, made[0], ("method", "case", "weights", "keys and values", "peak"), rows)


def foretold(pairs: Sequence[Pair]) -> Plot | None:
    """Predicted beside measured."""
    shown = [(outcome, row) for outcome, row in pairs if row.predicted and row.seconds]
    if not shown:
        return None
    labels = [f"{row.method}, {name_of(outcome.case)}" for outcome, row in shown]
    measured = [1e3 * (row.seconds or 0.0) for _, row in shown]
    predicted = [1e3 * (row.predicted or 0.0) for _, row in shown]
    title = "Predicted and measured"
    with drawn("predicted", 1.4 + 0.3 * len(shown)) as (axes, made, finish):
        places = list(range(len(shown)))
        axes.hlines(places, predicted, measured, color=FAINT, linewidth=1.2)
        axes.plot(measured, places, "o", color=SERIES[0], label="measured", markersize=8)
        axes.plot(predicted, places, "D", color=SERIES[1], markerfacecolor=PAPER, label="predicted", markersize=7)
        axes.set_yticks(places, labels)
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel("milliseconds a token")
        axes.grid(axis="x", color=RULE, linewidth=0.4, alpha=0.5)
        axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=2)
        far = max(zip(labels, predicted, measured, strict=True), key=lambda t: max(t[1] / t[2], t[2] / t[1]))
        alt = (
            f"Pairs of marks for {len(shown)} runs. Furthest apart is {far[0]}: {far[1]:.1f} milliseconds predicted, "
            f"{far[2]:.1f} measured."
        )
        finish(title, alt)
    rows = [
        (row.method, outcome.case.words, f"{p:.2f}", f"{m:.2f}", f"{m / p:.2f}")
        for (outcome, row), p, m in zip(shown, predicted, measured, strict=True)
    ]
    caption = (
        "What the planner (`hspec plan`) promises from this host's measured rates, before anything runs, and what was "
        "measured. It takes acceptances that are typical of such a text."
    )
    heads = ("method", "case", "predicted ms", "measured ms", "measured / predicted")
    return Plot("predicted", title, caption, alt, made[0], heads, rows)
