"""The decoder: a Llama-shaped transformer that keeps its weights and nothing else.

Keys and values go to the `Memory` of the pass and come back as attention output, so that the same weights read the
whole cache, a window of it or a selection, as the level that runs them wants.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from hspec_decoding.config import ModelConfig
from hspec_decoding.rope import frequencies, rotation
from hspec_kernels.linear import Quantized, linear, quantizable, quantize
from hspec_kernels.mlp import silu_mul
from hspec_kernels.norm import rms_norm

Read = Callable[[str], Tensor]  # a checkpoint's tensor by name
Norms = tuple[Tensor, Tensor, float] | None  # weights of the norms of queries and keys, epsilon
Release = Callable[[Iterable[str]], None]  # told of tensors that were copied
Linear = tuple[Tensor | Quantized, Tensor | None]  # weight, bias


class Memory(Protocol):
    """Where one pass of R rows over B sequences puts its keys and values, and what it attends to."""

    @property
    def positions(self) -> Tensor:
        """The rows' positions for RoPE, [B, R] int64."""
        ...

    def attend(self, layer: int, stacked: Tensor, cos: Tensor, sin: Tensor, norms: Norms) -> Tensor:
        """Queries, keys and values [B, R, (H + 2 HK) D] of one layer, angles [B, R, D] -> [B, R, H, D]."""
        ...


@dataclass(frozen=True)
class Layer:
    """One layer's weights; linears with a common input are stacked."""

    input_norm: Tensor
    qkv: Linear
    qk_norms: Norms
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear

    def quantized(self, form: str) -> Layer:
        """The layer with its matrices in 4 bits, but for those whose shape does not allow it."""

        def small(linear: Linear) -> Linear:
            return _quantized(linear[0], form), linear[1]

        return replace(
            self, qkv=small(self.qkv), out=small(self.out), gate_up=small(self.gate_up), down=small(self.down)
        )


def _quantized(weight: Tensor | Quantized, form: str) -> Tensor | Quantized:
    return quantize(weight, form) if isinstance(weight, Tensor) and quantizable(weight) else weight


class Decoder:
    """Weights of one model on one device, and its forward pass."""

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
        load = _Loader(read, release, dtype, device)
        self.embedding = load("model.embed_tokens.weight")
        self.layers: list[Layer] = []
        for i in range(config.layers):
            self.layers.append(load.layer(f"model.layers.{i}.", config))
            if progress:
                progress(i + 1, config.layers)
        self.norm = load("model.norm.weight")
        self.head: Tensor | Quantized = (self.embedding if config.tied else load("lm_head.weight"))[:vocabulary]
        self.vocabulary = vocabulary or self.head.shape[0]
        inverse, self.rope_factor = frequencies(config, context)
        self.inverse = inverse.to(device)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, memory: Memory) -> Tensor:
        """Hidden states [B, R, hidden] after the final norm, for token ids [B, R]."""
        eps = self.config.norm_eps
        cos, sin = rotation(self.inverse, self.rope_factor, memory.positions, self.dtype)
        if len(self.embedding) < self.vocabulary:
            tokens = tokens.clamp(max=len(self.embedding) - 1)  # ids that this model lacks
        x = F.embedding(tokens, self.embedding)
        for i, layer in enumerate(self.layers):
            stacked = linear(rms_norm(x, layer.input_norm, eps), *layer.qkv)
            attended = memory.attend(i, stacked, cos, sin, layer.qk_norms)
            x = linear(attended.flatten(-2), *layer.out, residual=x)
            gated = silu_mul(linear(rms_norm(x, layer.mlp_norm, eps), *layer.gate_up))
            x = linear(gated, *layer.down, residual=x)
        return rms_norm(x, self.norm, eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [..., vocabulary] of hidden states [..., hidden]."""
        logits = linear(hidden, self.head).float()
        lacking = self.vocabulary - self.head.shape[0]
        return F.pad(logits, (0, lacking), value=float("-inf")) if lacking else logits

    def quantized(self, form: str) -> Self:
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
        named: list[tuple[str, Tensor | Quantized]] = [
            ("the embedding", self.embedding),
            ("the final norm", self.norm),
            ("the head", self.head),
        ]
        for i, layer in enumerate(self.layers):
            for part in vars(layer).values():
                tensors = part if isinstance(part, tuple) else (part,)
                named += [(f"layer {i}", tensor) for tensor in tensors if isinstance(tensor, Tensor)]
        return next((name for name, t in named if isinstance(t, Tensor) and not torch.isfinite(t).all()), None)


class _Loader:
    """Reads tensors in the run's dtype onto the run's device, stacking those that share an input."""

    def __init__(self, read: Read, release: Release | None, dtype: torch.dtype, device: torch.device) -> None:
        self._read, self._release, self._dtype, self._device = read, release, dtype, device

    def __call__(self, *names: str) -> Tensor:
        parts = [self._read(name).to(self._dtype) for name in names]
        joined = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(self._device)
        if self._release:
            self._release(names)
        return joined

    def linear(self, at: str, *names: str, bias: bool) -> Linear:
        weight = self(*(f"{at}{name}.weight" for name in names))
        return weight, self(*(f"{at}{name}.bias" for name in names)) if bias else None

    def layer(self, at: str, config: ModelConfig) -> Layer:
        attention, mlp = at + "self_attn.", at + "mlp."
        return Layer(
            input_norm=self(at + "input_layernorm.weight"),
            qkv=self.linear(attention, "q_proj", "k_proj", "v_proj", bias=config.qkv_bias),
            qk_norms=(self(attention + "q_norm.weight"), self(attention + "k_norm.weight"), config.norm_eps)
            if config.qk_norm
            else None,
            out=self.linear(attention, "o_proj", bias=config.o_bias),
            mlp_norm=self(at + "post_attention_layernorm.weight"),
            gate_up=self.linear(mlp, "gate_proj", "up_proj", bias=config.mlp_bias),
            down=self.linear(mlp, "down_proj", bias=config.mlp_bias),
        )
