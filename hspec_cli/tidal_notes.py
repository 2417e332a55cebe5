"""What a user should know before a run with TidalDecode levels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hspec_decoding.engine import Engine

APPROXIMATE = "APPROXIMATE"  # in every place that shows what such a run says


def notes(engine: Engine, method: str, length: int) -> Iterator[str]:
    """That the text is approximate, from which length on keys are left out at all, which layers read them all.

    `length`: tokens of prompt and answer.
    """
    from hspec_decoding.stack import approximate

    spec = next((spec for stack in engine.stacks for spec in stack if spec.tidal), None)
    if spec is None:
        if "tidal" in method:
            yield f"to leave keys out pays from two budgets of tokens on: these {length:,} are decoded plainly"
        return
    tidal = engine.parts.tidal(spec)
    if any(map(approximate, engine.stacks)):
        about = "leaves keys out, so this is only nearly the model's own text; `--lossless` has it verified"
        yield f"{APPROXIMATE}: `{spec}` {about}"
    if not tidal.pays(length):
        yield (
            f"to leave keys out pays from {tidal.least:,} tokens on with a budget of {tidal.budget:,}: "
            f"these {length:,} are read whole"
        )
    yield f"TidalDecode: {tidal.words}"
