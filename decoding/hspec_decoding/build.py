"""From a stack as data to the levels that run it."""

from __future__ import annotations

from collections.abc import Sequence

from hspec_decoding.cache import KVStore
from hspec_decoding.device import Shape
from hspec_decoding.graphs import Graphs
from hspec_decoding.levels import Level, ModelLevel, NGram, Target, Verified
from hspec_decoding.model import Decoder
from hspec_decoding.sparse import CHUNK, SELECT, SINKS, SparseView, Streaming
from hspec_decoding.stack import LONGEST, PLAIN, Spec, Stack
from hspec_decoding.views import FullView, View, WindowView
from hspec_profiles.errors import UsageError

WINDOW = 256  # tokens of a streaming view
LEAST_BUDGET, MOST_BUDGET, BUDGET_SHARE = 256, 4096, 8  # of a retrieval view: context / share, within these


def resolve(stack: Stack, context: int, *, budget: int | None, keep: bool) -> Stack:
    """Fill in budgets. A retrieval level that would hold the whole context is left out unless `keep`."""
    filled = []
    for spec in stack:
        if spec.view == "retrieval":
            share = min(MOST_BUDGET, max(LEAST_BUDGET, context // BUDGET_SHARE // CHUNK * CHUNK))
            spec = _with_budget(spec, budget or share)
            if not keep and spec.budget is not None and spec.budget >= context:
                continue
        elif spec.view == "streaming":
            spec = _with_budget(spec, WINDOW)
        filled.append(spec)
    return tuple(filled)


def _with_budget(spec: Spec, default: int) -> Spec:
    budget = spec.budget or default
    if budget < SINKS + CHUNK:
        raise UsageError(f"--budget must be at least {SINKS + CHUNK} tokens: {budget}")
    return Spec(spec.name, spec.view, budget, spec.width)


class Parts:
    """What outlives a request: weights, memory, captured graphs. Their contents mean nothing between requests."""

    def __init__(self, target: Decoder, draft: Decoder | None) -> None:
        self.target, self.draft = target, draft
        self.stores: dict[str, KVStore] = {}
        self.graphs = {id(d): Graphs(d) for d in (target, draft) if d and d.device.type == "cuda"}

    def store(self, name: str, decoder: Decoder, sequences: int, capacity: int) -> KVStore:
        """Memory for keys and values of `capacity` tokens; what was made before is used while it is large enough."""
        known = self.stores.get(name)
        if known is None or known.sequences < sequences or known.capacity < capacity:
            if known is not None:
                self._forget_graphs()  # some were captured over this memory
            known = KVStore(decoder.config, sequences, capacity, dtype=decoder.dtype, device=decoder.device)
            self.stores[name] = known
        return known

    def forget(self) -> None:
        """Drop all memory, with the graphs that were captured over it."""
        self.stores.clear()
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        for graphs in self.graphs.values():
            graphs.captured.clear()

    def level(self, name: str, decoder: Decoder, view: View) -> ModelLevel:
        """A level that runs `decoder` over `view`."""
        return ModelLevel(name, decoder, view, self.graphs.get(id(decoder)))


def build_levels(
    stack: Stack, parts: Parts, *, context: int, sequences: int, select: str, shape: Shape | None
) -> tuple[Target, list[Level]]:
    """The target and the levels that propose to it, each checked by the next, with fresh state.

    `context`: tokens of a sequence; `shape` None drops the fixed shape.
    """
    target = parts.target
    bucket, spare = (shape.bucket, shape.rows) if shape else (1, 2 * LONGEST)
    store = parts.store("target", target, sequences, -(-context // bucket) * bucket + spare)
    full = FullView(target.config, store, sequences, bucket)
    proposers: list[Level] = []
    for place, spec in enumerate(stack[: -len(PLAIN)]):
        if spec.name == "ngram":
            proposers.append(NGram(target.vocabulary, sequences))
            continue
        make = _sparse_level if spec.name == "target" else _draft_level
        model = make(spec, parts, f"level {place}", full, select)
        proposers.append(Verified(proposers[-1], model) if proposers else model)
    return Target(target, full, shape.rows if shape else None, parts.graphs.get(id(target))), proposers


def _sparse_level(spec: Spec, parts: Parts, store: str, full: FullView, select: str) -> ModelLevel:
    """The target over part of its own cache."""
    sequences = len(full.held)
    budget, target = spec.budget or WINDOW, parts.target
    rule = Streaming() if spec.view == "streaming" else SELECT[select]()
    copy = parts.store(store, target, sequences, budget + CHUNK + 3 * LONGEST)
    return parts.level(str(spec), target, SparseView(target.config, full, copy, sequences, budget, rule))


def _draft_level(spec: Spec, parts: Parts, store: str, full: FullView, select: str) -> ModelLevel:  # noqa: ARG001
    """The draft model over its own window."""
    if parts.draft is None:
        raise UsageError("this stack has a `draft` level and no draft model was given", "name one: `--draft-model`")
    return parts.level(str(spec), parts.draft, draft_window(spec, parts, store, len(full.held)))


def draft_window(spec: Spec, parts: Parts, store: str, sequences: int) -> WindowView:
    """A window of the level's budget, or of half the draft's context, started anew when it holds twice as much."""
    draft = parts.draft
    assert draft is not None
    window = min(spec.budget or WINDOW, draft.config.context // 2)
    memory = parts.store(store, draft, sequences, 2 * window + 2 * LONGEST)
    return WindowView(draft.config, memory, sequences, sinks=SINKS, recent=window - SINKS, capacity=2 * window)


def fixed_widths(stack: Sequence[Spec], gamma: int | None) -> list[int | None]:
    """Widths that the user set, by proposing level; `--gamma` is that of the level under the target."""
    widths = [spec.width for spec in stack[:-1]]
    if gamma is not None and widths:
        widths[-1] = gamma
    return widths
