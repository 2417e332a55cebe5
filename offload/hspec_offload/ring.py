"""The ring: everything that crosses the bus in a pass, in the order in which the pass uses it.

One arena on the device is filled round and round by one copy stream, as far ahead of the pass as there is room. A copy
waits for what used the bytes that it writes over, and what uses it waits for the copy, both by events: neither the
device nor the host ever waits for everything.

    ring.follow(items)              # what this pass takes, in order
    for item in items:
        weight, = ring.take(item.key)
        ...                         # enqueue what reads it
        ring.done(item.key)

Positions in the ring are bytes that never wrap: position p is byte p % N of the arena, and was byte p - N before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

ALIGNED = 256  # bytes
PIECE = 64 << 20  # bytes of one copy: the next one may have to wait for the room that it writes to
UNDER_WAY = 4096  # copies that are remembered until somebody asks
GROWTH = 4  # room kept for the next contents of what does not last: a quarter more


@dataclass(frozen=True, eq=False)
class Item:
    """Contiguous host tensors that cross together.

    `lasting`: the contents do not change between passes, so they may cross before the pass that takes them begins.
    What was written to others by the current stream before `follow` is seen. `ahead` is called some items before the
    copy, to have the bytes read from a disk.
    """

    key: Hashable
    sources: tuple[Tensor, ...]
    lasting: bool = True
    ahead: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the ring that it takes."""
        return sum(_aligned(source.nbytes) for source in self.sources)

    def same(self, other: Item) -> bool:
        """Whether what was copied for the other serves this one: key and places are the same."""
        return self.key == other.key and self._places == other._places

    @property
    def _places(self) -> list[tuple[int, torch.dtype, torch.Size]]:
        return [(source.data_ptr(), source.dtype, source.shape) for source in self.sources]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


@dataclass(eq=False)
class _Slot:
    """Room of one item: `room` bytes from position `start`. `before`: where the ring ended without it."""

    item: Item
    before: int
    start: int
    room: int
    pieces: deque[tuple[int, Tensor, Tensor]] = field(default_factory=deque)  # still to copy: end position, to, from
    tensors: tuple[Tensor, ...] = ()
    copied: torch.cuda.Event | None = None  # on a GPU, once all pieces are on their way
    done: bool = False
    free: torch.cuda.Event | None = None  # on a GPU, once `done`

    @property
    def end(self) -> int:
        return self.start + self.room


class Ring:
    """See the top of the file. `carried`: bytes copied so far."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """`nbytes` of the device's memory; no item may be larger."""
        self.nbytes, self.device = nbytes // ALIGNED * ALIGNED, device
        self.arena = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self.carried = 0
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))  # the arena may have been something else's
            self.arena.record_stream(self._stream)  # and is not given away while something is on its way to it
        self._items: Sequence[Item] = ()
        self._put = 0  # items that have room; those of the next pass are counted on
        self._taken = 0
        self._end = 0  # position behind the last room
        self._ready: deque[_Slot] = deque()  # not taken yet
        self._used: deque[_Slot] = deque()  # taken, and not yet written over
        self._unfilled: deque[_Slot] = deque()  # of those ready: with pieces to copy, but for what does not last yet
        self._under_way: deque[tuple[Hashable, torch.cuda.Event]] = deque(maxlen=UNDER_WAY)  # keys, ends of copies
        self._begun: torch.cuda.Event | None = None  # what the current stream had to do before this pass

    def follow(self, items: Sequence[Item]) -> None:
        """Begin a pass that takes these items in this order. Raises ValueError for an item larger than the ring.

        What was put ahead is kept as far as it is the same, and dropped from the first item that is not. What the
        last pass took counts as done.
        """
        for item in items:
            if item.nbytes > self.nbytes:
                raise ValueError(f"an item of {item.nbytes:,} bytes is larger than the ring, {self.nbytes:,}")
        for slot in self._used:
            self._finish(slot)
        kept = 0
        for slot, item in zip(self._ready, items, strict=False):
            if not self._keeps(slot, item):
                break
            kept += 1
        self._drop(kept)
        self._items, self._put, self._taken = tuple(items), kept, 0
        self._begun = None
        if self._stream is not None and not all(item.lasting for item in items):
            self._begun = torch.cuda.current_stream(self.device).record_event()
        for slot, item in zip(self._ready, items, strict=False):
            if not item.lasting:
                self._fill(slot, item)
        self._unfilled = deque(slot for slot in self._ready if slot.pieces)
        self.pump()

    def take(self, key: Hashable) -> tuple[Tensor, ...]:
        """The next item's tensors on the device: what is enqueued on the current stream from now on finds them whole.

        Raises RuntimeError when another item is next, and when there is no room because of items that are not done.
        """
        self.pump()
        slot = self._ready[0] if self._ready else None
        if slot is None or self._taken == len(self._items) or slot.item.key != key:
            wanted = repr(self._items[self._taken].key) if self._taken < len(self._items) else "nothing"
            raise RuntimeError(f"the pass takes {wanted} next, not {key!r}")
        if slot.pieces:
            held = sum(slot.room for slot in self._used if not slot.done)
            raise RuntimeError(
                f"{key!r} needs {slot.room:,} bytes of the ring's {self.nbytes:,}, of which {held:,} are taken and "
                "not done"
            )
        self._taken += 1
        self._used.append(self._ready.popleft())
        if slot.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(slot.copied)
        return slot.tensors

    def done(self, key: Hashable) -> None:
        """Count the item as done: all that reads it has been enqueued on the current stream."""
        slot = next((slot for slot in self._used if slot.item.key == key and not slot.done), None)
        if slot is None:
            raise RuntimeError(f"{key!r} was not taken")
        self._finish(slot)
        self.pump()

    def pump(self) -> None:
        """Put as much ahead as there is room for, into the next pass."""
        while self._filled() and self._put < 2 * len(self._items):
            if not self._reserve(self._items[self._put % len(self._items)]):
                return

    def in_flight(self) -> Hashable | None:
        """The key of the item that is crossing at this moment; another thread may ask."""
        while self._under_way and self._under_way[0][1].query():  # type: ignore[no-untyped-call]
            self._under_way.popleft()
        first = next(iter(self._under_way.copy()), None)
        return first and first[0]

    def forget(self) -> None:
        """Drop what was put ahead: contents that lasted have changed. Only between passes."""
        self._drop(0)
        self._items, self._put, self._taken = (), 0, 0

    def _keeps(self, slot: _Slot, item: Item) -> bool:
        """Whether a slot put ahead serves the item: with its contents, or with room for new ones."""
        if item.lasting:
            return slot.item.lasting and item.same(slot.item)
        return slot.item.key == item.key and item.nbytes <= slot.room

    def _drop(self, kept: int) -> None:
        """Take the room of all but the first `kept` slots ahead back. Nobody reads them, and one stream writes."""
        while len(self._ready) > kept:
            self._end = self._ready.pop().before
        self._unfilled.clear()

    def _finish(self, slot: _Slot) -> None:
        if not slot.done:
            slot.done = True
            if self._stream is not None:
                slot.free = torch.cuda.current_stream(self.device).record_event()

    def _reserve(self, item: Item) -> bool:
        """Room for the next item and, where its contents are known, the pieces to copy; False when it is not free."""
        ahead = self._put >= len(self._items)
        room = item.nbytes
        if ahead and not item.lasting:
            room = min(self.nbytes, _aligned(room + room // GROWTH))
        start, before = self._end, self._end
        if start % self.nbytes + room > self.nbytes:
            start = -(-start // self.nbytes) * self.nbytes
        if self._ready and start + room > self._ready[0].start + self.nbytes:
            return False  # the pass would wait for itself
        slot = _Slot(item, before, start, room)
        self._end = slot.end
        self._put += 1
        self._ready.append(slot)
        if item.lasting or not ahead:
            self._fill(slot, item)
            if slot.pieces:
                self._unfilled.append(slot)
        self._read_ahead()
        return True

    def _read_ahead(self) -> None:
        following = self._items[self._put % len(self._items)]
        if following.ahead is not None:
            following.ahead()

    def _fill(self, slot: _Slot, item: Item) -> None:
        """Note what is to be copied into a slot."""
        slot.item, slot.tensors, slot.copied = item, tuple(self._views(slot.start, item.sources)), None
        slot.pieces.clear()
        at = slot.start
        for target, source in zip(slot.tensors, item.sources, strict=True):
            to, of = target.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8)
            for low in range(0, len(of), PIECE):
                part = slice(low, min(low + PIECE, len(of)))
                slot.pieces.append((at + part.stop, to[part], of[part]))
            at += _aligned(source.nbytes)

    def _views(self, start: int, sources: Sequence[Tensor]) -> Iterator[Tensor]:
        at = start % self.nbytes
        for source in sources:
            yield self.arena[at : at + source.nbytes].view(source.dtype).view(source.shape)
            at += _aligned(source.nbytes)

    def _filled(self) -> bool:
        """Copy what may be copied into the slots that have room; whether that is all."""
        while self._unfilled:
            slot = self._unfilled[0]
            with self._copying():
                if not slot.item.lasting and self._stream is not None and self._begun is not None:
                    self._stream.wait_event(self._begun)
                    self._begun = None
                while slot.pieces:
                    end, target, source = slot.pieces[0]
                    if not self._freed(end):
                        return False
                    target.copy_(source, non_blocking=True)
                    self.carried += len(source)
                    slot.pieces.popleft()
                if self._stream is not None:
                    slot.copied = self._stream.record_event()
                    self._under_way.append((slot.item.key, slot.copied))
            self._unfilled.popleft()
        return True

    def _copying(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _freed(self, end: int) -> bool:
        """Whether all bytes up to position `end` may be written over; the copy stream then waits for their use."""
        while self._used and self._used[0].start + self.nbytes < end:
            oldest = self._used[0]
            if not oldest.done:
                return False
            if self._stream is not None and oldest.free is not None:
                self._stream.wait_event(oldest.free)
            self._used.popleft()
        return True
