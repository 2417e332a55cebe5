"""What a caller asks for: how to run, and what to decode."""

from __future__ import annotations

from dataclasses import dataclass, field

from hspec_decoding.sampling import Sampling

RULES = ("coupled", "rejection")
CORRECT = 64  # tokens after which an approximate target computes their keys again; 0: never


@dataclass(frozen=True)
class Settings:
    """How to run, apart from the models: what the command line's flags of the same names say."""

    method: str = "auto"
    levels: str | None = None
    rule: str = "coupled"
    select: str = "verify-fed"
    exact: bool = True
    budget: int | None = None
    gamma: int | None = None
    correct: int = CORRECT
    heads: str | None = None  # the directory of Chimera's heads; None looks where they are kept
    tree: int | None = None  # nodes of its trees; 0: chains; None: as many as measurements ask for
    adapt: bool = True  # widths follow measurements, and plain decoding takes over where it is faster
    dtype: str = "auto"
    device: str = "auto"


@dataclass(frozen=True)
class Request:
    """One prompt, and when to stop.

    `sequence` is what events call it by, and keys its randomness unless `key` does: same key, seed and prompt, same
    text.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    eos: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)
    sequence: int = 0
    key: int | None = None
