"""What a placement takes of each device's memory, by terms, and what finds room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from hspec_offload.ask import Ask, Copies
from hspec_offload.cost import PIECE
from hspec_offload.shape import ModelShape

LONGEST, ROWS = 63, 64  # tokens and rows of the longest block
SLACK = 3 * LONGEST  # slots behind the context for what levels speculate
CHUNKS = {True: 4096, False: 512}  # tokens of a prefill chunk, on a GPU and on a CPU
SPLIT = 1024  # keys of one part of the attention kernel
RESERVE, RESERVE_SHARE = 500_000_000, 0.01  # of a GPU: captured graphs, what is left between tensors, a margin
PROCESS, PROCESS_SHARE = 1_000_000_000, 0.02  # of RAM: each process itself
ROUNDING = 16  # bytes that rounding up of a rank's parts may add
WHOLE = {"embedding", "draft model", "ring of buffers", "activations"}  # on every rank; all else is split by heads
PINNED = ("weights, 16 bits", "KV cache")  # in RAM
TAIL = 512  # slots behind a unit of KV in RAM: what is not committed yet, and what levels speculate
UNIT, UNIT_BYTES = 1024, 8 << 20  # tokens and bytes that a unit has at least: whole parts of the attention kernel
RINGS = (4, 16)  # pieces of the ring: the more, the longer copies run ahead of a layer that the CPU computes


@dataclass(frozen=True)
class Term:
    """A part of what is used of a device's memory, in bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Placement:
    """How many layers have their weights, and their KV, on the GPU; of the others, what is done with them."""

    copies: Copies
    weights: int  # layers in 16 bits on the GPU
    keys: int  # layers whose KV is there
    pieces: int = 4  # of the ring of buffers
    disk: int = 0  # layers that do not fit RAM either
    embedding: bool = False  # on the GPU too
    cpu: int = 0  # layers that the CPU multiplies
    cpu_share: float = 0.0  # of the tokens of KV in RAM: attended by the CPU

    def resident(self, model: ModelShape) -> bool:
        """Whether nothing but the embedding is outside the GPU."""
        return self.weights == self.keys == model.layers


def chunk(ask: Ask) -> int:
    """Tokens of a prefill chunk."""
    return min(ask.work.context, CHUNKS[bool(ask.machine.gpus)])


def slots(ask: Ask) -> int:
    """Tokens that one layer's KV has room for, over all sequences. Sliding layers keep theirs whole too."""
    return (ask.work.context + SLACK) * ask.work.batch


def key_layer(ask: Ask) -> int:
    """Bytes of one layer's KV."""
    return slots(ask) * ask.model.key_bytes


def on_device(ask: Ask, place: Placement) -> list[Term]:
    """What the device that computes holds: a GPU, or the host where there is none."""
    model, copies = ask.model, place.copies
    late = int(copies.small * model.four_bit * model.layer_bytes)  # made when the prompt has been read
    heads = model.head_bytes + (model.four_bit * model.head_bytes if copies.small == model.layers else 0)
    ring = ask.machine.gpus and not place.resident(model)
    terms = [
        Term("weights, 16 bits", place.weights * model.layer_bytes),
        Term("weights, 4-bit copy", late),
        Term("head", int(heads)),
        Term("embedding", model.embedding_bytes if place.embedding else 0),
        Term("KV cache", place.keys * key_layer(ask)),
        Term("KV, latest", (model.layers - place.keys) * _latest(ask) if ask.machine.gpus else 0),
        Term("KV, 4-bit copy", int(model.key_share(copies.keys) * model.layers * key_layer(ask))),
        Term("retrieval copy", _sparse(ask, copies)),
        Term("draft model", _draft(ask) if copies.draft else 0),
        Term("ring of buffers", place.pieces * PIECE if ring else 0),
        Term("prompt's layer", max(0, _in_turn(ask, place) - late)),
        Term("activations", _activations(ask)),
    ]
    return [term for term in terms if term.nbytes]


def _latest(ask: Ask) -> int:
    """Bytes of the last tokens of a layer's KV, which stay on the GPU until they fill a unit."""
    tokens, key = UNIT, ask.model.key_bytes
    while tokens * key < UNIT_BYTES:
        tokens *= 2
    return min(slots(ask), (tokens + TAIL) * ask.work.batch) * key


def _sparse(ask: Ask, copies: Copies) -> int:
    """Selected keys and values, and the means to select by: half of KV's bytes (keys), one in eight."""
    if not copies.budget:
        return 0
    tokens = (copies.budget + 8 + SLACK) * ask.work.batch + (slots(ask) // 16 if copies.scored else 0)
    return ask.model.layers * ask.model.key_bytes * tokens


def _draft(ask: Ask) -> int:
    """The draft model with its window."""
    draft = ask.work.draft
    return draft.weight_bytes + draft.layers * draft.key_bytes * (512 + SLACK) * ask.work.batch if draft else 0


def _in_turn(ask: Ask, place: Placement) -> int:
    """Where something is offloaded a prompt is read layer by layer: one layer's KV is then whole on the GPU, and one
    layer's weights. A 4-bit copy of the weights takes their place afterwards.
    """
    model = ask.model
    if not ask.machine.gpus:
        return 0
    keys = (ask.work.context + SLACK) * model.key_bytes if place.keys < model.layers else 0
    return keys + (model.layer_bytes if place.weights < model.layers else 0)


def _activations(ask: Ask) -> int:
    """The larger of what a prefill chunk and a verify pass need between their kernels, and the logits."""
    model, element = ask.model, ask.model.element
    attention = 2 * (model.heads + model.kv_heads) * model.head_dim + model.hidden
    row = 3 * model.hidden + max(attention, 3 * model.ffn)
    parts = ROWS * model.heads * model.head_dim * -(-ask.work.context // SPLIT) * 4 * ask.work.batch
    rows = ROWS * ask.work.batch
    return max(chunk(ask) * row * element, parts + rows * row * element) + 3 * rows * model.vocabulary * 4


def reserve(ask: Ask, rank: int) -> int:
    """Bytes of a GPU that the plan leaves alone."""
    if ask.limits.reserve is not None:
        return ask.limits.reserve
    return RESERVE + int(RESERVE_SHARE * available(ask, rank))


def available(ask: Ask, rank: int) -> int:
    """Bytes of a GPU that may be used, the reserve among them."""
    memory = ask.machine.memory[rank]
    return memory if ask.limits.vram is None else min(memory, ask.limits.vram)


def left(ask: Ask, place: Placement) -> int:
    """Bytes, over all ranks, that a placement leaves on the GPUs; less than 0: it does not fit."""
    terms, total = on_device(ask, place), sum(ask.machine.heads)
    whole = sum(term.nbytes for term in terms if term.name in WHOLE)
    ranks = range(len(ask.machine.gpus))
    rooms = [available(ask, rank) - reserve(ask, rank) - whole - ROUNDING for rank in ranks]
    room = min(r * total // heads for r, heads in zip(rooms, ask.machine.heads, strict=True))
    return room - sum(term.nbytes for term in terms if term.name not in WHOLE)


def in_ram(ask: Ask, place: Placement) -> list[Term]:
    """What RAM holds beside the processes, each of which has some of it whole."""
    model, ranks = ask.model, ask.machine.ranks
    if not ask.machine.gpus:
        own = replace(place, weights=model.layers - place.disk, keys=model.layers, embedding=True)
        return [Term(term.name, term.nbytes) for term in on_device(ask, own)]
    terms = [
        Term("weights, 16 bits", (model.layers - place.weights - place.disk) * model.layer_bytes),
        Term("embedding", 0 if place.embedding else ranks * model.embedding_bytes),
        Term("KV cache", (model.layers - place.keys) * key_layer(ask)),
        Term("hidden states", 0 if place.resident(model) else ranks * ask.work.context * model.hidden * model.element),
    ]
    return [term for term in terms if term.nbytes]


def ram(ask: Ask) -> int:
    """Bytes of RAM that may be used."""
    return ask.machine.ram if ask.limits.ram is None else min(ask.machine.ram, ask.limits.ram)


def process(ask: Ask) -> int:
    """Bytes of RAM that the processes themselves take, and a margin; `--reserve` where there is no GPU."""
    if ask.limits.reserve is not None and not ask.machine.gpus:
        return ask.limits.reserve
    return PROCESS * ask.machine.ranks + int(PROCESS_SHARE * ram(ask))


def choices(ask: Ask, copies: Copies) -> Iterator[Placement]:
    """Placements worth timing: nothing or everything of weights or of KV on the GPU, and as much of the other as fits.

    What is tried does not depend on what there is, so that more of it never makes a plan worse.
    """
    seen = set()
    for place in _on_gpu(ask, copies) if ask.machine.gpus else [Placement(copies, 0, 0)]:
        fitted = _host(ask, place)
        if fitted and fitted not in seen:
            seen.add(fitted)
            yield fitted


def _on_gpu(ask: Ask, copies: Copies) -> Iterator[Placement]:
    layers = ask.model.layers
    everything = Placement(copies, layers, layers)
    weights, keys = spans(ask, copies)
    if layers in weights and layers in keys:
        whole = next((p for p in (replace(everything, embedding=True), everything) if left(ask, p) >= 0), None)
        if whole:
            yield whole
            return
    for pieces in RINGS:
        ring = replace(everything, pieces=pieces)
        for n in _ends(weights):
            some = partial(replace, ring, weights=n)
            most = _most(lambda k, some=some: left(ask, some(keys=k)) >= 0, keys, layers - (n == layers))  # type: ignore[misc]
            if most is not None:
                yield some(keys=most)
        for k in _ends(keys):
            some = partial(replace, ring, keys=k)
            most = _most(lambda n, some=some: left(ask, some(weights=n)) >= 0, weights, layers - (k == layers))  # type: ignore[misc]
            if most is not None:
                yield some(weights=most)


def _ends(span: range) -> set[int]:
    return {span[0], span[-1]} if span else set()


def _most(fits: Callable[[int], bool], span: range, top: int) -> int | None:
    """The largest number of a span, up to `top`, that fits, where all smaller ones do."""
    low, high = span.start - 1, min(span.stop - 1, top)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low if low in span else None


def spans(ask: Ask, copies: Copies) -> tuple[range, range]:
    """How many layers may have their weights, and how many their KV, on the GPU. That of sliding windows stays."""
    layers, limits = ask.model.layers, ask.limits
    stay = copies.needs_keys or ask.model.slides or limits.offload in ("none", "weights")
    least = layers if copies.needs_weights or limits.offload in ("none", "kv") else 0
    if copies.small:
        least = max(least, layers - copies.small)
    weights = range(least, layers + 1)
    keys = range(layers if stay else 0, layers + 1)
    if limits.gpu_layers is not None:
        weights = _only(min(limits.gpu_layers, layers), weights)
    if limits.kv_device is not None:
        keys = _only(layers if limits.kv_device == "gpu" else 0, keys)
    return weights, keys


def _only(number: int, span: range) -> range:
    """This number, if the span has it, and no other."""
    return range(number, number + 1) if number in span else range(0)


def _host(ask: Ask, place: Placement) -> Placement | None:
    """The placement with the layers that do not fit RAM on the disk; None where KV does not fit."""
    room = ram(ask) - process(ask)
    over = sum(term.nbytes for term in in_ram(ask, place)) - room
    disk = max(0, -(-over // ask.model.layer_bytes))
    return replace(place, disk=disk) if disk <= ask.model.layers - place.weights else None
