"""Prompt lookup: tokens that followed the same few tokens before, without any model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hspec_decoding.levels import Tally
from hspec_decoding.rules import Chooser, Draft, Rejection
from hspec_decoding.sequence import Text


class NGram:
    """Prompt lookup: what followed the last place where the text's last tokens stood before."""

    sequential, guess = False, 0.5

    def __init__(self, vocab_size: int, sequences: int, longest: int = 4, shortest: int = 2) -> None:
        self.name, self.tally = "ngram", Tally()
        self.vocab_size, self.sizes = vocab_size, range(longest, shortest - 1, -1)
        self.tables: list[dict[tuple[int, ...], int]] = [{} for _ in range(sequences)]  # n-gram -> index behind it
        self.indexed = [0] * sequences

    def propose(self, texts: Sequence[Text], limits: Sequence[int], widths: Sequence[int], by: Chooser) -> list[Draft]:
        drafts = []
        with self.tally.timed():
            for text, limit in zip(texts, limits, strict=True):
                self._index(text)
                tokens = self._continue(text, min(limit, widths[-1]))
                laws = [self._certain(token) for token in tokens] if isinstance(by, Rejection) else []
                drafts.append(Draft(tokens, laws))
        self.tally.passes += 1
        return drafts

    def read(self, text: Text) -> None:
        self._index(text)

    def forget(self, slot: int) -> None:
        self.tables[slot], self.indexed[slot] = {}, 0

    def _index(self, text: Text) -> None:
        """Enter the n-grams of committed tokens that have a successor."""
        table, tokens = self.tables[text.slot], text.tokens
        for end in range(self.indexed[text.slot] + 1, text.committed):
            for n in self.sizes:
                if end >= n:
                    table[tuple(tokens[end - n : end])] = end
        self.indexed[text.slot] = max(self.indexed[text.slot], text.committed - 1)

    def _continue(self, text: Text, limit: int) -> list[int]:
        """Up to `limit` tokens that followed the longest n-gram found; a copy may run on into itself."""
        tokens = text.tokens
        for n in self.sizes:
            at = self.tables[text.slot].get(tuple(tokens[-n:])) if len(tokens) >= n else None
            if at is not None:
                found: list[int] = []
                for i in range(at, at + limit):
                    found.append(tokens[i] if i < len(tokens) else found[i - len(tokens)])
                return found
        return []

    def _certain(self, token: int) -> Tensor:
        law = torch.zeros(self.vocab_size)
        law[token] = 1.0
        return law
