"""A host as the cost model sees it: the GPUs that share a pass as one device, and no figure unknown.

Each GPU (rank) holds a share of every layer, in whole KV heads, and carries it over its own link. A pass ends when the
slowest rank does, so the rates of the whole are those of the rank that has least for its share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hspec_profiles.profile import Gpu, Host, HostProfile

# What is taken for a figure that a profile lacks; bytes or operations a second.
COPY, MATRIX, PEER = 4e11, 5e13, 1e10  # of a middling consumer card
LANE = {3: 0.79e9, 4: 1.58e9, 5: 3.15e9}  # PCIe: 80 % of what a lane carries
LINK = 1.26e10  # 16 lanes of PCIe 3.0
PAGEABLE = 0.36  # of the pinned rate (20 of 55 GB/s, H200 host)
CORE, SOCKET = 1.2e10, 6e10  # DRAM read by one core, and by many
ATTENTION, ATTENTION_ROWS, PRODUCT = 0.75, 0.44, 0.95  # of DRAM (68, 40 and 86 of 90 GB/s, H200 host)
DISK = 5e8
SHARES = (0.03, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 0.97)  # of the heads, for the first of two unlike GPUs
WORDS = {
    "dram": "reading RAM",
    "attention": "CPU attention",
    "attention_rows": "CPU attention for 16 rows",
    "product": "CPU products",
    "disk": "disk",
    "copy": "GPU memory",
    "matrix": "GPU products",
    "to_device": "PCIe to the GPU",
    "to_host": "PCIe from the GPU",
}


@dataclass(frozen=True)
class Machine:
    """Memory in bytes; rates in bytes a second of the whole model's bytes, in operations a second for `matrix`."""

    name: str
    gpus: tuple[int, ...]  # their numbers in the profile, by rank; () for a host that computes by itself
    names: tuple[str, ...]
    heads: tuple[int, ...]  # KV heads, by rank
    memory: tuple[int, ...]  # free, by rank
    ram: int
    pinnable: int
    cores: int
    pin: float = 0.0  # bytes a second of allocating pinned memory; 0 where unknown
    copy: float = 0.0
    matrix: float = 0.0
    link: float = 0.0
    link_back: float = 0.0
    pageable: float = 0.0
    peer: float = 0.0
    dram: float = 0.0
    attention: float = 0.0
    attention_rows: float = 0.0
    product: float = 0.0
    disk: float = 0.0
    assumed: tuple[str, ...] = ()  # what the profile lacks, in words

    @property
    def ranks(self) -> int:
        """GPUs that share a pass, at least 1."""
        return max(1, len(self.gpus))

    def part(self, nbytes: float, rank: int) -> int:
        """Bytes that one rank holds of something that is split by heads."""
        return -int(-nbytes * self.heads[rank] // sum(self.heads)) if self.heads else int(nbytes)


def machines(profile: HostProfile, kv_heads: int, allowed: Sequence[int] | None = None) -> Iterator[Machine]:
    """Every way to use the profile's GPUs, or those `allowed`, that is worth a plan: each alone, and all together where
    there are heads for each; the host alone where there is none.
    """
    host, assumed = _known(profile.host)
    numbers = tuple(n for n in range(len(profile.gpus)) if allowed is None or n in allowed)
    if not numbers:
        yield _machine(profile, host, (), (), assumed)
        return
    alike = {replace(profile.gpus[number], identity=""): number for number in reversed(numbers)}
    for number in sorted(alike.values()):
        yield _machine(profile, host, (number,), (kv_heads,), assumed)
    if 1 < len(numbers) <= kv_heads:
        for heads in _splits([profile.gpus[number] for number in numbers], kv_heads):
            yield _machine(profile, host, numbers, heads, assumed)


def _splits(gpus: Sequence[Gpu], heads: int) -> list[tuple[int, ...]]:
    """Whole KV heads for each of several GPUs: of two, splits from end to end; of more, in proportion to what may limit
    them.
    """
    if len({replace(gpu, name="", identity="") for gpu in gpus}) == 1 and heads % len(gpus) == 0:
        return [(heads // len(gpus),) * len(gpus)]
    if len(gpus) == 2:
        firsts = dict.fromkeys(max(1, min(heads - 1, round(share * heads))) for share in SHARES)
        return [(first, heads - first) for first in firsts]
    figures: list[Callable[[Gpu], float]] = [
        lambda _: 1.0,
        lambda gpu: gpu.free,
        lambda gpu: _known_gpu(gpu)[0].to_device or 1.0,
    ]
    return list(dict.fromkeys(_proportional([figure(gpu) for gpu in gpus], heads) for figure in figures))


def _proportional(weights: Sequence[float], heads: int) -> tuple[int, ...]:
    """Whole heads in proportion to `weights`, at least one each."""
    given = [1] * len(weights)
    for _ in range(heads - len(weights)):
        neediest = max(range(len(weights)), key=lambda i: weights[i] / given[i])
        given[neediest] += 1
    return tuple(given)


def _machine(
    profile: HostProfile, host: Host, numbers: tuple[int, ...], heads: tuple[int, ...], assumed: Sequence[str]
) -> Machine:
    """The GPUs of one pass as one device."""
    gpus = [profile.gpus[number] for number in numbers]
    known = [_known_gpu(gpu) for gpu in gpus]
    shares = [n / sum(heads) for n in heads]

    def least(field: str) -> float:
        return min((getattr(gpu, field) / s for (gpu, _), s in zip(known, shares, strict=True)), default=0.0)

    both = (profile.both_links if len(gpus) > 1 else None) or float("inf")
    lacking = [*assumed, *(word for _, words in known for word in words)]
    return Machine(
        name=profile.name,
        gpus=numbers,
        names=tuple(gpu.name for gpu in gpus),
        heads=heads,
        memory=tuple(min(gpu.free, gpu.memory) for gpu in gpus),
        ram=host.ram,
        pinnable=host.ram if host.pinnable is None else host.pinnable,
        cores=host.cores,
        pin=host.pin or 0.0,
        copy=least("copy"),
        matrix=least("matrix"),
        link=min(least("to_device"), both),
        link_back=min(least("to_host"), both),
        pageable=min(least("to_device_pageable"), both),
        peer=profile.peer or PEER,
        dram=host.dram or 0.0,
        attention=host.attention or 0.0,
        attention_rows=host.attention_rows or 0.0,
        product=host.product or 0.0,
        disk=host.disk or DISK,
        assumed=tuple(dict.fromkeys(lacking)),
    )


def _known(host: Host) -> tuple[Host, list[str]]:
    """The host with every rate filled in, and which ones were not known."""
    dram = host.dram or min(CORE * host.cores, SOCKET)
    guesses = {
        "dram": dram,
        "attention": ATTENTION * dram,
        "attention_rows": ATTENTION_ROWS * dram,
        "product": PRODUCT * dram,
        "disk": DISK,
    }
    unknown: dict[str, Any] = {field: guess for field, guess in guesses.items() if getattr(host, field) is None}
    return replace(host, **unknown), [WORDS[field] for field in unknown]


def _known_gpu(gpu: Gpu) -> tuple[Gpu, list[str]]:
    """The same of a GPU."""
    lane = LANE.get(gpu.pcie_generation or 0)
    link = gpu.to_device or (lane * gpu.pcie_width if lane and gpu.pcie_width else LINK)
    guesses = {
        "copy": COPY,
        "matrix": MATRIX,
        "to_device": link,
        "to_host": link,
        "to_device_pageable": PAGEABLE * link,
        "to_host_pageable": PAGEABLE * link,
    }
    unknown: dict[str, Any] = {field: guess for field, guess in guesses.items() if getattr(gpu, field) is None}
    return replace(gpu, **unknown), [WORDS[field] for field in unknown if field in WORDS]
