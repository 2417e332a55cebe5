"""The ring: contents always right, nothing written over while it is used, and no wait but those that must be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hspec_offload.ring
from hspec_offload.ring import ALIGNED, Item, Ring

CPU = torch.device("cpu")
DTYPES = (torch.uint8, torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hspec_offload.ring, "PIECE", 3 * ALIGNED)


def poisoned(nbytes: int) -> Ring:
    made = Ring(nbytes, CPU)
    made.arena.fill_(255)
    return made


def numbers(count: int, dtype: torch.dtype = torch.uint8, seed: int = 0) -> Tensor:
    return torch.randint(0, 120, (count,), generator=torch.Generator().manual_seed(seed)).to(dtype)


def item(key: object, count: int, *, lasting: bool = True) -> Item:
    return Item(key, (numbers(count, seed=hash(key) % 1000),), lasting)


def run(ring: Ring, items: Sequence[Item], hold: int = 1) -> None:
    """One pass, in which `hold` items are in use at a time."""
    ring.follow(items)
    held: list[tuple[Item, tuple[Tensor, ...]]] = []
    for one in items:
        if len(held) == hold:
            finish(ring, *held.pop(0))
        held.append((one, ring.take(one.key)))
    for one, tensors in held:
        finish(ring, one, tensors)


def finish(ring: Ring, one: Item, tensors: tuple[Tensor, ...]) -> None:
    assert all(map(torch.equal, tensors, one.sources)), one.key
    assert [t.dtype for t in tensors] == [t.dtype for t in one.sources]
    ring.done(one.key)


# contents


@st.composite
def passes(draw: st.DrawFn) -> tuple[int, list[list[Item]], list[int]]:
    """A ring, what several passes take, and how many items each holds at a time."""
    size = ALIGNED * draw(st.integers(4, 24))
    pool: list[Item] = []
    for key in range(draw(st.integers(1, 10))):
        parts, room = [], size
        for part in range(draw(st.integers(0, 3))):
            dtype = draw(st.sampled_from(DTYPES))
            count = draw(st.integers(0, size // 3 // dtype.itemsize))
            if -(-count * dtype.itemsize // ALIGNED) * ALIGNED <= room:
                room -= -(-count * dtype.itemsize // ALIGNED) * ALIGNED
                parts.append(numbers(count, dtype, 10 * key + part))
        pool.append(Item(key, tuple(parts), draw(st.booleans())))
    plans = [pool]
    for _ in range(draw(st.integers(1, 5))):
        change = draw(st.sampled_from(["same", "some", "shuffled", "cut"]))
        last = plans[-1]
        if change == "some":
            last = [one for one in pool if draw(st.booleans())]
        elif change == "shuffled":
            last = draw(st.permutations(pool))
        elif change == "cut":
            last = last[: draw(st.integers(0, len(last)))]
        plans.append(list(last))
    return size, plans, [draw(st.integers(1, 3)) for _ in plans]


@settings(max_examples=150, deadline=None)
@given(passes(), st.randoms(use_true_random=False))
def test_what_is_taken_is_what_was_put(drawn: tuple[int, list[list[Item]], list[int]], random: object) -> None:
    """Whatever the passes take, in whatever order what they took is done; contents that do not last change."""
    size, plans, holds = drawn
    ring = poisoned(size)
    for plan, hold in zip(plans, holds, strict=True):
        for one in plan:
            if not one.lasting:
                for source in one.sources:
                    source.add_(1)
        ring.follow(plan)
        held: list[tuple[Item, tuple[Tensor, ...]]] = []
        for one in plan:
            while held and (len(held) >= hold or sum(h.nbytes for h, _ in held) + 2 * one.nbytes > size):
                finish(ring, *held.pop(random.randrange(len(held))))  # type: ignore[attr-defined]
            if held and random.random() < 0.2:  # type: ignore[attr-defined]
                ring.pump()
            try:
                tensors = ring.take(one.key)
            except RuntimeError:  # it stands where those in use do
                while held:
                    finish(ring, *held.pop(0))
                tensors = ring.take(one.key)
            held.append((one, tensors))
        if random.random() < 0.7:  # type: ignore[attr-defined]
            while held:
                finish(ring, *held.pop(0))


def test_a_pass_of_equal_items_is_carried_once() -> None:
    items = [item(n, 4 * ALIGNED) for n in range(10)]
    ring = poisoned(16 * ALIGNED)
    for _ in range(3):
        run(ring, items)
    assert ring.carried == (30 + 4) * 4 * ALIGNED  # and four that wait for the next pass


def test_the_next_pass_is_put_ahead() -> None:
    items = [item(n, 4 * ALIGNED) for n in range(10)]
    ring = poisoned(16 * ALIGNED)
    run(ring, items)
    before = ring.carried
    ring.follow(items)
    assert ring.carried == before
    ring.follow([*items[:2], item("other", 100), *items[2:]])
    assert ring.carried == before + 100 + 4 * ALIGNED  # the first two are kept


def test_what_does_not_last_is_put_when_its_pass_begins() -> None:
    items = [item(0, 300), item("tail", 400, lasting=False), item(2, 300)]
    ring = poisoned(8 * ALIGNED)
    run(ring, items)
    items[1].sources[0].add_(1)
    grown = Item("tail", (numbers(450),), lasting=False)
    before = ring.carried
    run(ring, [items[0], grown, items[2]])
    assert ring.carried == before + 450 + 600  # the tail only, and what waits for the next pass


def test_what_outgrows_its_room_gets_another() -> None:
    ring = poisoned(32 * ALIGNED)
    for size in (300, 2000, 4000, 100):
        run(ring, [item(0, 300), Item("tail", (numbers(size),), lasting=False), item(2, 300)])


def test_lasting_contents_may_be_forgotten() -> None:
    items = [item(n, 100) for n in range(3)]
    ring = poisoned(8 * ALIGNED)
    run(ring, items)
    items[0].sources[0].add_(1)
    ring.forget()
    run(ring, items)


def test_another_tensor_is_another_content() -> None:
    ring = poisoned(8 * ALIGNED)
    run(ring, [item(0, 100)])
    run(ring, [Item(0, (numbers(100, seed=5),))])


def test_a_pass_that_was_broken_off_leaves_nothing() -> None:
    items = [item(n, 3 * ALIGNED) for n in range(6)]
    ring = poisoned(8 * ALIGNED)
    ring.follow(items)
    ring.take(0)
    ring.take(1)
    run(ring, items)


def test_mistakes_are_told() -> None:
    ring = poisoned(8 * ALIGNED)
    items = [item(0, 5 * ALIGNED), item(1, 5 * ALIGNED)]
    with pytest.raises(ValueError, match=r"2,304 bytes is larger than the ring, 2,048"):
        ring.follow([item(0, 2300)])
    with pytest.raises(RuntimeError, match="takes nothing next, not 0"):
        ring.take(0)
    ring.follow(items)
    with pytest.raises(RuntimeError, match="takes 0 next, not 1"):
        ring.take(1)
    with pytest.raises(RuntimeError, match="0 was not taken"):
        ring.done(0)
    ring.take(0)
    with pytest.raises(RuntimeError, match=r"1 needs 1,280 bytes of the ring's 2,048, of which 1,280 are taken and"):
        ring.take(1)
    ring.done(0)
    ring.take(1)
    ring.done(1)
    with pytest.raises(RuntimeError, match="takes nothing next"):
        ring.take(0)


def test_a_disk_is_asked_in_time() -> None:
    """Before its own copy, when the item before it has its room."""
    asked: list[int] = []
    items = [Item(n, (numbers(4 * ALIGNED),), ahead=lambda n=n: asked.append(n)) for n in range(4)]  # type: ignore[misc]
    ring = poisoned(8 * ALIGNED)
    ring.follow(items)
    assert asked == [1, 2, 3][: len(asked)]
    assert 2 in asked


# waits


@dataclass
class FakeStream:
    """A stream that notes what is asked of it."""

    name: str
    log: list[str]
    events: int = 0

    def record_event(self) -> FakeEvent:
        self.events += 1
        event = FakeEvent(f"{self.name}{self.events}")
        self.log.append(f"{self.name} records {event.name}")
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(f"{self.name} waits for {event.name}")

    def wait_stream(self, other: FakeStream) -> None:
        pass


@dataclass
class FakeEvent:
    name: str
    over: bool = False

    def query(self) -> bool:
        return self.over


@dataclass
class FakeCuda:
    """Streams `main` and `copy`; every copy is noted on the stream that it is enqueued on."""

    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.main, self.copy = FakeStream("main", self.log), FakeStream("copy", self.log)
        self.current = self.main

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: fake.copy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: fake.current)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    copy_ = Tensor.copy_

    def noted(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        fake.log.append(f"{fake.current.name} copies {len(source)}{'' if non_blocking else ', blocking'}")
        return copy_(target, source)

    monkeypatch.setattr(Tensor, "copy_", noted)
    return fake


def on_fake_gpu(nbytes: int) -> Ring:
    made = poisoned(nbytes)
    made.device = torch.device("cuda", 0)
    made._stream = torch.cuda.Stream(made.device)  # type: ignore[no-untyped-call]
    return made


def test_memory_is_not_given_away_while_something_is_on_its_way_to_it(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator must know of the stream that copies: a ring may go with copies put ahead for nobody."""
    told: list[object] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda _, stream: told.append(stream))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, dtype, device: empty(*size, dtype=dtype))  # noqa: ARG005
    Ring(8 * ALIGNED, torch.device("cuda", 0))
    assert told == [cuda.copy]


@pytest.mark.usefixtures("cuda")
def test_what_is_crossing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first item whose copy is not over, whatever was enqueued behind it."""
    events: list[FakeEvent] = []
    record = FakeStream.record_event
    monkeypatch.setattr(FakeStream, "record_event", lambda self: events.append(record(self)) or events[-1])
    ring = on_fake_gpu(16 * ALIGNED)
    assert ring.in_flight() is None
    ring.follow([item(n, ALIGNED) for n in range(3)])
    assert ring.in_flight() == 0
    events[0].over = events[1].over = True
    assert ring.in_flight() == 2
    for event in events:
        event.over = True
    assert ring.in_flight() is None


def test_the_order_of_waits(cuda: FakeCuda) -> None:
    """A copy waits for the use of what it writes over, a use for its copy, and nothing for anything else."""
    ring, log = on_fake_gpu(8 * ALIGNED), cuda.log
    items = [item(n, 3 * ALIGNED + n) for n in range(3)]  # rooms 3, 4 and 4: the third stands where the first did

    def said() -> list[str]:
        told, log[:] = list(log), []
        return told

    ring.follow(items)
    assert said() == [
        "copy copies 768",
        "copy records copy1",
        "copy copies 768",
        "copy copies 1",
        "copy records copy2",
    ]
    ring.take(0)
    assert said() == ["main waits for copy1"]
    ring.take(1)
    assert said() == ["main waits for copy2"]
    ring.done(0)
    # the third item's first piece stands where the first one did, its last byte where the second does
    assert said() == ["main records main1", "copy waits for main1", "copy copies 768"]
    ring.done(1)
    # ... and then the next pass's first one where the second was
    assert said() == [
        "main records main2",
        "copy waits for main2",
        "copy copies 2",
        "copy records copy3",
        "copy copies 768",
        "copy records copy4",
    ]
    ring.take(2)
    assert said() == ["main waits for copy3"]
    ring.done(2)
    assert said()[:2] == ["main records main3", "copy waits for main3"]


def test_room_that_nobody_used_is_not_waited_for(cuda: FakeCuda) -> None:
    """What was put ahead for nothing is written over by the stream that wrote it."""
    ring = on_fake_gpu(8 * ALIGNED)
    ring.follow([item(n, ALIGNED) for n in range(4)])
    ring.follow([item("other", 8 * ALIGNED)])
    assert not [line for line in cuda.log if "waits" in line]


def test_what_does_not_last_waits_for_its_writer(cuda: FakeCuda) -> None:
    ring, log = on_fake_gpu(8 * ALIGNED), cuda.log
    items = [item(0, 100), item(1, 200, lasting=False), item(2, 300, lasting=False)]
    ring.follow(items)
    assert log[:5] == [
        "main records main1",
        "copy copies 100",
        "copy records copy1",
        "copy waits for main1",
        "copy copies 200",
    ]
    assert log.count("copy waits for main1") == 1
