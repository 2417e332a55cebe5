"""How well the tokens that one layer chooses serve another: the attention mass they hold there, of what its own choice
would, and which layers should choose for all (arXiv 2410.05076).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest

import torch
import torch.nn.functional as F
from torch import Tensor

from hspec_decoding.calibration import Calibration, whole_layers
from hspec_decoding.model import Decoder
from hspec_decoding.rope import rotation
from hspec_decoding.sequence import Text
from hspec_decoding.tidal import PAYS, SINKS, Tidal
from hspec_decoding.views import QUERIES, FullView
from hspec_kernels.attention import Reach, attend_with
from hspec_kernels.select import score_chunks

PROBES = 8  # rows that are looked at of each chunk
LOW = 0.1  # quantile over rows that a pair of layers is judged by: what is lost at few tokens is lost


Chain = tuple[float, tuple[int, ...]]  # what is held, and the layers by which


@dataclass(frozen=True)
class Table:
    """C[i, j]: of the mass that layer j's own choice of tokens would hold, the share that layer i's holds.

    `heads` [L, L, HK, HK]: mean for head b of layer j by the list of head a of layer i. `shares` [L, L] by way: at the
    low quantile over rows, in the mean over heads. `weights` [L]: how far a layer's attention turns the residual
    stream.
    """

    heads: Tensor
    shares: dict[str, Tensor]
    weights: Tensor

    def nearest(self, full: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """By layer and KV head, the head whose list serves it best, of the selector before it."""
        made = []
        for layer in range(len(self.weights)):
            before = [one for one in full if one < layer]
            best = self.heads[before[-1], layer].argmax(-1) if before else torch.arange(self.heads.shape[-1])
            made.append(tuple(best.tolist()))
        return tuple(made)


class Captured:
    """A table in the making. Memory O(L HK k) for the lists of a chunk's rows, and O(L² HK²) for their means."""

    def __init__(self, decoder: Decoder, budget: int) -> None:
        """`budget`: tokens that a sparse layer will read."""
        self.decoder, config = decoder, decoder.config
        self.layers = whole_layers(config)
        self.alone, self.pooled = (Tidal(config, Calibration((0,)), budget, way) for way in ("heads", "pooled"))
        shape = config.layers, config.layers
        self.heads = torch.zeros(*shape, config.kv_heads, config.kv_heads)
        self.rows: dict[str, list[Tensor]] = {"heads": [], "pooled": []}  # [L, L, P] of each chunk
        self.turned = torch.zeros(config.layers)
        self.count = 0

    def read(self, view: FullView, text: Text, chunk: int) -> Iterator[int]:
        """Cache a text but its last token, and look at rows of every chunk that has enough behind it; the tokens cached
        so far after each.
        """
        view.record = True
        feed = view.missing(text)[:-1]
        for start in range(0, len(feed), chunk):
            part = feed[start : start + chunk]
            self._chunk(view, text, part)
            view.fed(text, part)
            yield start + len(part)

    @torch.inference_mode()
    def _chunk(self, view: FullView, text: Text, part: list[int]) -> None:
        decoder, eps, first = self.decoder, self.decoder.config.norm_eps, len(view.held[text.slot])
        memory = view.begin([text], len(part))
        cos, sin = rotation(decoder.inverse, decoder.rope_factor, memory.positions, decoder.dtype)
        step = max(1, min(QUERIES, len(part)) // PROBES)
        probes = torch.arange(len(part) - 1, max(-1, len(part) - 1 - QUERIES), -step, device=decoder.device)
        probes = probes[first + probes >= PAYS * self.alone.budget]
        look = _Look(self, text.slot, first + probes) if len(probes) else None
        x = decoder.embed(torch.tensor([part], device=decoder.device))
        for i, layer in enumerate(decoder.layers):
            attended = memory.attend(i, layer.before(x, eps), cos, sin, layer.qk_norms)
            assert memory.recorded is not None
            query, _ = memory.recorded.pop()
            if look and i in self.layers:
                before = x[0, probes]
                after = layer.out(attended[0, probes].flatten(-2), before)
                self.turned[i] += (1 - F.cosine_similarity(before.float(), after.float(), dim=-1)).sum().cpu()
                look.layer(i, query[0, probes - len(part)], view)
            x = layer.after(x, attended, eps)
        if look:
            self.count += len(probes)
            for way, shares in look.shares.items():
                self.rows[way].append(shares.cpu())

    def table(self) -> Table:
        """What was seen."""
        shares = {way: torch.cat(rows, -1).quantile(LOW, dim=-1) for way, rows in self.rows.items()}
        return Table(self.heads / self.count, shares, self.turned / self.count)


class _Look:
    """The rows of one chunk, on their way through the layers."""

    def __init__(self, into: Captured, slot: int, at: Tensor) -> None:
        """`at`: positions of the rows, [P]."""
        self.into, self.at, config = into, at, into.decoder.config
        self.slots = torch.full_like(at, slot)
        self.lists: dict[int, Tensor] = {}  # by layer, of every head and of all: [P, HK + 1, N]
        shape = config.layers, config.layers, len(at)
        self.shares = {way: torch.zeros(shape, device=at.device) for way in into.rows}

    def layer(self, j: int, query: Tensor, view: FullView) -> None:
        """Judge the lists of the layers before by what layer j attends to with query [P, H, D]."""
        mass = self._mass(query, view.store.keys[j], view.store.values[j])
        tidal, place = self.into.alone, torch.arange(mass.shape[-1], device=mass.device)
        recent = place >= self.at[:, None] - tidal.recent
        forced = mass.masked_fill(~recent[:, None], 0).sum(-1, keepdim=True)  # [P, HK, 1]
        open_ = mass.masked_fill((recent | (place < SINKS))[:, None], float("-inf"))
        own = tidal.lists(open_)
        held = forced[..., 0] + mass.gather(-1, own.long()).sum(-1)  # [P, HK]
        for i, lists in self.lists.items():
            index = lists.flatten(1)[:, None].expand(-1, mass.shape[1], -1).long()
            got = (forced + mass.gather(-1, index).view(*mass.shape[:2], *lists.shape[1:]).sum(-1)) / held[..., None]
            self.into.heads[i, j] += got[..., :-1].sum(0).cpu()
            self.shares["heads"][i, j] = got[..., :-1].amax(-1).mean(-1)
            self.shares["pooled"][i, j] = got[..., -1].mean(-1)
        self.lists[j] = torch.cat((own, self.into.pooled.lists(open_)[:, :1]), 1)

    def _mass(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention mass [P, HK, C] of the rows on all tokens."""
        extent = int(self.at.max()) + 1
        reach = Reach(self.slots, self.at, 1, (extent,) * len(self.at))
        _, lse = attend_with(query[:, None], None, keys, values, reach)
        live = torch.ones_like(self.at)
        return score_chunks(query[:, None], lse, live, keys, self.slots, self.at + 1, extent).clamp(min=0)


def chains(table: Table, way: str, layers: Sequence[int], size: int, best: int) -> list[tuple[int, ...]]:
    """The `best` sets of `size` layers that read all keys by which most of the weighted mass is held, best first.

    `layers` that may be among them, the first of which always is. Dynamic program over the last one of a set.
    """
    shares: list[list[float]] = table.shares[way].tolist()
    weights: list[float] = table.weights.tolist()

    def held(l: int, start: int, stop: int) -> float:  # noqa: E741
        """By the list of layer l, in those behind it up to `stop`."""
        return sum(weights[j] * shares[l][j] for j in layers if start < j < stop)

    found: dict[int, list[Chain]] = {layers[0]: [(weights[layers[0]], (layers[0],))]}
    for _ in range(min(size, len(layers)) - 1):
        longer: dict[int, list[Chain]] = {}
        for last, ways in found.items():
            for i in layers:
                if i > last:
                    more = held(last, last, i) + weights[i]
                    longer.setdefault(i, []).extend((value + more, (*chain, i)) for value, chain in ways)
        found = {i: nlargest(best, ways) for i, ways in longer.items()}
    end = layers[-1] + 1
    whole = [(value + held(last, last, end), chain) for last, ways in found.items() for value, chain in ways]
    return [chain for _, chain in nlargest(best, whole)]


def neighbours(full: Sequence[int], layers: Sequence[int], reach: int = 2) -> Iterator[tuple[int, ...]]:
    """Sets in which one layer but the first stands up to `reach` places elsewhere."""
    places = [layers.index(layer) for layer in full]
    for n, place in enumerate(places[1:], 1):
        for moved in range(place - reach, place + reach + 1):
            if 0 < moved < len(layers) and moved not in places:
                yield tuple(layers[p] for p in sorted({*places[:n], moved, *places[n + 1 :]}))
