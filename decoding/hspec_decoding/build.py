"""From a stack as data to the levels that run it."""

from __future__ import annotations

from collections.abc import Sequence

from hspec_decoding.cache import KVStore
from hspec_decoding.config import ModelConfig
from hspec_decoding.device import Shape
from hspec_decoding.levels import Level, ModelLevel, NGram, Target, Verified
from hspec_decoding.model import Decoder
from hspec_decoding.sparse import CHUNK, SELECT, SINKS, SparseView, Streaming
from hspec_decoding.stack import LONGEST, PLAIN, Spec, Stack
from hspec_decoding.views import FullView, WindowView
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


def draft_store(spec: Spec, config: ModelConfig, sequences: int, like: KVStore) -> KVStore:
    """Memory of a draft's window: its budget, as much again before it starts anew, and a block to check."""
    window = min(spec.budget or WINDOW, config.context // 2)
    return KVStore(config, sequences, 2 * window + LONGEST + 1, dtype=like.keys[0].dtype, device=like.device)


def build_levels(
    stack: Stack,
    target: Decoder,
    draft: Decoder | None,
    store: KVStore,
    *,
    sequences: int,
    select: str,
    shape: Shape | None,
) -> tuple[Target, list[Level]]:
    """The target and the levels that propose to it, each checked by the next, with fresh state.

    `store` is the target's memory; `shape` None drops the fixed shape.
    """
    full = FullView(target.config, store, sequences, shape.bucket if shape else 1)
    proposers: list[Level] = []
    for spec in stack[: -len(PLAIN)]:
        if spec.name == "ngram":
            proposers.append(NGram(len(target.head), sequences))
            continue
        model = _model_level(spec, target, draft, full, sequences=sequences, select=select)
        proposers.append(Verified(proposers[-1], model) if proposers else model)
    return Target(target, full, shape.rows if shape else None), proposers


def _model_level(
    spec: Spec, target: Decoder, draft: Decoder | None, full: FullView, *, sequences: int, select: str
) -> ModelLevel:
    if spec.name == "target":
        rule = Streaming() if spec.view == "streaming" else SELECT[select]()
        view = SparseView(target.config, full, sequences, spec.budget or WINDOW, LONGEST + 1, rule)
        return ModelLevel(str(spec), target, view)
    if draft is None:
        raise UsageError("this stack has a `draft` level and no draft model was given", "name one with `--draft-model`")
    store = draft_store(spec, draft.config, sequences, full.store)
    recent = (store.capacity - LONGEST - 1) // 2 - SINKS
    window = WindowView(draft.config, store, sequences, sinks=SINKS, recent=recent, slack=LONGEST + 1)
    return ModelLevel(str(spec), draft, window)


def fixed_widths(stack: Sequence[Spec], gamma: int | None) -> list[int | None]:
    """Widths that the user set, by proposing level; `--gamma` is that of the level under the target."""
    widths = [spec.width for spec in stack[:-1]]
    if gamma is not None and widths:
        widths[-1] = gamma
    return widths
