"""A sentencepiece `tokenizer.model` as a `tokenizers` backend; needs neither sentencepiece nor protobuf.

The result encodes like the sentencepiece library itself: the file's own normalizer, a space put before the
text, merges ranked by the pieces' scores, user-defined pieces kept whole, unknown characters as bytes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # kinds of piece, as the format numbers them
UNIGRAM, BPE = 1, 2


@dataclass
class Piece:
    """One entry of the vocabulary; its id is its place in the file."""

    text: str = ""
    score: float = 0.0
    kind: int = NORMAL


@dataclass
class SentencePiece:
    """What a model file says; the defaults are the format's own."""

    pieces: list[Piece] = field(default_factory=list)
    kind: int = UNIGRAM
    byte_fallback: bool = False
    unk: int = 0
    bos: int = 1
    eos: int = 2
    charsmap: bytes = b""
    dummy_prefix: bool = True
    squeeze_spaces: bool = True
    escape_spaces: bool = True

    @classmethod
    def parse(cls, data: bytes) -> SentencePiece:
        """Read the file's bytes. Raises ValueError when they are not a sentencepiece model."""
        model, whole = cls(), False
        for number, value in _fields(data):
            if not isinstance(value, bytes):
                raise ValueError("not a sentencepiece model")
            if number == 1:
                model.pieces.append(_piece(value))
            elif number == 2:
                names = {3: "kind", 35: "byte_fallback", 40: "unk", 41: "bos", 42: "eos"}
                _set(model, value, names)
            elif number == 3:
                names = {2: "charsmap", 3: "dummy_prefix", 4: "squeeze_spaces", 5: "escape_spaces"}
                _set(model, value, names)
                whole = True  # it comes last
        if not (model.pieces and whole):
            raise ValueError("the file ends early" if model.pieces else "not a sentencepiece model")
        return model

    def named(self, token: int) -> str | None:
        """The text of a piece's id, None for an id that is not there."""
        return self.pieces[token].text if 0 <= token < len(self.pieces) else None

    def backend(self) -> Tokenizer:
        """The tokenizer that encodes and decodes as this model does, without BOS. Raises ValueError."""
        tokenizer = Tokenizer(self._model())
        tokenizer.normalizer = self._normalizer()
        user = sorted((p.text for p in self.pieces if p.kind == USER_DEFINED), key=len, reverse=True)
        if user:
            whole = Regex("|".join(map(re.escape, user)))
            tokenizer.pre_tokenizer = pre_tokenizers.Split(whole, behavior="isolated")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
            + ([decoders.Strip(" ", 1, 0)] if self.dummy_prefix else [])
        )
        special = [p.text for p in self.pieces if p.kind in (UNKNOWN, CONTROL)]
        tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
        return tokenizer

    def _model(self) -> models.Model:
        if self.kind == UNIGRAM:
            scores = [(p.text, p.score) for p in self.pieces]
            return models.Unigram(scores, unk_id=self.unk, byte_fallback=self.byte_fallback)
        if self.kind != BPE:
            raise ValueError(f"sentencepiece type {self.kind}: only unigram (1) and BPE (2) are read")
        return models.BPE(
            {p.text: i for i, p in enumerate(self.pieces)},
            self._merges(),
            unk_token=self.named(self.unk),
            fuse_unk=True,
            byte_fallback=self.byte_fallback,
            ignore_merges=any(p.kind == USER_DEFINED for p in self.pieces),
        )

    def _merges(self) -> list[tuple[str, str]]:
        """Every pair of pieces that makes a third, the best-scored result first."""
        normal = {p.text: (-p.score, i) for i, p in enumerate(self.pieces) if p.kind == NORMAL}
        ranked = []
        for text, rank in normal.items():
            for cut in range(1, len(text)):
                left, right = text[:cut], text[cut:]
                if left in normal and right in normal:
                    ranked.append((rank, left, right))
        return [(left, right) for _, left, right in sorted(ranked)]

    def _normalizer(self) -> normalizers.Normalizer:
        steps: list[normalizers.Normalizer] = []
        if self.charsmap:
            steps.append(normalizers.Precompiled(self.charsmap))
        if self.squeeze_spaces:
            steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
            steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        if self.dummy_prefix:
            steps.append(normalizers.Prepend(SPACE if self.escape_spaces else " "))
        if self.escape_spaces:
            steps.append(normalizers.Replace(" ", SPACE))
        return normalizers.Sequence(steps)


def _piece(data: bytes) -> Piece:
    piece = Piece()
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            piece.text = value.decode("utf-8")
        elif number == 2 and isinstance(value, bytes):
            piece.score = struct.unpack("<f", value)[0]
        elif number == 3 and isinstance(value, int):
            piece.kind = value
    return piece


def _set(model: SentencePiece, data: bytes, names: dict[int, str]) -> None:
    for number, value in _fields(data):
        name = names.get(number)
        if name and isinstance(value, bytes) == (name == "charsmap"):
            setattr(model, name, type(getattr(model, name))(value))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The (field number, value) pairs of one protobuf message: numbers as int, all else as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value - (1 << 64) if value >> 63 else value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError("not a sentencepiece model")
        if at + size > len(data):
            raise ValueError("the file ends early")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("the file ends early")
