"""What each token contributes to the text, in bytes, so that text joins token by token without loss."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from tokenizers import Tokenizer

from hspec_profiles.errors import HspecError

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class Spelling:
    """Ids to bytes, by the tokenizer's own decoder: byte-level, or words with byte pieces (sentencepiece)."""

    def __init__(self, backend: Tokenizer, silent: Collection[int]) -> None:
        """`silent` ids have no text. Raises HspecError for a decoder of another kind."""
        self._backend = backend
        self._known = dict.fromkeys(silent, b"")
        self._added = backend.get_added_tokens_decoder()
        self._byte_level, self._byte_pieces = False, False
        self._replace: list[tuple[str, str]] = []
        self.strips_space = False  # one space at the start of a text is not part of it
        for step in _steps(backend):
            self._follow(step)

    def __getitem__(self, token: int) -> bytes:
        """The bytes of an id; empty for special tokens and for ids that the tokenizer does not have."""
        if token not in self._known:
            self._known[token] = self._spell(token)
        return self._known[token]

    def _spell(self, token: int) -> bytes:
        piece = self._backend.id_to_token(token) if token >= 0 else None
        if piece is None:
            return b""
        if self._byte_level:
            known = token not in self._added and all(c in _BYTE_OF for c in piece)
            return bytes(_BYTE_OF[c] for c in piece) if known else piece.encode()
        if self._byte_pieces and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        for old, new in self._replace:
            piece = piece.replace(old, new)
        return piece.encode()

    def _follow(self, step: dict[str, Any]) -> None:
        kind, pattern = step["type"], step.get("pattern")
        if kind == "ByteLevel":
            self._byte_level = True
        elif kind == "ByteFallback":
            self._byte_pieces = True
        elif kind == "Replace" and isinstance(pattern, dict) and "String" in pattern:
            self._replace.append((pattern["String"], step["content"]))
        elif kind == "Metaspace":
            self._replace.append((step["replacement"], " "))
            self.strips_space |= step.get("prepend_scheme", "always") != "never"
        elif kind == "Strip" and (step["content"], step["start"], step["stop"]) == (" ", 1, 0):
            self.strips_space = True
        elif kind != "Fuse":
            raise HspecError(f"unsupported tokenizer: its decoder is `{kind}`")


def _steps(backend: Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return [{"type": "none"}]
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte: itself where visible, else the next one from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
