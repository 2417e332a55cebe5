"""The dashboard: snapshots of its views from recorded streams, what holds for any of them, the stream itself."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from dashboard_tools import PROSE, Terminal, offloaded, resident, same
from rich.cells import cell_len

from hspec_cli.dashboard import stream
from hspec_cli.dashboard.feed import Feed
from hspec_cli.dashboard.glyphs import ASCII, UNICODE, last_lines, safe
from hspec_cli.dashboard.hardware import layer_map
from hspec_cli.dashboard.live import Screen, leave_behind, plain
from hspec_cli.dashboard.parts import LIT, status
from hspec_cli.dashboard.state import SLOTS, History, State, folded
from hspec_cli.dashboard.stream import Began, Ended, Said, Timed
from hspec_cli.dashboard.view import render
from hspec_decoding.events import Emitted, InFlight, Prefilled, Round
from hspec_profiles.errors import HspecError

STREAMS = {"resident": resident, "offloaded": offloaded}


def upto(timed: Sequence[Timed], seconds: float) -> State:
    """The state at a time."""
    return folded(one for one in timed if one.at <= seconds)


# --- snapshots ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "at", "width", "height"),
    [
        ("resident", 1.7, 80, 24),
        ("resident", 3.6, 80, 24),
        ("resident", 5.6, 80, 24),
        ("resident", 5.6, 120, 40),
        ("resident", 5.6, 20, 10),
        ("resident", 9.9, 80, 24),
        ("offloaded", 4.0, 80, 24),
        ("offloaded", 15.0, 60, 12),
        ("offloaded", 30.0, 80, 24),
        ("offloaded", 52.5, 80, 24),
        ("offloaded", 52.5, 80, 50),
        ("offloaded", 52.5, 140, 45),
        ("offloaded", 52.5, 46, 20),
        ("offloaded", 52.5, 20, 24),
        ("offloaded", 52.5, 20, 10),
    ],
)
def test_views(name: str, at: float, width: int, height: int) -> None:
    lines = render(upto(STREAMS[name](), at), width, height, at)
    same(f"{name}-{at:g}s-{width}x{height}", [line.plain for line in lines])


@pytest.mark.parametrize("name", STREAMS)
def test_plain_lines(name: str) -> None:
    lines = list(plain(folded(STREAMS[name]())))
    assert all(line.isascii() for line in lines)
    same(f"{name}-plain", [*lines, status(folded(STREAMS[name]()))])


# --- what holds for any view -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STREAMS)
def test_every_size_is_kept_and_nothing_acts_on_the_terminal(name: str) -> None:
    timed = STREAMS[name]()
    for at in (0.0, 1.7, 3.6, 5.6, 15.0, 25.0, 52.5, 99.0):
        state = upto(timed, at)
        for width, height in ((1, 1), (7, 3), (20, 10), (33, 8), (47, 19), (71, 24), (80, 24), (104, 9), (200, 60)):
            lines = render(state, width, height, at, ASCII if width == 71 else UNICODE)
            assert len(lines) <= height
            assert max(line.cell_len for line in lines) <= width
            assert all(char.isprintable() for line in lines for char in line.plain)


def test_a_view_depends_on_the_stream_alone() -> None:
    """However it is cut."""
    timed = offloaded()
    assert folded(timed[100:], folded(timed[:100])) == folded(timed)


def test_text_is_not_markup() -> None:
    lines = render(folded([Timed(1.0, Said(PROSE))]), 120, 8, 1.0)
    shown = "".join(line.plain for line in lines)
    for words in ("[/INST]", "[bold]nothing[/bold]", ":smile:", "\\x1b[2Jé."):
        assert words in shown
    assert safe("a\u200bb\u00a0c\ue000\x9b1m") == "ab c\ufffd\\x9b1m"


def test_last_lines() -> None:
    assert last_lines("one two three four\nfive", 9, 9) == ["one two", "three", "four", "five"]
    assert last_lines("漢字漢字", 5, 9) == ["漢字", "漢字"]
    assert last_lines("a\n\n", 5, 2) == ["", ""]
    assert last_lines("x" * 12, 5, 2) == ["xxxxx", "xx"]
    assert last_lines("漢", 1, 3) == ["漢"]
    assert all(cell_len(line) <= 7 for line in last_lines("a b漢c" * 40, 7, 99))


def test_the_layer_in_flight_is_lit() -> None:
    """By its sign, and by a style."""
    state = folded([*offloaded()[:8], Timed(50.0, InFlight(66))])
    weights = layer_map(state, 96, UNICODE)[0][0]
    assert weights.plain[8 + 66] == UNICODE.flight
    assert [(span.start, span.end) for span in weights.spans if span.style == LIT] == [(74, 75)]
    dark = layer_map(folded([Timed(51.0, InFlight(None))], state), 96, UNICODE)
    assert UNICODE.flight not in dark[0][0].plain + dark[1].plain


def test_history_keeps_its_tokens_and_its_size() -> None:
    history, clock = History(), 0.0
    for n in range(3000):
        history = history.add(clock, 0.07 + n % 3, n % 5)
        clock += 0.07 + n % 3
    assert len(history.slots) <= SLOTS
    assert sum(history.slots) == pytest.approx(6000)
    assert History().add(0.0, 1.0, 8).slots == pytest.approx((2, 2, 2, 2, 0))


def test_speeds() -> None:
    """A round without levels tells as much as it can; several rounds of one burst are not counted twice."""
    state = folded([Timed(1.0, Emitted((1, 2, 3))), Timed(1.0, Round(4, 2, (4,), 0.5))])
    assert (state.speed, state.average, state.per_pass, state.plain_speed) == (6.0, 6.0, 3.0, None)
    assert folded([Timed(0.0, Prefilled(0, 10)), Timed(2.0, Prefilled(10, 10))]).read == 2.0


# --- the stream --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STREAMS)
def test_a_recording_comes_back(name: str, tmp_path: Path) -> None:
    timed = STREAMS[name]()
    path = tmp_path / "run.jsonl"
    with path.open("w") as file:
        file.write(stream.header() + "\n")
        stream.write(file, timed)
    assert stream.read(str(path)) == timed


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "its first line is no header"),
        ("[1]\n", "its first line is no header"),
        ('{"hspec-recording": 2}\n', "a recording of format 2, this hspec reads 1"),
        (
            '{"hspec-recording": 1}\n{"t": 1, "event": "Said", "text": 3}\n{"t": 2, "event": "New"}\n',
            "line 2: 3 where str",
        ),
        ('{"hspec-recording": 1}\n{"t": 1, "event": "Said"}\n\n', "line 2"),
        ('{"hspec-recording": 1}\n7\n\n', "line 2"),
    ],
)
def test_what_is_no_recording(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(HspecError, match=said):
        stream.read(str(path))


def test_a_recording_of_a_run_that_was_killed(tmp_path: Path) -> None:
    """The line that was being written is left out, and so is an event of a later version."""
    path = tmp_path / "x"
    path.write_text(stream.header() + '\n{"t":1,"event":"New"}\n{"t":2,"event":"Said","text":"a"}\n{"t":3,"eve')
    assert stream.read(str(path)) == [Timed(2.0, Said("a"))]


# --- a live view -------------------------------------------------------------------------------------------------


class Sized(io.StringIO):
    """A terminal of a given size that remembers what it was sent."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def sized(monkeypatch: pytest.MonkeyPatch) -> Sized:
    for name, value in (("TERM", "xterm-256color"), ("COLUMNS", "80"), ("LINES", "24")):
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return Sized()


def test_frames_draw_what_changed(sized: Sized, monkeypatch: pytest.MonkeyPatch) -> None:
    timed, screen, terminal, told = offloaded(), Screen(sized), Terminal(80, 24), 0
    for at in (4.0, 30.0, 37.0, 45.0, 52.5):
        screen.draw(upto(timed, at), at)
        terminal.feed(sized.getvalue()[told:])
        told = len(sized.getvalue())
        expected = [line.plain.replace("見る", "見 る ").rstrip() for line in render(upto(timed, at), 80, 24, at)]
        assert [line.replace("見る", "見 る ") for line in terminal.lines] == expected + [""] * (24 - len(expected))
    screen.draw(upto(timed, 52.5), 52.5)
    assert len(sized.getvalue()) == told
    assert "\x1b[1;36m" in sized.getvalue()
    monkeypatch.setenv("COLUMNS", "40")
    screen.draw(upto(timed, 52.5), 52.5)
    assert Terminal(40, 24).feed(sized.getvalue()[told:]).lines[5:] != terminal.lines[5:]
    assert terminal.alternate
    assert not terminal.cursor
    screen.close()
    screen.draw(upto(timed, 52.5), 52.5)
    terminal.feed(sized.getvalue()[told:])
    assert not terminal.alternate
    assert terminal.cursor


def test_no_colour(sized: Sized, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    leave_behind(folded(offloaded()), sized)
    codes = sized.getvalue().split("\x1b[")[1:]
    assert codes
    assert not [code for code in codes if code.split("m")[0] not in ("0", "1", "2", "7", "1;7")]


def test_an_encoding_without_bars(sized: Sized) -> None:
    sized.encoding = "ascii"  # type: ignore[misc]
    leave_behind(folded(resident()), sized)
    assert sized.getvalue().isascii()


class Full(io.StringIO):
    """A disk that takes the header and no more."""

    def write(self, text: str) -> int:
        if "Said" in text:
            raise OSError(28, "No space left on device")
        return len(text)


def test_a_recording_that_cannot_go_on_is_told() -> None:
    feed = Feed(Full())
    feed.start()
    feed.put(Said("a"))
    assert feed.close().text == "a"
    assert isinstance(feed.failure, OSError)


def test_a_view_that_fails_gives_the_terminal_back(sized: Sized, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(sized)
    feed = Feed(screen=screen)
    feed.start()
    feed.put(Said("a"))
    _wait(lambda: "\x1b[?1049h" in sized.getvalue())

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr("hspec_cli.dashboard.live.render", broken)
    _wait(lambda: feed.failure is not None)
    assert sized.getvalue().endswith("\x1b[?25h\x1b[?1049l")
    feed.put(Ended("eos"))
    assert feed.close().ended == "eos"


def test_frames_take_a_bounded_share(sized: Sized) -> None:
    """Slow frames come rarely."""
    drawn: list[float] = []

    class Slow(Screen):
        def draw(self, state: State, now: float) -> None:  # noqa: ARG002
            began = time.thread_time()
            while time.thread_time() < began + 0.01:
                pass
            drawn.append(now)

    feed = Feed(screen=Slow(sized))
    feed.put(Began("m", "cpu", "float32", "target(full)", "greedy", 1, 1, 2))
    feed.start()
    time.sleep(1.6)
    feed.close()
    assert 1 <= len(drawn) <= 3  # one at once, then one every 1.25 seconds


def _wait(done: Any) -> None:
    deadline = time.monotonic() + 10
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)
