"""The law of sampled text: section D of the cases that users of other tools hit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import case_models as models
import case_tools as cases
import pytest
import torch
from case_tools import Hspec, document


def law_deviation(target: Path, watched: Path, ids: Sequence[int], start: int, temperature: float) -> float:
    """How many standard deviations the tokens that `watched` likes best are above their share under `target`.

    A sum of (token is in the set) - (its probability) over positions is a martingale for tokens drawn from the
    target's law, whatever they depend on, so the ratio to its standard deviation is near a standard normal.
    """
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        row = torch.tensor([list(ids)])
        p, q = (
            (
                AutoModelForCausalLM.from_pretrained(d, dtype=torch.float32)(row).logits[0] / temperature
            ).softmax(-1)
            for d in (target, watched)
        )
    p, q = p[start - 1 : -1], q[start - 1 : -1]
    chosen = q.topk(8, dim=-1).indices
    share = p.gather(-1, chosen).sum(-1)
    hit = (chosen == row[0, start:, None]).any(-1)
    return float((hit - share).sum() / (share * (1 - share)).sum().sqrt())


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target and a draft with uneven laws that differ from each other, and from their own over few keys."""
    root = tmp_path_factory.mktemp("sharp")
    made = {}
    for seed, name in enumerate(("target", "draft")):
        made[name] = models.endless_model(root / name, seed=seed, max_position_embeddings=2048)
        models.edit_tensors(made[name], _sharpen)
    return made


def _sharpen(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            tensor.mul_(8 if "embed" not in name and "head" not in name else 18)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("levels", ["draft", "no draft"])
def test_D4_D5_law_of_the_output(hspec: Hspec, sharp: dict[str, Path], rule: str, levels: str) -> None:
    """Under both rules, with three different levels, sampled tokens follow the target's law."""
    more = ["--draft-model", sharp["draft"]] if levels == "draft" else []
    stack = ["--method", "triforce", "--rule", rule, "--budget", 16, "--gamma", 4, *more]
    got = document(hspec, sharp["target"], *stack, "--temp", 1, "--seed", 3, "-n", 1200, "--dtype", "float32")
    ids = [*models.tokenizer_of(sharp["target"]).encode(cases.PROMPT.decode()).ids, *got["tokens"]]
    assert len(got["tokens"]) > 1000
    for watched in sharp.values():
        assert abs(law_deviation(sharp["target"], watched, ids, got["prompt_tokens"], 1.0)) < 4
