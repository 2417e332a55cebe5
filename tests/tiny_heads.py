"""Chimera's heads for tests: untrained or broken ones, and such as know what the target will say."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tiny_engine
import torch
from torch import Tensor

from hspec_decoding.chimera.config import ChimeraConfig
from hspec_decoding.chimera.drafting import Drafting
from hspec_decoding.chimera.files import made
from hspec_decoding.chimera.heads import Heads
from hspec_decoding.model import Decoder
from hspec_decoding.options import Request
from hspec_kernels.sample import stream


def heads(target: Decoder, kind: str = "random", **changes: Any) -> Heads:
    """Heads that were never trained: random ones, or such as are broken in one of several ways."""
    torch.manual_seed(4)
    size = target.config.vocab_size
    drafted = {"few": torch.arange(0, size, 9), "doubles": torch.arange(size // 2).repeat(2)}
    config = ChimeraConfig.for_target(target.config, **{"window": 16, **changes})
    found = made(config, drafted.get(kind, torch.arange(size)), target).requires_grad_(False)
    for parameter in found.parameters():
        parameter.copy_(0.3 * torch.randn_like(parameter))
        if kind == "calm":  # no two chances are told apart by rounding alone
            parameter.mul_(0.4)
        if kind == "nan":
            parameter.fill_(float("nan"))
        if kind == "huge":
            parameter.mul_(1e20)
    found.to(target.dtype).fold()
    return found.eval()


def knowing(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """Heads that often know what the target says: by stream, the tokens at each position."""
    truth: dict[int, list[int]] = {}
    children, chance = Drafting._children, random.Random(5)

    def told(self: Drafting, logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        chances, tokens = children(self, logits, *rest)
        streams, positions = (tensor.as_subclass(Tensor).tolist() for tensor in rest[2:4])
        for b, (key, at) in enumerate(zip(streams, positions, strict=True)):
            if at < len(truth.get(key, [])) and chance.random() < 0.8:
                for row in range(tokens.shape[1]):
                    if truth[key][at] not in tokens[b, row]:
                        tokens[b, row, chance.randrange(tokens.shape[2])] = truth[key][at]
        return chances, tokens

    monkeypatch.setattr(Drafting, "_children", told)
    return truth


def learnt(truth: dict[int, list[int]], target: Decoder, asked: list[Request]) -> list[tuple[list[int], str]]:
    """What plain decoding says, which heads then know."""
    said = tiny_engine.answers(tiny_engine.engine("target(full)", target), *asked)
    for one, (tokens, _) in zip(asked, said, strict=True):
        truth[stream(one.sampling.seed, one.sequence)] = [*one.prompt, *tokens]
    return said
