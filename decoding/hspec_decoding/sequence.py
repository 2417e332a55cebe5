"""A sequence being decoded: its tokens, and which of them are certain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hspec_decoding.sampling import Sampling


@dataclass
class Text:
    """Tokens of one sequence. Levels append what they propose and take it back; `committed` tokens stay.

    `slot` is its row in every KV store, `key` what its randomness is keyed by, `prompt` the tokens it began with,
    `sampling` how they are drawn.
    """

    slot: int
    key: int
    tokens: list[int]
    sampling: Sampling = field(default_factory=Sampling)
    committed: int = field(init=False)
    prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.committed = self.prompt = len(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def commit(self, tokens: Sequence[int]) -> None:
        """Append tokens of the target's own; nothing speculated may be pending."""
        assert len(self.tokens) == self.committed, "speculated tokens are pending"
        self.tokens.extend(tokens)
        self.committed = len(self.tokens)


@contextmanager
def speculating(texts: Sequence[Text]) -> Iterator[None]:
    """Take back, on leaving, every token appended inside."""
    lengths = [len(text) for text in texts]
    try:
        yield
    finally:
        for text, length in zip(texts, lengths, strict=True):
            del text.tokens[length:]


class Held:
    """The tokens whose keys and values a view holds, kept in step with a text that grows and is taken back."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._certain = 0  # leading tokens that were committed when last compared: they need no comparing again

    def __len__(self) -> int:
        return len(self.tokens)

    def missing(self, tokens: list[int], committed: int) -> list[int]:
        """Drop what `tokens` does not begin with; those that remain to be fed, at least the last one.

        The first `committed` tokens will never change.
        """
        limit = min(len(self.tokens), len(tokens) - 1)
        at = min(self._certain, limit)
        while at < limit and self.tokens[at] == tokens[at]:
            at += 1
        del self.tokens[at:]
        self._certain = min(at, committed)
        return tokens[at:]

    def extend(self, tokens: Sequence[int]) -> None:
        """Count tokens as held."""
        self.tokens.extend(tokens)

    def cut(self, length: int) -> None:
        """Forget all tokens behind the first `length`."""
        del self.tokens[length:]
        self._certain = min(self._certain, length)

    def reset(self) -> None:
        """Forget everything."""
        self.tokens.clear()
        self._certain = 0
