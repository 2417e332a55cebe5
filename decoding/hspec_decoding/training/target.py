"""The frozen target: a pass over whole rows of text, and proof that training left its weights alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hspec_decoding.config import ModelConfig
from hspec_decoding.model import Decoder, Layer, Linear, Loader, Norms
from hspec_kernels.linear import Quantized
from hspec_kernels.norm import rms_norm_reference
from hspec_kernels.rope.reference import rotate
from hspec_offload.ring import Item

SCORED = 2048  # rows whose logits over the whole vocabulary are in memory at a time


@dataclass(frozen=True)
class Said:
    """What a target says of texts [B, S], for a loss: tensors that autograd may keep."""

    features: Tensor  # [B, S, n hidden]: what enters the layers that were asked for, then the final hidden states
    likeliest: Tensor  # int64 [B, S]: the token that it would put next


class SmallTarget(Decoder):
    """A target whose layers are in NF4 from the moment they are read, so that a 7B one fits a 24 GB card."""

    def _layer(self, load: Loader, i: int) -> Layer:
        return super()._layer(load, i).quantized("nf4")


class Whole:
    """Memory of a pass over whole texts from their first token: causal attention, nothing is kept."""

    def __init__(self, config: ModelConfig, batch: int, length: int, device: torch.device) -> None:
        self.config, self.length = config, length
        self.positions = torch.arange(length, device=device).expand(batch, -1)

    def items(self, layer: int) -> Sequence[Item]:  # noqa: ARG002
        """Nothing comes from a ring."""
        return ()

    def attend(self, layer: int, stacked: Tensor, cos: Tensor, sin: Tensor, norms: Norms) -> Tensor:
        """Queries, keys and values [B, S, (H + 2 HK) D] -> [B, S, H, D]."""
        query, key, value = (part.transpose(1, 2) for part in split(self.config, stacked, cos, sin, norms))
        window, mask = self.config.windows[layer], None
        if window is not None and window < self.length:
            at = self.positions[0]
            mask = (at <= at[:, None]) & (at > at[:, None] - window)
        groups = self.config.heads != self.config.kv_heads
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=groups
        )
        return attended.transpose(1, 2)


def split(
    config: ModelConfig, stacked: Tensor, cos: Tensor, sin: Tensor, norms: Norms
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, R, H, D], keys and values [B, R, HK, D], normed and rotated, of what a layer stacks."""
    heads, kv = config.heads, config.kv_heads
    parts = stacked.view(*stacked.shape[:2], heads + 2 * kv, config.head_dim)
    query, key, value = torch.split(parts, [heads, kv, kv], 2)
    if norms:
        query, key = rms_norm_reference(query, norms[0], norms[2]), rms_norm_reference(key, norms[1], norms[2])
    return rotate(query, cos, sin), rotate(key, cos, sin), value


def said(target: Decoder, tokens: Tensor, entering: Sequence[int]) -> Said:
    """One pass of the target over texts int64 [B, S]."""
    memory = Whole(target.config, len(tokens), tokens.shape[1], target.device)
    features = target.forward(tokens, memory, entering).clone()
    hidden = features[..., -target.config.hidden_size :].flatten(0, 1)
    likeliest = torch.cat([target.logits(part).argmax(-1) for part in torch.split(hidden, SCORED)])
    return Said(features, likeliest.view(tokens.shape).clone())


def weights(target: Decoder) -> Iterator[Tensor]:
    """Every tensor of a target, codes and scales of what is in 4 bits among them."""
    for layer in target.layers:
        for part in vars(layer).values():
            yield from _tensors(part)
    yield from _tensors((target.embedding, target.norm, target.head))


def _tensors(part: object) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, Quantized):
        yield from (part.codes, part.scales)
    elif isinstance(part, (Linear, tuple)):
        for one in part:
            yield from _tensors(one)


def checksum(target: Decoder) -> str:
    """A hash of all bits of a target's weights and of their places, computed where they are."""
    found = hashlib.sha256()
    for tensor in weights(target):
        for part in torch.split(tensor.reshape(-1).view(torch.uint8), 1 << 26):
            words = F.pad(part, (0, -len(part) % 8)).view(torch.int64)
            places = torch.arange(1, 2 * len(words), 2, device=words.device)  # odd, so that no bit is lost
            found.update(f"{len(part)} {int((words * places).sum())} {int(words.sum())}".encode())
    return found.hexdigest()[:16]
