"""Prompt lookup: tokens that followed the same few tokens before, without any model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
                tokens = next(self.continuations(text, min(limit, widths[-1])), [])
                laws = [certain(token, self.vocab_size) for token in tokens] if isinstance(by, Rejection) else []
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

    def continuations(self, text: Text, limit: int) -> Iterator[list[int]]:
        """Up to `limit` tokens that followed an n-gram of the text's last tokens, the longest found first, and each of
        another token than those before; a copy may run on into itself.
        """
        tokens, begun = text.tokens, set()
        for n in self.sizes:
            at = self.tables[text.slot].get(tuple(tokens[-n:])) if len(tokens) >= n else None
            if at is not None and tokens[at] not in begun:
                begun.add(tokens[at])
                found: list[int] = []
                for i in range(at, at + limit):
                    found.append(tokens[i] if i < len(tokens) else found[i - len(tokens)])
                yield found


def certain(token: int, vocab_size: int) -> Tensor:
    """The law of a token that is drafted without any doubt."""
    law = torch.zeros(vocab_size)
    law[token] = 1.0
    return law
