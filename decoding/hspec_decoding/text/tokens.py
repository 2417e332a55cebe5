"""Text to token ids and back, for the tokenizers of the model families that hspec runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer as Backend

from hspec_decoding.text import tokenizer_files
from hspec_decoding.text.chat_template import ChatTemplate, Message
from hspec_decoding.text.spelling import Spelling
from hspec_decoding.text.tokenizer_files import TokenizerFiles
from hspec_profiles.errors import HspecError

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Tokenizer:
    """A tokenizer with its model's stop tokens and chat template.

    `size` is the count of ids it can produce, `eos` the ids that end an answer (none, one or several),
    `spelling` the bytes of each id.
    """

    size: int
    eos: frozenset[int]
    spelling: Spelling

    def __init__(self, files: TokenizerFiles, eos: Iterable[int] = ()) -> None:
        self._backend: Backend = files.backend
        added = self._backend.get_added_tokens_decoder()
        self._special = {token.content: i for i, token in added.items() if token.special}
        self._bos = self._special.get(files.roles.get("bos_token", ""))
        own = self._backend.token_to_id(files.roles.get("eos_token", ""))
        self.size = max(self._backend.get_vocab_size(), *(i + 1 for i in added), 0)
        self.eos = frozenset(eos) | ({own} if own is not None else set())
        self.spelling = Spelling(self._backend, self._special.values())
        self._template: ChatTemplate | None = None
        if files.template:
            written = [t.content for t in added.values() if not t.special and t.content.strip()]
            controls = [*self._special, *(text for text in written if text in files.template)]
            self._template = ChatTemplate(files.template, files.roles, controls)

    @classmethod
    def load(cls, directory: Path, generation: Mapping[str, Any] = NOTHING) -> Tokenizer:
        """Read `tokenizer.json` or `tokenizer.model` with what lies beside it.

        `generation` is the model's generation_config.json. Needs no network and runs nothing of the directory.
        Raises HspecError naming a missing or broken file.
        """
        config = tokenizer_files.load_json(directory / "config.json")
        named = _ids(generation.get("eos_token_id")) | _ids(config.get("eos_token_id"))
        return cls(tokenizer_files.read(directory), named)

    @property
    def has_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """A raw prompt's ids: BOS where the tokenizer itself puts it, control strings as it parses them."""
        return list(self._backend.encode(_valid(text)).ids)

    def chat(self, user: str, system: str | None = None) -> list[int]:
        """The ids of one question under the chat template, ready for the answer."""
        said = [("system", system)] if system else []
        return self.converse([{"role": role, "content": text} for role, text in [*said, ("user", user)]])

    def converse(self, messages: Sequence[Message]) -> list[int]:
        """The ids of what was said so far, under the chat template, ready for the answer; system messages come first.

        They begin with one BOS where the tokenizer puts one. Control strings in what was said are text. Raises
        HspecError when there is no template or it refuses.
        """
        if self._template is None:
            raise HspecError("the model has no chat template", "`--raw` sends the prompt as it is")
        said = [{**message, "content": _valid(message["content"])} for message in messages]
        first, *rest = self._template.render(said)
        ids = self._plain(first)
        for piece in rest:
            ids += self._continued(piece)
        if self._bos is not None and self._bos in self.encode("") and ids[:1] != [self._bos]:
            ids.insert(0, self._bos)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The ids' text: special tokens are left out, invalid bytes become U+FFFD."""
        data = b"".join(self.spelling[token] for token in ids)
        if self.spelling.strips_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """The id of the special token with exactly this text."""
        return self._special.get(text)

    def difference(self, other: Tokenizer) -> str | None:
        """Why a draft with the tokenizer `other` cannot serve this one, None when it can.

        It can when every id is the same token in both; padding (`[PAD7]` at id 7, which conversions write for the
        rows that an embedding has beyond its tokens) does not count.
        """
        mine, theirs = self._backend.get_vocab(), other._backend.get_vocab()
        if mine == theirs:
            return None
        names, others = (
            {i: text for text, i in vocabulary.items() if text != f"[PAD{i}]"} for vocabulary in (mine, theirs)
        )
        if len(names) != len(others):
            return f"sizes {len(names)} and {len(others)}"
        for token in sorted(names.keys() | others.keys()):
            if names.get(token) != others.get(token):
                return f"first difference at id {token}: {names.get(token)!r} and {others.get(token)!r}"
        return None

    def _plain(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _continued(self, text: str) -> list[int]:
        """Ids of text in the middle of a prompt, without the space that some tokenizers put before a text."""
        if not self.spelling.strips_space:
            return self._plain(text)
        line = self._plain("\n")
        ids = self._plain("\n" + text)
        return ids[len(line) :] if ids[: len(line)] == line else ids


def _ids(value: object) -> set[int]:
    """The ids in an `eos_token_id`, which may be missing, one number or a list."""
    listed = value if isinstance(value, list) else [value]
    return {i for i in listed if isinstance(i, int) and not isinstance(i, bool) and i >= 0}


def _valid(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which have no UTF-8."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
