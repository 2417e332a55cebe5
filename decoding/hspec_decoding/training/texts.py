"""What a target is asked to continue: the chat header of a user's turn alone, so that it makes up the question too
(pre-query sampling, Xu et al., arXiv 2406.08464), the same with an excerpt of a text, or an excerpt as it is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from hspec_decoding.text.tokens import Tokenizer

PLAIN, QUOTED = 0.15, 0.25  # share of rows that continue text as it is, and of those whose question begins with some
SHORTEST, LONGEST = 24, 192  # tokens of an excerpt
TEMPERATURES = (1.0, 0.7, 0.0, 1.0, 0.7, 0.0, 1.0, 0.7, 0.0, 1.0)  # by row: 40 %, 30 % and 30 % greedy


@dataclass(frozen=True)
class Turns:
    """Tokens around the turns of a chat: `opening` before the first question; what comes after the token that ends a
    question, and after the one that ends an answer. `start` is what a text begins with, perhaps nothing; without a chat
    template it is all there is.
    """

    start: tuple[int, ...]
    opening: tuple[int, ...]
    to_answer: tuple[int, ...]
    to_question: tuple[int, ...]
    ends_question: frozenset[int]
    ends_answer: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Turns:
        """Read from what the chat template puts around two different questions."""
        start = tuple(tokenizer.encode(""))
        if not tokenizer.has_chat:
            return cls(start, start, (), start, frozenset(), tokenizer.eos)
        one, other = tokenizer.chat("a"), tokenizer.chat("Zebra 7")
        opening, ending = _common(one, other), _common(one[::-1], other[::-1])[::-1]
        turn = next((n for n in reversed(range(len(opening))) if opening[n] in tokenizer.eos | {*ending[:1]}), -1)
        return cls(
            start=start,
            opening=tuple(opening),
            to_answer=tuple(ending[1:]),
            to_question=tuple(opening[turn + 1 :]),
            ends_question=tokenizer.eos | {*ending[:1]},
            ends_answer=tokenizer.eos,
        )

    @property
    def control(self) -> frozenset[int]:
        """Tokens that a draft must be able to say."""
        return self.ends_question | self.ends_answer


def _common(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """What two lists begin with."""
    same = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return list(one[:same])


@dataclass(frozen=True)
class Prompt:
    """What a row begins with, the temperature of its answers, and whether it is one of these that it goes on with."""

    tokens: tuple[int, ...]
    temperature: float
    answering: bool


def prompts(turns: Turns, texts: Sequence[Sequence[int]], rows: int, length: int, seed: int) -> list[Prompt]:
    """Beginnings of `rows` rows of `length` tokens, by the seed. `texts`: tokens to cut excerpts from."""
    dealt = random.Random(seed)
    usable = [text for text in texts if len(text) > SHORTEST]
    chat = bool(turns.to_answer)
    made = []
    for row in range(rows):
        kind = dealt.random()
        plain = not chat or kind < PLAIN
        start, temperature = list(turns.start if plain else turns.opening), TEMPERATURES[row % len(TEMPERATURES)]
        if usable and (plain or kind < PLAIN + QUOTED):
            text = dealt.choice(usable)
            most = min(LONGEST, length // 2, len(text) - 1)
            size = dealt.randint(min(SHORTEST, most), most)
            at = dealt.randrange(len(text) - size)
            start += text[at : at + size]
        elif plain:
            temperature = TEMPERATURES[0]  # rows that begin alike must not go on alike
        tokens = tuple(start[: length - 1]) or (dealt.choice(sorted(turns.control) or [0]),)
        made.append(Prompt(tokens, temperature, plain))
    return made
