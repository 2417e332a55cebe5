"""Sequences in the slots of a batch: those that are done leave, and waiting ones take their places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from hspec_decoding.events import Reason
from hspec_decoding.options import Request
from hspec_decoding.sequence import Text
from hspec_profiles.errors import UsageError

Take = Callable[[bool], Request | None]  # the next request; None where none is there now, or, asked to wait, ever will


@dataclass
class Running:
    """One sequence on its way."""

    request: Request
    text: Text
    limit: int  # tokens to generate, cut to the context
    generated: int = 0
    finished: Reason | Literal["left"] | None = None

    @classmethod
    def of(cls, request: Request, slot: int, context: int) -> Running:
        """The request in a slot with room for `context` tokens. Raises UsageError for what cannot be meant."""
        room = context - len(request.prompt)
        if not request.prompt or room < 1:
            raise UsageError(f"a prompt must have from 1 to {context - 1:,} tokens: {len(request.prompt):,}")
        if request.max_tokens < 1:
            raise UsageError(f"tokens to generate must be 1 or more: {request.max_tokens}")
        key = request.sequence if request.key is None else request.key
        text = Text(slot, key, list(request.prompt), request.sampling)
        return cls(request, text, min(request.max_tokens, room))

    def take(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Commit tokens up to the first end of sequence or the limit; what was taken."""
        taken: list[int] = []
        for token in tokens:
            taken.append(token)
            if token in self.request.eos:
                self.finished = "eos"
            elif self.generated + len(taken) == self.limit:
                self.finished = "length" if self.limit == self.request.max_tokens else "context"
            if self.finished:
                break
        self.text.commit(taken)
        self.generated += len(taken)
        return tuple(taken)


@dataclass
class Totals:
    """Tokens of sequences that gave their slot to another."""

    prompt: int = 0
    generated: int = 0

    def add(self, run: Running) -> None:
        """Count one that left."""
        self.prompt += len(run.request.prompt)
        self.generated += run.generated


def free(runs: Sequence[Running], size: int) -> list[int]:
    """Slots that a request could take: of those that finished, and those not used so far."""
    return [slot for slot in range(size) if slot >= len(runs) or runs[slot].finished]


def nobody(wait: bool) -> Request | None:  # noqa: ARG001
    """No more requests."""
    return None


def waiting(take: Take, size: int) -> list[Request]:
    """At most `size` requests that are there now, and at least one unless there are no more."""
    found: list[Request] = []
    while len(found) < size and (request := take(not found)) is not None:
        found.append(request)
    return found
