"""The clock of all probes, and the memory that they may take."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hspec_profiles.probes.timing import SAMPLES, Unknown, buffer_size, first_line, rate


class Work:
    """Work of a known speed, on a clock of its own; nothing is done before somebody waits for it."""

    def __init__(self, *seconds: float) -> None:
        self.now, self.queued, self.times = 0.0, 0, 0
        self.seconds = itertools.chain(seconds[:-1], itertools.repeat(seconds[-1]))

    def begin(self) -> None:
        self.queued += 1
        self.times += 1

    def wait(self) -> None:
        self.now += sum(next(self.seconds) for _ in range(self.queued))
        self.queued = 0


def measured(work: Work, amount: float, seconds: float) -> float:
    return rate(work.begin, amount, seconds, wait=work.wait, clock=lambda: work.now)


def test_units_a_second() -> None:
    assert measured(Work(0.5), 100, 5) == pytest.approx(200)
    assert measured(Work(1e-5), 100, 1) == pytest.approx(1e7)


def test_the_first_time_is_warm_up() -> None:
    assert measured(Work(30, 0.5), 100, 2) == pytest.approx(200)
    assert measured(Work(30, 0.5), 100, 0) == pytest.approx(200)  # no time for more than one sample


def test_a_disturbance_does_not_move_the_median() -> None:
    assert measured(Work(1, 0.1, 0.1, 0.1, 5, 0.1), 1, 10) == pytest.approx(10)
    assert measured(Work(1, 5, 0.1), 1, 60) == pytest.approx(10)


@pytest.mark.parametrize("once", [1e-6, 1e-3, 0.1, 0.9, 2.0])
def test_seconds_are_kept_to(once: float) -> None:
    work = Work(once)
    measured(work, 1, 1.0)
    assert work.now <= max(1.0, once) + once + 1e-9
    assert work.times * once <= 2 * max(1.0, once)


def test_short_work_is_repeated_between_two_looks_at_the_clock() -> None:
    work = Work(1e-4)
    measured(work, 1, 100)
    assert work.times == 2 + SAMPLES * 200


def test_a_clock_that_stands_still_is_no_division_by_zero() -> None:
    assert rate(lambda: None, 1, 0.1, clock=lambda: 0.0) > 0


@given(largest=st.integers(4096, 1 << 40), free=st.integers(1 << 17, 1 << 42), buffers=st.integers(1, 8))
def test_at_most_a_quarter_of_the_memory(largest: int, free: int, buffers: int) -> None:
    size = buffer_size(largest, free, 4096, buffers)
    assert 4096 <= size <= largest
    assert size & (size - 1) == 0
    assert 4 * buffers * size <= free


@pytest.mark.parametrize(("largest", "free"), [(4095, 1 << 40), (1 << 40, 4 * 3 * 4096 - 1), (1 << 40, 0)])
def test_too_little_memory(largest: int, free: int) -> None:
    with pytest.raises(Unknown, match="not enough memory"):
        buffer_size(largest, free, 4096, buffers=3)


def test_reasons_are_one_line() -> None:
    assert first_line(RuntimeError("CUDA error: busy.\nCompile with `TORCH_USE_CUDA_DSA`")) == "CUDA error: busy"
    assert first_line(ValueError()) == "ValueError"
