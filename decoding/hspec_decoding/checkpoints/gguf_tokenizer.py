"""A GGUF file's vocabulary as `tokenizer.json` and `tokenizer_config.json`.

Two kinds exist in the families we run. Byte-level BPE comes with its merges and the *name* of its pre-tokenizer, whose
rules are written down here. Sentencepiece BPE comes with the pieces, scores and kinds of a `tokenizer.model`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hspec_decoding.checkpoints.files import Say
from hspec_profiles.errors import HspecError

CONTROL, USER_DEFINED = 3, 4  # token types

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {"llama-bpe": LLAMA3, "llama3": LLAMA3, "llama-v3": LLAMA3, "smaug-bpe": LLAMA3, "dbrx": LLAMA3}
SPLITS |= {"qwen2": QWEN2, "deepseek-r1-qwen": QWEN2, "megrez": QWEN2, "tekken": TEKKEN}
DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})  # each digit alone, then GPT-2's rule
GPT2 = frozenset({"gpt-2", "default", "mpt", "olmo", "phi-2"})
WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})  # a word that is a token is not merged


def tokenizer_files(path: Path, metadata: Mapping[str, Any], say: Say) -> dict[str, dict[str, Any]]:
    """File name -> content, ready for JSON. Raises HspecError for a kind of tokenizer that is not known."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama") or not tokens:
        raise HspecError(f"`{path}` has a tokenizer of kind {kind!r}, hspec reads 'gpt2' and 'llama'")
    body = _byte_level(path, metadata, say) if kind == "gpt2" else _sentencepiece(metadata)
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    processor = None
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", _adds_bos(metadata)):
        processor = _prepend(tokens[bos], bos)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(tokens, metadata.get("tokenizer.ggml.token_type", ())),
        "post_processor": processor,
        **body,
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": processor is not None}
    settings["clean_up_tokenization_spaces"] = False
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None and number < len(tokens):
            settings[f"{name}_token"] = tokens[number]
    if "tokenizer.chat_template" in metadata:
        settings["chat_template"] = metadata["tokenizer.chat_template"]
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    """What a file means that does not say whether a prompt begins with BOS."""
    return metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in WHOLE_WORDS


def _byte_level(path: Path, metadata: Mapping[str, Any], say: Say) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre is None:
        say(f"`{path.name}` does not name its pre-tokenizer; GPT-2's is taken, tokens may differ from the original's")
    merges = [merge.split(" ", 1) for merge in metadata.get("tokenizer.ggml.merges", ())]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "normalizer": {"type": "NFC"} if SPLITS.get(pre or "") == QWEN2 else None,
        "pre_tokenizer": _pre_tokenizer(path, pre or "default", byte_level),
        "decoder": byte_level,
        "model": {
            **_model(metadata["tokenizer.ggml.tokens"], merges),
            "ignore_merges": pre in WHOLE_WORDS,
        },
    }


def _pre_tokenizer(path: Path, pre: str, byte_level: Mapping[str, Any]) -> dict[str, Any]:
    if pre in GPT2:
        return dict(byte_level)
    first: dict[str, Any]
    if pre in DIGITS:
        first, last = {"type": "Digits", "individual_digits": True}, dict(byte_level)
    elif pre in SPLITS:
        pattern = {"Regex": SPLITS[pre]}
        first = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        last = {**byte_level, "use_regex": False}
    else:
        raise HspecError(
            f"`{path}` names the pre-tokenizer {pre!r}, which hspec does not know",
            "give the model's directory or Hugging Face id instead",
        )
    return {"type": "Sequence", "pretokenizers": [first, last]}


def _sentencepiece(metadata: Mapping[str, Any]) -> dict[str, Any]:
    from hspec_decoding.text.sentencepiece_model import BPE, Piece, SentencePiece

    columns = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    model = SentencePiece(
        pieces=[Piece(*row) for row in zip(*columns, strict=True)],
        kind=BPE,
        byte_fallback=True,
        unk=metadata.get("tokenizer.ggml.unknown_token_id", 0),
        dummy_prefix=metadata.get("tokenizer.ggml.add_space_prefix", True),
        squeeze_spaces=metadata.get("tokenizer.ggml.remove_extra_whitespaces", False),
    )
    body = json.loads(model.backend().to_str())
    return {key: body[key] for key in ("normalizer", "pre_tokenizer", "decoder", "model")}


def _model(tokens: Sequence[str], merges: list[list[str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": {token: number for number, token in reversed(list(enumerate(tokens)))},
        "merges": merges,
    }


def _added(tokens: Sequence[str], kinds: Sequence[int]) -> list[dict[str, Any]]:
    plain: dict[str, Any] = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": number, "content": token, **plain, "special": kind == CONTROL}
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (CONTROL, USER_DEFINED)
    ]


def _prepend(token: str, number: int) -> dict[str, Any]:
    """A post-processor that puts BOS before the text."""
    bos: dict[str, Any] = {"SpecialToken": {"id": token, "type_id": 0}}
    texts: list[dict[str, Any]] = [{"Sequence": {"id": part, "type_id": 0}} for part in "AB"]
    return {
        "type": "TemplateProcessing",
        "single": [bos, texts[0]],
        "pair": [bos, *texts],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }
