"""A decoder some of whose weights live in host memory or on a disk.

A pass takes them from the ring, matrix by matrix, or has the CPU multiply them where they lie. A prompt is read layer
by layer: each layer is then brought to the device once, whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from hspec_decoding.config import ModelConfig
from hspec_decoding.cpu_layer import CPU_ROWS, CPULayer, row_unit
from hspec_decoding.model import EMBEDDING, Decoder, Layer, Linear, Loader, Product, Read, Release
from hspec_kernels.linear import Quantized
from hspec_offload.pinned import pinned, seen_by
from hspec_offload.plan import Plan
from hspec_offload.ring import ALIGNED, Item, Ring

RING = 256 << 20  # bytes of a ring where the plan has none: weights come from a disk, and there is no GPU
LARGEST = 3 / 4  # of the ring: what is larger comes in pieces, and beside it the next copies are under way
FEW = 2048  # outputs up to which the sums of a product on a GPU depend on how many they are (hspec_kernels.linear)


@dataclass(frozen=True)
class WeightPlace:
    """Where each layer's weights are: "gpu" (the device), "stream", "disk" or "cpu"; whether it has a 4-bit copy; where
    the embedding is; what the ring is, and what hears about it.
    """

    weights: tuple[str, ...]
    copies: tuple[bool, ...]
    embedding: str = "gpu"  # or "host"
    ring: Ring | None = None
    expect: Release = lambda _: None  # told of tensors that will be read soon
    notes: list[str] = field(default_factory=list)
    exact: bool = True  # rows of a CPU beside a GPU are filled up

    @classmethod
    def of(cls, plan: Plan, ring: Ring | None, expect: Release, notes: list[str], exact: bool = True) -> WeightPlace:
        """As a plan says."""
        runs = [run for run in plan.layers for _ in range(run.count)]
        weights = tuple(run.weights for run in runs)
        return cls(weights, tuple(bool(run.copy) for run in runs), plan.embedding, ring, expect, notes, exact)


@dataclass(frozen=True, eq=False)
class Piece:
    """Part of a matrix that crosses at a time: outputs `start` to `stop` - 1; where its sources' rows begin."""

    item: Item
    start: int
    stop: int
    rows: tuple[int, ...]
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class HostLinear:
    """Weights [N, K] on the host, one or several tensors that lie below each other; pieces of them cross the bus."""

    parts: tuple[Tensor, ...]
    pieces: tuple[Piece, ...]
    bias: Tensor | None  # on the device
    ring: Ring
    dtype: torch.dtype
    used: Callable[[], None]  # told when they have crossed

    def __call__(self, x: Tensor, residual: Tensor | None = None, *, gated: bool = False) -> Tensor:
        made = []
        for piece in self.pieces:
            weight = joined(self.ring.take(piece.item.key), self.dtype)
            part = None if residual is None else residual[..., piece.start : piece.stop].contiguous()
            made.append(Linear(weight, piece.bias)(x, part, gated=gated))
            self.ring.done(piece.item.key)
        self.used()
        return made[0] if len(made) == 1 else torch.cat(made, dim=-1)

    @property
    def items(self) -> Sequence[Item]:
        return [piece.item for piece in self.pieces]

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]"""
        return sum(map(len, self.parts)), self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes on the device, in the run's precision."""
        return prod(self.shape) * self.dtype.itemsize

    def brought(self, room: Tensor) -> Linear:
        """The whole matrix, through the ring into bytes of the device."""
        weight = room[: self.nbytes].view(self.dtype).view(self.shape)
        for piece in self.pieces:
            for row, source in zip(piece.rows, self.ring.take(piece.item.key), strict=True):
                weight[row : row + len(source)] = source
            self.ring.done(piece.item.key)
        self.used()
        return Linear(weight, self.bias)

    def quantized(self, form: str) -> Linear:
        weight = torch.empty(self.shape, dtype=self.dtype, device=self.ring.device)
        for part, rows in zip(self.parts, torch.split(weight, list(map(len, self.parts))), strict=True):
            rows.copy_(part)
        self.used()
        return Linear(weight, self.bias).quantized(form)

    def finite(self) -> bool:
        return Linear(self.parts[0], self.bias).finite() and all(Linear(part, None).finite() for part in self.parts)


def joined(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Matrices [n, K] below each other; without a copy where they lie so already."""
    first = tensors[0]
    close = all(a.data_ptr() + a.nbytes == b.data_ptr() and a.dtype == b.dtype for a, b in pairwise(tensors))
    if close and first.dtype == dtype:
        return first.as_strided((sum(map(len, tensors)), first.shape[1]), (first.shape[1], 1))
    return torch.cat([tensor.to(dtype) for tensor in tensors])


class HostLoader(Loader):
    """Leaves matrices on the host: in pinned memory, or, `mapped`, in the file that they are read from."""

    def __init__(self, load: Loader, place: WeightPlace, ring: Ring, *, mapped: bool) -> None:
        super().__init__(load.read, load.release, load.dtype, load.device)
        self._place, self._ring, self._mapped = place, ring, mapped

    def linear(self, at: str, *names: str, bias: bool) -> Product:
        weights = [f"{at}{name}.weight" for name in names]
        parts = tuple(map(self.read, weights)) if self._mapped else (self._pinned(weights),)
        offset = self(*(f"{at}{name}.bias" for name in names)) if bias else None
        ahead = partial(self._place.expect, weights) if self._mapped else None
        pieces = tuple(
            _piece((at, names, n), parts, ranges, offset, ahead)
            for n, ranges in enumerate(self._cut(parts, gated="gate_proj" in names))
        )
        used = partial(self.release, weights) if self._mapped else lambda: None
        return HostLinear(parts, pieces, offset, self._ring, self.dtype, used)

    def _pinned(self, names: Sequence[str]) -> Tensor:
        parts = [self.read(name) for name in names]
        stacked = pinned((sum(map(len, parts)), parts[0].shape[1]), self.dtype, self._place.notes)
        for part, rows in zip(parts, torch.split(stacked, list(map(len, parts))), strict=True):
            rows.copy_(part)
        self.release(names)
        return stacked

    def _cut(self, parts: Sequence[Tensor], *, gated: bool) -> list[list[range]]:
        """Rows of every piece: one range or, gated, as many gates and what they are multiplied with."""
        outputs, halves = sum(map(len, parts)), 2 if gated else 1
        nbytes, rows = sum(part.nbytes for part in parts), outputs // halves
        count = -(-nbytes // int(LARGEST * self._ring.nbytes))
        if self.device.type == "cuda" and self.dtype.itemsize == 2:  # products in float32 are others
            count = min(count, max(1, outputs // (FEW + ALIGNED)))
        whole = 64 if gated else 16  # of gates, so that vectors of a CPU are full: what is left over it computes apart
        bounds = [rows * n // count // whole * whole for n in range(count)] + [rows]
        spans = [range(*span) for span in pairwise(dict.fromkeys(bounds))]
        return [[range(n * rows + span.start, n * rows + span.stop) for n in range(halves)] for span in spans]


def _piece(
    key: tuple[object, ...],
    parts: Sequence[Tensor],
    ranges: Sequence[range],
    bias: Tensor | None,
    ahead: Callable[[], None] | None,
) -> Piece:
    """Rows of tensors that lie below each other, in the order of `ranges`."""
    found: list[tuple[int, Tensor]] = []
    for rows in _merged(ranges):
        begin = 0
        for part in parts:
            start, stop = max(rows.start, begin), min(rows.stop, begin + len(part))
            if start < stop:
                found.append((start, part[start - begin : stop - begin]))
            begin += len(part)
    item = Item(("weights", *key), tuple(source for _, source in found), ahead=ahead)
    own = None if bias is None else torch.cat([bias[rows.start : rows.stop] for rows in ranges])
    return Piece(item, ranges[0].start, ranges[0].stop, tuple(row for row, _ in found), own)


def _merged(ranges: Sequence[range]) -> list[range]:
    """Ranges that touch as one."""
    touch = all(a.stop == b.start for a, b in pairwise(ranges))
    return [range(ranges[0].start, ranges[-1].stop)] if touch else list(ranges)


class HostDecoder(Decoder):
    """A decoder whose layers are where a plan puts them."""

    def __init__(
        self,
        config: ModelConfig,
        read: Read,
        *,
        place: WeightPlace,
        dtype: torch.dtype,
        device: torch.device,
        context: int,
        vocabulary: int | None = None,
        release: Release | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """As a Decoder; what is read from a disk keeps what `read` gave."""
        self._place = place
        self._unit: tuple[int, bool] | None = None
        self._ring = place.ring
        if self._ring is None and {"stream", "disk"} & set(place.weights):
            self._ring = Ring(RING, device)
        super().__init__(
            config,
            read,
            dtype=dtype,
            device=device,
            context=context,
            vocabulary=vocabulary,
            release=release,
            progress=progress,
        )
        self.ring = self._ring

    def _embedding(self, load: Loader) -> Tensor:
        if self._place.embedding == "gpu" or self.config.tied or self.device.type != "cuda":
            return super()._embedding(load)
        source = load.read(EMBEDDING)
        table = pinned(tuple(source.shape), self.dtype, self._place.notes)
        table.copy_(source)
        load.release([EMBEDDING])
        return seen_by(self.device, table)

    def _layer(self, load: Loader, i: int) -> Layer:
        where = self._place.weights[i]
        if self._ring is None or where == "gpu" or (where == "cpu" and self._place.ring is None):
            return super()._layer(load, i)
        made = HostLoader(load, self._place, self._ring, mapped=where == "disk").layer(i, self.config)
        return self._by_cpu(made) if where == "cpu" else made

    def _by_cpu(self, layer: Layer) -> Layer:
        norms = layer.qk_norms and (layer.qk_norms[0].cpu(), layer.qk_norms[1].cpu(), layer.qk_norms[2])
        products = map(_on_cpu, (layer.qkv, layer.out, layer.gate_up, layer.down))
        qkv, out, gate_up, down = products
        host = Layer(layer.input_norm.cpu(), qkv, norms, out, layer.mlp_norm.cpu(), gate_up, down)
        if self._unit is None:
            self._unit = (1, False)
            if self.device.type == "cuda" and self._place.exact:
                self._unit = row_unit(host, self.config, self.dtype)
        return CPULayer(**vars(layer), host=host, unit=self._unit[0], fixed=self._unit[1])

    @property
    def offloaded(self) -> bool:
        return any(map(_away, self.layers))

    @contextmanager
    def in_turn(self) -> Iterator[Iterator[Layer]]:
        """Layers that are away are brought into one layer's bytes on the device, one over the other."""
        if not self.offloaded:
            yield iter(self.layers)
            return
        assert self.ring is not None
        self.ring.follow([item for layer in self.layers for item in layer.items(CPU_ROWS + 1)])
        most = max(map(_layer_room, self.layers))
        yield self._brought(torch.empty(most, dtype=torch.uint8, device=self.device))

    def _brought(self, room: Tensor) -> Iterator[Layer]:
        for layer in self.layers:
            places = iter(torch.split(room, [*map(_room, _host_linears(layer)), len(room) - _layer_room(layer)]))
            yield layer.on_device(partial(_brought, places)) if _away(layer) else layer

    def quantized(self, form: str) -> Decoder:
        """Layers that the plan gives no copy are shared where they are on the device; where it gives none, all get one.

        What is away is brought to the device a matrix at a time, when the first pass asks for it.
        """
        planned = self._place.copies
        small = [not any(planned) or own or _away(layer) for own, layer in zip(planned, self.layers, strict=True)]
        return SmallDecoder(self, form, small)


class SmallDecoder(Decoder):
    """A copy in 4 bits of those layers of a decoder that `small` says, the others being shared.

    It is made when it is first used, and may be dropped: while a prompt is read, one layer's keys take its place.
    """

    def __init__(self, whole: HostDecoder, form: str, small: Sequence[bool]) -> None:
        vars(self).update({name: value for name, value in vars(whole).items() if name not in ("layers", "head")})
        self._whole, self._form, self._small = whole, form, small
        self.ring = None

    @cached_property
    def layers(self) -> list[Layer]:  # type: ignore[override]
        pairs = zip(self._small, self._whole.layers, strict=True)
        return [layer.quantized(self._form) if own else layer for own, layer in pairs]

    @cached_property
    def head(self) -> Tensor | Quantized:  # type: ignore[override]
        head = self._whole.head
        return Linear(head, None).quantized(self._form).weight if all(self._small) else head

    def make(self) -> None:
        """Make the copy now, if it is not there."""
        assert self.layers
        assert self.head is not None

    @property
    def made(self) -> bool:
        """Whether the copy is there."""
        return "layers" in vars(self)

    def drop(self) -> None:
        """Forget the copy."""
        for made in ("layers", "head"):
            vars(self).pop(made, None)


def _on_cpu(product: Product) -> Linear:
    assert isinstance(product, HostLinear)
    (weight,) = product.parts
    return Linear(weight, None if product.bias is None else product.bias.cpu())


def _away(layer: Layer) -> bool:
    return bool(layer.items(CPU_ROWS + 1))


def _brought(places: Iterator[Tensor], product: Product) -> Product:
    return product.brought(next(places)) if isinstance(product, HostLinear) else product


def _host_linears(layer: Layer) -> Iterable[HostLinear]:
    products = (layer.qkv, layer.out, layer.gate_up, layer.down)
    return (product for product in products if isinstance(product, HostLinear))


def _room(product: HostLinear) -> int:
    """Bytes of the device, of whole alignments."""
    return -(-product.nbytes // ALIGNED) * ALIGNED


def _layer_room(layer: Layer) -> int:
    return sum(map(_room, _host_linears(layer)))
