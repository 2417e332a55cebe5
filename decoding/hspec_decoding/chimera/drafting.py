"""Drafting a whole tree: every operation of a shape fixed by the tree's, so that one captured graph does all of it.

As EAGLE-2 (arXiv 2406.16858) does, the k best nodes of a depth are drafted from, each on its own branch, and of all
nodes the N best stay. The noise that the target will draw with is known: with logits l of the draft and noise g, the
chance that the target takes a token is taken to be softmax(l + T g), which orders them as log q / T + g does and at
temperature 0 is q. So trees hold what this seed will say, and not what might be said.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from hspec_decoding import graphs
from hspec_decoding.chimera.heads import Heads
from hspec_decoding.graphs import Graph, Results
from hspec_decoding.stack import LONGEST
from hspec_decoding.tree import NOWHERE, best, grafted
from hspec_kernels.sample import gumbel_of

DRAFTED = LONGEST + 1  # rows that are drafted from, at most
FRESH = 16  # verified tokens at most that a drafting is fed
CANDIDATES = 64  # likeliest tokens that noise is looked up for
SLACK = 128  # slots behind a window, so that what was taken back has not been written over
LEAST = -30.0  # log of the least chance that is told from none
STEP = 1e-3  # by which a child at least is worse than its parent


@dataclass(frozen=True)
class Shape:
    """What a tree may be: `depth` tokens deep, `beams` nodes of a depth drafted from, `nodes` of all kept, and
    `branches` continuations of the text with `grown` nodes each. A chain is a tree of one beam.
    """

    depth: int
    beams: int
    nodes: int
    branches: int = 0
    grown: int = 0

    @classmethod
    def chain(cls, length: int) -> Shape:
        """So many tokens one after the other."""
        return cls(length, 1, length)

    @classmethod
    def tree(cls, nodes: int, depth: int) -> Shape:
        """A tree of at most so many nodes, a quarter of them for what followed in the text before."""
        branches = 0 if nodes < 4 else 1 if nodes < 24 else 2
        grown = nodes // 4 // branches if branches else 0
        drafted = nodes - branches * grown
        depth, beams = min(depth, drafted), max(1, min(8, drafted // 3))
        possible = beams + (depth - 1) * beams**2
        return cls(depth, beams, min(drafted, possible), branches, grown)

    @property
    def rows(self) -> int:
        """Rows of the tree, its root's among them."""
        return 1 + self.nodes + self.branches * self.grown

    @property
    def reach(self) -> int:
        """Tokens of a continuation that may be of use."""
        return self.depth + self.grown


@dataclass(frozen=True)
class Given:
    """What the draft of one text is told, in order as int64 numbers."""

    slot: int
    length: int  # of the text
    root: int  # the last of its fresh rows
    temperature: int  # the bits of a float32, as `bits` gives them
    top_p: int
    stream: int
    positions: list[int]  # [FRESH]
    slots: list[int]  # [FRESH], of the cache
    trigrams: list[int]  # [FRESH * 3]
    continuations: list[int]  # [branches * reach], NOWHERE behind their ends

    @property
    def numbers(self) -> list[int]:
        told = [self.slot, self.length, self.root, self.temperature, self.top_p, self.stream]
        return [*told, *self.positions, *self.slots, *self.trigrams, *self.continuations]


def bits(value: float) -> int:
    """A float32 as an integer."""
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


class Cache:
    """Keys and values of the block for every sequence: sinks, a ring of recent rows, the rows being drafted, and one
    slot for what counts for nothing.
    """

    def __init__(self, heads: Heads, sequences: int, drafted: int) -> None:
        c = heads.config
        self.ring = c.window + SLACK
        self.tail = c.sinks + self.ring
        self.nowhere = self.tail + drafted
        weight = heads.fuse.weight
        shape = sequences, c.kv_heads, self.nowhere + 1, c.head_dim
        self.keys, self.values = torch.zeros(2, *shape, dtype=weight.dtype, device=weight.device)
        self.places = torch.full((sequences, self.tail), -1, device=weight.device)
        self.sinks = c.sinks

    def slot(self, position: int) -> int:
        """Where a row of that position has its place."""
        return position if position < self.sinks else self.sinks + (position - self.sinks) % self.ring

    def put(self, slots: Tensor, to: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keys and values [B, n, HK, D] to places [B, n] of sequences [B]."""
        self.keys[slots[:, None], :, to] = keys
        self.values[slots[:, None], :, to] = values


class Drafting:
    """Heads over their cache."""

    def __init__(self, heads: Heads, sequences: int) -> None:
        self.heads, self.sequences = heads, sequences
        self.cache = Cache(heads, sequences, DRAFTED)
        self.captured: dict[tuple[int, Shape], Captured] = {}  # by the number of texts

    def replay(self, numbers: Tensor, features: Tensor, shape: Shape) -> tuple[Tensor, float]:
        """`draft` by a graph, valid until its next replay; seconds that capturing it took."""
        key, seconds = (len(numbers), shape), 0.0
        if key not in self.captured:
            started = time.perf_counter()
            self.captured[key] = Captured.of(self, numbers, features, shape)
            seconds = time.perf_counter() - started
        return self.captured[key].replay(numbers, features), seconds

    @torch.inference_mode()
    def absorb(self, slot: int, positions: list[int], trigrams: list[list[int]], features: Tensor) -> None:
        """Take verified rows into the cache: features [n, 3 hidden]."""
        device, cache = self.cache.keys.device, self.cache
        at = torch.tensor([positions], device=device)
        to = torch.tensor([[cache.slot(position) for position in positions]], device=device)
        where = torch.tensor([slot], device=device)
        u = self.heads.encoded(torch.tensor([trigrams], device=device))
        _, keys, values = self.heads.project(u, self.heads.fused(features[None]), at)
        cache.put(where, to, keys, values)
        cache.places[slot, to[0]] = at[0]

    @torch.inference_mode()
    def draft(self, numbers: Tensor, features: Tensor, shape: Shape) -> Tensor:
        """Take the fresh rows, features [B, FRESH, 3 hidden], into the cache, and draft behind the last of each text.

        numbers [B, ...] as `Given` has them -> tokens and masks of the tree's rows, int64 [B, 2 * rows]
        """
        heads, c, cache = self.heads, self.heads.config, self.cache
        slots, length, root, temperature, top_p, stream = numbers[:, :6].unbind(1)
        temperature, top_p = (bits.to(torch.int32).view(torch.float32) for bits in (temperature, top_p))
        sizes = [FRESH, FRESH, 3 * FRESH, shape.branches * shape.reach]
        at, to, trigrams, continuations = torch.split(numbers[:, 6:], sizes, 1)
        trigrams, batch = trigrams.view(-1, FRESH, 3), torch.arange(len(numbers), device=numbers.device)
        states, u = heads.fused(features), heads.encoded(trigrams)
        query, keys, values = heads.project(u, states, at)
        cache.put(slots, to, keys, values)
        live = to < cache.nowhere
        cache.places[slots[:, None], torch.where(live, to, to[:, :1])] = torch.where(live, at, at[:, :1])

        def rooted(tensor: Tensor) -> Tensor:
            return tensor[batch, root][:, None]

        query, u, states, history, base = map(rooted, (query, u, states, trigrams, at[..., None]))
        last = features[batch, root, None, -c.hidden :]
        places = cache.places[slots]
        seen = (places >= 0) & (places <= base[:, 0]) & ((places < c.sinks) | (places > base[:, 0] - c.window))
        branch = torch.zeros(len(numbers), 1, cache.nowhere + 1 - cache.tail, dtype=torch.bool, device=numbers.device)

        total = torch.zeros(len(numbers), 1, device=numbers.device)  # log of a node's chance
        parent = torch.full((len(numbers), 1), -1, device=numbers.device)
        scores, tokens, parents, drafted = [], [], [], 0
        for depth in range(shape.depth):
            if depth:
                place = cache.tail + (depth - 1) * shape.beams + torch.arange(shape.beams, device=numbers.device)
                u = heads.encoded(history)
                query, keys, values = heads.project(u, states, (base[:, 0] + depth).expand(-1, shape.beams))
                cache.put(slots, place.expand(len(numbers), -1), keys, values)
                branch = branch | (place[:, None] == cache.tail + torch.arange(branch.shape[-1], device=place.device))
            attended = query
            if c.with_block:
                mask = torch.cat((seen[:, None].expand(-1, branch.shape[1], -1), branch), -1)
                attended = _attend(query, cache.keys[slots], cache.values[slots], mask)
            states = heads.finish(u, states, attended)
            logits = heads.logits(states, last, depth)
            chance, token = self._children(logits, temperature, top_p, stream, length + depth, shape.beams)
            chance = (total[..., None] + chance).flatten(1)
            scores.append(chance)
            tokens.append(token.flatten(1))
            parents.append(parent[..., None].expand(-1, -1, shape.beams).flatten(1))
            total, kept = chance.topk(shape.beams, 1)
            above = kept // shape.beams
            parent, drafted = drafted + kept, drafted + chance.shape[1]
            token = tokens[-1].gather(1, kept)
            history = torch.cat((_of(history, above)[..., 1:], token[..., None]), -1)
            states, branch = _of(states, above), _of(branch, above)
        every = torch.cat(scores, 1), torch.cat(tokens, 1), torch.cat(parents, 1)
        found = best(*every, nodes=shape.nodes, depth=shape.depth)
        for continuation in continuations.view(len(numbers), shape.branches, shape.reach).unbind(1):
            found = grafted(*found, continuation, shape.grown)
        return torch.cat(found, 1)

    def _children(
        self, logits: Tensor, temperature: Tensor, top_p: Tensor, stream: Tensor, position: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        """Of rows of logits [B, m, Vd] the logs of the best tokens' chances, and these, [B, m, count]."""
        logits = logits.nan_to_num(LEAST, LEAST, LEAST)
        likely, ids = logits.topk(min(CANDIDATES, logits.shape[-1]), -1)
        token = self.heads.vocabulary[ids]
        noise = gumbel_of(stream[:, None, None], position[:, None, None], token)
        heat = temperature[:, None, None]
        mass = (likely / heat.clamp(min=1e-3)).softmax(-1)
        dropped = (mass.cumsum(-1) - mass >= top_p[:, None, None]) & (heat > 0)
        chance = (likely + heat * noise).masked_fill(dropped, float("-inf")).log_softmax(-1)
        chance, kept = chance.topk(count, -1)
        return chance.clamp(LEAST, 0) - STEP, token.gather(-1, kept)


@dataclass(frozen=True)
class Captured:
    """A drafting of one shape as a graph, with what it reads and writes."""

    graph: Graph
    found: Tensor
    numbers: Tensor
    features: Tensor

    @classmethod
    def of(cls, drafting: Drafting, numbers: Tensor, features: Tensor, shape: Shape) -> Captured:
        """The graph of a draft, with its first inputs."""

        def run() -> Results:
            found = drafting.draft(numbers, features, shape)
            return Results(features.new_zeros(0), found, None)

        graph, results = graphs._recorded(run, numbers.device)
        return cls(graph, results.chosen, numbers, features)

    def replay(self, numbers: Tensor, features: Tensor) -> Tensor:
        """What is drafted of other inputs."""
        self.numbers.copy_(numbers, non_blocking=True)
        self.features.copy_(features)
        self.graph.replay()
        return self.found


def _of(tensor: Tensor, rows: Tensor) -> Tensor:
    """Rows [B, n] of a tensor [B, m, ...]."""
    return tensor[torch.arange(len(rows), device=rows.device)[:, None], rows]


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """query [B, n, H, D], keys and values [B, HK, C, D], mask [B, n, C] -> [B, n, H, D]"""
    batch, rows, heads, dim = query.shape
    packed = query.view(batch, rows, keys.shape[1], -1, dim).permute(0, 2, 3, 1, 4)
    scores = (packed @ keys[:, :, None].transpose(-1, -2)).float() / math.sqrt(dim)
    chances = scores.masked_fill(~mask[:, None, None], float("-inf")).softmax(-1).to(values.dtype)
    found = chances @ values[:, :, None]
    return found.permute(0, 3, 1, 2, 4).reshape(batch, rows, heads, dim)


__all__ = ["FRESH", "NOWHERE", "Drafting", "Given", "Shape", "bits"]
