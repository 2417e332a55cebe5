"""The page: what was found, plots with their tables, all figures, how to read them, how they were measured."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape

from hspec_cli.bench import figures
from hspec_cli.bench.records import LOSSY, OTHER, PLAIN, REFERENCE, Outcome, Result, Row
from hspec_cli.bench.report.colours import FAINT, INK, LINK, PAPER, RULE, SHADE
from hspec_cli.bench.report.drawing import Plot
from hspec_cli.bench.report.plots import plots
from hspec_cli.bench.table import headline, published_cells

STYLE = f"""
:root {{ color-scheme: light; }}
body {{ font: 16px/1.5 system-ui, sans-serif; color: {INK}; background: {PAPER}; margin: 0 auto; max-width: 60rem;
  padding: 1.5rem; }}
h1 {{ font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; }}
h2 {{ font-size: 1.25rem; margin: 2.5rem 0 .5rem; }}
h3 {{ font-size: 1rem; margin: 1.5rem 0 .25rem; }}
p, li {{ max-width: 46rem; }}
.faint, figcaption, caption {{ color: {FAINT}; }}
figure {{ margin: 1rem 0 2rem; }}
figure svg {{ display: block; width: 100%; height: auto; max-width: 52rem; }}
figcaption {{ max-width: 46rem; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; margin: .5rem 0; }}
caption {{ text-align: left; padding-bottom: .25rem; }}
th, td {{ padding: .25rem .75rem .25rem 0; text-align: right; white-space: nowrap; vertical-align: top; }}
th:first-child, td:first-child {{ text-align: left; padding-left: .4rem; }}
thead th {{ border-bottom: 1px solid {RULE}; font-weight: 600; }}
tbody tr:nth-child(even) {{ background: {SHADE}; }}
tbody th {{ font-weight: 400; }}
.best th, .best td {{ font-weight: 700; }}
summary {{ cursor: pointer; color: {LINK}; }}
.found {{ font-size: 1.1rem; }}
dt {{ font-weight: 600; }} dd {{ margin: 0 0 .5rem; max-width: 46rem; }}
@media print {{ details > * {{ display: block; }} }}
"""

TERMS = {
    "plain decoding": "the model alone writes one token a pass; `autoregressive`, and `one-row` where the fixed shape "
    "that makes all texts equal costs time. Speed-ups are over the faster of the two.",
    "ms/token": "milliseconds of one token of each sequence, after the prompt has been read: the median over the "
    "trials. Range: the fastest and the slowest trial.",
    "× plain": "how many times faster than plain decoding in the same case. It is told only where the text is plain "
    "decoding's, token for token.",
    "tok/pass": "tokens that one pass of the whole model brings. Plain decoding brings 1; speculation proposes several "
    "by cheaper means and checks them in one pass.",
    "kept": "of the tokens that a cheaper level proposed and the next one looked at, the share that it kept. Cheapest "
    "level first.",
    "first": "time from the request to the first token, the prompt read anew.",
    "ceiling": "the speed that plain decoding would have if reading weights, keys and values once a token took all the "
    "time, at this host's measured rate. A method that saves passes can be above 100 %.",
    "memory": "weights, and keys and values, of all levels of the method.",
    "T": "temperature: 0 always takes the likeliest token.",
}


def page(result: Result) -> str:
    """The whole HTML document."""
    title = f"hspec bench: {result.model} on {result.host}"
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="faint">{escape(headline(result))}. Measured {escape(_date(result.began))} with hspec '
        f"{escape(result.version)}.</p>",
        "<h2>What was found</h2>",
        *(f'<p class="found">{escape(line)}</p>' for line in found(result)),
        *map(_figure, plots(result)),
        "<h2>All figures</h2>",
        *map(_outcome, (o for o in result.outcomes if not result.published or any(row.trials for row in o.rows))),
        *_published(result),
        "<h2>What the words mean</h2><dl>",
        *(f"<dt>{escape(word)}</dt><dd>{words(text)}</dd>" for word, text in TERMS.items()),
        "</dl>",
        "<h2>How it was measured</h2>",
        *_how(result),
        "</main></body></html>",
    ]
    return "\n".join(parts) + "\n"


def found(result: Result) -> Iterator[str]:
    """The outcome in sentences: the best of every case, whether texts agree, what was not run."""
    for outcome in result.outcomes:
        told = [row for row in outcome.rows if row.speed_up and row.role not in (REFERENCE, OTHER, LOSSY)]
        best = max(told, key=lambda row: row.speed_up or 0.0, default=None)
        if best is not None and best is not outcome.plain:
            yield f"{figures.heading(outcome.case)}: {_told(best, outcome)}"
    rows = [row for outcome in result.outcomes for row in outcome.rows if row.trials]
    if result.differing:
        names = ", ".join(sorted({row.method for _, row in result.differing}))
        yield f"The text of {names} was not always plain decoding's; no speed is told of those rows."
    elif any(row.same for row in rows if row.role not in (REFERENCE, OTHER, LOSSY)):
        others = sorted({row.method for row in rows if row.role == PLAIN and row.same is False})
        but = f" ({', '.join(others)}, plain decoding that rounds in another way, did not always.)" * bool(others)
        kind = "verified method" if any(row.role == LOSSY for row in rows) else "method"
        yield f"Every {kind} wrote plain decoding's text, token for token.{but}"
    missing = sum(not row.trials for outcome in result.outcomes for row in outcome.rows)
    if missing:
        yield f"{missing} row{'s were' if missing > 1 else ' was'} not run; the tables say why."
    if result.interrupted:
        yield "The bench was interrupted; these are the cases that were done."


def _told(best: Row, outcome: Outcome) -> str:
    """The best method's speed, and whether it stands out of the spread of the trials."""
    plain, seconds = outcome.plain, best.seconds or 1.0
    if best.speed_up is not None and best.speed_up < 1:
        return f"nothing was faster than plain decoding; {best.method} came nearest, {best.speed_up:.2f} times as fast."
    said = f"{best.method} writes {1 / seconds:,.1f} tokens a second, {best.speed_up:.2f} times plain decoding"
    if plain is not None and best.times[-1] >= plain.times[0] and best.times[0] <= plain.times[-1]:
        return f"{said}, which is within the spread of the trials."
    return f"{said}."


def _date(began: str) -> str:
    """To the minute."""
    return began[:16].replace("T", " ") + " UTC" * began.endswith("+00:00")


def words(text: str) -> str:
    """Text with its `code`, escaped."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))


def _figure(plot: Plot) -> str:
    return (
        f'<figure id="{plot.name}"><h2>{escape(plot.title)}</h2>{plot.svg}'
        f"<figcaption>{words(plot.caption)}</figcaption>"
        f"<details><summary>The figures of this plot</summary>{table(plot.title, plot.heads, plot.rows)}</details>"
        "</figure>"
    )


def table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], best: int | None = None) -> str:
    """A table with a caption, heads with their scope, and one row that stands out."""
    top = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    lines = []
    for number, (first, *rest) in enumerate(rows):
        kind = ' class="best"' if number == best else ""
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        lines.append(f'<tr{kind}><th scope="row">{escape(first)}</th>{cells}</tr>')
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


COLUMNS = (
    figures.SPEED_UP,
    figures.PER_PASS,
    figures.FIRST,
    figures.CEILING,
    figures.PREDICTED,
    figures.MEMORY,
    figures.JOULES,
)


def _outcome(outcome: Outcome) -> str:
    used = [c for c in COLUMNS if any(c.value(outcome, row) is not None for row in outcome.rows)]
    heads = ["method", "ms/token", "range", *(column.head for column in used), "kept"]
    rows = [
        [
            *(row.method, figures.MS.text(outcome, row), figures.spread(outcome, row)),
            *(column.text(outcome, row) for column in used),
            figures.accepted(row),
        ]
        for row in outcome.rows
    ]
    caption = figures.ceiling_words(outcome.ceiling) if outcome.ceiling else "no ceiling is known"
    notes = "".join(f"<li>{escape(remark)}</li>" for remark in figures.remarks(outcome))
    return f"<h3>{escape(figures.heading(outcome.case))}</h3>{table(caption, heads, rows, _best(outcome.rows))}" + (
        f"<ul>{notes}</ul>" if notes else ""
    )


def _best(rows: Sequence[Row]) -> int | None:
    told = [n for n, row in enumerate(rows) if row.speed_up]
    return max(told, key=lambda n: rows[n].speed_up or 0.0) if len(told) > 1 else None


def _published(result: Result) -> Iterator[str]:
    if not result.published:
        return
    heads = ("setting", "method", "paper", "here", "kept, paper", "kept, here", "why not here")
    rows = [(row.setting, row.method, *published_cells(row), row.reason or "") for row in result.published]
    yield "<h2>Beside the published figures</h2>"
    yield table("TriForce, arXiv 2404.11912, tables 2 to 4", heads, rows)


def _how(result: Result) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    yield (
        "<p>All methods ran in one process on the same weights, after the same warm-up, taking turns within each of "
        f"the {result.trials} trials, so that a change of the machine's speed meets all of them. Every text was "
        f"compared with plain decoding's, token by token. The prompts are pieces of: {escape(result.text)}; seed "
        f"{result.seed}.</p>"
    )
    stacks = {row.method: row.typical.stack for o in result.outcomes for row in o.rows if row.typical}
    told = [(method, stack) for method, stack in stacks.items() if stack]
    if told:
        yield table("Levels of each method, cheapest first, in its last case", ("method", "levels"), told)
    yield "".join(f"<p>{words(note)}</p>" for note in result.notes)
    yield f'<p class="faint">{escape(versions)}; {escape(result.dtype)} on {escape(result.device)}.</p>'
