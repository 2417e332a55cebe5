"""What a draft model is: the numbers that fix its shape, and defaults that suit a target."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from hspec_decoding.calibration import fingerprint
from hspec_decoding.config import ModelConfig
from hspec_profiles.errors import HspecError

SMALL, MIDDLE = 1024, 2048  # hidden sizes: below the first a full encoder, below the second a narrow one
FREQUENT = 32_768  # tokens of a vocabulary that is drafted from as a whole


@dataclass(frozen=True)
class ChimeraConfig:
    """Sizes in elements, lengths in tokens; `lo`, `mid` are layers of the target.

    A row sees the first `sinks` rows of the verified text and the last `window` ones, its own among them. A row drafted
    after it sees what it saw, and the rows drafted on its own branch.
    """

    fingerprint: str  # of the target's shape
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    trigram: int  # width of the encoder's inner layer
    rank: int  # width of a residual head
    depths: int  # tokens drafted in a row that there are residual heads for
    lo: int
    mid: int
    vocabulary: int  # tokens that are drafted from
    window: int = 512
    sinks: int = 4
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    with_trigram: bool = True  # else the encoder sees the last token only
    with_tokens: bool = True  # else it sees none; without a block too, depths are independent heads, as Medusa's
    with_block: bool = True
    with_residual: bool = True

    @classmethod
    def for_target(cls, target: ModelConfig, **changes: Any) -> ChimeraConfig:
        """Sizes by the target's: 15 MB in 16 bits for a model of 135M parameters, 60 MB for one of 1.5B."""
        hidden, narrow = target.hidden_size, SMALL <= target.hidden_size < MIDDLE
        drafted = 8192 if hidden < SMALL else 16_384 if narrow else FREQUENT
        ffn = min(target.ffn_size, -(-hidden * 8 // 3 // 64) * 64)
        made = cls(
            fingerprint=fingerprint(target),
            hidden=hidden,
            heads=target.heads,
            kv_heads=target.kv_heads,
            head_dim=target.head_dim,
            ffn=hidden * 5 // 6 // 64 * 64 if narrow else ffn,
            trigram=hidden // 2 if narrow else hidden,
            rank=64,
            depths=6,
            lo=min(2, target.layers - 1),
            mid=target.layers // 2,
            vocabulary=target.vocab_size if target.vocab_size <= FREQUENT else drafted,
            rope_theta=float(target.rope["rope_theta"]),
            norm_eps=target.norm_eps,
        )
        return dataclasses.replace(made, **changes)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ChimeraConfig:
        """What `to_dict` gave. Raises HspecError for anything else."""
        hints = get_type_hints(cls)
        wrong = sorted(raw.keys() ^ hints.keys()) or sorted(
            name for name, kind in hints.items() if not isinstance(raw[name], (int, float) if kind is float else kind)
        )
        if wrong:
            raise HspecError(f"no configuration of a draft model: {', '.join(wrong)}")
        return cls(**raw)

    def to_dict(self) -> dict[str, Any]:
        """Every field, for a JSON file."""
        return dataclasses.asdict(self)

    @property
    def entering(self) -> tuple[int, int]:
        """Layers of the target whose input is part of a token's features."""
        return self.lo, self.mid


VARIANTS: Mapping[str, Callable[[ModelConfig], dict[str, Any]]] = {  # what is changed, to see what a part is worth
    "whole": lambda target: {},  # noqa: ARG005
    "no-trigram": lambda target: {"with_trigram": False},  # noqa: ARG005
    "no-block": lambda target: {"with_block": False},  # noqa: ARG005
    "no-residual": lambda target: {"with_residual": False},  # noqa: ARG005
    "medusa": lambda target: {"with_block": False, "with_tokens": False, "rank": target.hidden_size},
}
