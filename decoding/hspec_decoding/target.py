"""The last verifier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from hspec_decoding.device import Shape
from hspec_decoding.graphs import Clock, Graphs
from hspec_decoding.host_view import HostView
from hspec_decoding.levels import ModelLevel, _Block
from hspec_decoding.model import Decoder
from hspec_decoding.prefill import prefill_by_layers
from hspec_decoding.rules import Draft, NonFinite
from hspec_decoding.sequence import Text
from hspec_decoding.stack import LONGEST
from hspec_decoding.tree import row_masks
from hspec_decoding.views import FullView, Pass
from hspec_kernels.compact import compact, pointers


class Target(ModelLevel):
    """The last verifier: all keys, and blocks of a shape in which a row's bits never depend on how many tokens were
    drafted around it. `shape` None drops that: blocks are as long as they are.
    """

    view: FullView

    def __init__(self, decoder: Decoder, view: FullView, shape: Shape | None, graphs: Graphs | None = None) -> None:
        super().__init__("target(full)", decoder, view, graphs)
        self.most = shape.rows if shape else LONGEST + 1
        self.rows = shape.rows if shape and shape.padded else None  # always so many

    def room(self, text: Text) -> int:
        """Tokens that may be drafted for its next pass."""
        return min(self.most - 1, self.view.room(text))

    def logits(self, texts: Sequence[Text], drafts: Sequence[Draft]) -> list[Tensor]:
        """As for any model. Raises NonFinite."""
        logits = super().logits(texts, drafts)
        if not all(bool(torch.isfinite(rows.sum())) for rows in logits):
            raise NonFinite
        return logits

    def choices(self, texts: Sequence[Text], drafts: Sequence[Draft]) -> list[list[int]]:
        """As for any model. Of a tree what is left is the branch that was foreseen, as if it alone had been drafted,
        and the first token that was drafted behind it and refused.
        """
        chosen = super().choices(texts, drafts)
        paths = [draft.tree.walk(own) if draft.tree else [] for draft, own in zip(drafts, chosen, strict=True)]
        self._compact(texts, paths)
        for b, (text, draft, path) in enumerate(zip(texts, drafts, paths, strict=True)):
            if draft.tree:
                draft.tokens = [draft.tree.tokens[row - 1] for row in path]
                self.view.fed(text, draft.tokens)
                if self.notes:
                    self.notes.follow(text.slot, len(text) - 1, path)
                chosen[b] = [chosen[b][row] for row in (0, *path)]
                refused = draft.tree.beside(path[-1] if path else 0)
                draft.tokens += [] if refused is None else [refused]
        return chosen

    def _compact(self, texts: Sequence[Text], paths: Sequence[list[int]]) -> None:
        """Move the keys and values of the rows of each path behind those of its root, the text's last token."""
        longest = max(map(len, paths))
        if any(path != list(range(1, len(path) + 1)) for path in paths):
            moves = [
                [text.slot, len(text), *([row - 1 for row in path] + list(range(len(path), longest)))]
                for text, path in zip(texts, paths, strict=True)
            ]
            slots, first, *source = torch.tensor(moves).T.to(self.decoder.device, non_blocking=True)
            compact(self._caches, self._where, slots, first, torch.stack(source, 1))

    @property
    def _caches(self) -> list[Tensor]:
        return [*self.view.store.keys, *self.view.store.values]

    @cached_property
    def _where(self) -> Tensor:
        return pointers(self._caches)

    def _block(self, texts: Sequence[Text], drafts: Sequence[Draft], clock: Clock) -> _Block:
        for text, draft in zip(texts, drafts, strict=True):
            if draft.ahead and draft.ahead.masks is not None and len(self.view.missing(text)) > 1:
                draft.wait()  # its masks are of a root in row 0
        block = super()._block(texts, drafts, clock)
        if not any(draft.tree for draft in drafts):
            return block
        trees = [*(draft.tree for draft in drafts), *[None] * (len(block.texts) - len(drafts))]
        layout = block.memory.layout
        masks = row_masks(trees, [span.start for span in block.spans], layout.rows)
        return replace(block, memory=block.memory.moved(replace(layout, tree=masks)))

    def _fed(self, block: _Block, drafts: Sequence[Draft]) -> None:
        super()._fed(block, [Draft([]) if draft.tree else draft for draft in drafts])

    def _sound(self, chosen: list[int]) -> list[int]:
        if min(chosen) < 0:
            raise NonFinite
        return chosen

    def prefill(self, text: Text, chunk: int) -> Iterator[int]:
        """Cache all tokens of a text but the last, `chunk` at a time; the tokens cached so far after each."""
        if self.decoder.offloaded or isinstance(self.view, HostView):
            yield from prefill_by_layers(self.decoder, self.view, text, chunk)
            return
        feed = self.view.missing(text)[:-1]
        for start in range(0, len(feed), chunk):
            part = feed[start : start + chunk]
            self._read(text, part)
            yield len(text) - 1 - len(feed) + start + len(part)

    def _begin(self, texts: Sequence[Text], feed: Sequence[list[int]]) -> Pass:
        if self.rows is None:
            return super()._begin(texts, feed)
        live = [len(tokens) for tokens in feed]  # more than there are rows in a tree only
        return self.view.begin(texts, -(-max(live) // self.rows) * self.rows, live)

    def _score(self, hidden: Tensor, spans: Sequence[slice]) -> list[Tensor]:
        if self.rows is None:
            return super()._score(hidden, spans)
        return [rows[span] for rows, span in zip(self.decoder.logits(hidden), spans, strict=True)]
