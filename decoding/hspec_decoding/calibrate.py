"""A model's calibration for TidalDecode, found on texts: the captured-mass table, the best layers by it, and these and
their neighbours decoded with, told what to say, since a table does not see how errors add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from hspec_decoding.cache import KVStore
from hspec_decoding.calibration import WAYS, Calibration, by_rule, whole_layers
from hspec_decoding.captured import Captured, Table, chains, neighbours
from hspec_decoding.closed_loop import Heard, Place, Trial
from hspec_decoding.model import Decoder
from hspec_decoding.sequence import Text
from hspec_decoding.tidal import PAYS, Tidal
from hspec_decoding.views import FullView
from hspec_profiles.errors import HspecError, UsageError

LAYERS = 4  # that read all keys, as in the paper
BEST = 3  # sets of layers by the table that are decoded with, for each way of making lists
CHUNK = {"cpu": 256, "cuda": 1024}  # tokens of a text that are read at a time

Tell = Callable[[str, int, int], None]  # what, how much of it is done, of how much


@dataclass(frozen=True)
class Tried:
    """A calibration, and what decoding with it said."""

    calibration: Calibration
    heard: Heard


@dataclass(frozen=True)
class Found:
    """The calibration of least divergence; all that were tried, best first; lists fed by verify passes beside them."""

    best: Calibration
    tried: tuple[Tried, ...]
    fed: Heard
    table: Table


class Search:
    """What one calibration goes through."""

    def __init__(self, decoder: Decoder, texts: Sequence[list[int]], budget: int, tell: Tell) -> None:
        """`budget`: tokens that a sparse layer reads. Raises UsageError for texts too short for that."""
        self.decoder, self.budget, self.tell = decoder, budget, tell
        self.layers = whole_layers(decoder.config)
        self.texts = [Text(n, 0, tokens) for n, tokens in enumerate(texts)]
        capacity = max(map(len, texts), default=0)
        store = KVStore(decoder.config, len(texts), capacity, dtype=decoder.dtype, device=decoder.device)
        self.view = FullView(decoder.config, store, len(texts))
        self.tried: dict[tuple[tuple[int, ...], str], Tried] = {}
        self.places: list[Place] = []
        self.done = 0

    def read(self) -> Table:
        """Read the texts; the captured mass of all pairs of layers."""
        captured, chunk = Captured(self.decoder, self.budget), CHUNK[self.decoder.device.type]
        total, before = sum(len(text) - 1 for text in self.texts), 0
        for text in self.texts:
            for done in captured.read(self.view, text, chunk):
                self.tell("tokens read", before + done, total)
            before += len(text) - 1
        self.trial = Trial(self.decoder, self.view, self.texts)
        self.places = list(self.trial.places(PAYS * self.budget))
        if not captured.count or not self.places:
            least = PAYS * self.budget + CHUNK[self.decoder.device.type]
            raise UsageError(
                f"the texts are too short: with a budget of {self.budget} tokens one must have {least:,} at least",
                "give longer ones: `--text FILE`, `--tokens N`",
            )
        return captured.table()

    def attempt(self, calibrations: Iterable[Calibration], ahead: int = 0) -> list[Tried]:
        """Decode with all of these; `ahead` more are to come after them."""
        fresh = [one for one in calibrations if (one.full, one.way) not in self.tried]
        total = self.done + (len(fresh) + ahead) * len(self.places)
        for one in fresh:
            heard = self.heard(Tidal(self.decoder.config, one, self.budget), total)
            self.tried[one.full, one.way] = Tried(one, heard)
        return self.ranked

    def heard(self, tidal: Tidal, total: int) -> Heard:
        """What a way of decoding says."""

        def tick() -> None:
            self.done += 1
            self.tell("places decoded", self.done, total)

        return self.trial.heard(tidal, self.places, tick)

    @property
    def ranked(self) -> list[Tried]:
        """All that were tried, of least divergence first."""
        return sorted(self.tried.values(), key=lambda tried: tried.heard.kl)


@torch.inference_mode()
def calibrate(decoder: Decoder, texts: Sequence[list[int]], *, size: int, budget: int, tell: Tell) -> Found:
    """Find `size` layers, and the way of making lists, with which sparse decoding is nearest to dense decoding.

    `texts`: tokens, at their full lengths. Raises UsageError for texts that are too short, HspecError for a model that
    has no layer to spare.
    """
    search = Search(decoder, texts, budget, tell)
    layers, heads = search.layers, decoder.config.kv_heads
    if size >= len(layers):
        raise HspecError(f"{len(layers)} layers of the model read all keys, and {size} would stay", "fewer: `--layers`")
    table = search.read()
    ways = WAYS if heads > 1 else ("pooled",)

    def made(full: tuple[int, ...], way: str) -> Calibration:
        return Calibration(full, way, table.nearest(full) if way == "heads" else None)

    rule = replace(by_rule(decoder.config), way=ways[0])
    first = [made(full, way) for way in ways for full in chains(table, way, layers, size, BEST)]
    around = 4 * (size - 1) + 2  # neighbours and the other way at most, and lists fed by verify passes
    best = search.attempt([*first, made(rule.full, rule.way)], around)[0].calibration
    near = [made(full, best.way) for full in dict.fromkeys(neighbours(best.full, layers))]
    best = search.attempt(near, 2)[0].calibration
    best = search.attempt([made(best.full, way) for way in ways], 1)[0].calibration
    fed = search.heard(Tidal(decoder.config, best, budget, "fed"), search.done + len(search.places))
    return Found(best, tuple(search.ranked), fed, table)
