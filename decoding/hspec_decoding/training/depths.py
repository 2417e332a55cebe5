"""Chimera's loss: a training-time test (EAGLE-3, arXiv 2503.01840), in which the draft is shown its own states.

At depth 0 a row t has the target's feature of x_t; at depth i it has its own output of depth i - 1, stands at position
t + i and is given the text's token x_{t+1+i}. It sees the rows of depth 0 up to t, within the window, and its own rows
of depths 1 to i: what a chain drafted after t sees. Nothing is detached, so every depth teaches those before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hspec_decoding.chimera.heads import Heads
from hspec_decoding.training.corpus import Batch
from hspec_decoding.training.target import Said

DECAY = 0.8  # of the weight from depth to depth
PATHS = 3  # a simulated tree holds the paths whose ranks, from 1, multiply to no more
FARTHEST = 65_536  # tokens that may be left out between sinks and window


class Figures(NamedTuple):
    """Sums over rows, for means over several batches."""

    loss: Tensor  # [K], over the rows that count at a depth
    counted: Tensor  # [K]
    agreed: Tensor  # [K], rows whose draft is the target's likeliest token, of `asked`
    asked: Tensor  # [K]: rows whose token the target chose
    chain: Tensor  # [1], tokens of a step that drafts its likeliest ones, of `steps`
    tree: Tensor  # [1], the same of a tree
    steps: Tensor  # [1]

    def __add__(self, other: Figures) -> Figures:  # type: ignore[override]
        return Figures(*(a + b for a, b in zip(self, other, strict=True)))


class Row(NamedTuple):
    """What a depth gives."""

    logits: Tensor  # [b, T, Vd]
    loss: Tensor  # summed over the rows that count
    counted: Tensor  # how many they are


class Depths(nn.Module):
    """Heads under training."""

    ids: Tensor

    def __init__(self, heads: Heads, tokens: int) -> None:
        """`tokens`: size of the target's vocabulary."""
        super().__init__()
        self.heads = heads
        ids = torch.full((tokens,), -1, dtype=torch.int64)  # draft id by token
        ids[heads.vocabulary.cpu()] = torch.arange(len(heads.vocabulary))
        self.register_buffer("ids", ids.to(heads.vocabulary.device), persistent=False)

    @property
    def entering(self) -> tuple[int, ...]:
        return self.heads.config.entering

    def forward(self, batch: Batch, said: Said, step: int) -> Tensor:
        """The loss of a step: by depth the mean cross-entropy to the target's law over the draft's vocabulary."""
        gaps = _gaps(len(batch.tokens), step).to(batch.tokens.device)
        total = torch.zeros((), device=batch.tokens.device)
        for depth, row in enumerate(self.rows(batch, said, gaps, train=True)):
            total = total + DECAY**depth * row.loss / row.counted.clamp(min=1)
        return total

    @torch.no_grad()
    def figures(self, batch: Batch, said: Said) -> Figures:
        """How well the depths do on a batch."""
        gaps = torch.zeros(len(batch.tokens), dtype=torch.int64, device=batch.tokens.device)
        losses, counted, agreed, asked = [], [], [], []
        span = self._span(batch)
        first = batch.own[:, 2 : 2 + span]
        product, hits = torch.ones_like(first, dtype=torch.int64), first
        chain = tree = torch.zeros_like(product)  # tokens kept of a draft
        for depth, row in enumerate(self.rows(batch, said, gaps, train=False)):
            true = batch.tokens[:, 2 + depth :][:, :span]
            own = batch.own[:, 2 + depth :][:, :span]
            drafted = self.heads.vocabulary[row.logits.argmax(-1)]
            losses.append(row.loss)
            counted.append(row.counted)
            agreed.append(((drafted == said.likeliest[:, 1 + depth :][:, :span]) & own).sum())
            asked.append(own.sum())
            hits = hits & own & (drafted == true)
            chain = chain + hits
            product = product * self._rank(row.logits, true)
            tree = tree + ((product <= PATHS) & own & (tree == depth))
        by_depth = (torch.stack(sums).float() for sums in (losses, counted, agreed, asked))
        by_step = (((kept + 1) * first).sum()[None].float() for kept in (chain, tree))
        return Figures._make((*by_depth, *by_step, first.sum()[None].float()))

    def _rank(self, logits: Tensor, true: Tensor) -> Tensor:
        """Where the true token stands among the drafted ones, from 1; beyond all paths where it cannot be drafted."""
        ids = self.ids[true]
        own = logits.gather(-1, ids.clamp(min=0)[..., None])
        return torch.where(ids < 0, PATHS + 1, (logits > own).sum(-1) + 1).clamp(max=PATHS + 1)

    def _span(self, batch: Batch) -> int:
        """Rows of a text that every depth has a token for."""
        return batch.tokens.shape[1] - self.heads.config.depths - 1

    def rows(self, batch: Batch, said: Said, gaps: Tensor, *, train: bool) -> Iterator[Row]:
        """What each depth says, from the first. `gaps` [b]: tokens left out behind the sinks."""
        heads, c, span = self.heads, self.heads.config, self._span(batch)
        hidden = said.features[..., -c.hidden :]
        last, states = hidden[:, :span], heads.fused(said.features[:, :span])
        with torch.no_grad():
            laws = F.linear(hidden[:, 1:], heads.rows).float().softmax(-1).to(heads.dtype)
        inside = (self.ids[said.likeliest] >= 0)[:, 1:]
        at = torch.arange(span, device=gaps.device)
        positions = at + gaps[:, None] * (at >= c.sinks)
        seen = (at <= at[:, None]) & ((at < c.sinks) | (at > at[:, None] - c.window))
        padded = torch.cat((batch.tokens[:, :1], batch.tokens), 1)
        pairs: tuple[Tensor, ...] = ()
        for i in range(c.depths):
            trigrams = torch.stack([padded[:, i + n :][:, :span] for n in range(3)], -1)
            counts = inside[:, i:][:, :span] & batch.own[:, 2 + i :][:, :span]

            def deeper(
                states: Tensor,
                law: Tensor,
                *pairs: Tensor,
                i: int = i,
                trigrams: Tensor = trigrams,
                counts: Tensor = counts,
            ) -> tuple[Tensor, ...]:
                u = heads.encoded(trigrams)
                query, key, value = heads.project(u, states, positions + i)
                pairs = (*pairs, key, value)
                states = heads.finish(u, states, attended(query, pairs, seen) if c.with_block else query)
                logits = heads.logits(states, last, i)
                mass = law.sum(-1, dtype=torch.float32)  # rounding leaves it near 1 only, and would move all logits
                loss = (logits.logsumexp(-1) * mass - (law * logits).sum(-1)) * counts
                return states, loss.sum(), logits.detach(), *pairs[-2:]

            law = laws[:, i:][:, :span]
            if train:  # so that the logits of one depth at a time are in memory
                found = checkpoint(deeper, states, law, *pairs, use_reentrant=False)
            else:
                found = deeper(states, law, *pairs)
            states, loss, logits = found[:3]
            pairs += found[3:]
            yield Row(logits, loss, counts.sum())


def attended(query: Tensor, pairs: Sequence[Tensor], seen: Tensor) -> Tensor:
    """Attention [b, T, H, D] of rows at depth i: over the keys of depth 0, as `seen` [T, T] says, and over those of
    the same index at depths 1 to i.

    query [b, T, H, D]; `pairs`: keys and values [b, T, HK, D] of depth 0, of depth 1 and so on.
    """
    batch, span, heads, dim = query.shape
    grouped = query.view(batch, span, pairs[0].shape[2], -1, dim).permute(0, 2, 3, 1, 4)  # [b, HK, G, T, D]
    keys, values, *own = (part.permute(0, 2, 1, 3)[:, :, None] for part in pairs)
    scores = [(grouped @ keys.transpose(-1, -2)).masked_fill(~seen, float("-inf"))]
    scores += [(grouped * key).sum(-1, keepdim=True) for key in own[::2]]
    chances = torch.cat(scores, -1).float().mul(1 / math.sqrt(dim)).softmax(-1).to(query.dtype)
    found = chances[..., :span] @ values
    for n, value in enumerate(own[1::2]):
        found = found + chances[..., span + n, None] * value
    return found.permute(0, 3, 1, 2, 4).reshape(batch, span, heads, dim)


def _gaps(rows: int, step: int) -> Tensor:
    """Tokens left out between the sinks and the window, none in every other row: what long texts look like."""
    dealt = torch.Generator().manual_seed(step)
    far = torch.rand(rows, generator=dealt).mul(math.log(FARTHEST)).exp().long()
    return far * (torch.arange(rows) % 2)
