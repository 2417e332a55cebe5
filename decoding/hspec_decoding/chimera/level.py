"""The level that proposes with Chimera's heads: trees to the target, chains to a level that checks before it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from hspec_decoding.chimera.drafting import FRESH, NOWHERE, Drafting, Given, Shape, bits
from hspec_decoding.chimera.notes import Features
from hspec_decoding.graphs import Ahead, Mark
from hspec_decoding.levels import Tally
from hspec_decoding.ngram import NGram, certain
from hspec_decoding.rules import Chooser, Coupled, Draft
from hspec_decoding.sequence import Held, Text
from hspec_decoding.stack import LONGEST
from hspec_decoding.tree import Tree
from hspec_decoding.tuner import Growth
from hspec_kernels.sample import stream

DEPTH = 8  # tokens of the longest branch
HOTTEST = 1e6  # temperature


class Chimera:
    """Heads over features of the target that the passes above them leave."""

    guess = 0.6

    def __init__(
        self, name: str, drafting: Drafting, vocabulary: int, sequences: int, *, tree: bool, captured: bool = False
    ) -> None:
        """`tree`: what is proposed are trees, to the target itself. `captured`: drafts are replays of graphs."""
        self.name, self.heads, self.tally, self.captured = name, drafting.heads, Tally(), captured
        config = self.heads.config
        self.growth = Growth(DEPTH) if tree else None
        self.sequential = not tree
        self.shown = config.window + LONGEST  # rows that a window shows, or will when what is speculated is taken back
        self.features = Features(config.entering, config.sinks, self.shown)
        self.drafting = drafting
        drafting.cache.places.fill_(-1)
        self.ngram = NGram(vocabulary, sequences)
        self.vocabulary = vocabulary
        self.held = [Held() for _ in range(sequences)]  # row t was given the tokens up to x_{t+1}

    def read(self, text: Text) -> None:
        self.ngram.read(text)

    def forget(self, slot: int) -> None:
        self.ngram.forget(slot)
        self.held[slot].reset()
        self.features.forget(slot)
        self.drafting.cache.places[slot] = -1

    def propose(self, texts: Sequence[Text], limits: Sequence[int], widths: Sequence[int], by: Chooser) -> list[Draft]:
        """Under the rejection rule what is proposed is a chain, each token of which is drafted without any doubt."""
        coupled, width = isinstance(by, Coupled), widths[-1]
        drafts = [Draft([]) for _ in texts]
        if self.growth and coupled:
            shape = Shape.tree(width, self.growth.depth(width))
        else:
            shape = Shape.chain(min(width, max(1, *limits)))
        with self.tally.timed():
            ready = [(b, self._ready(text, shape)) for b, text in enumerate(texts) if limits[b] > 0]
            told = [(b, found) for b, found in ready if found]
            if not told:
                return drafts
            found = self._drafted([given for _, given in told], shape)
        self.tally.passes += shape.depth if self.sequential else 1
        going = [b for b, _ in told]
        if self.captured and coupled and (not self.growth or len(going) == len(texts)):
            return self._ahead(drafts, going, limits, found, shape)
        for b, row in zip(going, found.tolist(), strict=True):
            tree = Tree.of(row[: shape.rows], row[shape.rows :]).cut(limits[b])
            laws = [] if coupled else [certain(token, self.vocabulary) for token in tree.tokens]
            drafts[b] = Draft(list(tree.tokens), laws, tree=tree if self.growth and coupled else None)
        return drafts

    def _ready(self, text: Text, shape: Shape) -> tuple[Given, Tensor] | None:
        """What a draft after a text is told, and the features of its fresh rows; None where those of its last row are
        not known.
        """
        tokens, held, config = text.tokens, self.held[text.slot], self.heads.config
        by = text.sampling
        missing, last = held.missing(tokens, text.committed), len(tokens) - 2
        wanted = range(max(0, len(tokens) - len(missing) - 1), last + 1)
        positions, parts = self.features.find(
            text.slot, [t for t in wanted if t < config.sinks or t > last - self.shown]
        )
        if not positions or positions[-1] != last:
            return None
        held.extend(missing)
        features = torch.cat(parts)
        trigrams = [[tokens[max(0, t - 1)], tokens[t], tokens[t + 1]] for t in positions]
        old = max(0, len(positions) - FRESH)
        if old:
            self.drafting.absorb(text.slot, positions[:old], trigrams[:old], features[:old])
            positions, trigrams, features = positions[old:], trigrams[old:], features[old:]
        fresh, cache = len(positions), self.drafting.cache
        lacking = FRESH - fresh
        given = Given(
            text.slot,
            len(tokens),
            fresh - 1,
            bits(min(by.temperature, HOTTEST)),
            bits(by.top_p),
            stream(by.seed, text.key),
            positions + [0] * lacking,
            [cache.slot(t) for t in positions] + [cache.nowhere] * lacking,
            [token for trigram in trigrams for token in trigram] + [0] * 3 * lacking,
            self._continuations(text, shape),
        )
        return given, F.pad(features, (0, 0, 0, lacking))

    def _continuations(self, text: Text, shape: Shape) -> list[int]:
        if not shape.branches:
            return []
        self.ngram.read(text)
        found = list(islice(self.ngram.continuations(text, shape.reach), shape.branches))
        found += [[NOWHERE] * shape.reach] * (shape.branches - len(found))
        return [token for tokens in found for token in tokens]

    def _drafted(self, told: Sequence[tuple[Given, Tensor]], shape: Shape) -> Tensor:
        """Tokens and masks of every text's rows, [B, 2 * rows]."""
        device = self.heads.vocabulary.device
        numbers = torch.tensor([given.numbers for given, _ in told]).to(device, non_blocking=True)
        features = torch.stack([features for _, features in told])
        if not self.captured:
            return self.drafting.draft(numbers, features, shape)
        found, capturing = self.drafting.replay(numbers, features, shape)
        self.tally.seconds -= capturing
        return found

    def _ahead(
        self, drafts: list[Draft], going: Sequence[int], limits: Sequence[int], found: Tensor, shape: Shape
    ) -> list[Draft]:
        """Drafts that stand for what a device is drafting."""
        nodes = shape.rows - 1

        def tell(told: list[list[int]], seconds: float) -> None:
            self.tally.seconds += seconds
            for b, row in zip(going, told, strict=True):
                draft, draft.ahead = drafts[b], None
                if self.growth:
                    draft.tokens, draft.tree = row[:nodes], Tree.of([NOWHERE, *row[:nodes]], row[nodes:])
                else:
                    draft.tokens = row[: min(nodes, limits[b])]

        masks = found[:, shape.rows :] if self.growth else None
        ahead = Ahead(found[:, 1:] if self.growth else found[:, 1 : shape.rows], Mark(found.device), tell, masks)
        for n, b in enumerate(going):
            if self.growth:
                drafts[b] = Draft(ahead.places(n, nodes), ahead=ahead, tree=Tree([NOWHERE] * nodes, [0] * nodes))
            else:
                drafts[b] = Draft(ahead.places(n, min(nodes, limits[b])), ahead=ahead)
        return drafts
