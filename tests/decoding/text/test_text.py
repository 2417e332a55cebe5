"""Streaming text: equal to the one-shot decode however the ids arrive, and cut exactly before a stop."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from hspec_decoding.text.stream import TextStream
from hspec_decoding.text.tokens import Tokenizer

SMILES = "é😀漢"
IDS = st.lists(st.integers(0, tiny.SIZE + 10), max_size=60)
BOTH = st.booleans()


@cache
def load(sentencepiece: bool = False) -> Tokenizer:
    """The tiny tokenizer of either kind."""
    with TemporaryDirectory() as directory:
        tiny.tokenizer(Path(directory), sentencepiece=sentencepiece)
        return Tokenizer.load(Path(directory))


def plain(text: str, sentencepiece: bool = False) -> list[int]:
    """The ids of a text, without BOS."""
    return load(sentencepiece).encode(text)[1:]


def stream(ids: list[int], cuts: list[int], stops: tuple[str, ...] = (), sentencepiece: bool = False) -> TextStream:
    """A finished stream that got the ids in blocks ending at the cuts; every piece is checked to be final."""
    out = TextStream(load(sentencepiece), stops)
    pieces, start = [], 0
    for end in [*sorted(min(cut, len(ids)) for cut in cuts), len(ids)]:
        pieces.append(out.push(ids[start:end]))
        start = end
        assert out.text == "".join(pieces)
    pieces.append(out.finish())
    assert out.finish() == ""
    assert out.text == "".join(pieces)
    return out


def cut_at_stop(text: str, stops: tuple[str, ...]) -> str:
    """What a reader who sees the text grow by single characters keeps."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@settings(deadline=None)
@given(ids=IDS, cuts=st.lists(st.integers(0, 60), max_size=10), sentencepiece=BOTH)
def test_any_ids_in_any_blocks(ids: list[int], cuts: list[int], sentencepiece: bool) -> None:
    out = stream(ids, cuts, sentencepiece=sentencepiece)
    assert out.text == load(sentencepiece).decode(ids)
    assert out.consumed == len(ids)
    assert not out.stopped


@settings(deadline=None)
@given(ids=IDS)
def test_random_bytes_decode_as_in_the_tokenizers_library(ids: list[int]) -> None:
    assert load().decode(ids) == load()._backend.decode(ids)


@settings(deadline=None)
@given(text=st.text(max_size=30), sentencepiece=BOTH)
def test_any_text_by_single_ids(text: str, sentencepiece: bool) -> None:
    ids = plain(text, sentencepiece)
    out = stream(ids, list(range(len(ids))), sentencepiece=sentencepiece)
    assert out.text == (text.replace("▁", " ") if sentencepiece else text)


@settings(deadline=None)
@given(
    ids=st.lists(st.sampled_from([*plain("abc <|"), *plain("é"), 3]), max_size=40),
    stops=st.lists(st.text("abc <|é", min_size=1, max_size=4), max_size=3).map(tuple),
    cuts=st.lists(st.integers(0, 40), max_size=10),
)
def test_stops_in_any_blocks(ids: list[int], stops: tuple[str, ...], cuts: list[int]) -> None:
    out = stream(ids, cuts, stops)
    whole = load().decode(ids)
    assert out.text == cut_at_stop(whole, stops)
    assert out.stopped == any(stop in whole for stop in stops)
    used = load().decode(ids[: out.consumed])
    assert used.startswith(out.text)
    if out.stopped and out.consumed:
        assert len(load().decode(ids[: out.consumed - 1])) <= len(out.text)


@pytest.mark.parametrize("sentencepiece", [False, True])
def test_a_character_comes_out_whole(sentencepiece: bool) -> None:
    out = TextStream(load(sentencepiece))
    pieces = [out.push([token]) for token in plain(SMILES, sentencepiece)]
    assert [piece for piece in pieces if piece] == list(SMILES)


def test_invalid_bytes_are_held_for_at_most_one_character() -> None:
    vocabulary = load()._backend.get_vocab()
    bad = {0xF0: vocabulary["ð"], 0xFF: vocabulary["ÿ"]}
    out = TextStream(load())
    assert out.push([bad[0xFF]] * 5) == "\ufffd" * 5
    assert out.push([bad[0xF0]]) == ""
    assert out.push([bad[0xF0]]) == "\ufffd"
    assert out.push(plain("a")) == "\ufffda"
    assert out.push([bad[0xF0]]) == ""
    assert out.finish() == "\ufffd"


@pytest.mark.parametrize("sentencepiece", [False, True])
def test_spaces_at_the_start(sentencepiece: bool) -> None:
    for text in (" the hen", "the hen", "  the"):
        ids = plain(text, sentencepiece)
        assert stream(ids, [1, 2], sentencepiece=sentencepiece).text == load(sentencepiece).decode(ids) == text


@pytest.mark.parametrize(
    ("stops", "text"),
    [(("own fox",), "the quick br"), (("x", "own"), "the quick br"), (("",), "the quick brown fox"), (("t",), "")],
)
def test_stop_over_tokens(stops: tuple[str, ...], text: str) -> None:
    ids = plain("the quick brown fox")
    assert stream(ids, list(range(len(ids))), stops).text == text


def test_text_before_a_stop_arrives_at_once() -> None:
    out = TextStream(load(), ["own fox"])
    assert "".join(out.push([token]) for token in plain("the qu")) == "the qu"
    assert out.push(plain(" own")) == " "
    assert out.push(plain("x")) == "ownx"


def test_held_text_is_flushed() -> None:
    out = TextStream(load(), ["cdX"])
    assert out.push(plain("abcd")) == "ab"
    assert out.finish() == "cd"
    assert (out.stopped, out.consumed) == (False, 4)


def test_the_first_complete_stop_wins() -> None:
    assert stream(plain("xabcd"), [], ("abcd", "bc")).text == "xa"
    assert stream(plain("xabcd"), [], ("bc", "abc")).text == "x"
    assert stream(plain("?abc?abc?"), [], ("c?abc?",)).text == "?ab"


def test_a_special_token_stops_by_id() -> None:
    ids = [*plain("the e"), 3, *plain("fox")]
    out = stream(ids, [2], ("<|im_end|>", "en"))
    assert (out.text, out.stopped, out.consumed) == ("the e", True, len(plain("the e")))
    assert stream([*plain("fox"), 1], []).text == "fox"


def test_a_special_token_stops_by_its_letters_too() -> None:
    letters = [i for part in ("<", "|im_end|>") for i in plain(part)]
    assert stream([*plain("the"), *letters], [], ("<|im_end|>",)).text == "the"


def test_consumed_ends_with_the_text() -> None:
    ids = plain("a fox and")
    out = TextStream(load(), ["x a"])
    assert out.push(ids) + out.finish() == "a fo"
    assert load().decode(ids[: out.consumed]) == "a fox"
    assert out.push(plain("more")) == ""
    assert out.consumed < len(ids)


def test_the_work_per_token_does_not_grow() -> None:
    out = TextStream(load(), ["never this"])
    block = plain("the fox and the owl ") * 50
    for _ in range(200):
        out.push(block)
    assert len(out._held) < 10
    assert len(out._starts) < 10
