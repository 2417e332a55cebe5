"""The law of sampled text: section D of the cases that users of other tools hit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import case_models as models
import case_tools as cases
import pytest
import torch
from case_tools import Hspec, document

LETTERS = "abcdefgh"  # all that the models of this file ever say
PROMPT = LETTERS * 12


def talker(directory: Path, seed: int, head_dim: int) -> Path:
    """A one-layer model over eight letters whose law depends on the last one and on the average of all it sees.

    So the target over few keys has another law than over all, and a model of another seed has a third; all are
    alike enough to accept much of each other.
    """
    models.chain_model(directory, {}, positions=2048, eos=None, head_dim=head_dim)
    letters = models.byte_ids(directory, LETTERS)
    average = slice(300, 308)  # rows of the hidden state that no token uses
    common, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    head = torch.zeros(320, 320)
    head[:, letters] = -300.0
    likes = torch.randn(8, 8, generator=common) + torch.randn(8, 8, generator=own)
    head[torch.tensor(letters)[:, None], torch.tensor(letters)] = 1.5 * likes
    head[letters, average] = 3 * torch.randn(8, 8, generator=common)

    def speak(tensors: dict[str, torch.Tensor]) -> None:
        at = "model.layers.0.self_attn."
        tensors["lm_head.weight"] = head
        tensors[f"{at}v_proj.weight"].normal_(generator=common)
        tensors[f"{at}o_proj.weight"][average].normal_(std=0.02, generator=common)

    models.edit_tensors(directory, speak)
    return directory


@pytest.fixture(scope="module")
def talkers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target and a draft; the heads of the draft are narrower, which tells them apart."""
    root = tmp_path_factory.mktemp("talkers")
    return {"target": talker(root / "target", 1, 16), "draft": talker(root / "draft", 2, 8)}


def laws(model: Path, ids: Sequence[int], start: int, *filters: str | float) -> torch.Tensor:
    """Law of each token from position `start` on at temperature 1, [tokens, vocabulary], by transformers."""
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        law = made(torch.tensor([list(ids)])).logits[0, start - 1 : -1].double().softmax(-1)
    ordered, order = law.sort(-1, descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if "--top-k" in filters:
        keep[:, filters[1] :] = False
    if "--top-p" in filters:
        keep = ordered.cumsum(-1) - ordered < filters[1]
    law = torch.zeros_like(law).scatter(-1, order, ordered * keep)
    return law / law.sum(-1, keepdim=True)


def deviation(target: torch.Tensor, draft: torch.Tensor, said: torch.Tensor) -> float:
    """By how many standard deviations the tokens that the draft likes better were said too often.

    Over positions, the sum of (token is one of those) - (their probability under `target`) is a martingale for
    tokens drawn from `target`, however laws depend on the past, so the ratio is near a standard normal.
    """
    liked = draft > target
    share = (target * liked).sum(-1)
    hit = liked.gather(-1, said[:, None])[:, 0].double()
    return float((hit - share).sum() / (share * (1 - share)).sum().sqrt())


@pytest.mark.parametrize(
    ("rule", "drafted", "filters"),
    [
        ("coupled", True, ()),
        ("coupled", False, ()),
        ("rejection", True, ()),
        ("rejection", False, ()),
        ("rejection", True, ("--top-k", 3)),
        ("rejection", True, ("--top-p", 0.8)),
    ],
)
def test_D4_D5_law_of_the_output(
    hspec: Hspec,
    monkeypatch: pytest.MonkeyPatch,
    talkers: dict[str, Path],
    rule: str,
    drafted: bool,
    filters: tuple[str | float, ...],
) -> None:
    """Under both rules, with three levels of three different laws, sampled tokens follow the target's law."""
    target, draft = talkers["target"], talkers["draft"]
    run = ["--method", "triforce", "--rule", rule, "--draft-model", draft if drafted else "none", "--budget", 24]
    run += ["--gamma", 4, "--temp", 1, *filters, "--seed", 3, "-n", 1000, "--dtype", "float32"]
    with cases.pretending(monkeypatch, beyond=99, width=16):
        got = document(hspec, target, *run, stdin=PROMPT.encode())
    cases.speculated(got, proposals=200)
    said = torch.tensor(got["tokens"])
    ids = [*models.tokenizer_of(target).encode(PROMPT).ids, *got["tokens"]]
    p, q = (laws(model, ids, got["prompt_tokens"], *filters) for model in (target, draft))
    assert p.gather(-1, said[:, None]).min() > 0
    assert abs(deviation(p, q, said)) < 4


def test_D5_law_of_the_published_middle_level(hspec: Hspec, talkers: dict[str, Path]) -> None:
    """The measure used here finds the published rule, which draws anew from the whole law after a rejection."""
    run = ["--method", "autoregressive", "--temp", 1, "-n", 500, "--dtype", "float32"]
    got = document(hspec, talkers["target"], *run, stdin=PROMPT.encode())
    ids = [*models.tokenizer_of(talkers["target"]).encode(PROMPT).ids, *got["tokens"]]
    p, q = (laws(talkers[name], ids, got["prompt_tokens"]) for name in ("target", "draft"))
    assert abs(deviation(p, q, torch.tensor(got["tokens"]))) < 4
    kept = torch.minimum(p, q)
    published = kept + (1 - kept.sum(-1, keepdim=True)) * p
    said = torch.multinomial(published, 1, generator=torch.Generator().manual_seed(0))[:, 0]
    assert deviation(p, q, said) > 6
