"""The view of a draft model: a short memory of its own."""

from __future__ import annotations

from collections.abc import Sequence

from hspec_decoding.cache import KVStore
from hspec_decoding.config import ModelConfig
from hspec_decoding.sequence import Text
from hspec_decoding.views import FullView, Pass


class WindowView:
    """A draft model's own short memory: sinks and recent tokens at window positions (StreamingLLM, arXiv 2309.17453).

    When the window is full it is fed anew from the text's first `sinks` and last `recent` tokens, so that the model
    never sees a position beyond its training, whatever the length of the text.
    """

    def __init__(
        self, config: ModelConfig, store: KVStore, sequences: int, *, sinks: int, recent: int, capacity: int
    ) -> None:
        """The window is full at `capacity` tokens; the store needs room for a block more."""
        self.full = FullView(config, store, sequences)
        self.sinks, self.recent, self.capacity = sinks, recent, capacity
        self.step = capacity - sinks - recent
        self.skipped = [0] * sequences  # tokens left out between the sinks and the window

    def prepare(self, texts: Sequence[Text]) -> float:
        return self.full.prepare(texts)

    def missing(self, text: Text) -> list[int]:
        held, skipped = self.full.held[text.slot], self.skipped[text.slot]
        beyond = len(text) - skipped - self.capacity
        if beyond > 0:
            # By whole steps, so that the window depends on the text's length and not on when one looks.
            self.skipped[text.slot] = skipped = skipped + -(-beyond // self.step) * self.step
            held.reset()
        shown = text.tokens[: self.sinks] + text.tokens[self.sinks + skipped :]
        return held.missing(shown, max(0, text.committed - skipped))

    def fed(self, text: Text, tokens: Sequence[int]) -> None:
        self.full.fed(text, tokens)

    def forget(self, slot: int) -> None:
        self.full.forget(slot)
        self.skipped[slot] = 0

    def begin(self, texts: Sequence[Text], rows: int) -> Pass:
        return self.full.begin(texts, rows)
