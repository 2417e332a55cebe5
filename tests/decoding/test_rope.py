"""Rotary embedding: every scaling kind against transformers' own module, and what is frozen at the run's length."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
from tiny_engine import ROPES, rope_shape

from hspec_decoding.config import ModelConfig
from hspec_decoding.rope import frequencies, rotation


def old_spelling(raw: dict[str, Any], key: str) -> dict[str, Any]:
    """The same config as older libraries wrote it; `key` names the kind."""
    rope = dict(raw["rope_parameters"])
    kept = {name: value for name, value in raw.items() if name != "rope_parameters"}
    scaling = {key: rope.pop("rope_type")}
    return kept | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": scaling | rope}


@pytest.mark.parametrize("context", [50, 100, 300])
@pytest.mark.parametrize("kind", ROPES)
def test_angles_are_those_of_transformers(kind: str, context: int) -> None:
    """cos and sin over a run of `context` tokens, in every spelling of the config."""
    made = tiny_models.build("llama", 0, torch.float32, rope_shape(kind))
    positions = torch.arange(context)[None]
    cos, sin = made.model.rotary_emb(torch.zeros(1, context, 64), positions)
    raw = made.config.to_dict()
    for spelled in (raw, old_spelling(raw, "type"), old_spelling(raw, "rope_type")):
        inverse, factor = frequencies(ModelConfig.from_dict(spelled), context)
        ours = rotation(inverse, factor, positions, torch.float32)
        torch.testing.assert_close(ours[0], cos, rtol=0, atol=1e-5)
        torch.testing.assert_close(ours[1], sin, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_kinds_that_follow_the_length_are_frozen_at_the_run(kind: str) -> None:
    """The context of the run decides, not how far it has come: cached keys keep matching."""
    config = ModelConfig.from_dict({"model_type": "llama", **tiny_models.SHAPE, **rope_shape(kind)})
    short, long = (frequencies(config, context)[0] for context in (64, 65))
    assert not torch.equal(short, long)
