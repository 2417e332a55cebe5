"""From stacks as data to the levels that run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

import torch

from hspec_decoding.cache import KVStore, Store
from hspec_decoding.calibration import Calibration, find
from hspec_decoding.chimera import files
from hspec_decoding.chimera.drafting import Drafting
from hspec_decoding.chimera.heads import Heads
from hspec_decoding.chimera.level import Chimera
from hspec_decoding.device import Shape
from hspec_decoding.graphs import Graphs
from hspec_decoding.host_view import HostView, KVPlace
from hspec_decoding.host_weights import SmallDecoder
from hspec_decoding.levels import Level, ModelLevel, Verified
from hspec_decoding.model import Decoder
from hspec_decoding.ngram import NGram
from hspec_decoding.options import CORRECT
from hspec_decoding.sparse import CHUNK, SELECT, SINKS, SparseView, Streaming
from hspec_decoding.stack import LONGEST, Spec, Stack, approximate
from hspec_decoding.target import Target
from hspec_decoding.tidal import FLOOR, PAYS, LastView, Tidal, TidalView
from hspec_decoding.tidal_target import TidalTarget
from hspec_decoding.tuner import Growth, Plan
from hspec_decoding.views import FullView, InPlaceView, View
from hspec_decoding.window import WindowView
from hspec_kernels.attention import QuantizedKV
from hspec_offload.host_kv import HostKV
from hspec_profiles.errors import UsageError

DRAFTED, COPIED = 0.75, 0.93  # acceptance to expect of a draft model, and of the target with fewer keys or bits
WINDOW = 256  # tokens of a streaming view
LEAST_BUDGET, MOST_BUDGET, BUDGET_SHARE = 256, 4096, 8  # of a retrieval view: context / share, within these
TIDAL_SHARE = 16  # the same of a tidal view

AStore = TypeVar("AStore", KVStore, HostKV)


def resolve(stack: Stack, context: int, *, budget: int | None, keep: bool) -> Stack:
    """Fill in budgets. A retrieval level that would hold the whole context is left out unless `keep`, or reads it in
    place where its weights are a copy.
    """
    filled = []
    for spec in stack:
        if spec.view == "retrieval":
            share = min(MOST_BUDGET, max(LEAST_BUDGET, context // BUDGET_SHARE // CHUNK * CHUNK))
            spec = _with_budget(spec, budget or share)
            if not keep and spec.budget is not None and spec.budget >= context:
                if not spec.weights:
                    continue
                spec = replace(spec, view="full", budget=None)
        elif spec.view == "streaming":
            spec = _with_budget(spec, WINDOW)
        elif spec.tidal:
            spec = _with_budget(spec, budget or tidal_budget(context))
            if not keep and len(stack) > 1 and PAYS * (spec.budget or 0) >= context:
                continue  # what only proposes pays nowhere
        filled.append(spec)
    return tuple(filled)


def tidal_needs_all() -> UsageError:
    """What to say of tidal levels where something is offloaded."""
    return UsageError(
        "`tidal` levels need all weights, keys and values on the device, and here they do not fit there",
        "`--method triforce` and `--method auto` go with `--offload`; a shorter `--ctx` may fit without",
    )


def tidal_budget(context: int) -> int:
    """Tokens of a tidal view whose budget nobody set."""
    return min(MOST_BUDGET, max(LEAST_BUDGET, context // TIDAL_SHARE))


def _with_budget(spec: Spec, default: int) -> Spec:
    budget = spec.budget or default
    if budget < SINKS + CHUNK:
        raise UsageError(f"--budget must be at least {SINKS + CHUNK} tokens: {budget}")
    return replace(spec, budget=budget)


class Parts:
    """What outlives a request: weights, memory, captured graphs. Their contents mean nothing between requests."""

    def __init__(
        self,
        target: Decoder,
        draft: Decoder | None,
        quantized: Mapping[str, Decoder] | None = None,
        kv: KVPlace | None = None,
    ) -> None:
        """`quantized`: copies of the target in 4 bits that were made before, by format. `kv`: which of the target's
        keys and values live in host memory.
        """
        self.target, self.draft, self.kv = target, draft, kv
        self.stores: dict[str, Store] = {}
        self.prompts: dict[int, list[int]] = {}  # by slot of the target's store, the prompt last cached there
        self.copies: dict[str, tuple[Store, list[QuantizedKV]]] = {}  # by format
        self.quantized: dict[str, Decoder] = dict(quantized or {})
        self.calibration: Calibration | None = None  # of the target, for tidal levels
        self.tidals: dict[tuple[str | None, int | None], Tidal] = {}  # by view and budget
        self.heads: Heads | None = None  # Chimera's
        self.draftings: dict[int, Drafting] = {}  # what they draft in, by the heads
        self.graphs: dict[int, Graphs] = {}
        for decoder in (target, draft, *self.quantized.values()):
            self._graph(decoder)

    @property
    def offloaded(self) -> bool:
        """Whether passes of the target take something from the host."""
        return self.kv is not None or self.target.offloaded

    def store(self, name: str, decoder: Decoder, sequences: int, capacity: int) -> KVStore:
        """Memory for keys and values of `capacity` tokens; what was made before is used while it is large enough."""
        return self._kept(
            name,
            sequences,
            capacity,
            lambda: KVStore(decoder.config, sequences, capacity, dtype=decoder.dtype, device=decoder.device),
        )

    def host_store(self, place: KVPlace, sequences: int, capacity: int) -> HostKV:
        """The target's own where parts of it are in host memory; nothing of an earlier request is in it."""
        store = self._kept("target", sequences, capacity, lambda: place.store(self.target, sequences, capacity))
        store.forget()
        return store

    def _kept(self, name: str, sequences: int, capacity: int, make: Callable[[], AStore]) -> AStore:
        known = self.stores.get(name)
        if known is None or known.sequences < sequences or known.capacity < capacity:
            if known is not None:
                self._forget_graphs()  # some were captured over this memory
                self.prompts.clear()
                del self.stores[name]
            known = self.stores[name] = make()
        return cast(AStore, known)

    def copy(self, form: str, store: Store) -> list[QuantizedKV]:
        """Memory, by layer, for a copy of a store's keys and values in few bits."""
        known = self.copies.get(form)
        if known is None or known[0] is not store:
            bits, (size, heads, slots, dim) = {"int4": 4, "int8": 8}[form], store.shape
            copies = [QuantizedKV(size, heads, slots, dim, bits, store.dtype, store.device) for _ in store.keys]
            self.copies[form] = known = store, copies
        return known[1]

    def tidal(self, spec: Spec) -> Tidal:
        """What the layers of a tidal level read. Raises UsageError where something is offloaded, or elsewhere."""
        if self.target.ranks:
            raise UsageError("`tidal` levels need all heads in one process", "run without `--gpus` and `--ranks`")
        if self.offloaded:
            raise tidal_needs_all()
        known = self.tidals.get((spec.view, spec.budget))
        if known is None:
            calibration = self.calibration or find(self.target.config)
            way = (spec.view or "").removeprefix("tidal").removeprefix("-") or None
            floor = FLOOR[self.target.device.type]
            known = Tidal(self.target.config, calibration, spec.budget or LEAST_BUDGET, way, floor)
            self.tidals[spec.view, spec.budget] = known
        return known

    def weights(self, form: str | None) -> Decoder:
        """The target, in its own precision or in a format of 4 bits."""
        if form is None:
            return self.target
        if form not in self.quantized:
            self.quantized[form] = self.target.quantized(form)
            self._graph(self.quantized[form])
        return self.quantized[form]

    def chimera(self, name: str | None = None) -> Heads:
        """Chimera's heads for the target, from a folder that is named, else those kept or shipped for it.

        Raises HspecError where there are none, UsageError where ranks share the target.
        """
        if self.target.ranks:
            raise UsageError("`chimera` levels need the whole model in one process", "run without `--gpus`")
        if self.heads is None:
            self.heads = files.load(Path(name).expanduser() if name else None, self.target)
        return self.heads

    def drafting(self, sequences: int) -> Drafting:
        """Memory, and graphs over it, in which heads draft for so many sequences."""
        heads = self.chimera()
        known = self.draftings.get(id(heads))
        if known is None or known.sequences < sequences:
            known = self.draftings[id(heads)] = Drafting(heads, sequences)
        return known

    def make_room(self) -> None:
        """Drop what decoding makes anew, before a prompt is read that needs the memory."""
        for decoder in self.quantized.values():
            if isinstance(decoder, SmallDecoder):
                decoder.drop()
                self.graphs.pop(id(decoder), None)
                self._graph(decoder)
        self.give_back()

    def complete(self) -> None:
        """Make what `make_room` dropped, once prompts have been read."""
        for decoder in self.quantized.values():
            if isinstance(decoder, SmallDecoder):
                decoder.make()

    def give_back(self) -> None:
        """Where memory is planned to the last bytes, none of it lies idle in pieces of the wrong size."""
        if self.offloaded and self.target.device.type == "cuda":
            torch.cuda.empty_cache()

    def forget(self) -> None:
        """Drop all memory, with the graphs that were captured over it."""
        self.stores.clear()
        self.copies.clear()
        self.prompts.clear()
        self.draftings.clear()
        self._forget_graphs()

    def _graph(self, decoder: Decoder | None) -> None:
        if decoder is not None and decoder.device.type == "cuda" and (not decoder.ranks or decoder.ranks.captures):
            self.graphs[id(decoder)] = Graphs(decoder)

    def _forget_graphs(self) -> None:
        for graphs in self.graphs.values():
            graphs.captured.clear()

    def level(self, name: str, decoder: Decoder, view: View) -> ModelLevel:
        """A level that runs `decoder` over `view`."""
        guess = DRAFTED if decoder is self.draft else COPIED
        return ModelLevel(name, decoder, view, self.graphs.get(id(decoder)), guess)


@dataclass(frozen=True)
class Levels:
    """What stacks are made of: each proposing level once, however many stacks it is part of."""

    last: Target
    proposers: list[Level]
    fixed: list[int | None]  # per proposer: the width that the user set
    chains: list[tuple[int, ...]]  # per stack: its proposers, cheapest first

    @property
    def trees(self) -> dict[int, Growth]:
        """What is known of the trees of those that propose some."""
        levels = enumerate(self.proposers)
        return {n: level.growth for n, level in levels if isinstance(level, Chimera) and level.growth}

    def stacked(self, plan: Plan) -> Level:
        """The levels of a plan as one, each checked by the next."""
        level = self.proposers[plan.levels[0]]
        for n in plan.levels[1:]:
            model = self.proposers[n]
            assert isinstance(model, ModelLevel)
            level = Verified(level, model)
        return level


def build_levels(
    stacks: Sequence[Stack],
    parts: Parts,
    *,
    context: int,
    sequences: int,
    select: str,
    shape: Shape | None,
    gamma: int | None = None,
    correct: int = CORRECT,
    tree: int | None = None,
) -> Levels:
    """The target and the levels that propose to it, with fresh state.

    `context`: tokens of a sequence; `shape` None drops the fixed shape; `gamma`: the width of levels under the target;
    `correct`: tokens after which an approximate target computes their keys again; `tree` as in the settings.
    """
    target = parts.target
    bucket, spare = (shape.bucket, shape.rows) if shape else (1, 0)
    # Behind the context there is room for a block that ends there, and for what middle levels speculate.
    capacity = -(-context // bucket) * bucket + max(spare, 3 * LONGEST)
    full: FullView
    if parts.kv:
        full = HostView(target.config, parts.host_store(parts.kv, sequences, capacity), sequences, bucket)
    else:
        full = FullView(target.config, parts.store("target", target, sequences, capacity), sequences, bucket)
    graphs = None if parts.offloaded else parts.graphs.get(id(target))
    last = Target(target, full, shape, graphs)
    if approximate(stacks[0]):
        spec = stacks[0][-1]
        nearly = LastView(target.config, full.store, sequences, bucket, parts.tidal(spec), correct)
        last = TidalTarget(str(spec), target, nearly, shape, graphs)
    named = [_named(stack[:-1]) for stack in stacks]
    places = {name: n for n, name in enumerate(dict.fromkeys(name for names in named for name in names))}
    # Where selections are made by the rows of a pass, and where keys come in parts, blocks are chains.
    planted = tree != 0 and not parts.offloaded and all(len(stack) == 2 for stack in stacks)
    made = [_level(spec, time, parts, full, select, planted) for spec, time in places]
    for level in made:
        if isinstance(level, Chimera):
            for model in [last, *(other for other in made if isinstance(other, ModelLevel))]:
                model.notes = level.features if model.decoder.config is target.config else None
    tops = {names[-1] for names in named if names}
    fixed = [gamma if gamma and name in tops else name[0].width for name in places]
    if tree:
        fixed = [tree if name[0].name == "chimera" else width for name, width in zip(places, fixed, strict=True)]
    return Levels(last, made, fixed, [tuple(places[name] for name in names) for names in named])


def _named(specs: Sequence[Spec]) -> list[tuple[Spec, int]]:
    """Each level with how many of its kind stand before it: stacks share a level, but none has it twice."""
    return [(spec, specs[:place].count(spec)) for place, spec in enumerate(specs)]


def _level(spec: Spec, time: int, parts: Parts, full: FullView, select: str, tree: bool) -> Level:
    """One proposing level, the `time`-th of its kind, with memory of its own."""
    name, sequences = str(replace(spec, width=None)), len(full.held)
    memory = f"{spec}, {time}"
    if spec.name == "ngram":
        return NGram(parts.target.vocabulary, sequences)
    if spec.name == "chimera":
        captured = id(parts.target) in parts.graphs
        drafting = parts.drafting(sequences)
        return Chimera(name, drafting, parts.target.vocabulary, sequences, tree=tree, captured=captured)
    if spec.name == "draft":
        if parts.draft is None:
            raise UsageError("this stack has a `draft` level and no draft model was given", "name one: `--draft-model`")
        return parts.level(name, parts.draft, draft_window(spec, parts, memory, sequences))
    target, model = parts.target, parts.weights(spec.weights)
    if spec.view == "full":
        copies = parts.copy(spec.kv, full.store) if spec.kv else None
        return parts.level(name, model, InPlaceView(target.config, full, copies, sequences))
    if spec.tidal:
        return parts.level(name, model, TidalView(target.config, full, parts.tidal(spec), sequences))
    budget = spec.budget or WINDOW
    rule = Streaming() if spec.view == "streaming" else SELECT[select]()
    copy = parts.store(memory, target, sequences, budget + CHUNK + 3 * LONGEST)
    return parts.level(name, model, SparseView(target.config, full, copy, sequences, budget, rule))


def draft_window(spec: Spec, parts: Parts, store: str, sequences: int) -> WindowView:
    """A window of the level's budget, or of half the draft's context, started anew when it holds twice as much."""
    draft = parts.draft
    assert draft is not None
    window = min(spec.budget or WINDOW, draft.config.context // 2)
    memory = parts.store(store, draft, sequences, 2 * window + 3 * LONGEST)
    return WindowView(draft.config, memory, sequences, sinks=SINKS, recent=window - SINKS, capacity=2 * window)
