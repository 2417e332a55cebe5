"""A placement as the plan tells it: what each layer does, what each device holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

from hspec_offload.ask import Ask
from hspec_offload.memory import WHOLE, Placement, Term, available, in_ram, on_device, process, ram, reserve


@dataclass(frozen=True)
class Layers:
    """A run of equal layers, `last` among them."""

    first: int
    last: int
    weights: str = "gpu"  # in 16 bits: "gpu"; "stream": pinned RAM; "disk"; "cpu": RAM, multiplied where they lie
    copy: str = ""  # "int4": of the weights, on the GPU
    keys: str = "gpu"  # KV: "gpu"; RAM, and "stream": carried to the GPU; "cpu": attended there; "split": both

    @property
    def count(self) -> int:
        """Layers of the run."""
        return self.last - self.first + 1


@dataclass(frozen=True)
class Device:
    """One device's memory in bytes: what may be used of it, and for what it is."""

    name: str
    available: int
    terms: tuple[Term, ...]

    @property
    def used(self) -> int:
        """Bytes of all terms together."""
        return sum(term.nbytes for term in self.terms)


def layer_runs(ask: Ask, place: Placement) -> tuple[Layers, ...]:
    """What every layer does. Those outside the GPU come first, so that copies run while the last round's end drafts;
    those of the CPU are spread among them, so that copies run while it computes.
    """
    layers, small = ask.model.layers, place.copies.small
    away, elsewhere = layers - place.weights, layers - place.keys
    away_keys = {0.0: "stream", 1.0: "cpu"}.get(place.cpu_share, "split")
    carried = iter(range(away))  # those from the disk are the first
    made = []
    for n in range(layers):
        weights = "gpu"
        if not ask.machine.gpus:
            weights = "disk" if n < place.disk else "cpu"
        elif n < away:
            by_cpu = (n + 1) * place.cpu // away > n * place.cpu // away
            weights = "cpu" if by_cpu else "disk" if next(carried) < place.disk else "stream"
        keys = "gpu" if n >= elsewhere else away_keys
        made.append(Layers(n, n, weights, "int4" if n < small else "", keys))
    return _runs(made)


def _runs(layers: list[Layers]) -> tuple[Layers, ...]:
    """Equal neighbours as one."""
    groups = (list(group) for _, group in groupby(layers, key=lambda one: replace(one, first=0, last=0)))
    return tuple(replace(group[0], last=group[-1].last) for group in groups)


def devices(ask: Ask, place: Placement) -> tuple[Device, ...]:
    """Every GPU of the plan, then RAM."""
    made = []
    for rank, number in enumerate(ask.machine.gpus):
        terms = [
            term if term.name in WHOLE else Term(term.name, ask.machine.part(term.nbytes, rank))
            for term in on_device(ask, place)
        ]
        name = f"GPU {number} ({ask.machine.names[rank]})"
        made.append(Device(name, available(ask, rank), (*terms, Term("reserve", reserve(ask, rank)))))
    host = (*in_ram(ask, place), Term("reserve", process(ask)))
    return (*made, Device("RAM", ram(ask), host))
