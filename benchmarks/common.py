"""What the benchmarks of a GPU share: documents, models, clocks, and rows as they are printed."""

from __future__ import annotations

import json
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hspec_decoding.checkpoints import hub
from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.events import Report, Round

Row = dict[str, Any]


@dataclass
class Spent:
    """What rounds of one stack brought and took."""

    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0
    inside: float = 0.0  # seconds that levels account for

    def take(self, done: Round) -> None:
        """Enter a round."""
        self.rounds += 1
        self.tokens += done.levels[-1].kept
        self.seconds += done.seconds
        self.inside += sum(level.seconds for level in done.levels)

    @property
    def told(self) -> str:
        ms, share = 1e3 * self.seconds / max(1, self.tokens), self.inside / self.seconds
        return f"{self.rounds} rounds, {self.tokens} tokens, {ms:.2f} ms a token, {share:.0%} of it in levels"


@dataclass
class Run:
    """What a run said, how long it took (ms a token of each sequence), and its rounds by the stack that made them."""

    texts: dict[int, list[int]]
    report: Report
    ms: float
    spent: dict[str, Spent]


def say(line: str) -> None:
    print(line, flush=True)


def open_checkpoint(path: str) -> Checkpoint:
    directory = hub.fetch(path, offline=True, say=lambda line: print(line, file=sys.stderr), progress=None)
    return Checkpoint.open(directory)


def sources() -> str:
    """Source code that every Python has, some 400,000 tokens."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.name)
    return "\n\n".join(f"# {path.name}\n{path.read_text(errors='replace')}" for path in files)[:1_500_000]


def seconds_of(work: Callable[[], object], repeats: int = 10) -> float:
    """Median GPU seconds of `work`."""
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()  # type: ignore[no-untyped-call]
        work()
        end.record()  # type: ignore[no-untyped-call]
        end.synchronize()  # type: ignore[no-untyped-call]
        times.append(start.elapsed_time(end) / 1e3)  # type: ignore[no-untyped-call]
    return statistics.median(times[2:])


def printed(names: Sequence[str], sections: Mapping[str, Callable[[], Iterator[Row]]], results: Row) -> None:
    """Run sections, their rows printed as they come, and print all that was found as the last line, in JSON."""
    measured(names, sections, results)
    print(json.dumps(results))


def measured(names: Sequence[str], sections: Mapping[str, Callable[[], Iterator[Row]]], results: Row) -> None:
    """Run sections, and print their rows as they come."""
    for name in names:
        say(f"\n{name}")
        started = time.perf_counter()
        results[name] = []
        for row in sections[name]():
            results[name].append(row)
            say("  ".join(f"{key} {shown(value)}" for key, value in row.items()))
        say(f"({time.perf_counter() - started:.0f} s)")


def shown(value: object) -> str:
    """A value for people."""
    return f"{value:.2f}" if isinstance(value, float) else str(value)
