"""The passes of a placement: what each moves and computes, and which part of a pass the CPU takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hspec_offload.ask import Ask
from hspec_offload.cost import (
    GATHER,
    PIECE,
    Pass,
    Prefill,
    Work,
    attention_rate,
    overhead,
    prefill,
    seconds_a_byte,
    timed,
)
from hspec_offload.memory import PINNED, Placement, chunk, in_ram
from hspec_offload.speculation import Level

REFETCHED = 0.25  # of a retrieval copy, after a verify pass; assumed
LEAST_SHARE = 1e-6
INSIDE = 1 - 1e-9  # where everything is with the CPU, no copy stalls any more: the line ends before that


@dataclass
class Target:
    """Passes of the target over all keys and values, in one placement: plain decoding with one row, verify passes with
    a block of them.
    """

    ask: Ask
    place: Placement

    def __post_init__(self) -> None:
        model, work = self.ask.model, self.ask.work
        self.attended = model.attended(work.context)
        self.keys = self.attended * model.key_bytes * work.batch  # bytes of a layer
        self.pinned = pinned(self.ask, self.place)

    def timed(self, rows: int, cpu: float, share: float, *, key_stalls: bool = True) -> Pass:
        """One pass in which the CPU multiplies `cpu` layers and attends to this `share` of KV in RAM."""
        ask, place, model, layers = self.ask, self.place, self.ask.model, self.ask.model.layers
        gpu, batch = bool(ask.machine.gpus), ask.work.batch
        elsewhere = (layers - place.keys) * self.keys
        streamed_keys = gpu * (1 - share) * elsewhere
        work = Work(
            rows=rows,
            linear=(layers - cpu) * model.layer_bytes + gpu * model.head_bytes,
            keys=place.keys * self.keys + streamed_keys,
            streamed=gpu * (layers - place.weights - cpu) * model.layer_bytes + streamed_keys,
            streamed_keys=streamed_keys,
            disk=place.disk * model.layer_bytes,
            cpu_linear=cpu * model.layer_bytes + (not gpu) * model.head_bytes,
            cpu_keys=share * elsewhere,
            cpu_layers=cpu,
            key_layers=layers - place.keys if key_stalls else 0,
            ring=place.pieces * PIECE,
            operations=batch * model.operations(rows, self.attended),
            pinned=self.pinned,
            overhead=overhead(ask.machine, model, rows * batch, hops=cpu + (layers - place.keys if share else 0)),
        )
        return timed(work, ask.machine, model, batch)

    def shared_out(self, rows: int) -> Placement:
        """The placement with the CPU's parts that make a pass of so many rows shortest.

        Tried are any number of layers with none or all of KV, and any share of KV with none or all of the layers.
        Time is the largest of linear functions: of a number of layers its least is where it stops falling, of a share
        it is where copying and computing take equally long, where copies begin to stall, or at an end.
        """
        layers = self.ask.model.layers
        if not self.ask.machine.gpus:
            return replace(self.place, cpu=layers, cpu_share=1.0)
        away, keys = layers - self.place.weights - self.place.disk, self.place.keys < layers
        if not away and not keys:
            return self.place
        tries = {(0, 0.0), (away, 0.0)}
        ends = (0.0, 1.0) if keys else (0.0,)
        for share in ends:
            tries.add((_lowest(lambda n, share=share: self.timed(rows, n, share).seconds, away), share))  # type: ignore[misc]
        for cpu in {0, away} if keys else ():
            share = _root(lambda part, cpu=cpu: self._ahead(rows, cpu, part), LEAST_SHARE, 1)  # type: ignore[misc]
            tries |= {(cpu, share), (cpu, self._onset(rows)), (cpu, 1.0)}
        best = min(sorted(tries), key=lambda parts: self.timed(rows, *parts).seconds)
        return replace(self.place, cpu=best[0], cpu_share=best[1])

    def _ahead(self, rows: int, cpu: float, share: float) -> float:
        """Seconds by which copying outlasts computing, where no copy stalls within a layer's attention."""
        made = self.timed(rows, cpu, share, key_stalls=False)
        return made.pcie + made.stall - made.memory - made.cpu - made.overhead

    def _onset(self, rows: int) -> float:
        """The share of KV from which on the CPU's attention to it makes copies stall."""
        ask = self.ask
        a_byte = seconds_a_byte(ask.machine, self.pinned)
        carried = self.keys + self.place.pieces * PIECE
        return min(1.0, carried * a_byte / (self.keys * (1 / attention_rate(ask.machine, ask.model, rows) + a_byte)))


def target_pass(ask: Ask, place: Placement, rows: int) -> Pass:
    """A pass of the target with the placement's own parts for the CPU."""
    return Target(ask, place).timed(rows, place.cpu, place.cpu_share)


def pinned(ask: Ask, place: Placement) -> float:
    """The share of what is streamed that finds pinned memory."""
    wanted = sum(term.nbytes for term in in_ram(ask, place) if term.name in PINNED)
    return min(1.0, ask.machine.pinnable / wanted) if wanted else 1.0


def middle_pass(ask: Ask, place: Placement, level: Level, rows: int) -> Pass:
    """A middle level: the target's weights or their copy, over a copy of its keys and values or over all of them."""
    model, machine = ask.model, ask.machine
    small = place.copies.small if level.weights else 0
    whole = (model.layers - small) * model.layer_bytes
    head = model.head_bytes * (model.four_bit if small == model.layers else 1)
    tokens = model.attended(ask.work.context) if level.view == "full" else float(level.budget or 0)
    keys = tokens * model.key_bytes * model.layers * ask.work.batch
    spent = overhead(machine, model, rows * ask.work.batch, four_bit=small)
    if machine.gpus:
        few = model.key_share(level.kv or "")
        work = Work(
            rows=rows,
            linear=whole + head,
            four_bit=small * model.four_bit * model.layer_bytes,
            keys=0.0 if few else keys,
            four_bit_keys=few * keys,
            operations=ask.work.batch * model.operations(rows, tokens),
            overhead=spent,
        )
    else:
        disk = place.disk * model.layer_bytes
        work = Work(rows, cpu_linear=whole + head, cpu_keys=keys, disk=disk, overhead=spent)
    return timed(work, machine, model, ask.work.batch)


def draft_seconds(ask: Ask) -> float:
    """A step of the draft model over its window; every rank runs it whole."""
    draft = ask.work.draft
    if draft is None:
        return 0.0
    weights = draft.layers * draft.layer_bytes + draft.head_bytes
    alone = replace(ask.machine, gpus=ask.machine.gpus[:1])
    spent = overhead(alone, draft, 1)
    work = Work(1, linear=weights * ask.machine.ranks, overhead=spent)
    if not ask.machine.gpus:
        work = Work(1, cpu_linear=weights, overhead=spent)
    return timed(work, alone, draft).seconds


def refresh_seconds(ask: Ask, place: Placement) -> float:
    """Selecting anew after a verify pass: the chunks' means are read, and what is new is fetched."""
    model, copies, machine = ask.model, place.copies, ask.machine
    if not copies.budget:
        return 0.0
    token = model.key_bytes * ask.work.batch
    means = copies.scored * ask.work.context / 16 * token * model.layers
    fetched = REFETCHED * copies.budget * token
    if not machine.gpus:
        return (means + 2 * fetched * model.layers) / machine.dram
    there = place.keys * 2 * fetched / machine.copy
    return means / machine.copy + there + (model.layers - place.keys) * fetched / (machine.link * GATHER)


def prefill_of(ask: Ask, place: Placement) -> Prefill:
    """Reading the prompt, or one that fills the context."""
    model, tokens = ask.model, ask.work.prompt or ask.work.context
    return prefill(
        ask.machine,
        model,
        tokens,
        chunk(ask),
        batch=ask.work.batch,
        weights=(model.layers - place.weights) * model.layer_bytes,
        keys=(model.layers - place.keys) * model.key_bytes * tokens,
        disk=place.disk * model.layer_bytes,
        pinned=pinned(ask, place),
    )


def _lowest(convex: Callable[[int], float], high: int) -> int:
    """The least number from 0 to `high` from which on a convex function does not fall."""
    low = 0
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if convex(middle + 1) < convex(middle) else (low, middle)
    return low


def _root(falling: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling linear function is nothing, between `low` and `high`."""
    high *= INSIDE
    first, last = falling(low), falling(high)
    if first <= 0:
        return low
    return high if last >= 0 else low + (high - low) * first / (first - last)
