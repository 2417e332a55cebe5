"""What `hspec bench` makes of its measurements: tables, files, the page."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from bench_tools import CEILING, SHORT, TEXT, Fake, plain, result, row, runner
from case_tools import ESCAPES

from hspec_cli.bench import compare, compare_text, document, suite, table
from hspec_cli.bench.records import OTHER, PLAIN, Case, Outcome, Result
from hspec_cli.bench.report import colours
from hspec_cli.bench.report.page import page
from hspec_cli.bench.runner import judged, skipped
from hspec_profiles.errors import HspecError

OTHERS = TEXT[:9] + (1,) * 55
VOID = {"meta", "br", "hr", "img", "link"}


def measured(contexts: tuple[int, ...] = (1024, 4096), heats: tuple[float, ...] = (0.0, 0.6)) -> Result:
    outcomes = []
    for context in contexts:
        for heat in heats:
            case = Case(context, 64, heat)
            who = [
                plain(0.02, 0.021, 0.022),
                Fake("one-row", (0.018, 0.019, 0.02), PLAIN, text=OTHERS),
                Fake("triforce", (0.006, 0.007, 0.008)),
                Fake("broken <b>", (0.001,), text=OTHERS),
                Fake("hf", (0.04,), OTHER),
                Fake("large", (0.1,), failure=HspecError("no room for [/it]")),
            ]
            outcomes.append(judged(case, runner().case(case, [(1, 2)], who), CEILING))
    return result(outcomes)


def test_the_table_fits_80_columns_and_holds_no_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = table.listing(measured())
    assert not ESCAPES.search(text)
    assert max(map(len, text.splitlines())) <= 80
    assert "4,096 tokens of prompt, 64 new, temperature 0.6" in text
    lines = [line for line in text.splitlines() if line.startswith("triforce")]
    assert re.match(r"triforce +7.00 6.00-8.00 +2.71× +4.0 +.75 +2.0 s +167%", lines[0]), lines[0]
    broken = next(line for line in text.splitlines() if line.startswith("broken <b> "))
    assert broken.split()[2:5] == ["-", "-", "-"]
    assert "note: large: not run: no room for [/it]" in text
    assert "note: broken <b>: the text is not plain decoding's: token 9" in text


def test_a_wide_table_has_memory_and_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "130")
    text = table.listing(measured())
    assert "memory" in text.split("triforce")[0]
    assert re.search(r"triforce .*365 MB +0\.50", text)


def test_json_is_read_back_as_it_was() -> None:
    made = replace(measured(), published=tuple(suite.published([], False)))
    raw = json.loads(document.as_json(made))
    assert raw["outcomes"][0]["rows"][2]["figures"]["speed_up"] == pytest.approx(19 / 7)
    assert raw["outcomes"][0]["rows"][3]["figures"]["ms_per_token"] is None
    assert raw["outcomes"][0]["rows"][3]["figures"]["speed_withheld"]


def test_json_files_round_trip(tmp_path: Path) -> None:
    made, path = measured(), tmp_path / "bench.json"
    path.write_text(document.as_json(made))
    assert document.load(str(path)) == made
    path.write_text("{}")
    with pytest.raises(HspecError, match="not what"):
        document.load(str(path))
    with pytest.raises(HspecError, match="cannot read"):
        document.load(str(tmp_path / "none.json"))


def test_csv_has_a_line_for_every_row() -> None:
    lines = list(csv.DictReader(io.StringIO(document.as_csv(measured()))))
    assert len(lines) == 24
    assert (lines[2]["method"], lines[2]["text"], lines[2]["ms_per_token"]) == ("triforce", "same", "7")
    assert (lines[3]["ms_per_token"], lines[3]["speed_up"], lines[3]["text"]) == ("", "", "differs")
    assert lines[5]["reason"] == "no room for [/it]"


def test_markdown_has_tables_of_equal_width() -> None:
    text = document.as_markdown(measured())
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        assert len({line.count("|") for line in block.strip().splitlines()}) == 1
    assert "| triforce | 7.00 |" in text


class Page(HTMLParser):
    """Tags with their attributes, ids, and whether every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def report() -> str:
    return page(measured())


def test_the_page_needs_nothing_else(report: str) -> None:
    assert not re.search(r"https?:|src=|@import|xmlns|<script|<link|<image|file:", report)
    targets = re.findall(r'href="([^"]*)"|url\(([^)]*)\)', report)
    ids = set(re.findall(r'\bid="([^"]*)"', report))
    assert all((a or b).removeprefix("#") in ids for a, b in targets)
    assert "a &lt;model&gt; &amp; more" in report
    assert "broken <b>" not in report


def test_the_page_is_sound_and_can_be_read_without_seeing_it(report: str) -> None:
    parsed = Page(report)
    assert not parsed.open
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert parsed.named("html")[0]["lang"] == "en"
    figures = parsed.named("figure")
    assert [figure["id"] for figure in figures] == ["speed", "acceptance", "time", "memory", "predicted"]
    assert len(parsed.named("svg")) == len(figures)
    for drawing in parsed.named("svg"):
        assert drawing["role"] == "img"
        for name in (drawing["aria-labelledby"] or "").split():
            assert re.search(rf'id="{name}">[^<]+<', report)
    assert report.count("<details>") == len(figures)
    assert len(parsed.named("table")) >= len(figures) + 4
    assert len(parsed.named("caption")) == len(parsed.named("table"))
    assert all(head.get("scope") in ("col", "row") for head in parsed.named("th"))


def test_the_page_says_what_was_found(report: str) -> None:
    assert "triforce writes 142.9 tokens a second, 2.71 times plain decoding." in report
    assert "The text of broken &lt;b&gt; was not always plain decoding&#x27;s" in report
    assert "times the fastest plain decoding" in report


def test_what_does_not_stand_out_of_the_noise_is_said_so() -> None:
    case = Case(1024, 64)
    who = [plain(0.02, 0.021, 0.022), Fake("triforce", (0.015, 0.019, 0.03))]
    text = page(result([judged(case, runner().case(case, [(1, 2)], who))]))
    assert "which is within the spread of the trials" in text
    slow = [plain(0.02), Fake("triforce", (0.04,))]
    text = page(result([judged(case, runner().case(case, [(1, 2)], slow))]))
    assert "nothing was faster than plain decoding; triforce came nearest, 0.50 times as fast" in text


@pytest.mark.parametrize("heats", [(0.0,), (0.0, 0.6)])
def test_one_context_is_drawn_as_bars(heats: tuple[float, ...]) -> None:
    text = page(measured((1024,), heats))
    assert "Speed-up at 1,024 tokens" in text
    Page(text)


def test_a_page_of_nothing_is_a_page() -> None:
    text = page(result([skipped(SHORT, [("triforce", "method")], "no time")]))
    assert not Page(text).named("svg")
    assert "1 row was not run" in text


def test_colours_can_be_told_from_the_paper() -> None:
    assert colours.contrast("#000000", "#ffffff") == pytest.approx(21)
    for text in (colours.INK, colours.FAINT, colours.LINK):
        assert colours.contrast(text, colours.PAPER) >= 4.5
    for text in (colours.INK, colours.FAINT):
        assert colours.contrast(text, colours.SHADE) >= 4.5
    for drawn in (*colours.SERIES, *colours.PARTS.values(), colours.RULE):
        assert colours.contrast(drawn, colours.PAPER) >= 3


def test_the_page_uses_no_other_colours(report: str) -> None:
    known = {colours.PAPER, colours.INK, colours.FAINT, colours.RULE, colours.LINK, colours.SHADE}
    known |= {*colours.SERIES, *colours.PARTS.values(), "#000000"}
    assert set(re.findall(r"#[0-9a-f]{6}\b", report)) <= known


def outcome(*seconds: float) -> Outcome:
    return Outcome(SHORT, (row("triforce", *seconds),))


def test_compare_tells_changes_what_else_changed_and_the_rule() -> None:
    old = result([outcome(0.010, 0.011, 0.012), Outcome(Case(9, 9), (row("gone", 0.1),))])
    new = replace(result([outcome(0.005, 0.006, 0.007)]), dtype="float32", versions={"torch": "2.14.0"})
    text = compare_text.listing(old, new)
    assert re.search(r"triforce 1,024 tokens, T 0 +11.0 +6.00 +1.83 +faster", text), text
    assert "only in the old" in text
    assert "the dtype is another: bfloat16 before, float32 now" in text
    assert "torch was 2.13.0 and is 2.14.0" in text
    assert "1 faster, 0 slower" in text
    assert "do not overlap" in text
    assert not ESCAPES.search(text)
    raw = json.loads(compare_text.as_json(old, new))
    assert raw["changes"][0]["verdict"] == "faster"
    assert compare_text.as_markdown(old, new).count("| triforce |") == 1


def test_compare_does_not_tell_of_withheld_speeds() -> None:
    good = measured((1024,), (0.0,))
    made = {change.method: change for change in compare.changes(good, good)}
    assert made["broken <b>"].verdict == "in neither"
    assert "not plain decoding's" in made["broken <b>"].remark
    assert made["triforce"].verdict == "as fast"


def test_the_papers_rows_stand_beside_what_was_measured() -> None:
    case = Case(suite.PROMPT, suite.NEW, 0.6)
    made = Outcome(case, (row(suite.PAPER, 0.01, speed_up=2.5), row("autoregressive", 0.025, role="reference")))
    rows = suite.published([made], False)
    by = {(one.table, one.setting, one.method): one for one in rows}
    assert len(rows) == len(by) == 2 * 7 + 2 + 3 * 4 + 7
    beside = by["2", "A100, 122K, T 0.6", suite.PAPER]
    assert (beside.speed_up, beside.measured, beside.measured_acceptance) == (2.19, 2.5, 0.75)
    assert all(one.reason for one in rows if one.measured is None)
    assert sum(one.measured is not None for one in rows) == 1
    assert all(other.case.context + other.case.new <= 131072 for other in suite.contests(False))


def test_the_suite_with_offloading_stands_beside_its_own_rows() -> None:
    (contest,) = suite.contests(True)
    made = Outcome(contest.case, (row(suite.PAPER_OFFLOADED, 0.3, speed_up=5.5),))
    told = [one for one in suite.published([made], True) if one.measured is not None]
    assert [(one.speed_up, one.measured) for one in told] == [(4.86, 5.5)]
