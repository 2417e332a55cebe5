"""The draft model's parts, for training and decoding alike; attention between them is the caller's."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hspec_decoding.chimera.config import ChimeraConfig
from hspec_decoding.rope import rotation

FOLDED = 256_000_000  # bytes that the encoder's tables may take
QUIET = 0.5  # scale of the first logits, of the target's: sure of nothing, a draft learns faster


class Heads(nn.Module):
    """Trigram encoder, one block and residual heads over a frozen target's embedding and rows of its head.

    Row t has the feature of token x_t and the token side of x_{t-1}, x_t, x_{t+1}, stands at RoPE position t and
    predicts x_{t+2}. A drafted row has its parent's output in place of the feature.
    """

    vocabulary: Tensor

    def __init__(
        self, config: ChimeraConfig, vocabulary: Tensor, embedding: Tensor, rows: Tensor, scale: float = 1.0
    ) -> None:
        """`vocabulary` int64 [Vd]: token ids by draft id. The target's `embedding` [V, hidden] and `rows` [Vd, hidden]
        of its head, used on states of root mean square `scale`, are referenced; neither trained nor stored.
        """
        super().__init__()
        c, d = config, config.hidden
        self.config, self.embedding, self.rows, self.scale = config, embedding, rows, scale
        self.tables: Tensor | None = None
        self.register_buffer("vocabulary", vocabulary)
        self.fuse = _linear(3 * d, d)
        self.encode_in = _linear(3 * d, c.trigram)
        self.encode_out = _linear(c.trigram, d)
        self.token_norm, self.state_norm, self.mlp_norm, self.head_norm = (
            nn.Parameter(torch.ones(d)) for _ in range(4)
        )
        self.qkv = _linear(2 * d, (c.heads + 2 * c.kv_heads) * c.head_dim)
        self.out = _linear(c.heads * c.head_dim, d, 0.1)
        self.gate_up = _linear(d, 2 * c.ffn)
        self.down = _linear(c.ffn, d, 0.1)
        self.adapter = _linear(d, d)
        self.residual_in = nn.Parameter(torch.randn(c.depths, c.rank, d) / math.sqrt(d))
        self.residual_out = nn.Parameter(torch.zeros(c.depths, d, c.rank))
        with torch.no_grad():  # at first a row says what the target said of the token before, and is not sure of it
            self.head_norm.fill_(QUIET)
            self.fuse.weight.mul_(0.1)[:, 2 * d :].add_(torch.eye(d))
            self.adapter.weight.mul_(0.1).add_(torch.eye(d))
        exponents = torch.arange(0, c.head_dim, 2, dtype=torch.float32) / c.head_dim
        self.inverse = (1.0 / c.rope_theta**exponents).to(embedding.device)  # in float32, whatever the weights are

    def fused(self, features: Tensor) -> Tensor:
        """States [..., hidden] of verified tokens, from [..., 3 hidden]: what enters layers `lo` and `mid` of the
        target, and its final hidden state.
        """
        parts = features.view(*features.shape[:-1], 3, self.config.hidden)
        return self._multiplied(self.fuse, self._normed(parts).flatten(-2))

    def encoded(self, tokens: Tensor) -> Tensor:
        """The token side [..., hidden] of trigrams int64 [..., 3], newest last; at a text's start the first token
        stands for those that lack.
        """
        if not self.config.with_tokens:
            return torch.zeros(*tokens.shape[:-1], self.config.hidden, dtype=self.dtype, device=tokens.device)
        if not self.config.with_trigram:
            tokens = tokens[..., -1:].expand(tokens.shape)
        if self.tables is not None:
            inner = sum(F.embedding(tokens[..., n], table) for n, table in enumerate(self.tables))
            assert isinstance(inner, Tensor)
        else:
            inner = self._multiplied(self.encode_in, self._normed(F.embedding(tokens, self.embedding)).flatten(-2))
        return self._multiplied(self.encode_out, F.silu(inner))

    @torch.no_grad()
    def fold(self) -> None:
        """Replace the encoder's first layer by three tables of its products with every token, if they have room."""
        weight = self.encode_in.weight
        if 3 * len(self.embedding) * self.config.trigram * weight.element_size() > FOLDED:
            return
        tokens = self._normed(self.embedding).to(weight.dtype)
        self.tables = torch.stack([F.linear(tokens, part) for part in weight.chunk(3, dim=1)])

    def project(self, u: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [..., H, D], keys and values [..., HK, D] of rows with token sides and states [..., hidden] at
        positions int64 [...]; RoPE is applied.
        """
        c = self.config
        both = torch.cat((self._normed(u, self.token_norm), self._normed(states, self.state_norm)), -1)
        stacked = self._multiplied(self.qkv, both)
        stacked = stacked.view(*u.shape[:-1], c.heads + 2 * c.kv_heads, c.head_dim)
        query, key, value = torch.split(stacked, [c.heads, c.kv_heads, c.kv_heads], -2)
        cos, sin = (angle[..., None, :] for angle in rotation(self.inverse, 1.0, positions, stacked.dtype))
        return _rotated(query, cos, sin), _rotated(key, cos, sin), value

    def finish(self, u: Tensor, states: Tensor, attended: Tensor) -> Tensor:
        """The rows' outputs [..., hidden], from their token sides, their states and their attention [..., H, D].

        The token side is part of the residual stream: with it in attention alone a short training learns far less.
        """
        states = states + u
        if not self.config.with_block:
            return states
        states = states + self._multiplied(self.out, attended.flatten(-2))
        gate, up = self._multiplied(self.gate_up, self._normed(states, self.mlp_norm)).chunk(2, -1)
        return states + self._multiplied(self.down, F.silu(gate) * up)

    def logits(self, g: Tensor, last: Tensor, depth: int) -> Tensor:
        """Float32 logits [..., Vd] of outputs [..., hidden] of the rows at a depth from 0.

        `last` [..., hidden]: the target's final hidden state of the newest verified token. Depths beyond those that
        were trained have the last one's residual head.
        """
        hidden = self._normed(self._multiplied(self.adapter, g), self.head_norm * self.scale)
        if self.config.with_residual:
            depth = min(depth, self.config.depths - 1)
            inner = F.silu(F.linear(self._normed(last), self.residual_in[depth].to(hidden.dtype)))
            hidden = hidden + F.linear(inner, self.residual_out[depth].to(hidden.dtype))
        return F.linear(hidden, self.rows.to(hidden.dtype)).float()

    def _normed(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """x in the parameters' type or autocast's, over the root mean square of its last dimension."""
        normed = F.rms_norm(x.float(), x.shape[-1:], None if weight is None else weight.float(), self.config.norm_eps)
        return normed.to(self.dtype)

    def _multiplied(self, linear: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x.to(self.dtype), linear.weight.to(self.dtype))

    @property
    def dtype(self) -> torch.dtype:
        """The type that products are computed in."""
        kind = self.fuse.weight.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.fuse.weight.dtype


def _linear(inputs: int, outputs: int, scale: float = 1.0) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(made.weight, std=scale / math.sqrt(inputs))
    return made


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., D] turned by angles [..., D]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
