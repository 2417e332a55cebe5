"""The decoder: a Llama-shaped transformer that keeps its weights and nothing else.

Keys and values go to the `Memory` of the pass and come back as attention output, so that the same weights read the
whole cache, a window of it or a selection, as the level that runs them wants.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from hspec_decoding.config import ModelConfig
from hspec_decoding.rope import frequencies, rotation
from hspec_kernels.linear import Quantized, gated_linear, linear, quantizable, quantize
from hspec_kernels.norm import rms_norm
from hspec_offload.ring import Item, Ring

if TYPE_CHECKING:
    from hspec_decoding.ranks import Ranks

Read = Callable[[str], Tensor]  # a checkpoint's tensor by name
Norms = tuple[Tensor, Tensor, float] | None  # weights of the norms of queries and keys, epsilon
Release = Callable[[Iterable[str]], None]  # told of tensors that were copied
EMBEDDING = "model.embed_tokens.weight"


class Product(Protocol):
    """Weights [N, K], perhaps of several linears with a common input, wherever they are."""

    def __call__(self, x: Tensor, residual: Tensor | None = None, *, gated: bool = False) -> Tensor:
        """x [..., K] -> [..., N] plus the residual or, gated, silu(gate) * up [..., N / 2]."""
        ...

    @property
    def items(self) -> Sequence[Item]:
        """What a call takes from the ring, in order."""
        ...

    def quantized(self, form: str) -> Linear:
        """The same on the device, in 4 bits where its shape allows it."""
        ...

    def finite(self) -> bool:
        """Whether all weights are numbers."""
        ...


class Linear(NamedTuple):
    """Weights on the device."""

    weight: Tensor | Quantized
    bias: Tensor | None

    def __call__(self, x: Tensor, residual: Tensor | None = None, *, gated: bool = False) -> Tensor:
        return gated_linear(x, *self) if gated else linear(x, *self, residual=residual)

    @property
    def items(self) -> Sequence[Item]:
        return ()

    def quantized(self, form: str) -> Linear:
        return Linear(_quantized(self.weight, form), self.bias)

    def finite(self) -> bool:
        return all(_finite(tensor) for tensor in self if isinstance(tensor, Tensor))


class Memory(Protocol):
    """Where one pass of R rows over B sequences puts its keys and values, and what it attends to."""

    @property
    def positions(self) -> Tensor:
        """The rows' positions for RoPE, [B, R] int64."""
        ...

    def items(self, layer: int) -> Sequence[Item]:
        """What the pass takes from the ring for a layer's attention, in order."""
        ...

    def attend(self, layer: int, stacked: Tensor, cos: Tensor, sin: Tensor, norms: Norms) -> Tensor:
        """Queries, keys and values [B, R, (H + 2 HK) D] of one layer, angles [B, R, D] -> [B, R, H, D]."""
        ...


@dataclass(frozen=True)
class Layer:
    """One layer's weights; linears with a common input are stacked."""

    input_norm: Tensor
    qkv: Product
    qk_norms: Norms
    out: Product
    mlp_norm: Tensor
    gate_up: Product
    down: Product
    ranks: Ranks | None = field(default=None, kw_only=True)  # with whom the layer is shared

    def before(self, x: Tensor, eps: float) -> Tensor:
        """Queries, keys and values [B, R, (H + 2 HK) D] of hidden states [B, R, hidden]."""
        return self.qkv(rms_norm(x, self.input_norm, eps))

    def after(self, x: Tensor, attended: Tensor, eps: float) -> Tensor:
        """The next layer's hidden states, from this one's and its attention [B, R, H, D]."""
        x = self._whole(self.out, attended.flatten(-2), x)
        return self._whole(self.down, self.gate_up(rms_norm(x, self.mlp_norm, eps), gated=True), x)

    def _whole(self, product: Product, x: Tensor, residual: Tensor) -> Tensor:
        """A product of which every rank has some columns, plus the residual."""
        return self.ranks.total(product(x), residual) if self.ranks else product(x, residual)

    def items(self, rows: int, attention: Sequence[Item] = ()) -> Sequence[Item]:  # noqa: ARG002
        """What a pass of so many rows takes from the ring, `attention` of it between `before` and `after`."""
        return (*self.qkv.items, *attention, *self.out.items, *self.gate_up.items, *self.down.items)

    def quantized(self, form: str) -> Layer:
        """The layer with its matrices in 4 bits, but for those whose shape does not allow it."""
        return self.on_device(lambda product: product.quantized(form))

    def on_device(self, bring: Callable[[Product], Product]) -> Layer:
        """The layer with every product as `bring` makes it."""
        qkv, out, gate_up, down = map(bring, (self.qkv, self.out, self.gate_up, self.down))
        return Layer(self.input_norm, qkv, self.qk_norms, out, self.mlp_norm, gate_up, down, ranks=self.ranks)

    def together(self, ranks: Ranks) -> Self:
        """The same layer as one rank's share of it."""
        return replace(self, ranks=ranks)

    def finite(self) -> bool:
        """Whether all weights are numbers."""
        norms = (self.input_norm, self.mlp_norm, *(self.qk_norms or ())[:2])
        products = (self.qkv, self.out, self.gate_up, self.down)
        return all(map(_finite, norms)) and all(product.finite() for product in products)


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _quantized(weight: Tensor | Quantized, form: str) -> Tensor | Quantized:
    return quantize(weight, form) if isinstance(weight, Tensor) and quantizable(weight) else weight


class Decoder:
    """Weights of one model on one device, and its forward pass; or one rank's share of them."""

    ranks: Ranks | None = None  # who runs the same passes
    spans: Sequence[int] = ()  # by rank the rows of the head, where it is shared

    def __init__(
        self,
        config: ModelConfig,
        read: Read,
        *,
        dtype: torch.dtype,
        device: torch.device,
        context: int,
        vocabulary: int | None = None,
        release: Release | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Read every weight through `read`, a layer at a time.

        `context`: the run's tokens, for RoPE. `vocabulary`: ids that logits are wanted for; rows of the head beyond
        them are left out, and where it has fewer, the ids that it lacks have no chance.
        """
        self.config, self.dtype, self.device = config, dtype, device
        self.ring: Ring | None = None  # what passes take from the host comes through it
        load = Loader(read, release, dtype, device)
        self.embedding = self._embedding(load)
        self.layers: list[Layer] = []
        for i in range(config.layers):
            self.layers.append(self._layer(load, i))
            if progress:
                progress(i + 1, config.layers)
        self.norm = load("model.norm.weight")
        self.head: Tensor | Quantized = (self.embedding if config.tied else load("lm_head.weight"))[:vocabulary]
        self.vocabulary = vocabulary or self.head.shape[0]
        inverse, self.rope_factor = frequencies(config, context)
        self.inverse = inverse.to(device)

    def _embedding(self, load: Loader) -> Tensor:
        return load(EMBEDDING)

    def _layer(self, load: Loader, i: int) -> Layer:
        return load.layer(i, self.config)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, memory: Memory, entering: Sequence[int] = ()) -> Tensor:
        """Hidden states [B, R, hidden] after the final norm, for token ids [B, R].

        Those that enter the layers `entering` stand before them in the last dimension, [B, R, (n + 1) hidden].
        """
        eps = self.config.norm_eps
        cos, sin = rotation(self.inverse, self.rope_factor, memory.positions, self.dtype)
        rows, layers = tokens.numel(), enumerate(self.layers)
        items = [item for i, layer in layers for item in layer.items(rows, memory.items(i))] if self.ring else []
        if self.ring and items:  # a level that needs nothing leaves what was put ahead for the target
            self.ring.follow(items)
        x, inner = self.embed(tokens), {}
        for i, layer in enumerate(self.layers):
            if i in entering:
                inner[i] = x
            attended = memory.attend(i, layer.before(x, eps), cos, sin, layer.qk_norms)
            x = layer.after(x, attended, eps)
        final = rms_norm(x, self.norm, eps)
        return torch.cat([*(inner[i] for i in entering), final], -1) if entering else final

    def embed(self, tokens: Tensor) -> Tensor:
        """Hidden states [B, R, hidden] of token ids [B, R] before the first layer."""
        if len(self.embedding) < self.vocabulary:
            tokens = tokens.clamp(max=len(self.embedding) - 1)  # ids that this model lacks
        return F.embedding(tokens, self.embedding)

    @property
    def offloaded(self) -> bool:
        """Whether layers take weights from the host."""
        return False

    @contextmanager
    def in_turn(self) -> Iterator[Iterator[Layer]]:
        """The layers one after the other, each whole on the device while it is the last that was given."""
        yield iter(self.layers)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [..., vocabulary] of hidden states [..., hidden]."""
        logits = linear(hidden, self.head)
        if self.ranks and self.spans:
            logits = self.ranks.joined(logits, self.spans)
        logits, lacking = logits.float(), self.vocabulary - logits.shape[-1]
        return F.pad(logits, (0, lacking), value=float("-inf")) if lacking else logits

    def quantized(self, form: str) -> Decoder:
        """The same model with its matrices in 4 bits; embedding and norms are shared."""
        other = copy.copy(self)
        other.layers = [layer.quantized(form) for layer in self.layers]
        other.head = _quantized(self.head, form)
        return other

    def finish(self) -> None:
        """Wait until the device has done what was asked of it, so that a clock read next tells the truth."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def non_finite(self) -> str | None:
        """The first group of weights that holds NaN or infinity, in words, or None."""
        named = {"the embedding": self.embedding, "the final norm": self.norm, "the head": self.head}
        outside = (name for name, t in named.items() if isinstance(t, Tensor) and not _finite(t))
        inside = (f"layer {i}" for i, layer in enumerate(self.layers) if not layer.finite())
        return next(outside, None) or next(inside, None)


class Loader:
    """Reads tensors in the run's dtype onto the run's device, stacking those that share an input."""

    def __init__(self, read: Read, release: Release | None, dtype: torch.dtype, device: torch.device) -> None:
        self.read, self.dtype, self.device = read, dtype, device
        self.release = release or (lambda _: None)

    def __call__(self, *names: str) -> Tensor:
        parts = [self.read(name).to(self.dtype) for name in names]
        joined = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(self.device)
        self.release(names)
        return joined

    def linear(self, at: str, *names: str, bias: bool) -> Product:
        weight, offset = ([f"{at}{name}.{kind}" for name in names] for kind in ("weight", "bias"))
        return Linear(self(*weight), self(*offset) if bias else None)

    def layer(self, i: int, config: ModelConfig) -> Layer:
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        return Layer(
            input_norm=self(f"model.layers.{i}.input_layernorm.weight"),
            qkv=self.linear(attention, "q_proj", "k_proj", "v_proj", bias=config.qkv_bias),
            qk_norms=(self(attention + "q_norm.weight"), self(attention + "k_norm.weight"), config.norm_eps)
            if config.qk_norm
            else None,
            out=self.linear(attention, "o_proj", bias=config.o_bias),
            mlp_norm=self(f"model.layers.{i}.post_attention_layernorm.weight"),
            gate_up=self.linear(mlp, "gate_proj", "up_proj", bias=config.mlp_bias),
            down=self.linear(mlp, "down_proj", bias=config.mlp_bias),
        )
