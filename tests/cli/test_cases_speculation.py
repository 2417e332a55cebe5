"""Speculation: section D of the cases that users of other tools hit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import case_models as models
import case_tools as cases
import pytest
import tiny
import torch
from case_models import speaker
from case_tools import Hspec, answered, document, refused
from torch.utils._python_dispatch import TorchDispatchMode

SAMPLED = ("--temp", 0.8, "--top-p", 0.9)


def test_D1_draft_with_permuted_vocabulary(hspec: Hspec, tmp_path: Path) -> None:
    """A draft whose ids mean other tokens is refused before the target loads, naming the first that differs."""
    target = speaker(tmp_path / "target", "?", "abc", then=1)
    draft = speaker(tmp_path / "draft", "?", "abc", then=1, permute=3)
    (target / "model.safetensors").write_bytes(b"never read")
    mine, other = (dict(map(reversed, models.vocabulary_of(d).items())) for d in (target, draft))
    first = min(i for i in mine if mine[i] != other.get(i))
    refused(hspec("run", "-m", target, "--draft-model", draft, "--raw", "?"), (1, 2), "vocabular", f"{first}")


def test_D1_draft_with_a_vocabulary_of_another_size(hspec: Hspec, tmp_path: Path) -> None:
    """A draft with another number of tokens is refused with both numbers."""
    target = speaker(tmp_path / "target", "?", "abc", then=1)
    draft = speaker(tmp_path / "draft", "?", "abc", then=1)
    size = len(models.vocabulary_of(draft))
    models.add_tokens(draft, ["<extra1>", "<extra2>"])
    refused(
        hspec("run", "-m", target, "--draft-model", draft, "--raw", "?"), (1, 2), str(size), str(size + 2)
    )


def test_D8_draft_of_another_tokenizer_kind(hspec: Hspec, tmp_path: Path) -> None:
    """A draft whose tokenizer is of another kind is refused, not used with wrong ids."""
    target = speaker(tmp_path / "target", "?", "abc", then=1)
    draft = models.endless_model(tmp_path / "draft", tokenizer=False)
    tiny.tokenizer(draft, sentencepiece=True)
    refused(hspec("run", "-m", target, "--draft-model", draft, "--raw", "?"), (1, 2), "vocabular")


@pytest.mark.parametrize("sampling", [("--temp", 0), SAMPLED, ("--temp", 1.2, "--top-k", 40)])
@pytest.mark.parametrize("draft", ["same", "random", "short", "stuck", "ending", None])
def test_D3_same_text_with_every_draft(
    hspec: Hspec, drafts: dict[str, Path], draft: str | None, sampling: tuple[str | float, ...]
) -> None:
    """TriForce prints what plain decoding prints, 200 tokens, whatever the draft proposes; `auto` does too."""
    run = ["run", "-m", drafts["target"], "--raw", "-n", 200, "--budget", 64, "--seed", 5, *sampling]
    plain = answered(hspec(*run, "--method", "autoregressive", stdin=cases.PROMPT)).out
    more = ["--draft-model", drafts[draft]] if draft else []
    assert answered(hspec(*run, *more, "--method", "triforce", "--gamma", 5, stdin=cases.PROMPT)).out == plain
    assert answered(hspec(*run, *more, stdin=cases.PROMPT)).out == plain


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(4))
def test_D3_same_text_with_every_seed(hspec: Hspec, drafts: dict[str, Path], seed: int, dtype: str) -> None:
    """Sampled text depends on the seed and not on the method, in fp32 and in bf16."""
    run = ["run", "-m", drafts["target"], "--raw", "-n", 80, "--dtype", dtype, "--seed", seed, *SAMPLED]
    plain = answered(hspec(*run, "--method", "autoregressive", stdin=cases.PROMPT)).out
    fast = ["--method", "triforce", "--draft-model", drafts["random"], "--budget", 32]
    assert answered(hspec(*run, *fast, stdin=cases.PROMPT)).out == plain


def test_D3_seeds_differ(hspec: Hspec, drafts: dict[str, Path]) -> None:
    """Two seeds give two texts, one seed gives one."""
    texts = [document(hspec, drafts["target"], "-n", 40, "--seed", s, *SAMPLED)["text"] for s in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]


@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("method", cases.METHODS)
def test_D6_D24_end_inside_an_accepted_run(hspec: Hspec, tmp_path: Path, gamma: int, method: str) -> None:
    """With a draft that proposes tokens beyond the end token, all accepted, nothing after the end is printed."""
    target = speaker(tmp_path / "target", "?", "abc", then=1)
    ids = models.byte_ids(target, "?abc")
    chain = models.path_of([*ids, 1, *models.byte_ids(target, "xyz")])
    for model in (target, tmp_path / "draft"):
        models.chain_model(model, chain)
    got = document(
        hspec, target, "--method", method, "--draft-model", tmp_path / "draft", "--gamma", gamma, stdin=b"?"
    )
    assert (got["text"], got["finish_reason"]) == ("abc", "eos")
    assert got["tokens"] in (ids[1:], [*ids[1:], 1])


@pytest.mark.parametrize("method", cases.METHODS)
def test_D6_model_without_an_end_token(hspec: Hspec, tmp_path: Path, method: str) -> None:
    """A model that names no end token runs to its token limit."""
    model = speaker(tmp_path / "model", "?", "abc", eos=None)
    got = document(hspec, model, "--method", method, "-n", 30, stdin=b"?")
    assert (len(got["tokens"]), got["finish_reason"]) == (30, "length")


@pytest.mark.parametrize("method", [*cases.METHODS, "auto"])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("sampling", [(), SAMPLED])
def test_D7_D24_fewer_tokens_than_a_block(
    hspec: Hspec, drafts: dict[str, Path], method: str, n: int, sampling: tuple[str | float, ...]
) -> None:
    """`-n` smaller than a block gives exactly n tokens."""
    more = ["--method", method, "--gamma", 7, "--draft-model", drafts["same"], *sampling]
    got = document(hspec, drafts["target"], "-n", n, *more)
    assert (len(got["tokens"]), got["finish_reason"]) == (n, "length")


@pytest.mark.parametrize("n", [0, -1])
def test_D7_no_tokens_asked(hspec: Hspec, drafts: dict[str, Path], n: int) -> None:
    """`-n` below one is a usage error."""
    refused(hspec("run", "-m", drafts["target"], "--raw", "-n", n, "hello"), 2, "max-tokens")


def test_D10_prompt_beyond_the_context_of_the_draft(hspec: Hspec, drafts: dict[str, Path]) -> None:
    """A draft with 64 positions serves a prompt of 200 tokens: same text, and its proposals are still kept."""
    prompt = (cases.PROMPT * 4)[:200]
    plain = document(hspec, drafts["target"], "--method", "autoregressive", "-n", 60, stdin=prompt)
    fast = ["--method", "triforce", "--draft-model", drafts["short"], "--budget", 64]
    got = document(hspec, drafts["target"], *fast, "-n", 60, stdin=prompt)
    assert plain["prompt_tokens"] > 128
    assert got["text"] == plain["text"]
    assert got["tokens"] == plain["tokens"]


def test_D13_speculation_that_does_not_pay(hspec: Hspec, drafts: dict[str, Path]) -> None:
    """With a draft as large as the target and never right, the run falls back to plain decoding and says so."""
    more = ["--method", "triforce", "--draft-model", drafts["random"], "-n", 400]
    result = answered(hspec("run", "-m", drafts["target"], "--raw", *more, stdin=cases.PROMPT))
    assert "plain decoding" in result.err, result.err


@pytest.mark.parametrize("method", [*cases.METHODS, "auto"])
def test_D14_prefill_in_chunks(hspec: Hspec, tmp_path: Path, method: str) -> None:
    """In every mode a long prompt goes through the model in chunks, and logits are made for few rows."""
    target = models.endless_model(tmp_path / "target", max_position_embeddings=8192, vocab_size=333)
    draft = models.endless_model(tmp_path / "draft", max_position_embeddings=8192, vocab_size=333, seed=1)
    with Products() as seen:
        more = ["--method", method, "--draft-model", draft, "-n", 8]
        got = document(hspec, target, *more, stdin=b"#" * 6000)
    assert got["prompt_tokens"] >= 6000
    assert max(seen.rows) <= 4096
    assert 0 < max(seen.head_rows) <= 128


class Products(TorchDispatchMode):
    """Rows of every matrix product, and of those that make logits (333 columns)."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []
        self.head_rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.linear):
            rows, columns = made.numel() // made.shape[-1], made.shape[-1]
            (self.head_rows if columns == 333 else self.rows).append(rows)
        return made


@pytest.mark.parametrize("fault", ["missing", "empty", "truncated", "no config"])
def test_D15_draft_that_does_not_load(hspec: Hspec, tmp_path: Path, fault: str) -> None:
    """A draft that cannot be loaded is refused by name with nothing printed, or said in one line and done without."""
    target = speaker(tmp_path / "target", "?", "abc", then=1)
    draft = tmp_path / "draft"
    if fault != "missing":
        speaker(draft, "?", "abc", then=1)
    if fault in ("empty", "truncated"):
        weights = draft / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[: 0 if fault == "empty" else -500])
    if fault == "no config":
        (draft / "config.json").unlink()
    result = hspec("run", "-m", target, "--method", "triforce", "--draft-model", draft, "--raw", "?")
    if result.code:
        refused(result, (1, 2), str(draft))
    else:
        assert answered(result).text == "abc"
        assert str(draft) in result.err


@pytest.mark.parametrize("method", [*cases.METHODS, "auto"])
def test_D20_without_a_gpu(hspec: Hspec, drafts: dict[str, Path], method: str) -> None:
    """Every method runs where no GPU is visible, and asking for one is a sentence that says so."""
    more = ["--method", method, "--draft-model", drafts["same"], "-n", 8]
    assert len(document(hspec, drafts["target"], *more, "--device", "cpu")["tokens"]) == 8
    result = hspec("run", "-m", drafts["target"], "--raw", *more, "--device", "cuda", "hello")
    refused(result, (1, 2, 3), "cuda")


@pytest.mark.parametrize("length", [1, 7, 8, 9, 63, 64, 65, 200])
def test_D21_prompts_of_any_length(hspec: Hspec, tmp_path: Path, length: int) -> None:
    """Prompts around a chunk and around the budget give the plain text, also with outputs longer than the budget."""
    target = models.without_bos(models.endless_model(tmp_path / "target", seed=1))
    draft = models.without_bos(models.endless_model(tmp_path / "draft", seed=2))
    prompt = bytes(33 + (i * 37) % 90 for i in range(length))
    prompt = _of_length(target, prompt, length)
    for sampling in ((), SAMPLED):
        plain = document(hspec, target, "--method", "autoregressive", "-n", 100, *sampling, stdin=prompt)
        assert plain["prompt_tokens"] == length
        fast = ["--method", "triforce", "--draft-model", draft, "--budget", 64, "-n", 100, *sampling]
        assert document(hspec, target, *fast, stdin=prompt)["tokens"] == plain["tokens"]


def _of_length(model: Path, text: bytes, tokens: int) -> bytes:
    """Text of exactly this many tokens: capitals and digits, which no merge of the tiny tokenizer joins."""
    text = bytes(65 + byte % 26 for byte in text)
    assert len(models.tokenizer_of(model).encode(text.decode()).ids) == tokens
    return text


@pytest.mark.parametrize(
    "shape",
    [
        {"num_attention_heads": 4, "num_key_value_heads": 2},
        {"num_attention_heads": 4, "num_key_value_heads": 1},
        {"num_attention_heads": 4, "num_key_value_heads": 4},
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
    ],
)
def test_D22_head_layouts(hspec: Hspec, tmp_path: Path, shape: dict[str, int]) -> None:
    """Grouped, single and full KV heads, and heads wider or narrower than hidden / heads, all give the plain text."""
    target = models.endless_model(tmp_path / "target", seed=1, **shape)
    plain = document(hspec, target, "--method", "autoregressive", "-n", 60)
    for more in ([], ["--draft-model", target]):
        got = document(hspec, target, "--method", "triforce", "--budget", 32, "-n", 60, *more)
        assert got["tokens"] == plain["tokens"]
