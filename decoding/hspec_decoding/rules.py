"""The two rules by which a verifier checks drafted tokens, each with its randomness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from hspec_decoding.graphs import Ahead, Clock
from hspec_decoding.sampling import Draws, accept, agree, probabilities
from hspec_decoding.sequence import Text
from hspec_decoding.tree import Tree

if TYPE_CHECKING:
    from hspec_decoding.ranks import Ranks


@dataclass
class Draft:
    """Tokens proposed after a text; under the rejection rule `laws[i]` [V] is the law that token i was drawn from.

    With `ahead` the tokens only stand for those that a device is choosing, until a model has checked them or `wait` is
    called; they may then be fewer. With `tree` the tokens are its nodes, of which the last verifier leaves a branch.
    """

    tokens: list[int]
    laws: list[Tensor] = field(default_factory=list)
    ahead: Ahead | None = None
    tree: Tree | None = None

    @property
    def rows(self) -> int:
        """Rows of a pass that checks it, without the root's."""
        return len(self.tree.tokens if self.tree else self.tokens)

    def wait(self) -> None:
        """Have the tokens themselves."""
        if self.ahead:
            self.ahead.wait(Clock())


class Judge(Protocol):
    """What checks: a model that scores what follows a text."""

    def logits(self, texts: Sequence[Text], drafts: Sequence[Draft]) -> list[Tensor]:
        """For each text the logits [n + 1, V] after it and after each of its n drafted tokens."""
        ...

    def choices(self, texts: Sequence[Text], drafts: Sequence[Draft]) -> list[list[int]]:
        """For each text the coupled samples after it and after each of its n drafted tokens."""
        ...


class Chooser(Protocol):
    """How tokens are drawn and checked: one of the two rules, with its randomness."""

    def check(self, texts: Sequence[Text], drafts: Sequence[Draft], model: Judge) -> list[Draft]:
        """For each text the tokens that `model` makes of its draft of n tokens: from 1 to n + 1."""
        ...


@dataclass(frozen=True)
class Coupled:
    """The coupled rule: every level draws with the noise of the position."""

    def check(self, texts: Sequence[Text], drafts: Sequence[Draft], model: Judge) -> list[Draft]:
        chosen = model.choices(texts, drafts)
        return [Draft(agree(draft.tokens, own)) for draft, own in zip(drafts, chosen, strict=True)]


@dataclass(frozen=True)
class Rejection:
    """The rejection rule: every level hands up the laws that its tokens were drawn from."""

    draws: dict[int, Draws]  # by slot
    ranks: Ranks | None = None

    def check(self, texts: Sequence[Text], drafts: Sequence[Draft], model: Judge) -> list[Draft]:
        checked = []
        for text, draft, rows in zip(texts, drafts, model.logits(texts, drafts), strict=True):
            target = list(probabilities(rows, text.sampling))
            laws = [law.to(rows.device) for law in draft.laws]
            if self.ranks is None or not self.ranks.rank:
                tokens = accept(draft.tokens, laws, target, self.draws[text.slot])
            else:
                tokens = []
            if self.ranks:
                count, *told = self.ranks.same([len(tokens), *tokens, *[0] * (len(draft.tokens) + 1 - len(tokens))])
                tokens = told[:count]
            checked.append(Draft(tokens, target[: len(tokens)]))
        return checked


class NonFinite(Exception):
    """The target's logits are no numbers."""
