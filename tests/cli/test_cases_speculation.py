"""Speculation: section D of the cases that users of other tools hit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import case_models as models
import case_tools as cases
import pytest
import tiny
import tiny_models
import torch
from case_models import speaker
from case_tools import Hspec, answered, document, refused
from torch.utils._python_dispatch import TorchDispatchMode


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
    refused(hspec("run", "-m", target, "--draft-model", draft, "--raw", "?"), (1, 2), str(size), str(size + 2))


def test_D8_draft_of_another_tokenizer_kind(hspec: Hspec, tmp_path: Path) -> None:
    """A draft whose tokenizer is of another kind is refused, not used with wrong ids."""
    target = speaker(tmp_path / "target", "?", "abc", then=1)
    draft = tiny_models.model(tmp_path / "draft", tokenizer=False)
    tiny.tokenizer(draft, sentencepiece=True)
    refused(hspec("run", "-m", target, "--draft-model", draft, "--raw", "?"), (1, 2), "vocabular")


@pytest.fixture(scope="module")
def plain() -> dict[tuple[str | float, ...], dict[str, Any]]:
    """Answers of plain decoding by sampling options, each made once."""
    return {}


@pytest.mark.parametrize("sampling", [("--temp", 0), cases.SAMPLED])
@pytest.mark.parametrize("draft", ["same", "random", "short", "stuck", "ending", "none"])
def test_D3_same_text_with_every_draft(
    hspec: Hspec,
    monkeypatch: pytest.MonkeyPatch,
    drafts: dict[str, Path],
    plain: dict[tuple[str | float, ...], dict[str, Any]],
    draft: str,
    sampling: tuple[str | float, ...],
) -> None:
    """TriForce at work says what plain decoding says, whatever the draft proposes."""
    run = [drafts["target"], "-n", 200, "--budget", 64, "--seed", 5, *sampling]
    if sampling not in plain:
        plain[sampling] = document(hspec, *run, "--method", "autoregressive", stdin=cases.LONG_PROMPT)
    more = ["--draft-model", drafts.get(draft, draft), "--method", "triforce", "--gamma", 5]
    with cases.pretending(monkeypatch):
        got = document(hspec, *run, *more, stdin=cases.LONG_PROMPT)
    cases.speculated(got)
    assert (got["tokens"], got["text"]) == (plain[sampling]["tokens"], plain[sampling]["text"])
    if draft == "same" and sampling == ("--temp", 0):
        assert got["levels"][-1]["passes"] < 180


def test_D3_same_stream_with_every_method(hspec: Hspec, drafts: dict[str, Path]) -> None:
    """All methods stream the same bytes."""
    run = ["run", "-m", drafts["target"], "--draft-model", drafts["same"], "--raw", "-n", 100, *cases.SAMPLED]
    streams = [answered(hspec(*run, "--method", m, stdin=cases.PROMPT)).out for m in (*cases.METHODS, "auto")]
    assert streams[0] == streams[1] == streams[2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(4))
def test_D3_same_text_with_every_seed(
    hspec: Hspec, monkeypatch: pytest.MonkeyPatch, drafts: dict[str, Path], seed: int, dtype: str
) -> None:
    """Sampled text depends on the seed and not on the method, in fp32 and in bf16."""
    run = [drafts["target"], "-n", 60, "--dtype", dtype, "--seed", seed, *cases.SAMPLED]
    plain = document(hspec, *run, "--method", "autoregressive", stdin=cases.LONG_PROMPT)
    more = ["--method", "triforce", "--draft-model", drafts["random"], "--budget", 64]
    with cases.pretending(monkeypatch):
        got = document(hspec, *run, *more, stdin=cases.LONG_PROMPT)
    cases.speculated(got)
    assert got["tokens"] == plain["tokens"]


def test_D3_seeds_differ(hspec: Hspec, drafts: dict[str, Path]) -> None:
    """Two seeds give two texts, one seed gives one."""
    texts = [document(hspec, drafts["target"], "-n", 40, "--seed", s, *cases.SAMPLED)["text"] for s in (1, 2, 1)]
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
    got = document(hspec, target, "--method", method, "--draft-model", tmp_path / "draft", "--gamma", gamma, stdin=b"?")
    assert (got["text"], got["finish_reason"]) == ("abc", "eos")
    if method == "triforce":
        cases.speculated(got, proposals=1)
    assert got["tokens"] in (ids[1:], [*ids[1:], 1])


@pytest.mark.parametrize("method", cases.METHODS)
def test_D6_model_without_an_end_token(hspec: Hspec, tmp_path: Path, method: str) -> None:
    """A model that names no end token runs to its token limit."""
    model = speaker(tmp_path / "model", "?", "abc", eos=None)
    got = document(hspec, model, "--method", method, "-n", 30, stdin=b"?")
    assert (len(got["tokens"]), got["finish_reason"]) == (30, "length")


@pytest.mark.parametrize("method", [*cases.METHODS, "auto"])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("sampling", [(), cases.SAMPLED])
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


def test_D10_prompt_beyond_the_context_of_the_draft(
    hspec: Hspec, monkeypatch: pytest.MonkeyPatch, drafts: dict[str, Path]
) -> None:
    """A draft with 64 positions serves a prompt of some 660 tokens: the same text, and proposals still kept."""
    run = [drafts["target"], "-n", 60]
    plain = document(hspec, *run, "--method", "autoregressive", stdin=cases.LONG_PROMPT)
    more = ["--method", "triforce", "--draft-model", drafts["short"], "--budget", 64]
    with cases.pretending(monkeypatch):
        got = document(hspec, *run, *more, stdin=cases.LONG_PROMPT)
    cases.speculated(got)
    assert got["tokens"] == plain["tokens"]
    assert got["prompt_tokens"] > 600
    assert got["levels"][0]["kept"] > 0


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_D13_speculation_that_does_not_pay(hspec: Hspec, drafts: dict[str, Path], rule: str) -> None:
    """With a draft as large as the target and never right, the run falls back to plain decoding and says so."""
    more = ["--method", "triforce", "--draft-model", drafts["stuck"], "--rule", rule, "--temp", 1, "-n", 400]
    result = answered(hspec("run", "-m", drafts["target"], "--raw", *more, stdin=cases.PROMPT))
    assert "slower than plain decoding" in result.err, result.err


@pytest.mark.parametrize("method", [*cases.METHODS, "auto"])
def test_D14_prefill_in_chunks(hspec: Hspec, tmp_path: Path, method: str) -> None:
    """In every mode a long prompt goes through the model in chunks, and logits are made for few rows."""
    target = models.endless_model(tmp_path / "target", max_position_embeddings=8192, vocab_size=tiny.SIZE)
    draft = models.endless_model(tmp_path / "draft", max_position_embeddings=8192, vocab_size=tiny.SIZE, seed=1)
    with Products() as seen:
        more = ["--method", method, "--draft-model", draft, "-n", 8]
        got = document(hspec, target, *more, stdin=b"#" * 6000)
    assert got["prompt_tokens"] >= 6000
    assert max(seen.rows) <= 4096
    assert 0 < max(seen.head_rows) <= 128


class Products(TorchDispatchMode):
    """Rows of every matrix product, and of those that make logits (as many columns as tokens)."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []
        self.head_rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.linear):
            rows, columns = made.numel() // made.shape[-1], made.shape[-1]
            (self.head_rows if columns == tiny.SIZE else self.rows).append(rows)
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


def test_D15_draft_of_no_numbers(hspec: Hspec, drafts: dict[str, Path], tmp_path: Path) -> None:
    """A draft with NaN weights is refused, or costs nothing but speed."""
    target, draft = drafts["target"], models.endless_model(tmp_path / "draft", seed=1)
    models.edit_tensors(draft, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    run = ["run", "-m", target, "--raw", "-n", 30]
    result = hspec(*run, "--method", "triforce", "--draft-model", draft, stdin=cases.PROMPT)
    if result.code:
        refused(result, 1, "finite", str(draft))
    else:
        assert answered(result).out == hspec(*run, "--method", "autoregressive", stdin=cases.PROMPT).out


@pytest.mark.parametrize("method", [*cases.METHODS, "auto"])
def test_D20_without_a_gpu(hspec: Hspec, drafts: dict[str, Path], method: str) -> None:
    """Every method runs where no GPU is visible, and asking for one is a sentence that says so."""
    more = ["--method", method, "--draft-model", drafts["same"], "-n", 8]
    assert len(document(hspec, drafts["target"], *more, "--device", "cpu")["tokens"]) == 8
    result = hspec("run", "-m", drafts["target"], "--raw", *more, "--device", "cuda", "hello")
    refused(result, (1, 2, 3), "cuda")


@pytest.mark.parametrize("length", [1, 7, 8, 9, 63, 64, 65, 200])
@pytest.mark.parametrize("sampling", [(), cases.SAMPLED])
def test_D21_prompts_of_any_length(
    hspec: Hspec,
    monkeypatch: pytest.MonkeyPatch,
    drafts: dict[str, Path],
    tmp_path: Path,
    length: int,
    sampling: tuple[str | float, ...],
) -> None:
    """Prompts around a chunk and around the budget give the plain text, with outputs longer than the budget."""
    target = models.without_bos(models.endless_model(tmp_path / "target", seed=1))
    prompt = bytes(65 + i * 37 % 26 for i in range(length))  # capitals, which no merge joins
    run = [target, "-n", 100, *sampling]
    plain = document(hspec, *run, "--method", "autoregressive", stdin=prompt)
    assert plain["prompt_tokens"] == length
    more = ["--method", "triforce", "--draft-model", drafts["random"], "--budget", 64]
    with cases.pretending(monkeypatch, beyond=199, width=16):
        got = document(hspec, *run, *more, stdin=prompt)
    cases.speculated(got)
    assert got["tokens"] == plain["tokens"]


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
def test_D22_head_layouts(hspec: Hspec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shape: dict[str, int]) -> None:
    """Grouped, single and full KV heads, and heads wider or narrower than hidden / heads, give the plain text."""
    target = models.endless_model(tmp_path / "target", seed=1, max_position_embeddings=1024, **shape)
    run = [target, "-n", 50, "--budget", 64]
    plain = document(hspec, *run, "--method", "autoregressive", stdin=cases.LONG_PROMPT)
    for draft in ("none", target):
        with cases.pretending(monkeypatch):
            got = document(hspec, *run, "--draft-model", draft, "--method", "triforce", stdin=cases.LONG_PROMPT)
        cases.speculated(got)
        assert got["tokens"] == plain["tokens"]
