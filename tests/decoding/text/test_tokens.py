"""Tokenizers from their files: prompts, stop tokens, and whether a draft's vocabulary fits."""

from __future__ import annotations

import importlib
import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from hspec_decoding.text.sentencepiece_model import SentencePiece
from hspec_decoding.text.tokens import Tokenizer
from hspec_profiles.errors import HspecError

BOS, EOS, START, END = range(4)


def load(directory: Path, generation: dict[str, Any] | None = None, **options: Any) -> Tokenizer:
    """The tiny tokenizer, written and read."""
    tiny.tokenizer(directory, **options)
    return Tokenizer.load(directory, generation or {})


def edit(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **changes}), "utf-8")


# raw prompts


def test_raw_follows_the_post_processor(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    assert tokenizer.encode("")[:1] == [BOS]
    assert tokenizer.encode("the fox") == [BOS, *tokenizer.encode("the fox")[1:]]
    assert tokenizer.size == tiny.SIZE
    assert tokenizer.decode(tokenizer.encode("the brown fox\n\n  é😀漢")) == "the brown fox\n\n  é😀漢"


def test_raw_parses_control_strings(tmp_path: Path) -> None:
    assert END in load(tmp_path).encode("a<|im_end|>b")


@pytest.mark.parametrize(("setting", "first"), [({"add_bos_token": False}, []), ({"add_bos_token": True}, [BOS])])
def test_configuration_decides_bos(tmp_path: Path, setting: dict[str, bool], first: list[int]) -> None:
    tiny.tokenizer(tmp_path)
    edit(tmp_path / "tokenizer_config.json", **setting)
    assert Tokenizer.load(tmp_path).encode("") == first


def test_configuration_adds_eos(tmp_path: Path) -> None:
    tiny.tokenizer(tmp_path)
    edit(tmp_path / "tokenizer_config.json", add_eos_token=True)
    assert Tokenizer.load(tmp_path).encode("") == [BOS, EOS]


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    tiny.tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(5)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path).encode("x" * 20)) == 21


def test_lone_surrogates_become_replacement_characters(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    text = "caf\udce9 \ud83d x"
    assert tokenizer.decode(tokenizer.encode(text)) == "caf\ufffd \ufffd x"
    assert "caf\ufffd" in tokenizer.decode(tokenizer.chat(text))


@settings(deadline=None)
@given(st.text(max_size=40))
def test_text_survives_encoding(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    tokenizer = load(tmp_path_factory.mktemp("tiny"))
    assert tokenizer.decode(tokenizer.encode(text)) == text


# stop tokens


@pytest.mark.parametrize(
    ("generation", "config", "own", "all_of_them"),
    [
        ({"eos_token_id": [1, 3]}, {}, None, {1, 3}),
        ({"eos_token_id": 2}, {"eos_token_id": 3}, "</s>", {1, 2, 3}),
        ({"eos_token_id": None}, {"eos_token_id": [3]}, None, {3}),
        ({}, {}, "<|im_end|>", {3}),
        ({"eos_token_id": -1}, {"eos_token_id": "x"}, None, set()),
    ],
)
def test_eos_is_the_union(
    tmp_path: Path, generation: dict[str, Any], config: dict[str, Any], own: str | None, all_of_them: set[int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    assert load(tmp_path, generation, eos=own).eos == all_of_them


def test_token_id_is_of_special_tokens_only(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    assert [tokenizer.token_id(text) for text in tiny.SPECIAL] == [BOS, EOS, START, END]
    assert [tokenizer.token_id(text) for text in ("the", "<|im_end", " <s>", "")] == [None] * 4


def test_special_tokens_are_not_decoded(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    assert tokenizer.decode([BOS, *tokenizer.encode("a")[1:], END, tiny.SIZE, 10**6, EOS]) == "a"


# sentencepiece


@settings(deadline=None)
@given(st.text(alphabet="then as\n\té😀漢▁0<>x", max_size=30))
def test_sentencepiece_encodes_like_its_library(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    directory = tmp_path_factory.mktemp("sp")
    tokenizer = load(directory, sentencepiece=True)
    library = importlib.import_module("sentencepiece")
    theirs = library.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    assert tokenizer.encode(text) == [1, *theirs.encode(text)]
    assert tokenizer.decode(tokenizer.encode(text)) == theirs.decode(theirs.encode(text))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
def test_other_sentencepiece_models(kind: str, rule: str) -> None:
    """Unigram models, normalization rules and user-defined pieces are read as the library reads them."""
    import io

    library = importlib.import_module("sentencepiece")
    made = io.BytesIO()
    corpus = iter(["the fox and the hen", "one two three four", "(a) (b) 1234 end"] * 20)
    library.SentencePieceTrainer.train(
        sentence_iterator=corpus, model_writer=made, model_type=kind, vocab_size=330 if kind == "bpe" else 310,
        byte_fallback=True, normalization_rule_name=rule, user_defined_symbols=["<tool>", "fox"], minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    theirs = library.SentencePieceProcessor(model_proto=made.getvalue())
    backend = SentencePiece.parse(made.getvalue()).backend()
    for text in ["the fox", "  two   spaces ", "<tool>the<tool> foxfox", "ﬁne ① é", "", " ", "hen\nthe"]:
        assert backend.encode(text, add_special_tokens=False).ids == theirs.encode(text), text


def test_sentencepiece_has_bos_eos_and_added_tokens(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, sentencepiece=True)
    assert tokenizer.size == tiny.SIZE
    assert tokenizer.eos == {2}
    assert tokenizer.encode("the")[0] == 1
    ids = tokenizer.chat("the")
    assert ids[:2] == [1, tokenizer.token_id("<|im_start|>")]
    assert tokenizer.token_id("<|im_end|>") == tiny.SIZE - 1


def test_added_tokens_without_a_right_id_are_left_out(tmp_path: Path) -> None:
    tiny.tokenizer(tmp_path, sentencepiece=True)
    added = {"<a>": tiny.SIZE, "<b>": tiny.SIZE + 1, "<far>": tiny.SIZE + 90}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added), "utf-8")
    edit(tmp_path / "tokenizer_config.json", pad_token="[PAD]", additional_special_tokens=["<none>"])
    assert Tokenizer.load(tmp_path).size == tiny.SIZE + 2


# files


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(HspecError, match=r"tokenizer\.json.*tokenizer\.model") as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in caught.value.message


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"not json", b"\xff\xfe", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n"]
)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "tokenizer_config.json", "config.json"])
def test_broken_files_are_named(tmp_path: Path, name: str, data: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    tiny.tokenizer(tmp_path, sentencepiece=name == "tokenizer.model")
    (tmp_path / name).write_bytes(data)
    if data == b"{}" and "config" in name:
        assert Tokenizer.load(tmp_path).size == tiny.SIZE
        return
    with pytest.raises(HspecError, match="broken tokenizer file") as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path / name) in caught.value.message
    assert "\n" not in caught.value.message
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_truncated_files_are_refused(tmp_path: Path, name: str) -> None:
    tiny.tokenizer(tmp_path, sentencepiece=name == "tokenizer.model")
    whole = (tmp_path / name).read_bytes()
    for size in range(0, len(whole), len(whole) // 40):
        (tmp_path / name).write_bytes(whole[:size])
        with pytest.raises(HspecError, match=name):
            Tokenizer.load(tmp_path)


def test_unknown_decoder_is_refused(tmp_path: Path) -> None:
    Backend(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(HspecError, match="decoder is `none`"):
        Tokenizer.load(tmp_path)


def test_nothing_of_a_repository_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Custom code, the network and the terminal are left alone, and a long text makes no noise."""
    monkeypatch.setattr(socket, "socket", lambda *_a, **_k: pytest.fail("the network was used"))
    tiny.tokenizer(tmp_path)
    auto_map = {"AutoTokenizer": ["evil.Slow", "evil.Fast"]}
    edit(tmp_path / "tokenizer_config.json", auto_map=auto_map, model_max_length=4, tokenizer_class="EvilTokenizer")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')", "utf-8")
    assert len(Tokenizer.load(tmp_path).chat("x" * 50)) > 50
    assert not (tmp_path / "ran").exists()
    assert capfd.readouterr() == ("", "")


# drafts


def test_same_and_permuted_vocabularies(tmp_path: Path) -> None:
    target, same = load(tmp_path / "a"), load(tmp_path / "b", eos=None, template=None)
    other = load(tmp_path / "c", permute=1)
    assert target.difference(same) is None
    assert (target.difference(other) or "").startswith("first difference at id 4: '")


def test_vocabularies_of_other_sizes(tmp_path: Path) -> None:
    target = load(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    backend = Backend.from_file(str(tmp_path / "b" / "tokenizer.json"))
    backend.add_tokens(["<extra>"])
    backend.save(str(tmp_path / "b" / "tokenizer.json"))
    assert target.difference(Tokenizer.load(tmp_path / "b")) == "sizes 276 and 277"


def test_padding_is_no_difference(tmp_path: Path) -> None:
    target = load(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    backend = Backend.from_file(str(tmp_path / "b" / "tokenizer.json"))
    backend.add_tokens([f"[PAD{i}]" for i in range(276, 320)])
    backend.save(str(tmp_path / "b" / "tokenizer.json"))
    padded = Tokenizer.load(tmp_path / "b")
    assert padded.size == 320
    assert target.difference(padded) is None
    assert padded.difference(target) is None


def test_other_kinds_of_vocabulary(tmp_path: Path) -> None:
    assert load(tmp_path / "a").difference(load(tmp_path / "b", sentencepiece=True))
