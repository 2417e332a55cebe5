"""Views: which part of the keys a level attends to. Only the full view of the target decides the output.

Before a pass a view says which tokens of a text it still has to be fed (`missing`); for the pass it gives the memory
that keys and values go to (`begin`); after it, it counts the tokens as held (`fed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from hspec_decoding.cache import KVStore
from hspec_decoding.config import ModelConfig
from hspec_decoding.model import Norms
from hspec_decoding.sequence import Held, Text
from hspec_kernels.attention import Reach, attend
from hspec_kernels.rope import rope_append

QUERIES = 64  # rows of a pass, the last ones, whose queries are kept for views that select by them


class View(Protocol):
    """Part of a KV cache that one level reads."""

    def missing(self, text: Text) -> list[int]:
        """Tokens to feed so that all of `text` is held; never empty, the last one is always fed."""
        ...

    def begin(self, texts: Sequence[Text], rows: int) -> Pass:
        """Memory of a pass of `rows` tokens behind those held of each text."""
        ...

    def fed(self, text: Text, tokens: Sequence[int]) -> None:
        """Count `tokens` as held: the pass has run."""
        ...


@dataclass(frozen=True)
class Layout:
    """Where the rows of a pass go and what they see, as plain numbers; row 0 of each sequence, the rest follows on.

    `first` and `extent` by the sliding window of a layer: the slot of row 0, and how many slots are looked at.
    """

    slots: list[int]
    rows: int
    positions: list[int]
    first: dict[int | None, list[int]]
    extent: dict[int | None, list[int]]

    @property
    def numbers(self) -> list[list[int]]:
        """What changes from pass to pass, [2 + windows, B]."""
        return [self.slots, self.positions, *self.first.values()]


class Pass:
    """Memory of one pass: rows are written into a store and attend over a prefix of its slots.

    What changes from pass to pass is in one tensor, `numbers`, so that a captured pass can be told where it stands.
    """

    def __init__(self, config: ModelConfig, store: KVStore, layout: Layout, *, windowed: bool) -> None:
        """`windowed`: slots are positions, so that sliding windows still have to be applied."""
        self.config, self.store, self.layout, self.windowed = config, store, layout, windowed
        self.queries: list[Tensor] | None = None

    @cached_property
    def numbers(self) -> Tensor:
        """int64 [2 + windows, B] on the store's device: slots, positions, first slots by window."""
        return torch.tensor(self.layout.numbers, device=self.store.device)

    @cached_property
    def positions(self) -> Tensor:
        return self.numbers[1][:, None] + torch.arange(self.layout.rows, device=self.store.device)

    @cached_property
    def reach(self) -> dict[int | None, Reach]:
        """What the rows see, by the sliding window of a layer."""
        layout, slots = self.layout, self.numbers[0]
        return {
            window: Reach(slots, first, layout.rows, tuple(layout.extent[window]), window if self.windowed else None)
            for window, first in zip(layout.first, self.numbers[2:], strict=True)
        }

    def attend(self, layer: int, stacked: Tensor, cos: Tensor, sin: Tensor, norms: Norms) -> Tensor:
        reach = self.reach[self.config.windows[layer]]
        keys, values = self.store.keys[layer], self.store.values[layer]
        query = rope_append(stacked, cos, sin, keys, values, reach.slots, reach.first, norms)
        if self.queries is not None:
            self.queries.append(query[:, -QUERIES:].clone())
        return attend(query, keys, values, reach)


class FullView:
    """Every key. Rows attend over a multiple of `bucket` slots, so that a position always sees one shape.

    For that a pass of the fixed shape must stay inside one bucket: `room` says how many tokens it may draft.
    """

    def __init__(self, config: ModelConfig, store: KVStore, sequences: int, bucket: int = 1) -> None:
        self.config, self.store, self.bucket = config, store, bucket
        self.held = [Held() for _ in range(sequences)]
        self.record = False  # keep the queries of each pass, for views that select by them
        self.recorded: dict[int, tuple[int, int, list[Tensor]]] = {}  # slot -> position of row 0, b, queries by layer

    def missing(self, text: Text) -> list[int]:
        return self.held[text.slot].missing(text.tokens, text.committed)

    def fed(self, text: Text, tokens: Sequence[int]) -> None:
        self.held[text.slot].extend(tokens)

    def room(self, text: Text) -> int:
        """Tokens that may be fed behind the text's last one without leaving its bucket; no limit without buckets."""
        return self.bucket - 1 - (len(text) - 1) % self.bucket if self.bucket > 1 else self.store.capacity

    def begin(self, texts: Sequence[Text], rows: int, live: Sequence[int] | None = None) -> Pass:
        """`live`: rows of each text that count; the rest is padding, and may stand beyond the text's bucket."""
        first = [len(self.held[text.slot]) for text in texts]
        live = live or [rows] * len(texts)
        extent = [-(-(at + n) // self.bucket) * self.bucket for at, n in zip(first, live, strict=True)]
        slots, windows = [text.slot for text in texts], set(self.config.windows)
        layout = Layout(slots, rows, first, dict.fromkeys(windows, first), dict.fromkeys(windows, extent))
        memory = Pass(self.config, self.store, layout, windowed=True)
        if self.record:
            memory.queries = []
            for b, (slot, at) in enumerate(zip(slots, first, strict=True)):
                self.recorded[slot] = (at + max(0, rows - QUERIES), b, memory.queries)
        return memory

    def verified_queries(self, layer: int, slot: int, length: int) -> Tensor:
        """Queries [N, H, D], N ≥ 1, of the last pass's rows at positions below `length`; needs `record`."""
        first, b, queries = self.recorded[slot]
        return queries[layer][b, : length - first]


class WindowView:
    """A draft model's own short memory: sinks and recent tokens at window positions (StreamingLLM, arXiv 2309.17453).

    When the window is full it is fed anew from the text's first `sinks` and last `recent` tokens, so that the model
    never sees a position beyond its training, whatever the length of the text.
    """

    def __init__(
        self, config: ModelConfig, store: KVStore, sequences: int, *, sinks: int, recent: int, capacity: int
    ) -> None:
        """The window is full at `capacity` tokens; the store needs room for a block more."""
        self.full = FullView(config, store, sequences)
        self.sinks, self.recent, self.capacity = sinks, recent, capacity
        self.step = capacity - sinks - recent
        self.skipped = [0] * sequences  # tokens left out between the sinks and the window

    def missing(self, text: Text) -> list[int]:
        held, skipped = self.full.held[text.slot], self.skipped[text.slot]
        beyond = len(text) - skipped - self.capacity
        if beyond > 0:
            # By whole steps, so that the window depends on the text's length and not on when one looks.
            self.skipped[text.slot] = skipped = skipped + -(-beyond // self.step) * self.step
            held.reset()
        shown = text.tokens[: self.sinks] + text.tokens[self.sinks + skipped :]
        return held.missing(shown, max(0, text.committed - skipped))

    def fed(self, text: Text, tokens: Sequence[int]) -> None:
        self.full.fed(text, tokens)

    def begin(self, texts: Sequence[Text], rows: int) -> Pass:
        return self.full.begin(texts, rows)
