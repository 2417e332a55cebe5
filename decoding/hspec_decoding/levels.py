"""Levels: what proposes tokens after a text. A level checked by a verifier is again a level.

ModelLevel               proposes by itself, as does NGram (ngram.py)
Verified(level, model)   proposes what `model` makes of the level's proposals
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from hspec_decoding.graphs import Ahead, Clock, Graphs, Mark, Noise, fetched, forward
from hspec_decoding.model import Decoder
from hspec_decoding.rules import Chooser, Coupled, Draft
from hspec_decoding.sampling import choose
from hspec_decoding.sequence import Text, speculating
from hspec_decoding.views import FullView, Pass, View
from hspec_kernels.attention import PACKED

if TYPE_CHECKING:
    from hspec_decoding.ranks import Ranks


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


class Notes(Protocol):
    """Takes down features of the tokens that models are fed."""

    entering: tuple[int, ...]  # layers whose input is wanted beside the final hidden state

    def take(self, slot: int, first: int, features: Tensor) -> None:
        """Features [R, (n + 1) hidden] of rows from position `first`, of which the true ones come first; a later pass
        may be over some of the same positions.
        """
        ...

    def follow(self, slot: int, root: int, path: Sequence[int]) -> None:
        """The rows taken last are a tree of the root at that position: those on the path follow it."""
        ...


class Level(Protocol):
    """Proposes tokens."""

    name: str
    tally: Tally
    sequential: bool  # a pass for every token, rather than one for a whole block
    guess: float  # share of its tokens that may be kept, as long as nothing is known

    def read(self, text: Text) -> None:
        """Look at a prompt before it is answered."""
        ...

    def forget(self, slot: int) -> None:
        """Another text takes this slot: nothing of the former one remains."""
        ...

    def propose(self, texts: Sequence[Text], limits: Sequence[int], widths: Sequence[int], by: Chooser) -> list[Draft]:
        """At most `limits[b]` tokens after each text, none where it has nothing to say.

        `widths`: tokens per block for this level and those below it, cheapest first. The texts are left as they were.
        The host may have to `wait` for a draft's tokens.
        """
        ...


CAPTURED = (1, 4, 16, 32, PACKED)  # rows of a captured pass: a capture costs more than some rows too many
BEHIND = 8  # tokens that a level may catch up on within a block


@dataclass(frozen=True)
class _Block:
    """One pass: the tokens of each text that it is fed, what they see, and the rows that are wanted.

    A captured pass is one of the whole batch, so texts that have no part in it come along behind those that do.
    """

    texts: Sequence[Text]
    feed: list[list[int]]
    memory: Pass
    spans: list[slice]  # the rows that score the tokens after each text: its own last and those of its draft

    @property
    def padded(self) -> list[list[int]]:
        """Rows that fill up a block repeat its last token: whatever that is, nothing worse joins the live rows."""
        return [tokens + tokens[-1:] * (self.memory.layout.rows - len(tokens)) for tokens in self.feed]

    def after(self, b: int) -> list[int]:
        """The positions that the rows wanted of a text choose the tokens of."""
        text, span = self.texts[b], self.spans[b]
        behind = self.memory.behind.expand(len(self.texts), -1)[b, span]
        positions: list[int] = (behind + len(text) - span.start).tolist()
        return positions

    @property
    def noise(self) -> Noise:
        """What randomness the rows are drawn with."""
        after = [len(text) - span.start for text, span in zip(self.texts, self.spans, strict=True)]
        return Noise([text.sampling for text in self.texts], [text.key for text in self.texts], after)


class ModelLevel:
    """A model over a view of its cache: proposes token by token, or checks a block in one pass."""

    sequential = True

    def __init__(
        self, name: str, decoder: Decoder, view: View, graphs: Graphs | None = None, guess: float = 0.75
    ) -> None:
        """With `graphs`, passes are captured and replayed."""
        self.name, self.decoder, self.view, self.graphs, self.tally = name, decoder, view, graphs, Tally()
        self.guess = guess
        self.crew: Sequence[Text] = ()  # all texts of a batch
        self.notes: Notes | None = None  # who wants the features of what is fed

    def read(self, text: Text) -> None:
        """Nothing to do: what a model must know of a text it is fed when it is asked."""

    def forget(self, slot: int) -> None:
        self.view.forget(slot)

    def propose(self, texts: Sequence[Text], limits: Sequence[int], widths: Sequence[int], by: Chooser) -> list[Draft]:
        if self.graphs and isinstance(by, Coupled):
            return self._chain(texts, [min(limit, widths[-1]) for limit in limits])

        def step(some: Sequence[Text], room: Sequence[int]) -> list[Draft]:  # noqa: ARG001
            return by.check(some, [Draft([]) for _ in some], self)

        return _grow(texts, limits, widths[-1], step)

    def logits(self, texts: Sequence[Text], drafts: Sequence[Draft]) -> list[Tensor]:
        """For each text the logits [n + 1, V] after it and after each of its n drafted tokens, in one pass."""
        with self._timed() as clock:
            block = self._block(texts, drafts, clock)
            if self.graphs and block.memory.layout.rows <= PACKED:
                replayed = self.graphs.replay(block.padded, block.memory, block.noise, clock)
                logits = [rows[span] for rows, span in zip(replayed.logits, block.spans, strict=True)]
            else:
                logits = self._score(self._forward(block.padded, block.memory), block.spans)
            self._fed(block, drafts)
            self.decoder.finish()
        return logits[: len(texts)]

    def choices(self, texts: Sequence[Text], drafts: Sequence[Draft]) -> list[list[int]]:
        """For each text the coupled samples after it and after each of its n drafted tokens, in one pass."""
        return [self._sound(own) for own in self._choices(texts, drafts)]

    def _choices(self, texts: Sequence[Text], drafts: Sequence[Draft]) -> list[list[int]]:
        ahead = next((draft.ahead for draft in drafts if draft.ahead), None)  # they are all of one chain
        with self._timed() as clock:
            block = self._block(texts, drafts, clock)
            if self.graphs and block.memory.layout.rows <= PACKED:
                results = self.graphs.replay(block.padded, block.memory, block.noise, clock, ahead)
                found = ahead.wait(clock, results.chosen) if ahead else fetched(results.chosen)
                chosen = [own[span] for own, span in zip(found[0], block.spans, strict=True)]
            else:
                logits = self._score(self._forward(block.padded, block.memory, ahead), block.spans)
                chosen = [
                    choose(rows, text.sampling, [text.key] * len(rows), block.after(b))
                    for b, (text, rows) in enumerate(zip(block.texts, logits, strict=True))
                ]
                if self.decoder.ranks:
                    chosen = _agreed(chosen, self.decoder.ranks)
                if ahead:
                    ahead.wait(clock)
            self._fed(block, drafts)
        return [own[: len(draft.tokens) + 1] for draft, own in zip(drafts, chosen, strict=False)]

    def _sound(self, chosen: list[int]) -> list[int]:
        """Where logits are no numbers, which a broken draft may give, any token will do."""
        return [max(0, token) for token in chosen]

    def _sound_part(self, chosen: list[int]) -> list[int]:
        """Of tokens each fed after the one before, those up to the first whose logits are no numbers."""
        broken = next((n for n, token in enumerate(chosen) if token < 0), len(chosen))
        return chosen[:broken] or self._sound(chosen[:1])

    def _chain(self, texts: Sequence[Text], lengths: Sequence[int]) -> list[Draft]:
        """Coupled samples token after token, each fed back on the device; the host has yet to wait for them."""
        drafts = [Draft([]) for _ in texts]
        going = [b for b, length in enumerate(lengths) if length]
        if not going:
            return drafts
        assert self.graphs is not None
        some = [texts[b] for b in going]

        def tell(chosen: list[list[int]], seconds: float) -> None:
            self.tally.seconds += seconds
            for b, tokens in zip(going, chosen, strict=False):
                drafts[b].tokens, drafts[b].ahead = self._sound_part(tokens[: lengths[b]]), None
                self.view.fed(texts[b], drafts[b].tokens[:-1])

        with self._timed() as clock:
            alone = [Draft([]) for _ in some]
            block = self._block(some, alone, clock)
            chosen, last = self.graphs.chain(
                block.padded, block.memory, block.noise, list(map(len, block.feed)), max(lengths), clock
            )
            self._fed(block, alone)
            self._note(some, [len(text) - 1 for text in some], last)
            if isinstance(self.view, FullView):
                self.view.note(last)
            ahead = Ahead(chosen, Mark(self.decoder.device), tell)
        self.tally.passes += max(lengths) - 1
        for n, b in enumerate(going):
            drafts[b] = Draft(ahead.places(n, lengths[b]), ahead=ahead)
        return drafts

    def rehearse(self, texts: Sequence[Text], rows: int) -> float | None:
        """Capture the pass of a block of so many rows, and replay it; seconds of that. None without graphs.

        Texts and tallies are left as they are.
        """
        if not self.graphs:
            return None
        tally, drafts = replace(self.tally), [Draft([0] * (rows - 1)) for _ in texts]
        for _ in range(2):
            before = self.tally.seconds
            self._choices(texts, drafts)
            seconds = self.tally.seconds - before
        vars(self.tally).update(vars(tally))
        return seconds

    @contextmanager
    def _timed(self) -> Iterator[Clock]:
        """Count a pass and its seconds, less what the clock is told to leave out."""
        clock = Clock()
        started = time.perf_counter()
        yield clock
        self.tally.passes += 1
        self.tally.seconds += time.perf_counter() - started - clock.left_out

    def _block(self, texts: Sequence[Text], drafts: Sequence[Draft], clock: Clock) -> _Block:
        slots = {text.slot for text in texts}
        riders = [text for text in self.crew if text.slot not in slots] if self.graphs else []
        clock.left_out += self.view.prepare([*texts, *riders])
        feed = [self._caught_up(text) + draft.tokens for text, draft in zip(texts, drafts, strict=True)]
        if max(map(len, feed)) > PACKED:
            riders = []  # not a pass that is captured
        aboard = [*texts, *riders]
        feed += [text.tokens[-1:] for text in riders]
        spans = _spans(feed, [*drafts, *(Draft([]) for _ in riders)])
        memory = self._begin(aboard, feed)
        memory.entering = self.notes.entering if self.notes else ()
        return _Block(aboard, feed, memory, spans)

    def _fed(self, block: _Block, drafts: Sequence[Draft]) -> None:
        """Count what the texts that have drafts were fed."""
        for text, draft, tokens, span in zip(block.texts, drafts, block.feed, block.spans, strict=False):
            self.view.fed(text, tokens[: span.start + 1] + draft.tokens)
        self._note(block.texts[: len(drafts)], block.memory.layout.positions, block.memory)

    def _note(self, texts: Sequence[Text], first: Sequence[int], memory: Pass) -> None:
        """Hand on what a pass noted of the rows of some texts, of which row 0 stands at `first`."""
        if self.notes and memory.features is not None:
            for text, at, features in zip(texts, first, memory.features, strict=False):
                self.notes.take(text.slot, at, features)

    def _caught_up(self, text: Text) -> list[int]:
        """The few tokens still to feed, after a pass of its own where there are many: a block stays a block."""
        missing = self.view.missing(text)
        if len(missing) > BEHIND:
            self._read(text, missing[:-1])
        return missing[-1:] if len(missing) > BEHIND else missing

    def _read(self, text: Text, tokens: list[int]) -> None:
        """Feed tokens of a text that nothing is asked about."""
        memory = self.view.begin([text], len(tokens))
        self._forward([tokens], memory)
        self.view.fed(text, tokens)
        self._note([text], memory.layout.positions, memory)

    def _begin(self, texts: Sequence[Text], feed: Sequence[list[int]]) -> Pass:
        """Memory for what is fed; graphs want few different numbers of rows."""
        rows = max(map(len, feed))
        if self.graphs:
            rows = next((made for made in CAPTURED if made >= rows), rows)
        return self.view.begin(texts, rows)

    def _forward(self, tokens: Sequence[list[int]], memory: Pass, ahead: Ahead | None = None) -> Tensor:
        fed = torch.tensor(tokens, device=self.decoder.device)
        if ahead:
            ahead.put(fed)
        memory.entering = self.notes.entering if self.notes else ()
        return forward(self.decoder, fed, memory)

    def _score(self, hidden: Tensor, spans: Sequence[slice]) -> list[Tensor]:
        """Logits of the rows that are wanted; no others are multiplied with the head."""
        wanted = [rows[span] for rows, span in zip(hidden, spans, strict=True)]
        return list(torch.split(self.decoder.logits(torch.cat(wanted)), [len(rows) for rows in wanted]))


def _agreed(chosen: Sequence[Sequence[int]], ranks: Ranks) -> list[list[int]]:
    """Rank 0's tokens."""
    told = iter(ranks.same([token for own in chosen for token in own]))
    return [list(islice(told, len(own))) for own in chosen]


def _spans(feed: Sequence[list[int]], drafts: Sequence[Draft]) -> list[slice]:
    """The rows that score the tokens after each text: its own last and those of its draft."""
    return [slice(len(f) - len(d.tokens) - 1, len(f)) for f, d in zip(feed, drafts, strict=True)]


class Verified:
    """A level whose proposals are checked by a model before they are handed up."""

    sequential = True

    def __init__(self, below: Level, model: ModelLevel) -> None:
        self.below, self.model = below, model
        self.name, self.tally, self.guess = model.name, model.tally, model.guess

    def read(self, text: Text) -> None:
        self.below.read(text)

    def forget(self, slot: int) -> None:
        self.below.forget(slot)
        self.model.forget(slot)

    def propose(self, texts: Sequence[Text], limits: Sequence[int], widths: Sequence[int], by: Chooser) -> list[Draft]:
        def step(some: Sequence[Text], room: Sequence[int]) -> list[Draft]:
            below = self.below.propose(some, [n - 1 for n in room], widths[:-1], by)
            checked = by.check(some, below, self.model)
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
