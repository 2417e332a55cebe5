"""Views: which part of the keys a level attends to. Only the full view of the target decides the output.

Before a pass a view brings itself up to date (`prepare`) and says which tokens of a text it still has to be fed
(`missing`); for the pass it gives the memory that keys and values go to (`begin`); after it, it counts the tokens as
held (`fed`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import Tensor

from hspec_decoding.cache import Lane, Slots, Store
from hspec_decoding.config import ModelConfig
from hspec_decoding.model import Norms
from hspec_decoding.sequence import Held, Text
from hspec_decoding.tree import depths
from hspec_kernels.attention import (
    GROUP,
    PACKED,
    Quantized,
    QuantizedKV,
    Reach,
    attend,
    attend_split,
    attend_with,
)
from hspec_kernels.rope import rope_append
from hspec_kernels.shapes import on_triton
from hspec_offload.host_kv import AWAY, HostKV
from hspec_offload.ring import Item

if TYPE_CHECKING:
    from hspec_decoding.sparse import ChunkMeans

TAIL = 512  # slots at most between what a copy in few bits holds and the end of a pass
QUERIES = 64  # rows of a pass, the last ones, whose queries are kept for views that select by them


class View(Protocol):
    """Part of a KV cache that one level reads."""

    def prepare(self, texts: Sequence[Text]) -> float:
        """Follow what was committed since; the seconds of it that were spent once and for all."""
        ...

    def missing(self, text: Text) -> list[int]:
        """Tokens to feed so that all of `text` is held; never empty, the last one is always fed."""
        ...

    def begin(self, texts: Sequence[Text], rows: int) -> Pass:
        """Memory of a pass of `rows` tokens behind those held of each text."""
        ...

    def fed(self, text: Text, tokens: Sequence[int]) -> None:
        """Count `tokens` as held: the pass has run."""
        ...

    def forget(self, slot: int) -> None:
        """Another text takes this slot."""
        ...


@dataclass(frozen=True)
class Layout:
    """Where the rows of a pass go and what they see, as plain numbers; row 0 of each sequence, the rest follows on.

    `first` and `extent` by the lane of a layer: the slot of row 0, and how many slots are looked at.
    """

    slots: list[int]
    rows: int
    positions: list[int]
    first: dict[Lane, list[int]]
    extent: dict[Lane, list[int]]
    copied: list[int] | None = None  # leading tokens of each sequence that are read from a copy in few bits
    padded: bool = False  # always so many rows, of which the last may be repetitions
    tree: list[list[int]] | None = None  # of each sequence the masks of its rows, as `Reach.tree`; nothing is `copied`

    @property
    def numbers(self) -> list[list[int]]:
        """What changes from pass to pass, [2 + lanes (+ 1) (+ rows of a tree), B]."""
        copied, tree = [] if self.copied is None else [self.copied], map(list, zip(*self.tree or (), strict=True))
        return [self.slots, self.positions, *self.first.values(), *copied, *tree]

    def behind(self, fed: Sequence[int], rows: int) -> Layout:
        """The layout of `rows` behind the first `fed[b]` rows of each sequence."""

        def moved(starts: list[int]) -> list[int]:
            return [at + n for at, n in zip(starts, fed, strict=True)]

        first = {lane: moved(starts) for lane, starts in self.first.items()}
        extent = {lane: [at + rows for at in starts] for lane, starts in first.items()}
        return replace(self, rows=rows, positions=moved(self.positions), first=first, extent=extent)


Recorded = tuple[Tensor, Tensor | None]  # queries [B, R, H, D] of a layer, and log-sum-exps [B, R, H] where known


class Pass:
    """Memory of one pass: rows are written into a store and attend over a prefix of its slots.

    What changes from pass to pass is in one tensor, `numbers`, so that a captured pass can be told where it stands.
    """

    def __init__(
        self,
        config: ModelConfig,
        store: Slots,
        layout: Layout,
        *,
        windowed: bool,
        record: bool = False,
        copies: list[QuantizedKV] | None = None,
    ) -> None:
        """`windowed`: slots are positions, so that sliding windows still have to be applied. `record`: keep the
        queries of the last rows. `copies`: by layer, what the leading tokens are read from instead of the store.
        """
        self.config, self.store, self.layout, self.windowed, self.copies = config, store, layout, windowed, copies
        self.recorded: list[Recorded] | None = [] if record else None
        self.entering: tuple[int, ...] = ()  # layers whose input is wanted in `features` [B, R, (n + 1) hidden]
        self.features: Tensor | None = None
        self.captured = False  # only `numbers` will be true when this is replayed, and not the layout

    @property
    def key(self) -> tuple[object, ...]:
        """What a captured pass must have in common with this one, besides the layout's shape."""
        tree = self.layout.tree is not None
        return self.store, self.recorded is None, self.copies and id(self.copies), self.entering, tree

    def moved(self, layout: Layout) -> Self:
        """The same with rows elsewhere."""
        moved = type(self)(
            self.config,
            self.store,
            layout,
            windowed=self.windowed,
            record=self.recorded is not None,
            copies=self.copies,
        )
        moved.entering = self.entering
        return moved

    @cached_property
    def numbers(self) -> Tensor:
        """int64 [.., B] on the store's device: slots, positions, first slots by lane, copied, masks of a tree."""
        return torch.tensor(self.layout.numbers, device=self.store.device)

    @cached_property
    def positions(self) -> Tensor:
        return self.numbers[1][:, None] + self.behind

    @cached_property
    def behind(self) -> Tensor:
        """How far behind row 0 every row stands, [B, R] or [R]: in a tree, its depth."""
        if self.tree is not None:
            return depths(self.tree)
        return torch.arange(self.layout.rows, device=self.store.device)

    @cached_property
    def tree(self) -> Tensor | None:
        """The masks of the rows, [B, R]."""
        return None if self.layout.tree is None else self.numbers[-self.layout.rows :].T.contiguous()

    @cached_property
    def reach(self) -> dict[Lane, Reach]:
        """What the rows see, by the lane of a layer."""
        return {
            lane: self._reach(lane, first) for lane, first in zip(self.layout.first, self.numbers[2:], strict=False)
        }

    def _reach(self, lane: Lane, first: Tensor) -> Reach:
        layout, start = self.layout, None
        if layout.copied is not None and lane in (None, AWAY):
            start = self.numbers[-1] if lane is None else self.numbers[-1] - (self.numbers[1] - first)
        room = self.store.held if lane == AWAY and isinstance(self.store, HostKV) else self.store.capacity
        return Reach(
            self.numbers[0],
            first,
            layout.rows,
            tuple(min(n, room) for n in layout.extent[lane]),
            lane if self.windowed and isinstance(lane, int) else None,
            self.tree,
            start=start,
            span=TAIL,
            known=None if self.captured else tuple(zip(layout.slots, layout.first[lane], strict=True)),
        )

    def items(self, layer: int) -> Sequence[Item]:  # noqa: ARG002
        """What the pass takes from a ring for a layer's attention, in order."""
        return ()

    def attend(self, layer: int, stacked: Tensor, cos: Tensor, sin: Tensor, norms: Norms) -> Tensor:
        lane = self.store.lanes[layer]
        reach = self.reach[lane]
        keys, values = self.store.keys[layer], self.store.values[layer]
        query = rope_append(stacked, cos, sin, keys, values, reach.slots, reach.first, norms)
        if self.copies is not None and not isinstance(lane, int):
            prefix = Quantized(self.copies[layer], reach.slots, self.numbers[-1], max(self.layout.extent[None]))
            return attend_with(query, prefix, keys, values, reach)[0]
        if self.recorded is None:
            return attend(query, keys, values, reach)
        lse = None
        if on_triton(query) and reach.rows <= PACKED:
            out, lse = attend_split(query, keys, values, reach)
        else:
            out = attend(query, keys, values, reach)
        self.recorded.append((query[:, -QUERIES:], lse))
        return out


@dataclass(frozen=True)
class Verified:
    """Where the queries of a text's last pass are: sequence `b` of `layers`, row 0 at position `first`."""

    layers: list[Recorded]
    b: int
    first: int


class FullView:
    """Every key. Rows attend over a multiple of `bucket` slots, so that a position always sees one shape.

    For that a pass of the fixed shape must stay inside one bucket: `room` says how many tokens it may draft.
    """

    def __init__(self, config: ModelConfig, store: Store, sequences: int, bucket: int = 1) -> None:
        self.config, self.store, self.bucket = config, store, bucket
        self.held = [Held() for _ in range(sequences)]
        self.record = False  # keep the queries of each pass, for views that select by them
        self.recorded: dict[int, Verified] = {}  # by slot
        self.means: ChunkMeans | None = None  # one for all views that select by them

    def prepare(self, texts: Sequence[Text]) -> float:  # noqa: ARG002
        return 0.0

    def missing(self, text: Text) -> list[int]:
        return self.held[text.slot].missing(text.tokens, text.committed)

    def fed(self, text: Text, tokens: Sequence[int]) -> None:
        self.held[text.slot].extend(tokens)

    def forget(self, slot: int) -> None:
        self.held[slot].reset()
        self.recorded.pop(slot, None)
        if self.means is not None:
            self.means.done[slot] = 0

    def room(self, text: Text) -> int:
        """Tokens that may be fed behind the text's last one without leaving its bucket; no limit without buckets."""
        return self.bucket - 1 - (len(text) - 1) % self.bucket if self.bucket > 1 else self.store.capacity

    def begin(self, texts: Sequence[Text], rows: int, live: Sequence[int] | None = None) -> Pass:
        """`live`: rows of each text that count; the rest is padding, and may stand beyond the text's bucket."""
        first = [len(self.held[text.slot]) for text in texts]
        padded, live = live is not None, live or [rows] * len(texts)
        extent = [-(-(at + n) // self.bucket) * self.bucket for at, n in zip(first, live, strict=True)]
        slots = [text.slot for text in texts]
        first_by, extent_by = by_lane(self.store, slots, first), by_lane(self.store, slots, extent)
        layout = Layout(slots, rows, first, first_by, extent_by, padded=padded)
        memory = self.passed(layout)
        self.note(memory)
        return memory

    def passed(self, layout: Layout) -> Pass:
        """Memory of a pass of that layout."""
        return Pass(self.config, self.store, layout, windowed=True, record=self.record)

    def note(self, memory: Pass, slot: int | None = None) -> None:
        """Take this pass for the last one of its texts, or of the text in `slot`."""
        layout = memory.layout
        slots = layout.slots if slot is None else [slot]
        if memory.recorded is not None:
            for b, (slot, at) in enumerate(zip(slots, layout.positions, strict=True)):
                self.recorded[slot] = Verified(memory.recorded, b, at + max(0, layout.rows - QUERIES))


class InPlaceView:
    """Every key, read where the target keeps it; with `copies`, committed ones from a copy of few bits, and only the
    last GROUP or so in the target's own precision (KIVI, arXiv 2402.02750; QuantSpec, arXiv 2502.10424).

    Rows that this level adds are written behind the target's own. What a pass of the target has not confirmed there
    counts for nothing and is written over, so this view is for levels that only propose.
    """

    def __init__(self, config: ModelConfig, source: FullView, copies: list[QuantizedKV] | None, sequences: int) -> None:
        self.config, self.source, self.copies = config, source, copies
        self.held = [Held() for _ in range(sequences)]  # tokens added behind the committed ones
        self.base = [-1] * sequences  # tokens whose exact keys the source held when last prepared
        self.copied = [0] * sequences
        if isinstance(source.store, HostKV):
            source.store.observers.append(self)

    def prepare(self, texts: Sequence[Text]) -> float:
        started, store = time.perf_counter(), self.source.store
        first = False
        for text in texts:
            slot, length = text.slot, text.committed - 1
            if self.base[slot] != length:
                first |= self.base[slot] < 0
                self.held[slot].reset()
                self.base[slot] = length
                self._copy(slot, length // GROUP)
        if not first:
            return 0.0
        if store.device.type == "cuda":
            torch.cuda.synchronize(store.device)
        return time.perf_counter() - started

    def _copy(self, slot: int, groups: int) -> None:
        """Bring the copy up to `groups` whole groups of tokens."""
        store = self.source.store
        if self.copies is None or groups * GROUP <= self.copied[slot]:
            return
        for layer, (keys, values) in enumerate(zip(store.keys, store.values, strict=True)):
            self.derive(layer, keys[slot], values[slot], slot, origin(store, layer, slot), groups * GROUP)
        self.copied[slot] = groups * GROUP

    def derive(self, layer: int, keys: Tensor, values: Tensor, slot: int, origin: int, stop: int) -> None:
        """Bring one layer's copy up to position `stop`, from [HK, n, D] that begins at position `origin`."""
        if self.copies is not None:
            new = slice(self.copied[slot] - origin, max(self.copied[slot], stop) - origin)
            self.copies[layer].put(keys[:, new], values[:, new], slot, self.copied[slot] // GROUP)

    def derived(self, slot: int, stop: int) -> None:
        """Every layer was brought up to `stop`."""
        if self.copies is not None:
            self.copied[slot] = max(self.copied[slot], stop)

    def missing(self, text: Text) -> list[int]:
        length = self.base[text.slot]
        return self.held[text.slot].missing(text.tokens[length:], text.committed - length)

    def fed(self, text: Text, tokens: Sequence[int]) -> None:
        self.held[text.slot].extend(tokens)

    def forget(self, slot: int) -> None:
        self.held[slot].reset()
        self.base[slot], self.copied[slot] = -1, 0

    def begin(self, texts: Sequence[Text], rows: int) -> Pass:
        slots, store = [text.slot for text in texts], self.source.store
        first = [self.base[slot] + len(self.held[slot]) for slot in slots]
        extent = [at + rows for at in first]
        copied = None if self.copies is None else [self.copied[slot] for slot in slots]
        layout = Layout(slots, rows, first, by_lane(store, slots, first), by_lane(store, slots, extent), copied)
        return Pass(self.config, store, layout, windowed=True, copies=self.copies)


def by_lane(store: Slots, slots: Sequence[int], positions: list[int]) -> dict[Lane, list[int]]:
    """Where the positions of each sequence are among the slots of every lane."""
    made = dict.fromkeys(store.lanes, positions)
    if isinstance(store, HostKV) and AWAY in made:
        made[AWAY] = [at - store.origins[slot] for slot, at in zip(slots, positions, strict=True)]
        made.setdefault(None, positions)
    return made


def origin(store: Store, layer: int, slot: int) -> int:
    """The position that a layer's first slot stands for."""
    return store.origin(layer, slot) if isinstance(store, HostKV) else 0
