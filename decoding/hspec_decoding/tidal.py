"""TidalDecode (arXiv 2410.05076) over the target's own keys: some layers read all of them and choose tokens, the layers
between read only these, with sinks and recent tokens always among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol, Self

import torch
from torch import Tensor

from hspec_decoding.cache import Slots, Store
from hspec_decoding.calibration import Calibration
from hspec_decoding.config import ModelConfig
from hspec_decoding.model import Norms
from hspec_decoding.sequence import Text
from hspec_decoding.sparse import Asked, lse_of_means
from hspec_decoding.views import FullView, InPlaceView, Layout, Pass
from hspec_kernels.attention import PACKED, Chosen, Reach, attend_with
from hspec_kernels.rope import rope_append
from hspec_kernels.select import score_chunks

SINKS = 4  # first tokens, always read
RECENT = 4  # the last tokens always read are the budget divided by this
PAYS = 2  # budgets that a text must hold before some of its keys are left out
FLOOR = {"cpu": 0, "cuda": 4096}  # tokens below which choosing takes longer than reading; of a GPU by bytes alone
SPECULATED = 192  # tokens at most between a verified token and the end of a pass behind it


class Selection(Protocol):
    """How the attention mass of a layer becomes lists of tokens, and which list a layer's heads read."""

    fed: bool  # every layer has a list from the verify pass; none reads all keys

    def shared(self, mass: Tensor) -> Tensor:
        """Mass [B, HK, C] by KV head -> [B, HK or 1, C], a row for each list to make."""
        ...

    def mapped(self, layer: int, lists: Tensor) -> Tensor:
        """Lists [B, HK, N] of a selector -> those that the heads of a layer read."""
        ...


class Heads:
    """A list for each KV head; the heads of a layer read those that the calibration found nearest to their own."""

    fed = False

    def __init__(self, calibration: Calibration, device: torch.device) -> None:
        heads = calibration.heads
        self._map = None if heads is None else torch.tensor(heads, device=device)

    def shared(self, mass: Tensor) -> Tensor:
        return mass

    def mapped(self, layer: int, lists: Tensor) -> Tensor:
        return lists if self._map is None else lists.index_select(1, self._map[layer])


class Pooled:
    """One list for all heads, by the mass that they give together."""

    fed = False

    def shared(self, mass: Tensor) -> Tensor:
        return mass.sum(1, keepdim=True)

    def mapped(self, layer: int, lists: Tensor) -> Tensor:  # noqa: ARG002
        return lists


class Fed(Pooled):
    """A list for each KV head of every layer, by the queries of the last verify pass (arXiv 2512.01278)."""

    fed = True

    def shared(self, mass: Tensor) -> Tensor:
        return mass


class Tidal:
    """What each layer of a level reads. Captured passes hold its tensors, so it lives as long as they do."""

    def __init__(
        self, config: ModelConfig, calibration: Calibration, budget: int, way: str | None = None, floor: int = 0
    ) -> None:
        """`budget`: tokens that a sparse layer reads. `way`: heads, pooled or fed, else as the calibration says.
        `floor`: tokens of a text below which all layers read all of them.
        """
        self.config, self.calibration, self.budget, self.floor = config, calibration, budget, floor
        self.way = way or calibration.way
        self.recent = budget // RECENT
        self.most = budget - SINKS - self.recent
        fed = self.way == "fed"
        self.full = frozenset() if fed else frozenset(calibration.full)
        self.selectors = frozenset() if fed else calibration.selectors(config)
        self._selections: dict[torch.device, Selection] = {}
        self._fed: list[Tensor] = []

    def selection(self, device: torch.device) -> Selection:
        """The way in which lists are made."""
        if device not in self._selections:
            made: dict[str, Selection] = {"pooled": Pooled(), "fed": Fed()}
            self._selections[device] = made.get(self.way) or Heads(self.calibration, device)
        return self._selections[device]

    @property
    def least(self) -> int:
        """Cached tokens from which on a text is read in part."""
        return max(self.floor, PAYS * self.budget)

    @property
    def words(self) -> str:
        """What is read, in a line."""
        if self.way == "fed":
            return f"every layer reads {self.budget:,} tokens, chosen by the last verify pass"
        return f"{self.calibration.words}; the others read {self.budget:,} tokens, {self.way}"

    def pays(self, length: int) -> bool:
        """Whether a text of so many cached tokens is read in part."""
        return length >= self.least

    def read(self, length: int) -> float:
        """Tokens of so many that a layer reads, in the mean."""
        if not self.pays(length):
            return length
        share = len(self.full) / self.config.layers
        return share * length + (1 - share) * self.budget

    def lists(self, mass: Tensor) -> Tensor:
        """The tokens of most mass [B, HK, C], after the sinks and in order: int32 [B, HK, SINKS + most]."""
        shared = self.selection(mass.device).shared(mass)
        best = shared.topk(self.most, dim=-1, sorted=False).indices.sort(dim=-1).values
        sinks = torch.arange(SINKS, device=mass.device).expand(*best.shape[:2], -1)
        return torch.cat((sinks, best), dim=-1).int().expand(-1, mass.shape[1], -1)

    def fed(self, store: Slots) -> list[Tensor]:
        """By layer the lists of every sequence of a store, int32 [S, HK, SINKS + most]."""
        slots = store.keys[0].shape[0]
        if not self._fed or self._fed[0].shape[0] != slots:
            shape = slots, self.config.kv_heads, SINKS + self.most
            self._fed = [torch.zeros(shape, dtype=torch.int32, device=store.device) for _ in store.keys]
        return self._fed


class TidalPass(Pass):
    """Memory of a pass of at most 64 rows, each of which stands behind at least a budget of tokens."""

    def __init__(self, config: ModelConfig, store: Slots, layout: Layout, tidal: Tidal) -> None:
        super().__init__(config, store, layout, windowed=True)
        self.tidal = tidal
        self.lists: Tensor | None = None  # of the last selector

    @property
    def key(self) -> tuple[object, ...]:
        return *super().key, self.tidal

    def moved(self, layout: Layout) -> Self:
        moved = type(self)(self.config, self.store, layout, self.tidal)
        moved.entering = self.entering
        return moved

    @cached_property
    def count(self) -> Tensor:
        """Tokens of every list, int64 [B]."""
        return torch.full_like(self.numbers[0], SINKS + self.tidal.most)

    @cached_property
    def recent(self) -> Reach:
        """The last tokens before the rows, or before those that are not verified, and the rows themselves."""
        whole, layout, tidal = self.reach[None], self.layout, self.tidal
        behind = whole.first if layout.copied is None else self.numbers[-1]
        span = tidal.recent + (layout.rows if layout.copied is None else SPECULATED)
        start = behind - tidal.recent
        return Reach(whole.slots, whole.first, whole.rows, whole.extent, start=start, span=span, known=whole.known)

    def attend(self, layer: int, stacked: Tensor, cos: Tensor, sin: Tensor, norms: Norms) -> Tensor:
        if self.store.lanes[layer] is not None:
            return super().attend(layer, stacked, cos, sin, norms)
        reach, keys, values = self.reach[None], self.store.keys[layer], self.store.values[layer]
        query = rope_append(stacked, cos, sin, keys, values, reach.slots, reach.first, norms)
        if layer not in self.tidal.full:
            chosen = Chosen(keys, values, reach.slots, self._lists(layer), self.count, 1)
            return attend_with(query, chosen, keys, values, self.recent)[0]
        out, lse = attend_with(query, None, keys, values, reach)
        if layer in self.tidal.selectors:
            live, count = torch.full_like(reach.first, reach.rows), self.recent.start
            assert count is not None
            mass = score_chunks(query, lse, live, keys, reach.slots, count, max(reach.extent), SINKS)
            self.lists = self.tidal.lists(mass)
        return out

    def _lists(self, layer: int) -> Tensor:
        selection = self.tidal.selection(self.store.device)
        if selection.fed:
            return self.tidal.fed(self.store)[layer].index_select(0, self.numbers[0])
        assert self.lists is not None, "a layer before the first selector reads all keys"
        return selection.mapped(layer, self.lists)


class TidalView(InPlaceView):
    """For levels that only propose: rows are added behind the target's own, whose verify pass writes them over."""

    def __init__(self, config: ModelConfig, source: FullView, tidal: Tidal, sequences: int) -> None:
        super().__init__(config, source, None, sequences)
        self.tidal, self.fed_by_target = tidal, tidal.selection(source.store.device).fed
        source.record = source.record or self.fed_by_target
        if self.fed_by_target:
            tidal.fed(source.store)  # made before a pass is captured, not by it

    def prepare(self, texts: Sequence[Text]) -> float:
        stale = [text for text in texts if self.base[text.slot] != text.committed - 1]
        once = super().prepare(texts)
        if self.fed_by_target:
            for text in stale:
                self._renew(text.slot)
        return once

    def begin(self, texts: Sequence[Text], rows: int) -> Pass:
        memory = super().begin(texts, rows)
        if rows > PACKED or not all(self.tidal.pays(self.base[text.slot]) for text in texts):
            return memory
        verified = [self.base[text.slot] for text in texts] if self.fed_by_target else None
        return TidalPass(self.config, memory.store, replace(memory.layout, copied=verified), self.tidal)

    def _renew(self, slot: int) -> None:
        """Lists of every layer, by the queries of the text's last verified rows."""
        length, verified = self.base[slot], self.source.recorded.get(slot)
        if verified is None or not self.tidal.pays(length):
            return
        store, b = self.source.store, verified.b
        rows = verified.layers[0][0].shape[1]
        live = min(max(1, length - verified.first), rows)
        numbers = torch.tensor([[live], [slot], [length - self.tidal.recent]]).to(store.device, non_blocking=True)
        for layer, ((queries, lse), lists) in enumerate(zip(verified.layers, self.tidal.fed(store), strict=True)):
            if store.lanes[layer] is None:
                asked = Asked(queries[b : b + 1], None if lse is None else lse[b : b + 1], numbers[0])
                lists[slot] = self.tidal.lists(_mass(asked, store, layer, numbers))[0]


def _mass(asked: Asked, store: Store, layer: int, numbers: Tensor) -> Tensor:
    """Attention mass [1, HK, C] that verified rows give to the tokens of a layer."""
    keys, (_, slots, count) = store.keys[layer], numbers
    lse = asked.lse
    if lse is None:
        lse = lse_of_means(asked, keys[slots], count)
    return score_chunks(asked.queries, lse, asked.live, keys, slots, count, keys.shape[2], SINKS)


class LastView(FullView):
    """Every key, and for passes that are asked for so, some of them: what such a pass adds is only nearly what the
    target would have cached, until it is fed again.
    """

    def __init__(
        self, config: ModelConfig, store: Store, sequences: int, bucket: int, tidal: Tidal, every: int
    ) -> None:
        """`every`: tokens that are decoded before their keys are computed again by a pass over all keys; 0: never."""
        super().__init__(config, store, sequences, bucket)
        self.tidal, self.every = tidal, every
        self.exact = [0] * sequences  # leading tokens whose keys are the target's own

    def pays(self, texts: Sequence[Text]) -> bool:
        """Whether the next pass may leave keys out: none of its texts is short."""
        return all(self.tidal.pays(len(self.held[text.slot])) for text in texts)

    def sparsely(self, texts: Sequence[Text], rows: int) -> Pass:
        """Memory of a pass that reads some keys."""
        memory = self.begin(texts, rows)
        return TidalPass(self.config, self.store, memory.layout, self.tidal)

    def confirmed(self, text: Text) -> None:
        """All that is held of a text is the target's own."""
        self.exact[text.slot] = len(self.held[text.slot])

    def due(self, text: Text) -> bool:
        """Whether so many tokens were added since that they are to be fed again."""
        return 0 < self.every <= len(self.held[text.slot]) - self.exact[text.slot]

    def again(self, text: Text) -> list[int]:
        """Forget the tokens that are not the target's own, and what they were."""
        held, exact = self.held[text.slot], self.exact[text.slot]
        tokens = held.tokens[exact:]
        held.cut(exact)
        return tokens
