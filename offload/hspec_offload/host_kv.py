"""Keys and values of some layers in host memory, in units that cross the bus as they lie; the latest tokens stay on the
device, and leave it a whole unit at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hspec_kernels.select import gather_chunks
from hspec_offload.memory import TAIL, UNIT, UNIT_BYTES
from hspec_offload.pinned import pinned
from hspec_offload.ring import Item, Ring

AWAY = "away"  # the lane of layers whose keys are in host memory


class Derived(Protocol):
    """What is made of keys and values, and must be made before they leave the device."""

    def derive(self, layer: int, keys: Tensor, values: Tensor, slot: int, origin: int, stop: int) -> None:
        """Bring it up to position `stop`, of [HK, n, D] from position `origin` on."""
        ...

    def derived(self, slot: int, stop: int) -> None:
        """Every layer was brought up to `stop`."""
        ...


def unit_tokens(kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Tokens of a unit: the fewest that make copies over the bus efficient."""
    tokens = UNIT
    while 2 * kv_heads * tokens * head_dim * itemsize < UNIT_BYTES:
        tokens *= 2
    return tokens


@dataclass(frozen=True)
class Carried:
    """A run of units of one layer and sequence, the first of which begins at position `start`."""

    start: int
    item: Item


class HostKV:
    """Per layer keys and values on the device: of all positions, or, of layers that are away, from `origins[slot]` on;
    what is before that is in `units[layer]`, [sequences, units, 2, kv_heads, unit, head_dim] of host memory.
    """

    def __init__(
        self,
        sequences: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        windows: Sequence[int | None],
        away: Sequence[bool],
        *,
        dtype: torch.dtype,
        device: torch.device,
        ring: Ring,
        piece_bytes: int,
        unit: int | None = None,
        cpu_share: float = 0.0,
    ) -> None:
        """`capacity` in tokens; `windows` and `away` by layer (one with a sliding window stays); `cpu_share`: of the
        units, those that the CPU attends to where they lie.
        """
        self.sequences, self.capacity, self.device, self.dtype, self.ring = sequences, capacity, device, dtype, ring
        self.unit = unit or unit_tokens(kv_heads, head_dim, dtype.itemsize)
        self.away = [there and window is None for there, window in zip(away, windows, strict=True)]
        self.lanes = [AWAY if there else window for there, window in zip(self.away, windows, strict=True)]
        self.shape = sequences, kv_heads, capacity, head_dim
        self.origins = [0] * sequences
        self.cpu_share, self.observers = cpu_share, list[Derived]()
        self.held = min(capacity, self.unit + TAIL)  # slots on the device of a layer that is away
        sizes = [self.held if there else capacity for there in self.away]
        self.keys, self.values = (
            [torch.zeros(sequences, kv_heads, size, head_dim, dtype=dtype, device=device) for size in sizes]
            for _ in range(2)
        )
        count = capacity // self.unit
        unit_shape = sequences, count, 2, kv_heads, self.unit, head_dim
        self.units = {n: pinned(unit_shape, dtype) for n, there in enumerate(self.away) if there and count}
        self.run = max(1, piece_bytes // (2 * kv_heads * self.unit * head_dim * dtype.itemsize))  # units of a copy

    @property
    def nbytes(self) -> int:
        """Bytes on the device and in host memory together."""
        return sum(t.nbytes for t in (*self.keys, *self.values, *self.units.values()))

    def origin(self, layer: int, slot: int) -> int:
        """The position of the first slot of `keys[layer][slot]`."""
        return self.origins[slot] if self.away[layer] else 0

    def by_cpu(self, slot: int) -> int:
        """Leading units of a sequence that the CPU attends to: whole runs or all, the same whatever a pass is for."""
        units = self.origins[slot] // self.unit
        return units if self.cpu_share >= 1 else min(units, round(units * self.cpu_share / self.run) * self.run)

    def carried(self, layer: int, slot: int) -> list[Carried]:
        """What a pass takes from the ring of one sequence, in order."""
        if not self.away[layer]:
            return []
        units, run = self.origins[slot] // self.unit, self.run
        made = []
        for at in range(self.by_cpu(slot), units, run):
            stop = min(at + run, units)
            source = self.units[layer][slot, at:stop]
            made.append(Carried(at * self.unit, Item(("kv", layer, slot, at, stop), (source,))))
        return made

    def settle(self, slot: int, certain: int) -> None:
        """Let whole units of the first `certain` positions, which no longer change, leave the device."""
        if not self.units or certain - self.origins[slot] < self.unit:
            return
        first = self.origins[slot]
        stop = first + (certain - first) // self.unit * self.unit
        for layer in range(len(self.keys)):
            self._derive(layer, self.keys[layer][slot], self.values[layer][slot], slot, self.origin(layer, slot), stop)
        for observer in self.observers:
            observer.derived(slot, stop)
        for layer, units in self.units.items():
            for n, tail in enumerate((self.keys[layer][slot], self.values[layer][slot])):
                for at in range(first, stop, self.unit):
                    units[slot, at // self.unit, n].copy_(
                        tail[:, at - first : at - first + self.unit], non_blocking=True
                    )
                rest = tail[:, stop - first :].clone()
                tail[:, : rest.shape[1]] = rest
        self.origins[slot] = stop
        self._wait()

    def absorb(self, layer: int, slot: int, keys: Tensor, values: Tensor, tokens: int) -> None:
        """Take over one layer of a prompt's keys and values [HK, tokens, D]; `absorbed` ends it for all layers."""
        stop = tokens // self.unit * self.unit if self.units else 0
        self._derive(layer, keys, values, slot, 0, stop)
        if not self.away[layer]:
            return
        for n, (whole, tail) in enumerate(((keys, self.keys[layer]), (values, self.values[layer]))):
            for at in range(0, stop, self.unit):
                self.units[layer][slot, at // self.unit, n].copy_(whole[:, at : at + self.unit], non_blocking=True)
            tail[slot, :, : tokens - stop] = whole[:, stop:tokens]

    def absorbed(self, slot: int, tokens: int) -> None:
        """All layers of a prompt were taken over."""
        stop = tokens // self.unit * self.unit if self.units else 0
        for observer in self.observers:
            observer.derived(slot, stop)
        self.origins[slot] = stop
        self._wait()

    def gather(self, layer: int, index: Tensor, slots: Tensor, copy: tuple[Tensor, Tensor], chunk: int) -> None:
        """Chunks [B, HK, N] of a layer to the start of another store's keys and values, read where they lie."""
        keys, values = self.keys[layer], self.values[layer]
        if not self.away[layer]:
            gather_chunks(keys, values, index, slots, *copy, chunk)
            return
        origins = torch.tensor(self.origins).to(index.device, non_blocking=True)[slots, None, None] // chunk
        gather_chunks(keys, values, torch.where(index < origins, -1, index - origins), slots, *copy, chunk)
        if layer in self.units:
            units = self.units[layer]
            before = torch.where(index < origins, index, -1)
            gather_chunks(units[:, :, 0], units[:, :, 1], before, slots, *copy, chunk)

    def forget(self) -> None:
        """Begin anew: no sequence has positions in host memory, nothing is derived."""
        self.origins = [0] * self.sequences
        self.observers.clear()
        self.ring.forget()

    def _derive(self, layer: int, keys: Tensor, values: Tensor, slot: int, origin: int, stop: int) -> None:
        for observer in self.observers:
            observer.derive(layer, keys, values, slot, origin, stop)

    def _wait(self) -> None:
        """What went to host memory is there: the ring and the CPU read it without asking."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def host_attention(query: Tensor, units: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of rows [R, H, D] over all of the units [n, 2, HK, T, D], on the CPU: out [R, H, D] and natural
    log-sum-exps [R, H], float32. The rows of all heads of a group share one read.
    """
    rows, _, dim = query.shape
    kv_heads = units.shape[2]
    packed = query.reshape(rows, kv_heads, -1, dim).transpose(0, 1).flatten(1, 2)[None]  # [1, HK, R G, D]
    out = total = None
    for keys, values in units.unbind(0):
        part, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(packed, keys[None], values[None])
        part = part.float()
        if out is None or total is None:
            out, total = part, lse
            continue
        out = out + (part - out) * (lse - total).sigmoid()[..., None]
        total = torch.logaddexp(total, lse)
    assert out is not None
    assert total is not None
    grouped = out[0].view(kv_heads, rows, -1, dim), total[0].view(kv_heads, rows, -1)
    return grouped[0].transpose(0, 1).flatten(1, 2), grouped[1].transpose(0, 1).flatten(1)


def of_pieces(store: HostKV, layer: int, slot: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Position, keys and values [1, HK, unit, D] on the device of every unit that a pass takes from the ring."""
    for carried in store.carried(layer, slot):
        (units,) = store.ring.take(carried.item.key)
        for n, unit in enumerate(units):
            yield carried.start + n * store.unit, unit[0][None], unit[1][None]
        store.ring.done(carried.item.key)
