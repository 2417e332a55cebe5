"""How often something can be done a second, and how much memory may be taken to find out."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

SAMPLE = 0.02  # seconds of work between two looks at the clock, so that starting it does not count
SAMPLES = 25  # more would not move the median
SHARE = 4  # part of the free memory that a measurement may take


class Unknown(Exception):
    """A figure that cannot be had here; the text says why."""


@dataclass(frozen=True)
class Figure:
    """A measured value, and how it was measured; None with the reason where it was not."""

    value: float | None
    how: str = "measured"


@dataclass(frozen=True)
class Effort:
    """What one probe may spend: `seconds` of repeating after the first time, `largest` bytes of host memory."""

    seconds: float = 1.0
    largest: int = 1 << 30


def first_line(failure: BaseException) -> str:
    """What an exception says, without the paragraphs that follow."""
    return (str(failure).strip().splitlines() or [type(failure).__name__])[0].rstrip(".")


def nothing() -> None:
    """What there is to wait for where work is done when it returns."""


def rate(
    work: Callable[[], object],
    amount: float,
    seconds: float,
    *,
    wait: Callable[[], object] = nothing,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Units a second of a `work` that does `amount` units: the median of samples that take about `seconds` together.

    `wait` returns when the work is done. The first time is warm-up and does not count.
    """

    def timed(times: int) -> float:
        began = clock()
        for _ in range(times):
            work()
        wait()
        return max(clock() - began, 1e-6 * times)

    timed(1)
    once = timed(1)
    times = max(1, round(SAMPLE / once))
    samples: list[float] = []
    spent = once
    while len(samples) < SAMPLES and spent + times * once < seconds:
        sample = timed(times)
        samples.append(sample / times)
        spent += sample
    return amount / statistics.median(samples or [once])


def buffer_size(largest: int, free: int, least: int, buffers: int = 1) -> int:
    """Bytes for each of so many buffers: a power of two, at most `largest`, in all at most a quarter of `free`.

    Raises Unknown when that would be less than `least`.
    """
    room = min(largest, free // SHARE // buffers)
    if room < least:
        there, needed = (f"{nbytes / 1e6:,.0f} MB" for nbytes in (free, SHARE * buffers * least))
        raise Unknown(f"not enough memory: {there} free, {needed} needed")
    return 1 << (room.bit_length() - 1)
