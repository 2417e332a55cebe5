"""Levels: what proposes tokens after a text. A level checked by a verifier is again a level.

NGram, ModelLevel        propose by themselves
Verified(level, model)   proposes what `model` makes of the level's proposals
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hspec_decoding.graphs import Graphs
from hspec_decoding.model import Decoder
from hspec_decoding.sampling import Draws, Sampling, accept, agree, choose, probabilities
from hspec_decoding.sequence import Text, speculating
from hspec_decoding.stack import LONGEST
from hspec_decoding.views import FullView, Pass, View
from hspec_kernels.attention import PACKED
from hspec_kernels.shapes import power_of_two


@dataclass
class Draft:
    """Tokens proposed after a text; under the rejection rule `laws[i]` [V] is the law that token i was drawn from."""

    tokens: list[int]
    laws: list[Tensor] = field(default_factory=list)


@dataclass
class Tally:
    """What a level did so far: tokens it proposed, how many of them its verifier kept and refused, passes, seconds.

    Behind the first token refused nothing is looked at, so `kept + refused` are those that were.
    """

    proposed: int = 0
    kept: int = 0
    refused: int = 0
    passes: int = 0
    seconds: float = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the seconds spent inside."""
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started


class Chooser(Protocol):
    """How tokens are drawn and checked: one of the two rules, with its randomness."""

    def draw(self, texts: Sequence[Text], logits: Tensor) -> list[Draft]:
        """One token after each text, from logits [B, V]."""
        ...

    def check(self, texts: Sequence[Text], drafts: Sequence[Draft], logits: Sequence[Tensor]) -> list[Draft]:
        """For each text the tokens that its verifier, with logits [n + 1, V], makes of its draft of n tokens."""
        ...


@dataclass(frozen=True)
class Coupled:
    """The coupled rule: every level draws with the noise of the position."""

    sampling: Sampling

    def draw(self, texts: Sequence[Text], logits: Tensor) -> list[Draft]:
        keys, positions = [text.key for text in texts], [len(text) for text in texts]
        return [Draft([token]) for token in choose(logits, self.sampling, keys, positions)]

    def check(self, texts: Sequence[Text], drafts: Sequence[Draft], logits: Sequence[Tensor]) -> list[Draft]:
        keys = [text.key for text, rows in zip(texts, logits, strict=True) for _ in rows]
        positions = [len(text) + i for text, rows in zip(texts, logits, strict=True) for i in range(len(rows))]
        chosen = choose(torch.cat(list(logits)), self.sampling, keys, positions)
        checked = []
        for draft, rows in zip(drafts, logits, strict=True):
            checked.append(Draft(agree(draft.tokens, chosen[: len(rows)])))
            chosen = chosen[len(rows) :]
        return checked


@dataclass(frozen=True)
class Rejection:
    """The rejection rule: every level hands up the laws that its tokens were drawn from."""

    sampling: Sampling
    draws: dict[int, Draws]  # by slot

    def draw(self, texts: Sequence[Text], logits: Tensor) -> list[Draft]:
        laws = probabilities(logits, self.sampling)
        return [Draft([self.draws[t.slot].choice(law)], [law]) for t, law in zip(texts, laws, strict=True)]

    def check(self, texts: Sequence[Text], drafts: Sequence[Draft], logits: Sequence[Tensor]) -> list[Draft]:
        checked = []
        for text, draft, rows in zip(texts, drafts, logits, strict=True):
            target = list(probabilities(rows, self.sampling))
            laws = [law.to(rows.device) for law in draft.laws]
            tokens = accept(draft.tokens, laws, target, self.draws[text.slot])
            checked.append(Draft(tokens, target[: len(tokens)]))
        return checked


class Level(Protocol):
    """Proposes tokens."""

    name: str
    tally: Tally
    sequential: bool  # a pass for every token, rather than one for a whole block

    def propose(self, texts: Sequence[Text], limits: Sequence[int], widths: Sequence[int], by: Chooser) -> list[Draft]:
        """At most `limits[b]` tokens after each text, none where it has nothing to say.

        `widths`: tokens per block for this level and those below it, cheapest first. The texts are left as they were.
        """
        ...


class NGram:
    """Prompt lookup: what followed the last place where the text's last tokens stood before."""

    sequential = False

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


BEHIND = 8  # tokens that a level may catch up on within a block


class ModelLevel:
    """A model over a view of its cache: proposes token by token, or checks a block in one pass."""

    sequential = True

    def __init__(self, name: str, decoder: Decoder, view: View, graphs: Graphs | None = None) -> None:
        """With `graphs`, passes are captured and replayed."""
        self.name, self.decoder, self.view, self.graphs, self.tally = name, decoder, view, graphs, Tally()

    def propose(self, texts: Sequence[Text], limits: Sequence[int], widths: Sequence[int], by: Chooser) -> list[Draft]:
        def step(some: Sequence[Text], room: Sequence[int]) -> list[Draft]:  # noqa: ARG001
            logits = torch.cat(self.logits(some, [Draft([]) for _ in some]))
            with self.tally.timed():
                return by.draw(some, logits)

        return _grow(texts, limits, widths[-1], step)

    def logits(self, texts: Sequence[Text], drafts: Sequence[Draft]) -> list[Tensor]:
        """For each text the logits [n + 1, V] after it and after each of its n drafted tokens, in one pass."""
        started = time.perf_counter()
        feed = [self._caught_up(text) + draft.tokens for text, draft in zip(texts, drafts, strict=True)]
        memory = self._begin(texts, feed)
        spans = _spans(feed, drafts)
        # Rows that fill up a block repeat its last token: whatever that is, nothing worse joins the live rows.
        padded = [tokens + tokens[-1:] * (memory.layout.rows - len(tokens)) for tokens in feed]
        if self.graphs and memory.layout.rows <= PACKED:
            started += self.graphs.prepare(padded, memory)
            logits = [rows[span] for rows, span in zip(self.graphs.logits(padded, memory), spans, strict=True)]
        else:
            logits = self._score(self._forward(padded, memory), spans)
        for text, tokens in zip(texts, feed, strict=True):
            self.view.fed(text, tokens)
        self.decoder.finish()
        self.tally.passes += 1
        self.tally.seconds += time.perf_counter() - started
        return logits

    def _caught_up(self, text: Text) -> list[int]:
        """The few tokens still to feed, after a pass of its own where there are many: a block stays a block."""
        missing = self.view.missing(text)
        if len(missing) > BEHIND:
            self._forward([missing[:-1]], self.view.begin([text], len(missing) - 1))
            self.view.fed(text, missing[:-1])
        return missing[-1:] if len(missing) > BEHIND else missing

    def _begin(self, texts: Sequence[Text], feed: Sequence[list[int]]) -> Pass:
        """Memory for what is fed; graphs want few different numbers of rows."""
        rows = max(map(len, feed))
        return self.view.begin(texts, power_of_two(rows) if self.graphs and rows <= PACKED else rows)

    def _forward(self, tokens: Sequence[list[int]], memory: Pass) -> Tensor:
        return self.decoder.forward(torch.tensor(tokens, device=self.decoder.device), memory)

    def _score(self, hidden: Tensor, spans: Sequence[slice]) -> list[Tensor]:
        """Logits of the rows that are wanted; no others are multiplied with the head."""
        wanted = [rows[span] for rows, span in zip(hidden, spans, strict=True)]
        return list(torch.split(self.decoder.logits(torch.cat(wanted)), [len(rows) for rows in wanted]))


class Target(ModelLevel):
    """The last verifier: all keys, and a block of always the same rows, so that a row's bits never depend on how
    many tokens were drafted around it. `rows` None drops that: blocks are as long as they are.
    """

    view: FullView

    def __init__(self, decoder: Decoder, view: FullView, rows: int | None, graphs: Graphs | None = None) -> None:
        super().__init__("target(full)", decoder, view, graphs)
        self.rows = rows

    def room(self, text: Text) -> int:
        """Tokens that may be drafted for its next pass."""
        if self.rows is None:
            return LONGEST
        return min(self.rows - 1, self.view.room(text))

    def prefill(self, text: Text, chunk: int) -> Iterator[int]:
        """Cache all tokens of a text but the last, `chunk` at a time; the tokens cached so far after each."""
        feed = self.view.missing(text)[:-1]
        for start in range(0, len(feed), chunk):
            part = feed[start : start + chunk]
            self._forward([part], self.view.begin([text], len(part)))
            self.view.fed(text, part)
            yield len(text) - 1 - len(feed) + start + len(part)

    def _begin(self, texts: Sequence[Text], feed: Sequence[list[int]]) -> Pass:
        if self.rows is None:
            return super()._begin(texts, feed)
        return self.view.begin(texts, self.rows, [len(tokens) for tokens in feed])

    def _score(self, hidden: Tensor, spans: Sequence[slice]) -> list[Tensor]:
        if self.rows is None:
            return super()._score(hidden, spans)
        return [rows[span] for rows, span in zip(self.decoder.logits(hidden), spans, strict=True)]


def _spans(feed: Sequence[list[int]], drafts: Sequence[Draft]) -> list[slice]:
    """The rows that score the tokens after each text: its own last and those of its draft."""
    return [slice(len(f) - len(d.tokens) - 1, len(f)) for f, d in zip(feed, drafts, strict=True)]


class Verified:
    """A level whose proposals are checked by a model before they are handed up."""

    sequential = True

    def __init__(self, below: Level, model: ModelLevel) -> None:
        self.below, self.model = below, model
        self.name, self.tally = model.name, model.tally

    def propose(self, texts: Sequence[Text], limits: Sequence[int], widths: Sequence[int], by: Chooser) -> list[Draft]:
        def step(some: Sequence[Text], room: Sequence[int]) -> list[Draft]:
            below = self.below.propose(some, [n - 1 for n in room], widths[:-1], by)
            logits = self.model.logits(some, below)
            with self.tally.timed():
                checked = by.check(some, below, logits)
            count(self.below.tally, below, checked)
            return checked

        return _grow(texts, limits, widths[-1], step)


def _grow(
    texts: Sequence[Text],
    limits: Sequence[int],
    width: int,
    step: Callable[[Sequence[Text], Sequence[int]], list[Draft]],
) -> list[Draft]:
    """Repeat `step` (texts, tokens they have room for) until each text has `width` tokens or is at its limit."""
    drafts = [Draft([]) for _ in texts]
    with speculating(texts):
        while going := [b for b, d in enumerate(drafts) if len(d.tokens) < min(limits[b], width)]:
            room = [limits[b] - len(drafts[b].tokens) for b in going]
            for b, more in zip(going, step([texts[b] for b in going], room), strict=True):
                drafts[b].tokens += more.tokens
                drafts[b].laws += more.laws
                texts[b].tokens += more.tokens
    return drafts


def count(tally: Tally, drafts: Sequence[Draft], checked: Sequence[Draft]) -> None:
    """Enter what a verifier made of a level's drafts."""
    for draft, result in zip(drafts, checked, strict=True):
        tally.proposed += len(draft.tokens)
        tally.kept += len(result.tokens) - 1
        tally.refused += len(result.tokens) <= len(draft.tokens)
