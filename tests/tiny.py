"""Tiny tokenizers for tests, written as a model repository has them: 276 ids, a chat template, no download."""

from __future__ import annotations

import io
import json
import random
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
SIZE = 276  # 4 special tokens, 256 bytes, 16 merges; the sentencepiece kind has as many

CHATML = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here.') }}{% endif %}" + CHATML
NO_CHAT = "{{ raise_exception('this model does not chat.') }}"

_MERGES = ["t h", "th e", "i n", "e r", "a n", "o n", "r e", "Ġ the", "Ġ a"]
_MERGES += ["o w", "ow n", "q u", "f o", "fo x", "an d", "Ġ f"]
_CORPUS = ["the hen than then the nest", "a tea tent set as an east sea", "ten ants sat on the stone"]


def tokenizer(
    directory: Path,
    *,
    template: str | None = CHATML,
    eos: str | None = "</s>",
    permute: int | None = None,
    sentencepiece: bool = False,
) -> None:
    """Write tokenizer files into `directory`.

    Byte-level BPE in `tokenizer.json`, whose post-processor puts `<s>` before a text. `permute` is a seed that deals
    the ids of all tokens but the special ones anew. `sentencepiece` writes only a `tokenizer.model`, of Llama 2's
    kind, with the chat tokens added by `tokenizer_config.json`. `eos` is one of SPECIAL, None for a model without.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config: dict[str, object] = {"bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if eos is not None:
        config["eos_token"] = eos
    if template is not None:
        config["chat_template"] = template
    if sentencepiece:
        (directory / "tokenizer.model").write_bytes(_sentencepiece())
        chat = {str(SIZE - 2 + i): {"content": text, "special": True} for i, text in enumerate(SPECIAL[2:])}
        config |= {"added_tokens_decoder": chat, "tokenizer_class": "LlamaTokenizer", "eos_token": eos}
    else:
        _byte_level(permute).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")


def _byte_level(permute: int | None) -> Tokenizer:
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in _MERGES)]
    if permute is not None:
        random.Random(permute).shuffle(pieces)
    vocabulary = {text: i for i, text in enumerate([*SPECIAL, *pieces])}
    pairs = [(left, right) for left, right in map(str.split, _MERGES)]
    made = Tokenizer(models.BPE(vocabulary, pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return made


@cache
def _sentencepiece() -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_CORPUS * 20),
        model_writer=model,
        model_type="bpe",
        vocab_size=SIZE - 2,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return model.getvalue()
