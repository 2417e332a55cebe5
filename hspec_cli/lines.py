"""Prompts as lines of JSON: read in a thread of their own, each checked by itself."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from io import UnsupportedOperation
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from hspec_cli.words import real, whole
from hspec_decoding.text.chat_template import Message
from hspec_profiles.errors import UsageError

if TYPE_CHECKING:
    from hspec_cli.run import Run

NUMBERS: Mapping[str, Callable[[str], float]] = {
    "temperature": real("temperature", 0),
    "top_p": real("top_p", 0, 1),
    "top_k": whole("top_k", 0),
    "min_p": real("min_p", 0, 1),
    "seed": whole("seed", 0, 2**63 - 1),
    "max_tokens": whole("max_tokens", 1),
}
FIELDS = ("id", "prompt", "messages", *NUMBERS, "stop")
ROLES = ("system", "user", "assistant")
SHOWN = 60  # characters of a value in a message


class Lines:
    """Lines of standard input that are not blank, with their numbers, read to its end as they come.

    They are taken off the pipe whether or not there is room to decode them, so that whoever writes all of them before
    it reads an answer does not wait for ever.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[int, bytes] | OSError | None] = SimpleQueue()
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def take(self, wait: bool) -> tuple[int, bytes] | None:
        """The next line; None where none is there yet, or, asked to wait, where none will come. Raises OSError."""
        if self._ended:
            return None
        try:
            line = self._queue.get(wait)
        except Empty:
            return None
        if isinstance(line, OSError):
            raise line
        self._ended = line is None
        return line

    def _read(self) -> None:
        try:
            for number, line in enumerate(_stdin(), 1):
                if line.strip():
                    self._queue.put((number, line))
            self._queue.put(None)
        except OSError as failure:
            self._queue.put(failure)


def _stdin() -> Iterable[bytes]:
    """Standard input by a reader of its own: the interpreter, as it ends, would wait for one that it knows."""
    if sys.stdin is None or sys.stdin.closed:
        return ()
    try:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    except UnsupportedOperation:  # no file of the system
        return sys.stdin.buffer


@dataclass(frozen=True)
class Line:
    """One prompt, text or what was said so far, and the run that it asks for."""

    run: Run
    prompt: str | list[Message]


def fields(line: bytes) -> dict[str, Any]:
    """The object in a line. Raises UsageError."""
    try:
        made = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as wrong:
        raise UsageError(f"not valid UTF-8 at byte {wrong.start:,}") from None
    except (ValueError, RecursionError) as wrong:
        raise UsageError(f"not JSON: {str(wrong).split(': line')[0]}") from None
    if not isinstance(made, dict):
        raise UsageError(f"not a JSON object: {_shown(made)}")
    return {name: value for name, value in made.items() if value is not None}


def named(made: Mapping[str, Any], number: int) -> str | int:
    """The `id` of a line, else its number. Raises UsageError."""
    name = made.get("id", number)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise UsageError(f"`id` must be text or a whole number, got {_shown(name)}")
    return name


def parse(made: Mapping[str, Any], run: Run) -> Line:
    """What a line asks for, of a run that says what all lines have in common. Raises UsageError."""
    unknown = [name for name in made if name not in FIELDS]
    if unknown:
        raise UsageError(f"unknown field `{unknown[0]}`", "fields are " + ", ".join(FIELDS))
    own: dict[str, Any] = {name: _number(name, made[name]) for name in NUMBERS if name in made}
    if "stop" in made:
        own["stop"] = [made["stop"]] if isinstance(made["stop"], str) else made["stop"]
        if not isinstance(own["stop"], list) or not all(isinstance(text, str) and text for text in own["stop"]):
            raise UsageError(f"`stop` must be text or a list of texts, none empty, got {_shown(made['stop'])}")
    return Line(replace(run, **own), _prompt(made))


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"`{name}` must be a number, got {_shown(value)}")
    return NUMBERS[name](json.dumps(value))


def _prompt(made: Mapping[str, Any]) -> str | list[Message]:
    if ("prompt" in made) == ("messages" in made):
        raise UsageError("a line needs `prompt` or `messages`" + ", not both" * ("prompt" in made))
    if "messages" in made:
        return _messages(made["messages"])
    prompt = made["prompt"]
    if not isinstance(prompt, str):
        raise UsageError(f"`prompt` must be text, got {_shown(prompt)}")
    if not prompt.strip():
        raise UsageError("the prompt is empty")
    return prompt


def _messages(said: object) -> list[Message]:
    for message in said if isinstance(said, list) else ():
        known = isinstance(message, dict) and message.keys() == {"role", "content"}
        if not known or message["role"] not in ROLES or not isinstance(message["content"], str):
            raise UsageError(f"a message has a role ({', '.join(ROLES)}) and text as its content: {_shown(message)}")
    roles = [message["role"] for message in said] if isinstance(said, list) else []
    if roles[-1:] != ["user"] or "system" in roles[1:]:
        raise UsageError("`messages` must be a list that ends with the user's; the system's may come first")
    return cast(list[Message], said)


def _shown(value: object) -> str:
    """The beginning of a value, as JSON."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"
