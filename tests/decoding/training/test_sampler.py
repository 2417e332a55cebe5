"""The target's own text: it is what plain decoding says, with turns where a chat has them, and no endless loops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import tiny_engine
import torch

from hspec_decoding.model import Decoder
from hspec_decoding.options import Request
from hspec_decoding.sampling import Sampling
from hspec_decoding.text.tokens import Tokenizer
from hspec_decoding.training import corpus
from hspec_decoding.training.corpus import Corpus, Wanted, frequent
from hspec_decoding.training.sampler import Sampler
from hspec_decoding.training.target import checksum, said
from hspec_decoding.training.texts import TEMPERATURES, Prompt, Turns, prompts
from hspec_profiles.errors import HspecError

PLAIN = Turns((2,), (2,), (), (2,), frozenset(), frozenset())
CHAT = Turns((2,), (2, 3), (5, 6), (7,), frozenset({8, 9}), frozenset({9}))


def made(
    target: Decoder, turns: Turns, asked: list[Prompt], length: int, seed: int = 0
) -> tuple[list[list[int]], torch.Tensor]:
    sampler = Sampler(target, turns, len(asked), length)
    assert [*sampler.shard(asked, seed)] == [*range(1, length)]
    tokens, own = sampler.result()
    return tokens.tolist(), own


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_rows_are_what_plain_decoding_says(family: str) -> None:
    """Token for token, greedy and sampled by the same noise, behind prompts of different lengths."""
    target, length = tiny_engine.random_decoder(family), 140
    asked = [Prompt(tiny_engine.prompt(3 + 20 * n, n), t, True) for n, t in enumerate((0.0, 0.7, 1.0))]
    rows, own = made(target, PLAIN, asked, length, seed=4)
    engine = tiny_engine.engine("target(full)", target, context=256)
    for n, (row, prompt) in enumerate(zip(rows, asked, strict=True)):
        size = len(prompt.tokens)
        request = Request(prompt.tokens, length - size, sampling=Sampling(prompt.temperature, seed=4), sequence=n)
        assert row[:size] == [*prompt.tokens]
        assert row[size:] == tiny_engine.answer(engine, request)[0]
        assert own[n].tolist() == [False] * size + [True] * (length - size)


def test_turns_follow_each_other() -> None:
    """What ends a question is followed by the answer's header, what ends an answer by the next question's."""
    target = tiny_engine.random_decoder()
    chat = replace(CHAT, ends_question=frozenset(range(10, 40)), ends_answer=frozenset(range(10, 30)))
    asked = [Prompt((2, 3, 40 + n), 1.0, False) for n in range(16)]
    turns = 0
    for row, own in zip(*made(target, chat, asked, 100), strict=True):
        answering, at = False, 3
        while at < len(row):
            assert own[at]
            ends = chat.ends_answer if answering else chat.ends_question
            if row[at] in ends:
                script = chat.to_question if answering else chat.to_answer
                here = row[at + 1 : at + 1 + len(script)]
                assert here == [*script[: len(here)]]
                assert not own[at + 1 : at + 1 + len(script)].any()
                at += len(script)
                answering, turns = not answering, turns + 1
            at += 1
    assert turns > 16


def test_rows_that_begin_alike_ask_different_questions_and_answer_as_they_are_told() -> None:
    target = tiny_engine.random_decoder()
    chat = replace(CHAT, ends_question=frozenset(range(10, 40)))
    rows, own = made(target, chat, [Prompt((2, 3), 0.0, False)] * 8, 80)
    assert len({tuple(row[:6]) for row in rows}) == 8
    likeliest, greedy = said(target, torch.tensor(rows), ()).likeliest, 0
    for row, mine, top in zip(rows, own.tolist(), likeliest.tolist(), strict=True):
        end = next((n for n in range(2, 60) if row[n] in chat.ends_question), 80)
        answer = [n for n in range(end + 1, 80) if mine[n]]
        if 9 not in row[end:]:  # a single answer
            assert all(row[n] == top[n - 1] for n in answer)
            greedy += len(answer)
    assert greedy > 100


def test_a_row_that_loops_is_ended() -> None:
    target = tiny_engine.decoder(tiny_engine.config(), tiny_engine.stuck(tiny_engine.weights(tiny_engine.config()), 50))
    (row,), own = made(target, CHAT, [Prompt((2, 3), 0.0, True)], 300)
    stops = [n for n, token in enumerate(row) if token == 9]
    assert 64 < stops[0] < 130
    assert len(stops) > 1
    assert not own[0, stops].any()


def test_turns_are_read_from_the_chat_template(tmp_path: Path) -> None:
    tiny.tokenizer(tmp_path, eos="<|im_end|>")
    tokenizer = Tokenizer.load(tmp_path)
    turns = Turns.of(tokenizer)
    one = [*turns.opening, *tokenizer.encode("Why?")[1:], 3, *turns.to_answer]
    assert one == tokenizer.chat("Why?")
    assert turns.ends_question == turns.ends_answer == {3}
    tiny.tokenizer(tmp_path, template=None)
    without = Turns.of(Tokenizer.load(tmp_path))
    assert without == Turns((0,), (0,), (), (0,), frozenset(), frozenset({1}))


def test_prompts_are_of_all_kinds_and_repeat_by_their_seed() -> None:
    text = [*range(100, 300)]
    some = prompts(CHAT, [text], 400, 64, seed=1)
    assert some == prompts(CHAT, [text], 400, 64, seed=1)
    assert some != prompts(CHAT, [text], 400, 64, seed=2)
    bare = sum(prompt.tokens == CHAT.opening for prompt in some)
    plain = sum(prompt.answering for prompt in some)
    assert 200 < bare < 280
    assert 30 < plain < 100
    assert {prompt.temperature for prompt in some} == set(TEMPERATURES)
    assert all(
        prompt.tokens[-20:] == tuple(range(prompt.tokens[-20], prompt.tokens[-20] + 20))
        for prompt in some
        if len(prompt.tokens) > 26
    )


@pytest.fixture
def wanted() -> Wanted:
    return Wanted(checksum(tiny_engine.random_decoder()), 60 * 64, 30, 64, 3, "")


def test_text_is_made_once_and_taken_up_where_it_stopped(wanted: Wanted, tmp_path: Path) -> None:
    target, told = tiny_engine.random_decoder(), list[int]()

    def tell(done: int, total: int) -> None:
        assert total == wanted.tokens
        told.append(done)
        if len(told) == 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        corpus.make(tmp_path / "a", wanted, target, CHAT, [], tell)
    assert [path.name for path in sorted((tmp_path / "a").glob("*.safetensors"))] == ["text-0000.safetensors"]
    later = list[int]()
    resumed = corpus.make(tmp_path / "a", wanted, target, CHAT, [], lambda done, total: later.append(done))  # noqa: ARG005
    assert later[0] == 30 * 64 + 30
    whole = corpus.make(tmp_path / "b", wanted, target, CHAT, [], lambda done, total: None)  # noqa: ARG005
    assert torch.equal(resumed.tokens, whole.tokens)
    assert torch.equal(resumed.own, whole.own)
    other = Wanted(**{**vars(wanted), "seed": 4})
    with pytest.raises(HspecError, match="made with other settings: seed"):
        corpus.make(tmp_path / "a", other, target, CHAT, [], tell)
    (tmp_path / "b" / "text-0001.safetensors").write_bytes(b"short")
    with pytest.raises(HspecError, match=r"text-0001\.safetensors` cannot be read"):
        Corpus.read(tmp_path / "b", wanted)


def test_every_row_is_seen_once_a_pass_and_none_that_is_held_out() -> None:
    tokens = torch.arange(110, dtype=torch.int32)[:, None].expand(-1, 8)
    made = Corpus(tokens, torch.ones(110, 8, dtype=torch.bool), 0)
    held = [int(row) for batch in made.held_out(2, 64) for row in batch.tokens[:, 0]]
    assert held == [0, 50, 100]
    seen = [int(row) for step in range(107) for row in made.batch(step, 4).tokens[:, 0]]
    for turn in range(4):
        assert sorted(seen[107 * turn : 107 * (turn + 1)]) == [row for row in range(110) if row not in held]
    assert seen[:107] != seen[107:214]
    assert torch.equal(made.batch(5, 4).tokens, made.batch(5, 4).tokens)


def test_the_vocabulary_is_what_the_target_says_most() -> None:
    counts = torch.tensor([0, 5, 0, 9, 1, 0, 7])
    assert frequent(counts, 3, frozenset()).tolist() == [1, 3, 6]
    assert frequent(counts, 3, frozenset({5})).tolist() == [3, 5, 6]
    assert frequent(counts, 5, frozenset()).tolist() == [0, 1, 3, 4, 6]
