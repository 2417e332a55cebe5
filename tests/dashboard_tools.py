"""What the tests of dashboards share: recorded and made-up streams, snapshots, a terminal that can be looked at."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from hspec_cli.dashboard import stream
from hspec_cli.dashboard.stream import Began, Ended, Progressed, Said, Timed
from hspec_decoding.events import (
    DeviceMemory,
    Emitted,
    Expected,
    Finished,
    InFlight,
    LayerPlace,
    LevelRound,
    MemoryPart,
    Placed,
    Prefilled,
    Round,
)

SNAPSHOTS = Path(__file__).parent / "cli" / "snapshots"
PROSE = "A llama [/INST] in the hills said [bold]nothing[/bold] :smile: and\twalked on, 見る and \x1b[2Jé\u202e. "


def resident() -> list[Timed]:
    """A real run, of the small model on a CPU."""
    return stream.read(str(SNAPSHOTS / "resident.jsonl"))


def offloaded() -> list[Timed]:
    """A made-up run of a large model whose layers are everywhere, on two GPUs."""
    began = Began(
        "big-70b", "cuda:0", "bfloat16", "draft > target(retrieval:4096) > target(full)", "greedy", 9000, 400, 9400
    )
    made = [Timed(0.1, Progressed("layers loaded", 1, 80)), Timed(8.1, Progressed("layers loaded", 80, 80))]
    made += [
        Timed(8.2, Progressed("bytes pinned", 0, 60 * 10**9)),
        Timed(20.2, Progressed("bytes pinned", 6 * 10**10, 6 * 10**10)),
    ]
    made += [Timed(20.3, began), Timed(20.3, Expected(0.11, 0.9, 14.0, 9.07e11, 2.5e10, 6.5e10)), Timed(20.4, placed())]
    made += [Timed(20.4 + n, Prefilled(600 * n, 9000)) for n in range(16)]
    for n in range(60):
        at = round(37.0 + 0.4 * n, 3)
        kept = (5, 3, 6, 0)[n % 4]
        made += [Timed(at, Emitted((7,) * (kept + 1))), Timed(at, Said(PROSE[7 * n % 60 : 7 * n % 60 + 24]))]
        made += [Timed(at, _round(kept, 0.4 if kept else 1.1)), Timed(round(at + 0.1, 3), InFlight(n % 80))]
    return [*made, Timed(62.0, Finished("eos")), Timed(62.0, Ended("eos"))]


def placed() -> Placed:
    layers = (
        [LayerPlace("gpu", "gpu", "int4")] * 30
        + [LayerPlace("4bit", "gpu")] * 10
        + [LayerPlace("streamed", "host", "int4")] * 25
    )
    layers += [LayerPlace("cpu", "split")] * 10 + [LayerPlace("disk", "cpu")] * 5
    parts = tuple(
        MemoryPart(*part)
        for part in (("weights, 16 bits", 14 * 10**9), ("KV cache", 4 * 10**9), ("ring of buffers", 10**9))
    )
    gpus = [DeviceMemory(f"GPU {n} (NVIDIA GeForce RTX 4090)", 25 * 10**9, parts) for n in range(2)]
    ram = DeviceMemory(
        "RAM", 120 * 10**9, (MemoryPart("weights, 16 bits", 60 * 10**9), MemoryPart("KV cache", 8 * 10**9))
    )
    return Placed(tuple(layers), (*gpus, ram))


def _round(kept: int, seconds: float) -> Round:
    draft = LevelRound("draft", 9, 6, 1, 9, 0.1 * seconds)
    middle = LevelRound("target(retrieval:4096)", 6, kept, int(kept < 6), 3, 0.3 * seconds)
    target = LevelRound("target(full)", kept + 1, kept + 1, 0, 1, 0.5 * seconds)
    done = Round(6, kept, (3, 6), seconds, (draft, middle, target), 0.8, 0.1)
    return replace(done, gpu_bytes=int(3e11 * seconds), link_bytes=int(2.3e10 * seconds), ram_bytes=int(4e10 * seconds))


def same(name: str, lines: list[str]) -> None:
    """Compare lines with the snapshot of this name, which HSPEC_SNAPSHOTS=write makes anew."""
    path, text = SNAPSHOTS / f"{name}.txt", "".join(f"{line.rstrip()}\n" for line in lines)
    if os.environ.get("HSPEC_SNAPSHOTS") == "write":
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8"), f"{name}: HSPEC_SNAPSHOTS=write makes it anew"


class Terminal:
    """As much of a terminal as `hspec` uses: text, lines that wrap late, cursor moves, erasing, two screens."""

    CODES = re.compile(r"\x1b(?:\[(\??)([\d;]*)([A-Za-z])|([78DM]))|[\s\S]")

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.main = self.cells = [[" "] * width for _ in range(height)]
        self.row = self.column = 0
        self.saved = self.main_at = (0, 0)
        self.cursor, self.alternate = True, False

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self.cells]

    def feed(self, text: str) -> Terminal:
        for match in self.CODES.finditer(text):
            private, numbers, code, single = match.groups()
            if code or single:
                self._act(private or "", [int(n or 0) for n in (numbers or "").split(";")], code or single)
            elif match[0] == "\x1b":
                raise AssertionError(f"unknown code at {text[match.start() : match.start() + 12]!r}")
            else:
                self._put(match[0])
        return self

    def _put(self, char: str) -> None:
        if char == "\n":
            self._down()
            self.column = 0  # as the line discipline has it
        elif char == "\r":
            self.column = 0
        else:
            assert char.isprintable(), repr(char)
            if self.column == self.width:
                self._down()
                self.column = 0
            self.cells[self.row][self.column] = char
            self.column += 1

    def _down(self) -> None:
        if self.row < self.height - 1:
            self.row += 1
        else:
            self.cells.append([" "] * self.width)
            del self.cells[0]

    def _act(self, private: str, numbers: list[int], code: str) -> None:
        if private:
            self._mode(numbers[0], code == "h")
        elif code == "D":
            self._down()
        elif code in "AB":
            self.row = max(0, min(self.height - 1, self.row + (1 if code == "B" else -1)))
        elif code == "7":
            self.saved = self.row, self.column
        elif code == "8":
            self.row, self.column = self.saved
        elif code == "H":
            self.row, self.column = (max(0, n - 1) for n in (*numbers, 1)[:2])
        elif code in "JK":
            self._erase(whole=code == "J", all_=numbers[0] == 2)
        else:
            assert code == "m", code

    def _erase(self, whole: bool, all_: bool) -> None:
        row, column = (0, 0) if all_ else (self.row, min(self.column, self.width - 1))
        self.cells[row][column:] = [" "] * (self.width - column)
        for below in range(row + 1, self.height) if whole else ():
            self.cells[below] = [" "] * self.width

    def _mode(self, number: int, on: bool) -> None:
        if number == 25:
            self.cursor = on
        elif number == 1049:
            self.alternate = on
            if on:
                self.main_at = self.row, self.column
                self.cells = [[" "] * self.width for _ in range(self.height)]
            else:
                self.cells = self.main
                self.row, self.column = self.main_at
