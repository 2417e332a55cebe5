"""Features of tokens that models were fed, kept until the draft model has seen them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class _Piece:
    """Rows of one pass: the feature of position `first + n` is row `path[n]`, or n where there is no path."""

    first: int
    features: Tensor  # [R, 3 hidden]
    path: list[int] | None = None

    def row(self, position: int) -> int | None:
        n = position - self.first
        if n < 0 or n >= (len(self.features) if self.path is None else len(self.path)):
            return None
        return n if self.path is None else self.path[n]


class Features:
    """By slot, what is known of the positions that a window with sinks still has to see."""

    def __init__(self, entering: tuple[int, ...], sinks: int, window: int) -> None:
        self.entering, self.sinks, self.window = entering, sinks, window
        self._pieces: dict[int, list[_Piece]] = {}

    def take(self, slot: int, first: int, features: Tensor) -> None:
        """Note a pass, the newest over its positions; of a long one only what a window would show."""
        pieces = self._pieces.setdefault(slot, [])
        skipped = max(0, len(features) - self.window)
        if skipped and first < self.sinks:
            pieces.append(_Piece(first, features[: self.sinks - first].clone()))
        pieces.append(_Piece(first + skipped, features[skipped:].clone()))
        self._drop(slot, first + len(features) - self.window)

    def follow(self, slot: int, root: int, path: Sequence[int]) -> None:
        """The pass noted last is a tree with the root at that position, followed by the rows of a path."""
        piece = self._pieces[slot][-1]
        start = root - piece.first
        piece.path = [*range(start + 1), *(start + row for row in path)]

    def find(self, slot: int, positions: Sequence[int]) -> tuple[list[int], list[Tensor]]:
        """Those of the positions whose features are known, and these, parts of [n, 3 hidden]."""
        known: list[int] = []
        runs: list[tuple[_Piece, list[int]]] = []
        for position in positions:
            for piece in reversed(self._pieces.get(slot, [])):
                row = piece.row(position)
                if row is not None:
                    if not runs or runs[-1][0] is not piece:
                        runs.append((piece, []))
                    runs[-1][1].append(row)
                    known.append(position)
                    break
        return known, [_rows(piece.features, rows) for piece, rows in runs]

    def _drop(self, slot: int, before: int) -> None:
        pieces = self._pieces[slot]
        pieces[:] = [p for p in pieces if p.first < self.sinks or p.first + len(p.features) > before]

    def forget(self, slot: int) -> None:
        """Another text takes this slot."""
        self._pieces.pop(slot, None)


def _rows(features: Tensor, rows: Sequence[int]) -> Tensor:
    """Rows of features; the host tells a device of them only where they are scattered."""
    if list(rows) == list(range(rows[0], rows[-1] + 1)):
        return features[rows[0] : rows[-1] + 1]
    return features[torch.tensor(rows).to(features.device, non_blocking=True)]
