"""What the engine tells while it works. Everything that a person sees is made of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reason = Literal["eos", "length", "context"]


@dataclass(frozen=True)
class Prefilled:
    """`done` of `total` prompt tokens of one sequence are in the cache."""

    done: int
    total: int
    sequence: int = 0


@dataclass(frozen=True)
class Emitted:
    """Tokens that are certain, in order; an end-of-sequence token comes last."""

    tokens: tuple[int, ...]
    sequence: int = 0


@dataclass(frozen=True)
class LevelRound:
    """What one level did in one round: as in `LevelReport`."""

    name: str
    proposed: int
    kept: int
    refused: int
    passes: int
    seconds: float


@dataclass(frozen=True)
class Round:
    """One pass of the target: how many tokens were proposed to it and kept, at which width of each level."""

    proposed: int
    kept: int
    widths: tuple[int, ...]
    seconds: float
    levels: tuple[LevelRound, ...] = ()  # those that had a part in it, cheapest first, the target last
    plain: float | None = None  # seconds of a token decoded without speculation, as measured so far
    promised: float | None = None  # seconds of a token that the measurements so far promised of this round
    gpu_bytes: int = 0  # read by the GPU from its own memory
    link_bytes: int = 0  # carried from the host to the GPU
    ram_bytes: int = 0  # read by the CPU from RAM, to compute with


Weights = Literal["gpu", "4bit", "streamed", "cpu", "disk"]
Keys = Literal["gpu", "host", "cpu", "split"]


@dataclass(frozen=True)
class LayerPlace:
    """Where one layer of the target lives.

    Weights: on the GPU in 16 bits, or in 4 alone; in RAM and carried to the GPU for every pass; in RAM and multiplied
    there by the CPU; on the disk. Keys and values: on the GPU; in RAM, and carried ("host"), attended there by the CPU
    ("cpu"), or some of each ("split"). `copy`: the format of a copy of the weights on the GPU for levels that propose.
    """

    weights: Weights
    keys: Keys
    copy: str = ""


@dataclass(frozen=True)
class MemoryPart:
    """Bytes of a device's memory that one thing takes."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class DeviceMemory:
    """A device's memory: bytes that the run could use when it began, and what it uses."""

    name: str
    available: int
    parts: tuple[MemoryPart, ...]


@dataclass(frozen=True)
class Placed:
    """Where everything is, told before the prompt is read and again whenever that changes."""

    layers: tuple[LayerPlace, ...]
    devices: tuple[DeviceMemory, ...]


@dataclass(frozen=True)
class Expected:
    """What a plan promises of this run, and what the host was measured to reach; None where nobody knows.

    Seconds of a token by the plan's levels and by plain decoding, and of reading the prompt; bytes a second that the
    GPU reads from its memory, that the link carries to it, and that all cores read from RAM.
    """

    token: float | None = None
    plain: float | None = None
    prefill: float | None = None
    gpu: float | None = None
    link: float | None = None
    ram: float | None = None


@dataclass(frozen=True)
class InFlight:
    """The layer whose weights, keys or values are on their way at this moment; None: nothing is."""

    layer: int | None


@dataclass(frozen=True)
class Finished:
    """A sequence is complete."""

    reason: Reason
    sequence: int = 0


Event = Placed | Expected | InFlight | Prefilled | Emitted | Round | Finished


@dataclass(frozen=True)
class LevelReport:
    """One level's work: tokens it proposed to the level above and that were kept there, its passes and seconds."""

    name: str
    proposed: int
    kept: int
    passes: int
    seconds: float
    refused: int = 0  # tokens looked at and not kept; those behind them were not looked at


@dataclass(frozen=True)
class Choice:
    """One of the stacks that an engine could use: seconds a token at its best widths, as measured, and its rounds."""

    stack: str
    widths: tuple[int, ...]
    seconds: float
    rounds: int


@dataclass(frozen=True)
class Report:
    """A run in numbers. Levels cheapest first, the target last; seconds are wall time."""

    prompt_tokens: int
    generated_tokens: int
    prefill_seconds: float
    decode_seconds: float
    levels: tuple[LevelReport, ...]
    stack: str
    seed: int
    note: str | None = None  # a fall-back, in one sentence
    plain_seconds: float | None = None  # of one token decoded without speculation, where it was measured
    setup_seconds: float = 0.0  # between prompt and first token, where passes are captured and timed
    choices: tuple[Choice, ...] = ()  # where several stacks were to choose from, best first

    @property
    def target_passes(self) -> int:
        """Verify passes of the target."""
        return self.levels[-1].passes
