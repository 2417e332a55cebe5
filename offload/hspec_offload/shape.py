"""What a planner must know of a model: the sizes of its parts. Plain arithmetic on the numbers of its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from hspec_offload.sizes import kv_bytes, tensor_bytes

FOUR_BIT = (
    0.2825  # bytes of a layer in 4 bits, of those in 16: 32 bits of scales for 64 weights; norms stay as they are
)
BITS = {"int4": 4, "int8": 8}  # of copies of keys and values


class Config(Protocol):
    """What `ModelShape.of` reads of a model's config."""

    @property
    def layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def ffn_size(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tied(self) -> bool: ...
    @property
    def windows(self) -> tuple[int | None, ...]: ...
    @property
    def context(self) -> int: ...
    def tensors(self) -> Mapping[str, tuple[int, ...]]: ...


@dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes: counts, lengths in tokens, and bytes of one layer's weights in 16 bits."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int  # tokens that its positions reach
    tied: bool
    layer_bytes: int
    windows: tuple[int | None, ...]  # per layer: tokens of sliding attention, None for full attention
    element: int = 2  # bytes

    @classmethod
    def of(cls, config: Config, name: str, element: int = 2) -> ModelShape:
        """The shape of a model with `element` bytes a weight, key or value."""
        layer = [shape for tensor, shape in config.tensors().items() if tensor.startswith("model.layers.0.")]
        return cls(
            name=name,
            layers=config.layers,
            hidden=config.hidden_size,
            ffn=config.ffn_size,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            vocabulary=config.vocab_size,
            context=config.context,
            tied=config.tied,
            layer_bytes=tensor_bytes(layer, element),
            windows=config.windows,
            element=element,
        )

    @property
    def four_bit(self) -> float:
        """Bytes of a layer in 4 bits, of those that it has."""
        return FOUR_BIT * 2 / self.element

    @property
    def head_bytes(self) -> int:
        """The output matrix, which is the embedding too where they are tied."""
        return self.vocabulary * self.hidden * self.element

    @property
    def embedding_bytes(self) -> int:
        """The embedding where it is a matrix of its own, else nothing."""
        return 0 if self.tied else self.head_bytes

    @property
    def weight_bytes(self) -> int:
        """All weights."""
        return self.layers * self.layer_bytes + self.head_bytes + self.embedding_bytes

    @property
    def key_bytes(self) -> int:
        """Keys and values of one token in one layer."""
        return kv_bytes(1, self.kv_heads, self.head_dim, 1, self.element)

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    def key_share(self, form: str) -> float:
        """Bytes of keys and values in so few bits, of those in 16: 32 bits of scale and minimum for 128 keys of a
        channel, and for half the channels of a value. Nothing for the form "".
        """
        return (BITS[form] + (32 / 128 + 64 / self.head_dim) / 2) / (8 * self.element) if form else 0.0

    def attended(self, tokens: int) -> float:
        """Tokens that a layer attends to behind `tokens`, averaged over the layers."""
        if not self.slides:
            return tokens
        return sum(min(tokens, window or tokens) for window in self.windows) / self.layers

    @cached_property
    def slides(self) -> bool:
        """Whether some layer attends to a window only."""
        return any(self.windows)

    def operations(self, rows: int, tokens: float, *, head: bool = True) -> float:
        """Multiplications and additions of a pass of `rows` rows of which each attends to `tokens` tokens."""
        products = self.layers * self.layer_bytes + head * self.head_bytes
        attention = 4 * self.heads * self.head_dim * tokens * self.layers
        return rows * (2 * products / self.element + attention)
