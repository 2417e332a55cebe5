"""The target's view where keys and values of some layers live in host memory.

A pass takes them from the ring unit by unit, or has the CPU attend to them where they lie, and joins the parts where
one store's parts would have been. A prompt is read layer by layer, so that every byte crosses the bus once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hspec_decoding.cache import Lane
from hspec_decoding.model import Decoder, Norms
from hspec_decoding.sequence import Text
from hspec_decoding.views import QUERIES, FullView, Layout, Pass
from hspec_kernels.attention.pieces import Pieces
from hspec_kernels.rope import rope_append
from hspec_offload.host_kv import AWAY, HostKV, host_attention, of_pieces
from hspec_offload.ring import Item, Ring


@dataclass(frozen=True)
class KVPlace:
    """Which layers' keys and values are in host memory, what they come through, and the CPU's share of their units."""

    away: tuple[bool, ...]
    ring: Ring
    piece_bytes: int
    cpu_share: float = 0.0
    unit: int | None = None  # tokens

    def store(self, target: Decoder, sequences: int, capacity: int) -> HostKV:
        """Memory for keys and values of `capacity` tokens."""
        config = target.config
        return HostKV(
            sequences,
            config.kv_heads,
            config.head_dim,
            capacity,
            config.windows,
            self.away,
            dtype=target.dtype,
            device=target.device,
            ring=self.ring,
            piece_bytes=self.piece_bytes,
            unit=self.unit,
            cpu_share=self.cpu_share,
        )


class HostPass(Pass):
    """Memory of one pass of the target."""

    store: HostKV

    def items(self, layer: int) -> Sequence[Item]:
        return [carried.item for slot in self.layout.slots for carried in self.store.carried(layer, slot)]

    def attend(self, layer: int, stacked: Tensor, cos: Tensor, sin: Tensor, norms: Norms) -> Tensor:
        if not self.store.away[layer]:
            return super().attend(layer, stacked, cos, sin, norms)
        reach = self.reach[AWAY]
        query = rope_append(
            stacked, cos, sin, self.store.keys[layer], self.store.values[layer], reach.slots, reach.first, norms
        )
        parts = [self._attend_one(layer, b, query[b : b + 1]) for b in range(len(query))]
        if self.recorded is not None:
            lses = [lse for _, lse in parts if lse is not None]
            self.recorded.append((query[:, -QUERIES:], torch.cat(lses) if len(lses) == len(parts) else None))
        return torch.cat([out for out, _ in parts])

    def _attend_one(self, layer: int, b: int, query: Tensor) -> tuple[Tensor, Tensor | None]:
        """The attention of one sequence; the CPU's part is computed while pieces are on their way."""
        store, slot = self.store, self.layout.slots[b]
        by_cpu = store.by_cpu(slot)
        rows = Fetched(query[0]) if by_cpu else None
        first, start = self._behind[b], store.origins[slot]
        pieces = Pieces(query, first[:1], self.layout.extent[None][b], store.shape[1], store.capacity)
        for at, keys, values in of_pieces(store, layer, slot):
            pieces.add(keys, values, at, first[at // store.unit :][:1])
        tail = store.keys[layer][slot : slot + 1], store.values[layer][slot : slot + 1]
        pieces.add(*tail, start, first[start // store.unit :][:1])
        if rows is not None:
            out, lse = host_attention(rows.tensor, store.units[layer][slot, :by_cpu])
            pieces.add_attended(carried_back(out, query), carried_back(lse, query), by_cpu * store.unit)
        return pieces.join()

    @cached_property
    def _behind(self) -> Tensor:
        """The position of row 0 behind the start of every unit, int64 [B, units + 1]."""
        units = torch.arange(self.store.capacity // self.store.unit + 1, device=self.store.device)
        return self.numbers[1][:, None] - units * self.store.unit


class Fetched:
    """A tensor on its way to the CPU."""

    def __init__(self, source: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if source.device.type == "cuda":
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._host = source

    @property
    def tensor(self) -> Tensor:
        """It, once it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def carried_back(result: Tensor, like: Tensor) -> Tensor:
    """A result of the CPU on the device of `like`, without waiting for it."""
    if like.device.type != "cuda":
        return result
    return result.pin_memory().to(like.device, non_blocking=True)


class Workspace:
    """One prompt's keys and values as its layers are read in turn: those that are away share one layer's memory."""

    def __init__(self, store: HostKV, slot: int) -> None:
        self.device, self.capacity, self.dtype = store.device, store.capacity, store.dtype
        self.lanes: list[Lane] = [None if there else lane for lane, there in zip(store.lanes, store.away, strict=True)]
        self.shape = 1, *store.shape[1:]
        keys, values = torch.zeros(2, *self.shape, dtype=store.dtype, device=store.device)
        self.keys, self.values = (
            [whole if there else own[slot : slot + 1] for own, there in zip(part, store.away, strict=True)]
            for part, whole in ((store.keys, keys), (store.values, values))
        )


class HostView(FullView):
    """Every key, wherever it is."""

    store: HostKV

    def room(self, text: Text) -> int:
        """Where the CPU attends, a pass stays within a unit too: what is the CPU's follows from where row 0 stands."""
        room, unit = super().room(text), self.store.unit
        return min(room, unit - 1 - (len(text) - 1) % unit) if self.store.cpu_share else room

    def begin(self, texts: Sequence[Text], rows: int, live: Sequence[int] | None = None) -> Pass:
        for text in texts:
            self.store.settle(text.slot, len(self.held[text.slot]))
        return super().begin(texts, rows, live)

    def passed(self, layout: Layout) -> Pass:
        return HostPass(self.config, self.store, layout, windowed=True, record=self.record)
