"""Sparse views of the target's own cache: sinks, recent tokens and, for retrieval, chunks chosen by score.

TriForce (arXiv 2404.11912) section 4.1, with two changes that measurements ask for: a large recent share is always
taken, and the selection is renewed with the queries of every verify pass instead of once at the prompt's end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hspec_decoding.cache import KVStore, Lane, Store
from hspec_decoding.config import ModelConfig
from hspec_decoding.sequence import Held, Text
from hspec_decoding.views import FullView, Layout, Pass, Verified
from hspec_kernels.select import mean_chunks, score_chunks
from hspec_offload.host_kv import HostKV

CHUNK = 8  # tokens scored and taken together
SINKS = 16  # first tokens, always taken


@dataclass(frozen=True)
class Asked:
    """Queries of the last verified rows of B sequences, by which chunks of their keys are scored, in one layer."""

    queries: Tensor  # [B, R, H, D]
    lse: Tensor | None  # [B, R, H] log-sum-exps of their attention, where known
    live: Tensor  # [B] int64: rows that count

    @property
    def last(self) -> Tensor:
        """The last row that counts, [B, H, D]."""
        return self.queries[torch.arange(len(self.queries), device=self.live.device), self.live - 1]


class Rule(Protocol):
    """How a budget of tokens is spent on the cached ones."""

    scored: bool  # chunks are taken by score
    once: bool  # they are scored at the prompt's end only

    def recent(self, budget: int, prompt: int, length: int) -> int:
        """Of `length` cached tokens, `prompt` of them the prompt's, how many of the last are always taken."""
        ...

    def scores(self, asked: Asked, means: Tensor, slots: Tensor, count: Tensor, extent: int) -> Tensor:
        """Mean keys of chunks [S, HK, C, D], of which sequence b, in `slots[b]`, has `count[b]` -> [B, HK, extent];
        -inf beyond the count.
        """
        ...


class Streaming:
    """Sinks and recent tokens only."""

    scored = once = False

    def recent(self, budget: int, prompt: int, length: int) -> int:  # noqa: ARG002
        return budget - SINKS

    def scores(self, asked: Asked, means: Tensor, slots: Tensor, count: Tensor, extent: int) -> Tensor:
        raise NotImplementedError("streaming takes nothing by score")


class VerifyFed:
    """Sinks, a recent half, and the chunks that the last verified tokens attended to most."""

    scored, once = True, False

    def recent(self, budget: int, prompt: int, length: int) -> int:  # noqa: ARG002
        return budget // 2

    def scores(self, asked: Asked, means: Tensor, slots: Tensor, count: Tensor, extent: int) -> Tensor:
        """Attention mass over the chunks' means, summed over rows and over the query heads of each KV head."""
        lse = lse_of_means(asked, means[slots, :, :extent], count) if asked.lse is None else asked.lse
        return score_chunks(asked.queries, lse, asked.live, means, slots, count, extent)


def lse_of_means(asked: Asked, means: Tensor, count: Tensor) -> Tensor:
    """Log-sum-exps [B, R, H] over the means [B, HK, C, D] themselves, of which count[b] are there."""
    batch, rows, _, dim = asked.queries.shape
    grouped = asked.queries.float().reshape(batch, rows, means.shape[1], -1, dim)  # [B, R, HK, G, D]
    logits = torch.einsum("brkgd,bkcd->brkgc", grouped, means.float()) * means.shape[-1] ** -0.5
    beyond = torch.arange(means.shape[2], device=count.device) >= count[:, None]
    lse: Tensor = logits.masked_fill(beyond[:, None, None, None], float("-inf")).logsumexp(-1)
    return lse.flatten(2)


class Paper:
    """TriForce's own rule: chunks by the last prompt token's query, scored once; what is generated comes on top."""

    scored = once = True

    def recent(self, budget: int, prompt: int, length: int) -> int:  # noqa: ARG002
        """All that came after the last whole chunk when the prompt was scored; its last token is not cached then."""
        return length - (prompt - 1) // CHUNK * CHUNK

    def scores(self, asked: Asked, means: Tensor, slots: Tensor, count: Tensor, extent: int) -> Tensor:
        """Dot product of the last row with the chunks' means, summed over the query heads of each KV head."""
        ours = means[slots, :, :extent].float()  # [B, HK, extent, D]
        grouped = asked.last.float().reshape(*ours.shape[:2], -1, ours.shape[-1]).sum(2)
        scores = torch.einsum("bkd,bkcd->bkc", grouped, ours)
        beyond = torch.arange(extent, device=count.device) >= count[:, None]
        return scores.masked_fill(beyond[:, None], float("-inf"))


SELECT: dict[str, type[Rule]] = {"verify-fed": VerifyFed, "paper": Paper}


class ChunkMeans:
    """Mean key of every complete chunk of a store, brought up to date as the store grows."""

    def __init__(self, store: Store, sequences: int) -> None:
        self.store = store
        slots, heads, capacity, dim = store.shape
        shape = slots, heads, capacity // CHUNK, dim
        self.means = [torch.zeros(shape, dtype=store.dtype, device=store.device) for _ in store.keys]
        self.done = [0] * sequences  # complete chunks summarised, by slot
        if isinstance(store, HostKV):
            store.observers.append(self)

    def upto(self, slots: Sequence[int], chunks: Sequence[int]) -> None:
        """Summarise the first `chunks[b]` chunks of each sequence, whose keys must be final."""
        start = [self.done[slot] for slot in slots]
        most = max(0, *(n - at for n, at in zip(chunks, start, strict=True)))
        if not most:
            return
        if isinstance(self.store, HostKV):
            for slot, n in zip(slots, chunks, strict=True):
                for layer, (keys, values) in enumerate(zip(self.store.keys, self.store.values, strict=True)):
                    self.derive(layer, keys[slot], values[slot], slot, self.store.origin(layer, slot), n * CHUNK)
        else:
            at, first, stop = torch.tensor([slots, start, chunks]).to(self.store.device, non_blocking=True)
            for keys, means in zip(self.store.keys, self.means, strict=True):
                mean_chunks(keys, means, at, first, stop, CHUNK, most)
        for slot, n in zip(slots, chunks, strict=True):
            self.derived(slot, n * CHUNK)

    def derive(self, layer: int, keys: Tensor, values: Tensor, slot: int, origin: int, stop: int) -> None:  # noqa: ARG002
        """Summarise one layer up to position `stop`, from keys [HK, n, D] that begin at position `origin`."""
        first, last = self.done[slot] - origin // CHUNK, (stop - origin) // CHUNK
        if first < last:
            means = self.means[layer][slot : slot + 1, :, origin // CHUNK :]
            at, start, end = torch.tensor([[0], [first], [last]]).to(self.store.device, non_blocking=True)
            mean_chunks(keys[None], means, at, start, end, CHUNK, last - first)

    def derived(self, slot: int, stop: int) -> None:
        """Every layer was summarised up to `stop`."""
        self.done[slot] = max(self.done[slot], stop // CHUNK)


@dataclass(frozen=True)
class _Share:
    """What a layer's copy takes of a text: sinks and the best chunks, where `chunks` is not None, and all from
    `start` on.
    """

    chunks: int | None
    start: int
    length: int

    @property
    def recent(self) -> range:
        """Chunks of the recent tokens; the first begins where they do, unless a sliding window cuts it."""
        return range(self.start // CHUNK, -(-self.length // CHUNK))

    @property
    def filled(self) -> int:
        """Slots of the copy that are used."""
        return (0 if self.chunks is None else SINKS + self.chunks * CHUNK) + self.length - self.start


class SparseView:
    """A copy of `budget` tokens of the full store, and behind it the rows that this level itself adds.

    It may be stale or wrong without harm: the level that reads it only proposes. It is renewed whenever the text has
    committed tokens since; keys keep the rotation of their own positions.
    """

    def __init__(
        self, config: ModelConfig, source: FullView, copy: KVStore, sequences: int, budget: int, rule: Rule
    ) -> None:
        """`budget`: tokens taken of the source's; `copy`: room for them, a chunk more, and the tokens added here."""
        self.config, self.source, self.copy, self.budget, self.rule = config, source, copy, budget, rule
        self.held = [Held() for _ in range(sequences)]  # tokens added behind the copy
        self.base = [-1] * sequences  # cached tokens at the time of the copy
        self.filled: list[dict[Lane, int]] = [{} for _ in range(sequences)]  # slots of the copy, by window
        if rule.scored and source.means is None:
            source.means = ChunkMeans(source.store, sequences)
        self.means = source.means if rule.scored else None
        self.ranked: dict[tuple[int, int | None], Tensor] = {}  # by slot and window, for a rule that scores once
        self.chosen: dict[tuple[int, int | None], Tensor] = {}  # what the copy holds by score, in order
        source.record = source.record or rule.scored

    def prepare(self, texts: Sequence[Text]) -> float:
        stale = [text for text in texts if self.base[text.slot] != text.committed - 1]
        if not stale:
            return 0.0
        started = time.perf_counter()
        first = any(self.base[text.slot] < 0 for text in stale)
        for text in stale:
            self.held[text.slot].reset()
            self.base[text.slot] = text.committed - 1  # tokens whose exact keys the source holds
        self._renew(stale)
        if not first:
            return 0.0
        if self.copy.device.type == "cuda":
            torch.cuda.synchronize(self.copy.device)
        return time.perf_counter() - started

    def missing(self, text: Text) -> list[int]:
        length = self.base[text.slot]
        return self.held[text.slot].missing(text.tokens[length:], text.committed - length)

    def fed(self, text: Text, tokens: Sequence[int]) -> None:
        self.held[text.slot].extend(tokens)

    def forget(self, slot: int) -> None:
        self.held[slot].reset()
        self.base[slot], self.filled[slot] = -1, {}
        for known in (self.ranked, self.chosen):
            for place in [place for place in known if place[0] == slot]:
                del known[place]

    def begin(self, texts: Sequence[Text], rows: int) -> Pass:
        slots = [text.slot for text in texts]
        added = [len(self.held[slot]) for slot in slots]
        positions = [self.base[slot] + n for slot, n in zip(slots, added, strict=True)]
        first: dict[Lane, list[int]] = {
            window: [self.filled[slot][window] + n for slot, n in zip(slots, added, strict=True)]
            for window in set(self.config.windows)
        }
        extent = {window: [at + rows for at in starts] for window, starts in first.items()}
        return Pass(self.config, self.copy, Layout(slots, rows, positions, first, extent), windowed=False)

    def _renew(self, texts: Sequence[Text]) -> None:
        """Copy what the rule selects of the tokens whose keys are exact."""
        for window in set(self.config.windows):
            layers = [layer for layer, own in enumerate(self.config.windows) if own == window]
            shares = [self._share(text, window) for text in texts]
            for text, share in zip(texts, shares, strict=True):
                self.filled[text.slot][window] = share.filled
            if window is not None and window <= self.budget:
                self._copy_ends(layers, texts, shares)
            else:
                self._copy_chunks(layers, texts, shares, self._ranked(window, layers, texts, shares))

    def _share(self, text: Text, window: int | None) -> _Share:
        length = self.base[text.slot]
        if window is not None and window <= self.budget:
            return _Share(None, max(0, length - window + 1), length)  # and the row itself
        if length <= self.budget:
            return _Share(None, 0, length)
        recent = min(self.rule.recent(self.budget, text.prompt, length), self.budget - SINKS)
        recent += (length - recent) % CHUNK
        chunks = max(0, (self.budget - SINKS - recent) // CHUNK) if self.rule.scored else 0
        return _Share(chunks, length - recent, length)

    def _ranked(
        self, window: int | None, layers: Sequence[int], texts: Sequence[Text], shares: Sequence[_Share]
    ) -> list[Tensor | None]:
        """For each text the chunks between the sinks and the recent tokens, best first, [layers, HK, C]."""
        wanted = [
            (text, share)
            for text, share in zip(texts, shares, strict=True)
            if share.chunks and not (self.rule.once and (text.slot, window) in self.ranked)
        ]
        if wanted and self.means:
            self.means.upto([text.slot for text, _ in wanted], [share.recent.start for _, share in wanted])
        for verified, part in _by_pass(self.source, wanted):
            ranked = self._rank(layers, verified, part)
            self.ranked |= {(text.slot, window): ranked[:, b] for b, (text, _) in enumerate(part)}
        return [self.ranked.get((text.slot, window)) for text in texts]

    def _rank(self, layers: Sequence[int], verified: Sequence[Verified], part: Sequence[_Wanted]) -> Tensor:
        """[layers, B, HK, C] for texts whose last pass was the same."""
        assert self.means is not None
        device, first = self.copy.device, SINKS // CHUNK
        rows = verified[0].layers[0][0].shape[1]
        live = [min(max(1, share.length - own.first), rows) for own, (_, share) in zip(verified, part, strict=True)]
        count = [share.recent.start for _, share in part]
        slots = [text.slot for text, _ in part]
        numbers = torch.tensor([live, slots, count, [own.b for own in verified]]).to(device, non_blocking=True)
        whole = [own.b for own in verified] == list(range(len(verified[0].layers[0][0])))
        scores = []
        for layer in layers:
            queries, lse = verified[0].layers[layer]
            if not whole:
                queries, lse = queries[numbers[3]], None if lse is None else lse[numbers[3]]
            asked = Asked(queries, lse, numbers[0])
            scores.append(self.rule.scores(asked, self.means.means[layer], numbers[1], numbers[2], max(count)))
        best = torch.stack(scores)
        best[..., :first] = float("-inf")
        most = self.budget if self.rule.once else max(share.chunks or 0 for _, share in part) * CHUNK
        return best.topk(min(most // CHUNK, best.shape[-1] - first), dim=-1).indices

    def _copy_chunks(
        self, layers: Sequence[int], texts: Sequence[Text], shares: Sequence[_Share], ranked: Sequence[Tensor | None]
    ) -> None:
        device, heads = self.copy.device, self.config.kv_heads
        size = max(-(-share.filled // CHUNK) for share in shares)
        index = torch.full((len(layers), len(texts), heads, size), -1, device=device)
        for b, (share, best) in enumerate(zip(shares, ranked, strict=True)):
            at = 0
            if share.chunks is not None:
                at = SINKS // CHUNK
                index[:, b, :, :at] = torch.arange(at, device=device)
            if share.chunks and best is not None:
                lacking = self._lacking(texts[b].slot, self.config.windows[layers[0]], best[..., : share.chunks])
                index[:, b, :, at : at + share.chunks] = lacking
                at += share.chunks
            recent = torch.arange(share.recent.start, share.recent.stop, device=device)
            index[:, b, :, at : at + len(recent)] = recent
        slots = torch.tensor([text.slot for text in texts]).to(device, non_blocking=True)
        for chosen, layer in zip(index, layers, strict=True):
            copy = self.copy.keys[layer], self.copy.values[layer]
            self.source.store.gather(layer, chosen, slots, copy, CHUNK)

    def _lacking(self, slot: int, window: int | None, best: Tensor) -> Tensor:
        """What the places of the copy are to be filled with so that it holds `best` [layers, HK, N]; -1: it stays."""
        held = self.chosen.get((slot, window))
        index = best
        if held is not None:
            held = F.pad(held, (0, best.shape[-1] - held.shape[-1]), value=-1)  # its room may have changed by a chunk
            index = replaced(held, best, self.source.store.capacity // CHUNK)
            best = index.where(index >= 0, held)
        self.chosen[slot, window] = best
        return index

    def _copy_ends(self, layers: Sequence[int], texts: Sequence[Text], shares: Sequence[_Share]) -> None:
        """The last tokens alone, which need not begin with a chunk."""
        store = self.source.store
        for layer in layers:
            for source, copy in ((store.keys, self.copy.keys), (store.values, self.copy.values)):
                for text, share in zip(texts, shares, strict=True):
                    ours = source[layer][text.slot, :, share.start : share.length]
                    copy[layer][text.slot, :, : share.filled] = ours


def replaced(held: Tensor, wanted: Tensor, count: int) -> Tensor:
    """What to put where so that places that hold `held` [..., N] hold all of `wanted` [..., N] and as many as can stay
    as they are, which are -1 in the result. Numbers below `count`, none twice; -1 in `held` is a place that is empty.
    """
    free, new = _not_in(held, wanted, count), _not_in(wanted, held, count)  # as many of one as of the other
    places, order = (some.byte().argsort(dim=-1, descending=True, stable=True) for some in (free, new))
    put = wanted.gather(-1, order).where(new.gather(-1, order), -1)
    return put.scatter(-1, places, put)


def _not_in(some: Tensor, others: Tensor, count: int) -> Tensor:
    """Which numbers are not among the others, bool [..., N]."""
    absent = torch.ones((*some.shape[:-1], count + 1), dtype=torch.bool, device=some.device)
    absent.scatter_(-1, others.remainder(count + 1), False)
    return absent.gather(-1, some.remainder(count + 1))


_Wanted = tuple[Text, _Share]


def _by_pass(source: FullView, wanted: Sequence[_Wanted]) -> list[tuple[list[Verified], list[_Wanted]]]:
    """The texts in groups whose last pass was the same one, each in the order of that pass."""
    groups: dict[int, list[tuple[Verified, _Wanted]]] = {}
    for text, share in wanted:
        verified = source.recorded[text.slot]
        groups.setdefault(id(verified.layers), []).append((verified, (text, share)))
    ordered = [sorted(group, key=lambda pair: pair[0].b) for group in groups.values()]
    return [([own for own, _ in group], [part for _, part in group]) for group in ordered]
