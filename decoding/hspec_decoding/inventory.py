"""What memory holds and what a pass reads, counted from the tensors themselves, for events to tell."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hspec_decoding.events import DeviceMemory, LayerPlace, MemoryPart, Placed, Round
from hspec_decoding.host_weights import HostLinear, SmallDecoder
from hspec_decoding.levels import ModelLevel
from hspec_decoding.sparse import SparseView
from hspec_decoding.tidal import LastView, TidalView
from hspec_decoding.views import FullView, InPlaceView
from hspec_decoding.window import WindowView
from hspec_kernels.linear import Quantized
from hspec_offload.host_kv import HostKV
from hspec_profiles.memory import usable_ram

if TYPE_CHECKING:
    from hspec_decoding.build import Parts
    from hspec_decoding.cache import Store
    from hspec_decoding.levels import Level
    from hspec_decoding.model import Decoder
    from hspec_decoding.views import View
    from hspec_offload.plan import Plan


PLACES = {"stream": "streamed"}  # of weights; of keys
KEYS = {"stream": "host"}


def placed(parts: Parts, plan: Plan | None = None) -> Placed:
    """Where everything is: as a plan says, or all on one device."""
    device, copies = parts.target.device, "".join(list(parts.quantized)[:1])
    where = "gpu" if device.type == "cuda" else "cpu"
    layer = LayerPlace(where, where, copies)  # type: ignore[arg-type]
    held = tuple(MemoryPart(name, nbytes) for name, nbytes in _held(parts) if nbytes)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        rest = MemoryPart("graphs, buffers, others", max(0, total - free - sum(part.nbytes for part in held)))
        memory = DeviceMemory(f"GPU {device.index or 0} ({torch.cuda.get_device_name(device)})", total, (*held, rest))
    else:
        memory = DeviceMemory("RAM", usable_ram() + _resident(), held)
    if plan is None or plan.resident:
        return Placed((layer,) * parts.target.config.layers, (memory,))
    away = tuple(MemoryPart(name, nbytes) for name, nbytes in _away(parts) if nbytes)
    return Placed(_layers(plan), (memory, DeviceMemory("RAM", usable_ram() + _resident(), away)))


def _layers(plan: Plan) -> tuple[LayerPlace, ...]:
    """The plan's layers one by one."""
    return tuple(
        LayerPlace(PLACES.get(run.weights, run.weights), KEYS.get(run.keys, run.keys), run.copy)  # type: ignore[arg-type]
        for run in plan.layers
        for _ in range(run.count)
    )


def _away(parts: Parts) -> Iterator[tuple[str, int]]:
    """What host memory holds for passes on another device."""
    linears = (part for layer in parts.target.layers for part in vars(layer).values() if isinstance(part, HostLinear))
    yield "weights", sum(_nbytes(linear.parts) for linear in linears)
    store = parts.stores.get("target")
    yield "KV cache", sum(units.nbytes for units in store.units.values()) if isinstance(store, HostKV) else 0


def _held(parts: Parts) -> Iterator[tuple[str, int]]:
    """The parts of a device's memory, as plans name them, and their bytes."""
    target, stores = parts.target, parts.stores
    bits = 8 * target.dtype.itemsize
    yield f"weights, {bits} bits", weight_bytes(target) - _nbytes(target.head)
    yield "head", 0 if target.config.tied else _nbytes(target.head)
    yield "embedding", target.embedding.nbytes
    yield "weights, 4-bit copy", sum(weight_bytes(copy) for copy in parts.quantized.values())
    yield "KV cache", _on_device(stores["target"]) if "target" in stores else 0
    yield "KV, few-bit copy", sum(_nbytes(*copies) for _, copies in parts.copies.values())
    drafts = [store.nbytes for name, store in stores.items() if name.startswith("draft")]
    yield "draft model", (weight_bytes(parts.draft) + parts.draft.embedding.nbytes if parts.draft else 0) + sum(drafts)
    others = [name for name in stores if name != "target" and not name.startswith("draft")]
    yield "retrieval copy", sum(stores[name].nbytes for name in others)


def _on_device(store: Store) -> int:
    """Bytes of keys and values that are not in host memory."""
    return _nbytes(*store.keys, *store.values)


def weight_bytes(decoder: Decoder) -> int:
    """Bytes of weights that one pass reads: all but the embedding, of which it looks up rows."""
    if isinstance(decoder, SmallDecoder) and not decoder.made:
        return 0
    layers = (part for layer in decoder.layers for part in vars(layer).values())
    return _nbytes(*layers, decoder.norm, decoder.head)


def _nbytes(*parts: object) -> int:
    """Bytes of tensors, wherever they are in tuples, and of matrices and caches in few bits."""
    total = 0
    for part in parts:
        if isinstance(part, (Tensor, Quantized)):
            total += part.nbytes
        elif isinstance(part, tuple):
            total += _nbytes(*part)
        elif part is not None and not isinstance(part, (int, float, str)):
            total += sum(t.nbytes for t in vars(part).values() if isinstance(t, Tensor))  # a QuantizedKV
    return total


def _resident() -> int:
    """Bytes of RAM that this process holds."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def layer_of(key: tuple[object, ...]) -> int:
    """The layer that an item of the ring belongs to: ("kv", 7, ...) or ("weights", "model.layers.7.mlp.", ...)."""
    kind, where = key[:2]
    return int(str(where).split(".")[2]) if kind == "weights" else int(str(where))


class Traffic:
    """Bytes that levels read, from the passes that they took. All of them run on one device."""

    def __init__(self, levels: Sequence[Level], device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._levels = {level.name: level for level in levels if isinstance(level, ModelLevel)}
        self._weights: dict[str, int] = {}
        rings = {level.decoder.ring for level in self._levels.values() if level.decoder.ring}
        self._ring = next(iter(rings), None)
        self._carried = self._ring.carried if self._ring else 0

    def told(self, done: Round, lengths: Sequence[int]) -> Round:
        """The round with the bytes that it read behind texts of so many tokens."""
        read = sum(did.passes * self._of_pass(did.name, lengths) for did in done.levels if did.name in self._levels)
        if self._ring:
            done = replace(done, link_bytes=self._ring.carried - self._carried)
            self._carried = self._ring.carried
        return replace(done, gpu_bytes=read) if self._gpu else replace(done, ram_bytes=read)

    def _of_pass(self, name: str, lengths: Sequence[int]) -> int:
        each, most = _attended(self._levels[name].view)
        if name not in self._weights:
            self._weights[name] = weight_bytes(self._levels[name].decoder)
        view = self._levels[name].view
        read = view.tidal.read if isinstance(view, (LastView, TidalView)) else float
        return self._weights[name] + round(each * sum(min(read(length), most) for length in lengths))


def _attended(view: View) -> tuple[float, float]:
    """Bytes of keys and values that a pass of one row reads of each token, and of how many tokens at most."""
    if isinstance(view, FullView):
        return _token_bytes(view), inf
    if isinstance(view, InPlaceView):
        share = _nbytes(*view.copies) / view.source.store.nbytes if view.copies else 1.0
        return share * _token_bytes(view.source), inf
    if isinstance(view, WindowView):
        return _token_bytes(view.full), view.capacity
    if isinstance(view, SparseView):
        return _token_bytes(view.source), view.budget
    return 0.0, 0.0


def _token_bytes(view: FullView) -> float:
    store = view.store
    return store.nbytes / (store.sequences * store.capacity)
