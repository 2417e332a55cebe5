"""What a method keeps in memory, found by following its objects down to their tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hspec_cli.bench.records import Memory

BESIDE = ("graphs", "crew", "numbers")  # attributes that lead to what is not the method's own


def held(levels: Iterable[Any], peak: int | None = None) -> Memory:
    """Weights: tensors of the levels' decoders; caches: those of their views, whatever is shared counted once."""
    seen: set[int] = set()
    weights = caches = 0
    made = list(levels)
    for level in made:
        weights += sum(_sizes(getattr(level, "decoder", None), seen))
    for level in made:
        caches += sum(_sizes(getattr(level, "view", None), seen))
    return Memory(weights, caches, peak)


def _sizes(root: Any, seen: set[int]) -> Iterator[int]:
    """Bytes of every storage below `root` that was not seen before."""
    from torch import Tensor

    waiting, known = [root], {id(None)}
    while waiting:
        item = waiting.pop()
        if id(item) in known:
            continue
        known.add(id(item))
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage.nbytes()
        elif isinstance(item, Mapping):
            waiting += item.values()
        elif isinstance(item, (list, tuple)):
            if not item or not isinstance(item[0], (int, float, str)):  # tokens hold no tensors
                waiting += item
        elif type(item).__module__.startswith("hspec_"):
            waiting += [value for name, value in _attributes(item).items() if name not in BESIDE]


def _attributes(item: Any) -> dict[str, Any]:
    slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
    return {**getattr(item, "__dict__", {}), **{name: getattr(item, name) for name in slots if hasattr(item, name)}}
