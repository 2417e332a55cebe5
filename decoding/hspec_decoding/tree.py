"""Trees of drafted tokens: several guesses at every position, checked in one pass.

Row 0 of a tree is its root, the text's last token; node i stands in row i, behind its parent. A row sees itself and
its ancestors, which a mask of 64 bits says: bit j for row j.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

NOWHERE = -1  # in place of a token: none


@dataclass(frozen=True)
class Tree:
    """At most 63 drafted tokens; `parents[i]`, of node i + 1, is a row before its own."""

    tokens: list[int]
    parents: list[int]

    @classmethod
    def of(cls, tokens: Sequence[int], masks: Sequence[int]) -> Tree:
        """The tree of rows, the root's first, as a device made them."""
        above = [(mask & ~(1 << row) & (1 << row) - 1).bit_length() - 1 for row, mask in enumerate(masks)]
        return cls(list(tokens[1:]), above[1:])

    @cached_property
    def masks(self) -> list[int]:
        """Of every row, the rows that it sees."""
        masks = [1]
        for row, parent in enumerate(self.parents, 1):
            masks.append(masks[parent] | 1 << row)
        return masks

    @property
    def depths(self) -> list[int]:
        """Of every row, its distance from the root."""
        return [mask.bit_count() - 1 for mask in self.masks]

    def walk(self, chosen: Sequence[int]) -> list[int]:
        """Rows of the longest branch that was foreseen, where `chosen` is the token that follows each row."""
        path: list[int] = []
        children = {(parent, token): row for row, (parent, token) in reversed(list(enumerate(self._edges, 1)))}
        row = children.get((0, chosen[0]))
        while row is not None:
            path.append(row)
            row = children.get((row, chosen[row]))
        return path

    def beside(self, row: int) -> int | None:
        """The first token drafted after a row, if any is."""
        return next((token for parent, token in self._edges if parent == row and token >= 0), None)

    def cut(self, depth: int) -> Tree:
        """The nodes at most so deep, but those that hold no token."""
        kept = [row for row, at in enumerate(self.depths) if at <= depth and (not row or self.tokens[row - 1] >= 0)]
        places = {row: n for n, row in enumerate(kept)}
        return Tree([self.tokens[row - 1] for row in kept[1:]], [places[self.parents[row - 1]] for row in kept[1:]])

    @property
    def _edges(self) -> list[tuple[int, int]]:
        return list(zip(self.parents, self.tokens, strict=True))


def signed(mask: int) -> int:
    """64 bits as int64 holds them."""
    return mask - (1 << 64) if mask >> 63 else mask


def row_masks(trees: Sequence[Tree | None], roots: Sequence[int], rows: int) -> list[list[int]]:
    """For each sequence what its `rows` rows see, as int64: those before its root and the branch that they end.

    Without a tree it is all rows up to their own. What fills up a block sees as little as it can.
    """
    masks = []
    for tree, root in zip(trees, roots, strict=True):
        before = (1 << root) - 1
        if tree is None:
            own = [(2 << row) - 1 for row in range(rows)]
        else:
            own = [(2 << row) - 1 for row in range(root)] + [before | mask << root for mask in tree.masks]
            own += [before | 1 << root | 1 << row for row in range(len(own), rows)]
        masks.append(list(map(signed, own)))
    return masks


def depths(masks: Tensor) -> Tensor:
    """Of masks int64 [B, R] each row's number of ancestors."""
    places = torch.arange(masks.shape[-1], device=masks.device)
    return ((masks[..., None] >> places) & 1).sum(-1) - 1


def best(scores: Tensor, tokens: Tensor, parents: Tensor, nodes: int, depth: int) -> tuple[Tensor, Tensor]:
    """The `nodes` best of C candidates as rows behind a root: tokens [B, nodes + 1], the root's NOWHERE, and masks.

    scores, tokens, parents [B, C]: a parent is a candidate before its child, of a better score, or -1 for the root; so
    the best are connected. No branch is longer than `depth`.
    """
    batch, _ = scores.shape
    kept = scores.topk(nodes, dim=1).indices.sort(1).values
    row = torch.arange(1, nodes + 1, device=scores.device).expand(batch, -1)
    rows = torch.zeros_like(parents).scatter(1, kept, row)
    above = parents.gather(1, kept)
    above = torch.where(above < 0, 0, rows.gather(1, above.clamp(min=0)))
    above = torch.cat((torch.zeros_like(above[:, :1]), above), 1)
    own = _bits(torch.arange(nodes + 1, device=scores.device)).expand(batch, -1)
    masks = own
    for _ in range(depth):
        masks = own | masks.gather(1, above)
    found = torch.cat((torch.full_like(kept[:, :1], NOWHERE), tokens.gather(1, kept)), 1)
    return found, masks


def grafted(tokens: Tensor, masks: Tensor, continuation: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """The tree with a continuation of the text as a further branch: as far as the tree foresees it the branch is the
    tree's own, and `nodes` rows take what follows.

    tokens, masks [B, R] as of `best`, siblings of which differ; continuation [B, L], NOWHERE behind its end. Rows that
    nothing is left for hold NOWHERE beneath the root.
    """
    rows, length = tokens.shape[1], continuation.shape[1]
    at = depths(masks)
    foreseen = continuation.gather(1, (at - 1).clamp(0, length - 1))
    same = (tokens == foreseen) & (tokens >= 0) & (at <= length)
    same[:, 0] = True
    places = torch.arange(rows, device=tokens.device)
    whole = (same * _bits(places)).sum(1, keepdim=True)
    joined = torch.where((masks & ~whole) == 0, at, -1)  # depth of the rows that lie on the branch
    row = joined.argmax(1, keepdim=True)
    new = torch.arange(nodes, device=tokens.device)
    place = at.gather(1, row) + new
    fresh = continuation.gather(1, place.clamp(max=length - 1)).masked_fill(place >= length, NOWHERE)
    fresh = fresh.masked_fill(fresh.cummin(1).values < 0, NOWHERE)
    own = _bits(rows + new)
    branch = masks.gather(1, row) | own.cumsum(0)
    return torch.cat((tokens, fresh), 1), torch.cat((masks, torch.where(fresh < 0, own | 1, branch)), 1)


def _bits(rows: Tensor) -> Tensor:
    return torch.ones_like(rows) << rows
