"""Sparse views of the target's own cache: sinks, recent tokens and, for retrieval, chunks chosen by score.

TriForce (arXiv 2404.11912) section 4.1, with two changes that measurements ask for: a large recent share is always
taken, and the selection is renewed with the queries of every verify pass instead of once at the prompt's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from hspec_decoding.cache import KVStore
from hspec_decoding.config import ModelConfig
from hspec_decoding.sequence import Held, Text
from hspec_decoding.views import FullView, Layout, Pass

CHUNK = 8  # tokens scored and taken together
SINKS = 16  # first tokens, always taken


class Rule(Protocol):
    """How a budget of tokens is spent on the cached ones."""

    scored: bool  # chunks are taken by score
    once: bool  # they are scored at the prompt's end only

    def recent(self, budget: int, prompt: int, length: int) -> int:
        """Of `length` cached tokens, `prompt` of them the prompt's, how many of the last are always taken."""
        ...

    def scores(self, queries: Tensor, means: Tensor) -> Tensor:
        """queries [N, H, D] of the last verified tokens, mean keys of chunks [HK, C, D] -> [HK, C]."""
        ...


class Streaming:
    """Sinks and recent tokens only."""

    scored = once = False

    def recent(self, budget: int, prompt: int, length: int) -> int:  # noqa: ARG002
        return budget - SINKS

    def scores(self, queries: Tensor, means: Tensor) -> Tensor:
        raise NotImplementedError("streaming takes nothing by score")


class VerifyFed:
    """Sinks, a recent half, and the chunks that the last verified tokens attended to most."""

    scored, once = True, False

    def recent(self, budget: int, prompt: int, length: int) -> int:  # noqa: ARG002
        return budget // 2

    def scores(self, queries: Tensor, means: Tensor) -> Tensor:
        """Attention mass over the chunks' means, summed over rows and over the query heads of each KV head."""
        grouped = queries.float().reshape(len(queries), len(means), -1, queries.shape[-1])  # [N, HK, G, D]
        logits = torch.einsum("nkgd,kcd->nkgc", grouped, means.float()) * queries.shape[-1] ** -0.5
        mass: Tensor = logits.softmax(-1).sum((0, 2))
        return mass


class Paper:
    """TriForce's own rule: chunks by the last prompt token's query, scored once; what is generated comes on top."""

    scored = once = True

    def recent(self, budget: int, prompt: int, length: int) -> int:  # noqa: ARG002
        """All that came after the last whole chunk when the prompt was scored; its last token is not cached then."""
        return length - (prompt - 1) // CHUNK * CHUNK

    def scores(self, queries: Tensor, means: Tensor) -> Tensor:
        """Dot product of the last row with the chunks' means, summed over the query heads of each KV head."""
        grouped = queries[-1].float().reshape(len(means), -1, queries.shape[-1]).sum(1)  # [HK, D]
        return torch.einsum("kd,kcd->kc", grouped, means.float())


SELECT: dict[str, type[Rule]] = {"verify-fed": VerifyFed, "paper": Paper}


class ChunkMeans:
    """Mean key of every complete chunk of a store, brought up to date as the store grows."""

    def __init__(self, store: KVStore, sequences: int) -> None:
        self.store = store
        self.means = [
            torch.zeros(*k.shape[:2], k.shape[2] // CHUNK, k.shape[3], dtype=k.dtype, device=k.device)
            for k in store.keys
        ]
        self.done = [[0] * sequences for _ in store.keys]  # complete chunks summarised, by layer and slot

    def upto(self, layer: int, slot: int, chunks: int) -> Tensor:
        """Means [HK, chunks, D] of the first `chunks` chunks, whose keys must be final."""
        done = self.done[layer][slot]
        if done < chunks:
            fresh = self.store.keys[layer][slot, :, done * CHUNK : chunks * CHUNK]
            self.means[layer][slot, :, done:chunks] = fresh.reshape(len(fresh), -1, CHUNK, fresh.shape[-1]).mean(2)
            self.done[layer][slot] = chunks
        return self.means[layer][slot, :, :chunks]


class SparseView:
    """A copy of `budget` tokens of the full store, and behind it the rows that this level itself adds.

    It may be stale or wrong without harm: the level that reads it only proposes. It is renewed whenever the text has
    committed tokens since; keys keep the rotation of their own positions.
    """

    def __init__(
        self, config: ModelConfig, source: FullView, copy: KVStore, sequences: int, budget: int, rule: Rule
    ) -> None:
        """`budget`: tokens taken of the source's; `copy`: room for them, a chunk more, and the tokens added here."""
        store = source.store
        self.config, self.source, self.copy, self.budget, self.rule = config, source, copy, budget, rule
        self.held = [Held() for _ in range(sequences)]  # tokens added behind the copy
        self.base = [-1] * sequences  # cached tokens at the time of the copy
        self.filled: list[dict[int | None, int]] = [{} for _ in range(sequences)]  # slots of the copy, by window
        self.means = ChunkMeans(store, sequences) if rule.scored else None
        self.ranked: dict[tuple[int, int], Tensor] = {}  # by slot and layer, for a rule that scores once
        source.record = source.record or rule.scored

    def missing(self, text: Text) -> list[int]:
        length = text.committed - 1  # tokens whose exact keys the source holds
        if self.base[text.slot] != length:
            self._renew(text, length)
        return self.held[text.slot].missing(text.tokens[length:], text.committed - length)

    def fed(self, text: Text, tokens: Sequence[int]) -> None:
        self.held[text.slot].extend(tokens)

    def begin(self, texts: Sequence[Text], rows: int) -> Pass:
        slots = [text.slot for text in texts]
        added = [len(self.held[slot]) for slot in slots]
        positions = [self.base[slot] + n for slot, n in zip(slots, added, strict=True)]
        first = {
            window: [self.filled[slot][window] + n for slot, n in zip(slots, added, strict=True)]
            for window in set(self.config.windows)
        }
        extent = {window: [at + rows for at in starts] for window, starts in first.items()}
        return Pass(self.config, self.copy, Layout(slots, rows, positions, first, extent), windowed=False)

    def _renew(self, text: Text, length: int) -> None:
        """Copy what the rule selects of the first `length` tokens, whose keys are exact."""
        slot = text.slot
        self.held[slot].reset()
        self.base[slot] = length
        for layer, window in enumerate(self.config.windows):
            chunks, recent = self._select(layer, text, length, window)
            self.filled[slot][window] = self._copy(layer, slot, chunks, length - recent, length)

    def _select(self, layer: int, text: Text, length: int, window: int | None) -> tuple[Tensor | None, int]:
        """Chunk indices [HK, c] (None: no chunks), and how many of the last tokens to take."""
        if window is not None and window <= self.budget:
            return None, min(window - 1, length)  # and the row itself
        if length <= self.budget:
            return None, length
        recent = min(self.rule.recent(self.budget, text.prompt, length), self.budget - SINKS)
        recent += (length - recent) % CHUNK
        heads, device = self.config.kv_heads, self.copy.device
        sinks = torch.arange(SINKS // CHUNK, device=device).expand(heads, -1)
        wanted = (self.budget - SINKS - recent) // CHUNK
        if self.means is None or wanted <= 0:
            return sinks, recent
        ranked = self._ranked(layer, text.slot, length, recent)
        return torch.cat((sinks, ranked[:, :wanted]), dim=1), recent

    def _ranked(self, layer: int, slot: int, length: int, recent: int) -> Tensor:
        """Chunks between the sinks and the recent tokens, best first [HK, C']; at most a budget's worth."""
        if self.rule.once and (slot, layer) in self.ranked:
            return self.ranked[slot, layer]
        assert self.means is not None
        means = self.means.upto(layer, slot, (length - recent) // CHUNK)
        scores = self.rule.scores(self.source.verified_queries(layer, slot, length), means)
        scores[:, : SINKS // CHUNK] = float("-inf")
        count = min(self.budget // CHUNK, scores.shape[1] - SINKS // CHUNK)
        ranked = scores.topk(count, dim=1).indices
        if self.rule.once:
            self.ranked[slot, layer] = ranked
        return ranked

    def _copy(self, layer: int, slot: int, chunks: Tensor | None, start: int, end: int) -> int:
        """Fill the copy of one layer with `chunks` and the tokens from `start` to `end`; the slots used."""
        taken = 0 if chunks is None else chunks.shape[1] * CHUNK
        for source, copy in zip(
            (self.source.store.keys[layer][slot], self.source.store.values[layer][slot]),
            (self.copy.keys[layer][slot], self.copy.values[layer][slot]),
            strict=True,
        ):
            if chunks is not None:
                heads, _, dim = source.shape
                whole = source[:, : source.shape[1] // CHUNK * CHUNK].view(heads, -1, CHUNK, dim)
                picked = whole[torch.arange(heads, device=whole.device)[:, None], chunks]
                copy[:, :taken] = picked.view(heads, taken, dim)
            copy[:, taken : taken + end - start] = source[:, start:end]
        return taken + end - start
