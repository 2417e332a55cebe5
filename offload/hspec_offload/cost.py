"""What a pass costs: bytes over rates, and the slowest of what runs side by side.

    pass = max(PCIe + stalls, disk, GPU memory + CPU + overhead, GPU compute, DRAM) + first piece

Copies over PCIe run ahead of the layers, as far as the ring of buffers reaches, so they hide whatever else there is, or
it hides them; while the CPU computes a layer for longer than the ring takes to fill, they stall. Layers that the CPU
computes and layers that the GPU computes wait for each other. Copies and CPU both read DRAM, which bounds their sum.
Measured rates come from the profile; the factors below say what share of a rate a kernel reaches, and where that was
measured: on an H200 host, Llama-2-7B shape, unless stated.
"""

from __future__ import annotations

from dataclasses import dataclass

from hspec_offload.machine import Machine
from hspec_offload.shape import ModelShape

# GPU memory, of the rate of a copy
LINEAR = 0.88  # skinny products: 4.1 ms for 13.2 GB of weights, of which launches take 0.35
KEYS = {1: 1.0, 4: 0.85}  # attention by query heads of a KV head: 18.3 ms at 122,880 tokens; 3.2 to 3.9 TB/s with 4
KEYS_GROUPED = 0.7  # with more
FOUR_BIT_ATTENTION = 0.52  # attention over a 4-bit copy: 7.8 ms for 17.3 GB
# seconds beside the bytes
LAYER = 1.0e-5  # kernels of a layer starting one after the other in a graph
FOUR_BIT_LAYER = 2.6e-5  # more of a layer in 4 bits: its four products take 56 µs and their bytes 27
PASS = 5.0e-5  # sampling, and the one wait of the host
HOP = 1.0e-4  # a layer's rows to the CPU and back; assumed
REDUCE = 3.0e-5  # one sum over the ranks, of which a layer has two; assumed
CPU_LAYER = 2.0e-5  # operations of a layer starting on a CPU; assumed
NGRAM = 5.0e-5  # looking up one block; assumed
# PCIe
STREAM = 0.95  # of the rate of single large copies, averaged over a pass; to be reached: 0.93
GATHER = 0.87  # rows fetched by a kernel from pinned memory: 48 of 55 GB/s at 2 KB
PIECE = 64 << 20  # bytes of one copy (54 GB/s; 8 MB: 52)
# host
BESIDE = (
    0.5  # of the CPU's rates while copies cross the bus: 34 of 77 GB/s of keys, 39 of 75 of weights, both beside 50
)
SHARED = 0.88  # of DRAM's rate where copies and CPU both read it: 26 + 53 of 90 GB/s
GROUPED = 0.5  # of the CPU's attention rate with several query heads to a KV head: 34 of 68, 20 of 40 GB/s
TURNS = (
    8  # rows from which the CPU's products and copies take turns: any mix of a 7B's layers took 220 to 250 ms a pass
)
PRODUCT_ROWS = 8  # rows that the CPU multiplies for little more than one (1.1 times, 2 cores of Zen 4)
# compute
MATRIX = 0.5  # of the matrix rate, in passes of few rows; assumed
PREFILL = 0.85  # in prefill: 8.25 s for 122,880 tokens


@dataclass(frozen=True)
class Work:
    """What one pass moves and computes. Bytes of the whole model; times in seconds."""

    rows: int  # of one sequence
    linear: float = 0.0  # 16-bit weights that the GPU multiplies
    four_bit: float = 0.0  # 4-bit weights
    keys: float = 0.0  # keys and values that the GPU attends to
    four_bit_keys: float = 0.0
    streamed: float = 0.0  # of all these, carried to the GPU first; of which
    streamed_keys: float = 0.0  # keys and values
    disk: float = 0.0  # of these, read from the disk before that
    cpu_linear: float = 0.0  # 16-bit weights that the CPU multiplies
    cpu_keys: float = 0.0
    cpu_layers: float = 0.0  # layers that the CPU multiplies
    key_layers: int = 0  # layers whose KV is in RAM
    ring: int = 0  # bytes of the ring of buffers
    operations: float = 0.0
    pinned: float = 1.0  # share of what is streamed that lies in pinned memory
    overhead: float = 0.0


@dataclass(frozen=True)
class Pass:
    """Seconds of one pass and of its terms, which overlap."""

    seconds: float
    pcie: float = 0.0
    stall: float = 0.0
    memory: float = 0.0
    compute: float = 0.0
    cpu: float = 0.0
    dram: float = 0.0
    disk: float = 0.0
    overhead: float = 0.0


def timed(work: Work, machine: Machine, model: ModelShape, batch: int = 1) -> Pass:
    """The time of a pass over `batch` sequences."""
    streamed, cpu = work.streamed, work.cpu_linear + work.cpu_keys
    pcie = streamed * seconds_a_byte(machine, work.pinned) if streamed else 0.0
    beside = BESIDE if streamed else 1.0
    products = work.cpu_linear / (beside * product_rate(machine, work.rows * batch)) if work.cpu_linear else 0.0
    attention = work.cpu_keys / (beside * attention_rate(machine, model, work.rows)) if work.cpu_keys else 0.0
    turns = work.rows * batch >= TURNS
    stall = stalled(work, products, attention, pcie / streamed, turns=turns) if streamed and cpu else 0.0
    memory = gpu_memory_seconds(work, machine, model) if machine.gpus else 0.0
    compute = work.operations / (machine.matrix * MATRIX) if machine.gpus else 0.0
    dram = (streamed + cpu) / (machine.dram * (SHARED if streamed and cpu else 1.0))
    disk = work.disk / machine.disk
    slowest = max(pcie + stall, disk, memory + products + attention + work.overhead, compute, dram)
    first = min(model.layer_bytes, PIECE) * pcie / streamed if streamed else 0.0
    return Pass(slowest + first, pcie, stall, memory, compute, products + attention, dram, disk, work.overhead)


def stalled(work: Work, products: float, attention: float, a_byte: float, *, turns: bool) -> float:
    """Seconds in which the ring is full and waits for the CPU: beside a layer's attention its own keys are carried
    too, beside its products nothing that it could use, or, where they take turns, nothing at all.
    """
    ring, seconds = work.ring * a_byte, 0.0
    if work.cpu_layers:
        seconds += products if turns else max(0.0, products - work.cpu_layers * ring)
    if work.key_layers:
        seconds += max(0.0, attention - work.streamed_keys * a_byte - work.key_layers * ring)
    return seconds


def gpu_memory_seconds(work: Work, machine: Machine, model: ModelShape) -> float:
    """What the GPU reads, and writes where bytes come from outside."""
    keys = KEYS[1] if model.group == 1 else KEYS[4] if model.group <= 4 else KEYS_GROUPED
    read = (work.linear + work.four_bit) / LINEAR + work.keys / keys + work.four_bit_keys / FOUR_BIT_ATTENTION
    return (read + work.streamed) / machine.copy


def seconds_a_byte(machine: Machine, pinned: float) -> float:
    """Of a byte carried to the GPU, where a share of the bytes lies in pinned memory."""
    return pinned / (machine.link * STREAM) + (1 - pinned) / machine.pageable


def attention_rate(machine: Machine, model: ModelShape, rows: int) -> float:
    """Bytes of keys and values a second that the CPU attends to for `rows` query rows: bound by DRAM, then by rows."""
    rate = min(machine.attention, machine.attention_rows * 16 / rows)
    return rate * (1.0 if model.group == 1 else GROUPED)


def product_rate(machine: Machine, rows: int) -> float:
    """Bytes of 16-bit weights a second that the CPU multiplies with `rows` rows."""
    return machine.product / max(1.0, rows / PRODUCT_ROWS)


def overhead(machine: Machine, model: ModelShape, rows: int, *, four_bit: int = 0, hops: float = 0) -> float:
    """Seconds of a pass beside its bytes: `four_bit` layers in 4 bits, `hops` layers in which the CPU has a part."""
    seconds = PASS + model.layers * (LAYER if machine.gpus else CPU_LAYER) + four_bit * FOUR_BIT_LAYER
    if machine.ranks > 1:
        seconds += 2 * model.layers * (REDUCE + rows * model.hidden * model.element / machine.peer)
    return seconds + (hops * HOP if machine.gpus else 0.0)


@dataclass(frozen=True)
class Prefill:
    """Reading a prompt: seconds and terms, and how often a byte crosses the bus."""

    seconds: float
    compute: float = 0.0
    pcie: float = 0.0
    disk: float = 0.0
    chunk: int = 0  # tokens
    key_crossings: float = 0.0  # of a key or value that lives in host memory, there and back, on average
    weight_crossings: int = 0  # of weights that do
    tokens: int = 0  # of the prompt


def prefill(
    machine: Machine,
    model: ModelShape,
    tokens: int,
    chunk: int,
    *,
    batch: int,
    weights: float,
    keys: float,
    disk: float,
    pinned: float,
) -> Prefill:
    """One sequence after the other, each layer over all chunks before the next one begins. Of the bytes that live
    outside the GPU `weights` cross once, to it, and `keys`, of one sequence, once, to the host; `disk` of the weights
    come from the disk.
    """
    chunks = -(-tokens // chunk)
    attended = sum(min(tokens, 2 * window if window else tokens) for window in model.windows) / model.layers / 2
    operations = model.operations(tokens, attended, head=False)
    compute = operations / (machine.matrix * PREFILL if machine.gpus else machine.product * PRODUCT_ROWS)
    to_device = weights * seconds_a_byte(machine, pinned) if machine.gpus else 0.0
    to_host = keys / machine.link_back if machine.gpus else 0.0
    reading = disk / machine.disk
    memory = chunks * model.layers * model.layer_bytes / (machine.copy * LINEAR) if machine.gpus else 0.0
    longest = max(compute, memory, to_device, to_host, reading)
    return Prefill(
        batch * longest,
        batch * compute,
        batch * max(to_device, to_host),
        batch * reading,
        chunk,
        1.0,
        1,
        tokens,
    )
