"""Two processes that share a model say what one says, and all their methods say what they say by plain decoding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import ranks_tools
import torch
from plan_tools import gpus
from ranks_tools import CONTEXT, CPU, TOKENS, start, write
from tiny_engine import config
from torch._C._distributed_c10d import HashStore

from hspec_decoding import ranks as module
from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.config import ModelConfig
from hspec_decoding.options import Settings
from hspec_decoding.place import Asked, placed
from hspec_decoding.ranks import Ranks
from hspec_decoding.shares import Shard, Share, cut, shares
from hspec_offload.ask import Limits
from hspec_offload.plan_file import document
from hspec_profiles.errors import HspecError, UsageError
from hspec_profiles.profile import HostProfile

Found = list[dict[str, list[list[int]]]]
SMALL = {"num_hidden_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    "even heads": {},
    "uneven heads": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16},
    "one KV head": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "one KV head, uneven queries": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied, odd sizes": {"tie_word_embeddings": True, "vocab_size": 333, "intermediate_size": 90},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
    "mistral": {"family": "mistral"},
}
STACKS = {
    "plain": {"levels": "target(full)"},
    "n-grams": {"levels": "ngram > target(full)"},
    "triforce": {"levels": "draft > target(retrieval:64) > target(full)"},
    "small copies": {"levels": "ngram > target(full, kv=int4, w=int4) > target(full)"},
}
SLOW = gpus(0.6, 0.6)  # and a host that copies rather than computes; or the other way round
FAST = gpus(0.6, 0.6, to_device=1e5, to_host=1e5)
PLACES: dict[str, tuple[HostProfile, dict[str, Any]]] = {
    "weights streamed": (SLOW, {"gpu_layers": 1, "kv_device": "gpu"}),
    "all streamed": (SLOW, {"gpu_layers": 0, "kv_device": "cpu"}),
    "all by the CPU": (FAST, {"gpu_layers": 1, "kv_device": "cpu"}),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every model with every stack; what is offloaded; two texts at once. Each rank has another draft."""
    root, made = tmp_path_factory.mktemp("models"), dict[str, dict[str, Any]]()
    for name, overrides in MODELS.items():
        overrides = {"family": "llama", **SMALL, **overrides}
        model = str(write(root / name, **overrides))
        drafts = [str(write(root / f"{name}, draft {n}", seed=n, **overrides)) for n in (0, 1)]
        for stack in STACKS if name == "even heads" else ("plain", "triforce"):
            made[f"{name}, {stack}"] = {"model": model, "settings": STACKS[stack], "drafts": drafts}
    base = made["even heads, triforce"]
    made["greedy"] = {**base, "temperatures": [0.0]}
    made["greedy, plain"] = {**made["even heads, plain"], "temperatures": [0.0]}
    made["batch"] = {**base, "temperatures": [0.8, 0.8], "batch": True}
    made["closed early"] = {**base, "until": 5}
    made["after it"] = made["even heads, plain"]
    made["rejection"] = {**base, "settings": {**base["settings"], "rule": "rejection"}}
    made["bfloat16"] = {**base, "settings": {**base["settings"], "dtype": "bfloat16"}}
    made["bfloat16, plain"] = {**base, "settings": {**STACKS["plain"], "dtype": "bfloat16"}}
    whole = Checkpoint.open(Path(base["model"]))
    for name, (host, limits) in PLACES.items():
        asked = Asked((whole.config, "tiny"), None, Settings(**STACKS["n-grams"]), CONTEXT, element=4)
        plan = placed(host, asked, Limits(reserve=0, gpus=(0, 1), ranks=2, **limits))
        assert plan.kv_heads == (1, 1)
        assert not plan.resident
        assert (host is FAST) == any(run.weights == "cpu" for run in plan.layers)
        (root / f"{name}.json").write_text(json.dumps(document(plan, [])))
        made[name] = {**made["even heads, n-grams"], "plan": str(root / f"{name}.json")}
    return made


@pytest.fixture(scope="module")
def found(cases: Mapping[str, Mapping[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What two ranks say in each case."""
    return start(tmp_path_factory.mktemp("ranks") / "two", cases)


def test_ranks_agree(found: Found, cases: Mapping[str, Any]) -> None:
    """Though their drafts are different models and their clocks say different things."""
    first, second = found
    assert first.keys() == second.keys() == cases.keys()
    assert {name for name in cases if first[name] != second[name]} <= {"closed early"}


@pytest.mark.parametrize("model", MODELS)
def test_every_method_says_what_plain_decoding_says(found: Found, model: str) -> None:
    plain = found[0][f"{model}, plain"]
    assert [len(tokens) for tokens in plain] == [TOKENS]
    said = [found[0][name] for name in (f"{model}, {stack}" for stack in STACKS) if name in found[0]]
    assert len(said) >= 2
    assert all(one == plain for one in said)


def test_every_method_says_so_in_16_bits(found: Found) -> None:
    assert found[0]["bfloat16"] == found[0]["bfloat16, plain"]


def test_every_method_says_so_without_chance(found: Found) -> None:
    assert found[0]["greedy"] == found[0]["greedy, plain"]


@pytest.mark.parametrize("model", MODELS)
def test_two_processes_say_what_one_says(found: Found, cases: Mapping[str, Any], model: str) -> None:
    """In float32; a sum of two halves is rounded otherwise than the whole, but ties so narrow do not occur here."""
    assert found[0][f"{model}, plain"] == ranks_tools.run(cases[f"{model}, plain"])


@pytest.mark.parametrize("place", PLACES)
def test_what_is_offloaded_changes_nothing(found: Found, place: str) -> None:
    assert found[0][place] == found[0]["even heads, plain"]


def test_texts_of_a_batch(found: Found) -> None:
    assert found[0]["batch"][:1] == found[0]["even heads, plain"]
    assert [len(tokens) for tokens in found[0]["batch"]] == [TOKENS, TOKENS]


def test_rank_0_may_stop_early_and_go_on(found: Found) -> None:
    """The others stop with it; what comes next is not disturbed."""
    early, whole = found[0]["closed early"], found[0]["even heads, plain"]
    assert 5 <= len(early[0]) < TOKENS
    assert early[0] == whole[0][: len(early[0])]
    assert found[0]["after it"] == whole


def test_the_rejection_rule(found: Found) -> None:
    assert [len(tokens) for tokens in found[0]["rejection"]] == [TOKENS]


def test_three_ranks(cases: Mapping[str, Mapping[str, Any]], found: Found, tmp_path: Path) -> None:
    """More than KV heads, with queries unevenly shared; sums of three parts have one order, however many the rows."""
    name = "even heads, triforce"
    three = start(tmp_path / "three", {name: cases[name]}, size=3)
    assert [rank[name] for rank in three] == [found[0]["even heads, plain"]] * 3


@pytest.mark.gpu
def test_ranks_on_gpus(tmp_path: Path) -> None:
    """One for each where there are two, by NCCL and in graphs; else both on one, by gloo."""
    shape = {"hidden_size": 256, "head_dim": 64, **SMALL}
    base = {
        "model": str(write(tmp_path / "model", **shape)),
        "drafts": [str(write(tmp_path / "draft", seed=1, **shape))],
    }
    cases = {
        f"{stack}, {dtype}": {**base, "settings": {**STACKS[stack], "dtype": dtype}}
        for stack in STACKS
        for dtype in ("bfloat16", "float32")
    }
    first, second = start(tmp_path / "ranks", cases, device="cuda")
    assert first == second
    for name in cases:
        assert first[name] == first["plain, " + name.split(", ")[1]], name


# --- shares ------------------------------------------------------------------------------------------------------


def parts(shape: ModelConfig, size: int, kv_heads: tuple[int, ...] | None = None) -> list[Share]:
    return shares(shape, size, kv_heads)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 2, 2), (9, 3, 2), (8, 2, 3), (8, 1, 8), (14, 2, 5), (6, 6, 4)]
)
def test_every_head_has_one_rank_and_every_query_its_keys(heads: int, kv_heads: int, size: int) -> None:
    shape = config(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=16)
    made = parts(shape, size)
    assert [head for share in made for head in share.heads] == list(range(heads))
    assert {head for share in made for head in share.kv_heads} == set(range(kv_heads))
    assert [column for share in made for column in share.ffn] == list(range(shape.ffn_size))
    for share in made:
        assert {head * kv_heads // heads for head in share.heads} == set(share.kv_heads)
        local = share.local(shape)
        assert local.heads % local.kv_heads == 0
        assert len(share.ffn) >= 1


def test_uneven_shares_are_those_of_the_plan() -> None:
    shape = config(num_attention_heads=32, num_key_value_heads=8, head_dim=16, intermediate_size=1024)
    made = parts(shape, 2, (6, 2))
    assert [len(share.heads) for share in made] == [24, 8]
    assert [len(share.ffn) for share in made] == [768, 256]
    assert [len(share.vocabulary(320)) for share in made] == [240, 80]


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="5 ranks cannot share a model of 4 attention heads"):
        parts(config(), 5)
    with pytest.raises(UsageError, match=r"1 \+ 2 KV heads"):
        parts(config(), 2, (1, 2))


@pytest.mark.parametrize("model", ["uneven heads", "one KV head", "biases"])
def test_shards_are_the_whole(tmp_path: Path, model: str) -> None:
    """Slices of the mapped file: together every tensor, and rows are not copied."""
    whole = Checkpoint.open(write(tmp_path / "model", **MODELS[model]))
    shards = [Shard.cut(whole, share, 320) for share in parts(whole.config, 2)]
    for shard in shards:
        shard.preflight()
        expected = shard.config.tensors()
        for name in expected:
            shape = expected[name]
            if name == "lm_head.weight":
                shape = (len(shard.share.vocabulary(320)), shape[1])
            assert shard.tensor(name).shape == shape, name
    for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.gate_proj"):
        key = f"model.layers.1.{name}.weight"
        pieces = [shard.tensor(key) for shard in shards]
        assert torch.equal(torch.cat(pieces), whole.tensor(key))
        assert pieces[0].data_ptr() == whole.tensor(key).data_ptr()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        key = f"model.layers.1.{name}.weight"
        assert torch.equal(torch.cat([shard.tensor(key) for shard in shards], 1), whole.tensor(key))
    assert torch.equal(torch.cat([shard.tensor("lm_head.weight") for shard in shards]), whole.tensor("lm_head.weight"))


def test_cut_is_in_proportion_and_whole() -> None:
    assert cut(10, (1, 1, 1)) == [range(0, 3), range(3, 6), range(6, 10)]
    assert cut(100, (3, 1), 16) == [range(0, 64), range(64, 100)]


# --- starting ----------------------------------------------------------------------------------------------------


def test_a_rank_that_never_comes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START", 0.1)
    with pytest.raises(HspecError, match="only 1 of 2 ranks started within 0 s"):
        Ranks(0, 2, CPU, HashStore())
