"""The runner of `hspec bench`: turns, warm-ups, statistics, and what is not told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench_tools import SHORT, TEXT, Fake, plain, runner

from hspec_cli.bench import defaults, figures
from hspec_cli.bench.compare import verdict_of
from hspec_cli.bench.defaults import Asked, chosen
from hspec_cli.bench.meter import Meter, Pace
from hspec_cli.bench.records import OTHER, PLAIN, Case, Outcome
from hspec_cli.bench.runner import Contestant, cases, judged
from hspec_cli.bench.texts import code, prompts, prose, tokens_of
from hspec_profiles.errors import DoesNotFit, UsageError

PROMPTS = [(1, 2, 3)]
LATE = (*TEXT[:17], 7, *TEXT[18:])  # differs at token 17


def run(*contestants: Contestant, trials: int = 3, case: Case = SHORT, **options: object) -> Outcome:
    return judged(case, runner(trials, **options).case(case, PROMPTS, contestants))


def test_methods_take_turns_after_their_warm_up() -> None:
    log: list[str] = []
    who = [Fake(name, [0.01], log=log) for name in "abc"]
    run(*who)
    assert log[:3] == ["warm a", "warm b", "warm c"]
    assert log[3:] == ["a anew", "b anew", "c anew", "b", "c", "a", "c", "a", "b"]


def test_the_prompt_is_read_anew_once_for_all_temperatures_or_in_every_trial() -> None:
    one, log = runner(2), []
    for heat in (0.0, 0.6):
        one.case(replace(SHORT, temperature=heat), PROMPTS, [Fake("a", [0.01], log=log)])
    assert [line for line in log if "warm" not in line] == ["a anew", "a", "a", "a"]
    always = Fake("a", [0.01])
    run(always, trials=2, fresh=True)
    assert always.log[1:] == ["a anew", "a anew"]


def test_median_spread_and_speed_up_over_the_fastest_plain_decoding() -> None:
    one_row = Fake("one-row", [0.016], PLAIN, text=LATE)
    outcome = run(plain(0.020, 0.024, 0.019), one_row, Fake("triforce", [0.008, 0.004, 0.009]))
    reference, other, method = outcome.rows
    assert reference.seconds == 0.020
    assert reference.times == (0.019, 0.020, 0.024)
    assert figures.spread(outcome, reference) == "19.0-24.0"
    assert outcome.plain is other
    assert method.speed_up == pytest.approx(2.0)
    assert reference.speed_up == pytest.approx(0.8)
    assert method.tokens_per_pass == 4
    assert method.first == 2.0
    assert method.joules == 0.5
    assert figures.accepted(method) == ".75"


def test_no_speed_is_told_of_another_text_and_the_place_is() -> None:
    outcome = run(plain(), Fake("triforce", [0.005], others={1: LATE}))
    row = outcome.rows[1]
    assert row.withheld
    assert row.speed_up is None
    assert row.difference is not None
    assert row.difference.token == 17
    assert (figures.MS.text(outcome, row), figures.SPEED_UP.text(outcome, row)) == ("-", "-")
    assert all(column.value(outcome, row) is None for column in (figures.MS, figures.FASTEST, figures.CEILING))
    assert "token 17: '117 118 119" in "\n".join(figures.remarks(outcome))


def test_a_text_that_ends_early_differs_too() -> None:
    row = run(plain(), Fake("triforce", [0.005], text=TEXT[:40])).rows[1]
    assert row.difference is not None
    assert row.difference.token == 40


def test_plain_decoding_that_changes_its_text_denies_all_speed_ups() -> None:
    reference = plain()
    reference.others[2] = LATE
    outcome = run(reference, Fake("triforce", [0.005]))
    assert [row.speed_up for row in outcome.rows] == [None, None]
    assert "its own text changed" in "\n".join(figures.remarks(outcome))


def test_another_implementation_keeps_its_time_and_has_a_speed_up_only_for_the_same_text() -> None:
    rows = run(plain(), Fake("hf", [0.04], OTHER, text=LATE), Fake("hf-offloaded", [0.04], OTHER)).rows
    assert [(row.withheld, row.speed_up) for row in rows[1:]] == [(False, None), (False, 0.5)]
    warm = run(plain(), Fake("hf", [0.04], OTHER), case=replace(SHORT, temperature=0.6))
    assert (warm.rows[1].same, warm.rows[1].speed_up) == (None, None)
    assert "another implementation" in "\n".join(figures.remarks(warm))


@pytest.mark.parametrize("failure", [DoesNotFit("too large"), MemoryError()], ids=["hspec", "memory"])
def test_a_method_that_cannot_run_is_a_row_with_its_reason(failure: Exception) -> None:
    outcome = run(plain(), Fake("triforce", [0.01], failure=failure))
    assert not outcome.rows[1].trials
    assert outcome.rows[1].reason in ("too large", "host memory ran out")
    assert "not run" in "\n".join(figures.remarks(outcome))


def test_a_mistake_of_ours_is_no_row() -> None:
    with pytest.raises(RuntimeError):
        run(plain(), Fake("triforce", [0.01], failure=RuntimeError("a bug")))
    assert run(plain(), Fake("hf", [0.01], OTHER, failure=RuntimeError("theirs"))).rows[1].reason == "theirs"


def test_when_the_time_is_up_every_method_has_one_trial() -> None:
    now = [0.0]
    who = [Fake(name, [0.1], clock=now) for name in "abc"]
    one = runner(5, deadline=20.0, clock=lambda: now[0])
    rows = one.case(SHORT, PROMPTS, who)
    assert [len(row.trials) for row in rows] == [1, 1, 1]
    assert one.late


def test_cases_are_ordered_by_size_with_temperatures_together() -> None:
    made = list(cases([4096, 512], 64, [0.6, 0.0], [2, 1]))
    assert [(case.batch, case.context, case.temperature) for case in made[:3]] == [
        (1, 512, 0.6),
        (1, 512, 0.0),
        (1, 4096, 0.6),
    ]
    assert len(made) == 8


def test_pace_follows_from_two_runs() -> None:
    pace = Pace.of((256, 1.0, 0.020), (1024, 7.0, 0.026))
    assert pace.reading(Case(1024, 1)) == pytest.approx(7.0)
    assert pace.reading(Case(256, 1)) == pytest.approx(1.0)
    assert pace.reading(Case(4096, 1)) > 4 * 7.0
    assert Pace.of((256, 1.0, 0.03), (1024, 3.0, 0.02)).decoding(Case(9000, 100)) == pytest.approx(2.0)  # noise


@pytest.mark.parametrize("speed", [1e-4, 1e-3, 1e-2, 0.1, 1.0])
def test_a_bare_bench_chooses_what_its_time_allows(speed: float) -> None:
    pace = Pace(speed / 30, 0.0, speed, speed / 1e5)
    work = chosen(Asked(), 8192, pace, 3, 280.0)
    least = len(work.cases) == 2 and work.cases[0].context == defaults.LEAST
    assert least or defaults.expected(work, pace, 3) <= 280.0
    assert max(case.context + case.new for case in work.cases) <= 8192
    assert work.trials >= 2


def test_a_bare_bench_of_a_tiny_context_stays_within_it() -> None:
    work = chosen(Asked(), 64, Pace(1e-5, 0, 1e-4, 0), 3, 100.0)
    assert all(1 <= case.context < case.context + case.new <= 64 for case in work.cases)


def test_what_was_asked_for_is_done() -> None:
    work = chosen(Asked((512, 128), 24, (0.0,), (1, 4), 2), 8192, Pace(1, 1, 1, 1), 3, 1.0)
    assert [(case.context, case.new, case.batch) for case in work.cases] == [
        (128, 24, 1),
        (512, 24, 1),
        (128, 24, 4),
        (512, 24, 4),
    ]
    assert work.trials == 2


def test_the_time_left_is_mended_by_what_was_measured() -> None:
    now, told = [0.0], []
    meter = Meter(Pace(0.0, 0.0, 0.1, 0.0), lambda _what, gone, total: told.append((gone, total)), lambda: now[0])
    meter.plan(["a"], [SHORT], 2, fresh=False)
    for _ in range(2):
        with meter.step("a", SHORT, fresh=not meter.learned):
            now[0] += 30.0
    assert told[0] == (0.0, pytest.approx(2 * 6.7))
    assert told[-1] == (60.0, 60.0)
    assert [figures.clock(s) for s in (45, 125, 3725)] == ["45 s", "2:05", "1:02:05"]


def test_prompts_are_different_pieces_of_a_real_text() -> None:
    document = tokens_of(code(), 5000, lambda text: [ord(c) for c in text])
    assert len(document) >= 5000
    made = prompts(document, 1000, 4)
    assert {len(prompt) for prompt in made} == {1000}
    assert len(set(made)) == 4
    assert len(prose()) > 100_000
    with pytest.raises(UsageError, match="the text has"):
        prompts(document, len(document) + 1, 1)
    with pytest.raises(UsageError, match="different prompts"):
        prompts(document, len(document), 2)


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ([10, 11, 12], [7, 8, 9], "faster"),
        ([7, 8, 9], [10, 11, 12], "slower"),
        ([10, 11, 12], [9, 10.5, 11], "as fast"),
        ([10, 10.01, 10.02], [9.9, 9.91, 9.92], "as fast"),
        ([10, 11], [5, 6], "too few trials"),
        ([10, 11, 12], [5, 6], "too few trials"),
        ([10, 11, 12, 13, 14], [5, 6], "faster"),
    ],
)
def test_what_is_a_change(old: list[float], new: list[float], verdict: str) -> None:
    assert verdict_of(old, new) == verdict
