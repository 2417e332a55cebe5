"""A text that grows as tokens arrive: what is returned is final, whatever comes after."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

from hspec_decoding.text.tokens import Tokenizer


class TextStream:
    """Joins tokens to text, piece by piece, and ends it before the first stop string.

    The pieces together are the one-shot decode of all ids, cut before the stop that is complete first. Held
    back are at most the bytes of one unfinished character and what may be the start of a stop string; the work
    per token does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        """`stops` end the text as strings, and as ids where one is exactly a special token."""
        self._spelling = tokenizer.spelling
        self._stops = [stop for stop in stops if stop]
        self._stop_ids = {token for stop in self._stops if (token := tokenizer.token_id(stop)) is not None}
        self._longest = max(map(len, self._stops), default=0)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = self._spelling.strips_space
        self._held = ""
        self._parts: list[str] = []
        self._decoded = self._returned = self._pushed = 0  # characters, characters, ids
        self._starts: deque[int] = deque()  # the character at which each id not yet returned begins
        self.stopped = False

    @property
    def text(self) -> str:
        """Everything returned so far."""
        return "".join(self._parts)

    @property
    def consumed(self) -> int:
        """How many of the pushed ids the returned text is made of; all of them at a finish without a stop."""
        return self._pushed - len(self._starts)

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids; return the text that is final, empty while none is. Ignores ids after a stop."""
        pieces = []
        for token in ids:
            if self.stopped:
                break
            if token in self._stop_ids:
                pieces.append(self.finish())
                self.stopped = True
            else:
                pieces.append(self._add(token))
        return "".join(pieces)

    def finish(self) -> str:
        """Return what was held back: no more ids will come. An unfinished character becomes U+FFFD."""
        if self.stopped:
            return ""
        text = self._accept(self._utf8.decode(b"", True))
        if not self.stopped:
            text += self._give(len(self._held))
            self._starts.clear()
        return text

    def _add(self, token: int) -> str:
        self._pushed += 1
        self._starts.append(self._decoded)
        data = self._spelling[token]
        if data and self._strip:
            data, self._strip = data.removeprefix(b" "), False
        return self._accept(self._utf8.decode(data))

    def _accept(self, text: str) -> str:
        if not text:
            return ""
        self._held += text
        self._decoded += len(text)
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if not found:
            return self._give(len(self._held) - self._unsure())
        self.stopped = True
        text = self._give(min(found)[1])
        self._held = ""
        return text

    def _unsure(self) -> int:
        """Characters at the end of what is held that may begin a stop string."""
        for size in range(min(self._longest - 1, len(self._held)), 0, -1):
            tail = self._held[-size:]
            if any(len(stop) > size and stop.startswith(tail) for stop in self._stops):
                return size
        return 0

    def _give(self, size: int) -> str:
        text, self._held = self._held[:size], self._held[size:]
        self._returned += size
        while self._starts and self._starts[0] < self._returned:
            self._starts.popleft()
        if text:
            self._parts.append(text)
        return text
