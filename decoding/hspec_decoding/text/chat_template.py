"""A model's chat template: Jinja source from a stranger, rendered in a sandbox around what was said so far.

It renders what transformers renders, without importing it. A user's text that spells a control token, such as
`<|im_end|>`, stays text: the rendering comes back in pieces, cut inside every such spelling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from hspec_profiles.errors import HspecError

Message = dict[str, str]  # role and content


class ChatTemplate:
    """One template with the special tokens' texts it may write and the control strings a user may not."""

    def __init__(self, source: str, roles: Mapping[str, str], controls: Sequence[str]) -> None:
        self._source = source
        self._roles = dict(roles)
        longer = sorted((text for text in controls if len(text) > 1), key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, longer))) if longer else None

    def render(self, messages: Sequence[Message]) -> list[str]:
        """The prompt up to where the assistant speaks, as pieces to be tokenized one by one and joined.

        A template that refuses or drops a system message, which comes first, gets it at the head of the one after it.
        Raises HspecError with the template's own message when it refuses the others too.
        """
        mark = _unused(self._source + "".join(message["content"] for message in messages))
        cut = [{**message, "content": self._cut(message["content"], mark)} for message in messages]
        text = None
        if len(cut) > 1 and cut[0]["role"] == "system":
            system, after, *rest = cut
            text = self._with_system(cut)
            cut = [{**after, "content": f"{system['content']}\n\n{after['content']}"}, *rest]
        return (self._fill(cut) if text is None else text).split(mark)

    def _with_system(self, messages: list[Message]) -> str | None:
        """The rendering with the system text in a message of its own, None where the template takes none."""
        try:
            text = self._fill(messages)
        except HspecError:
            return None
        return text if messages[0]["content"].strip() in text else None

    def _cut(self, text: str, mark: str) -> str:
        """The text with `mark` after the first character of every control string, overlapping ones too."""
        parts, start, at = [], 0, 0
        while self._controls and (found := self._controls.search(text, at)):
            at = found.start() + 1
            parts.append(text[start:at])
            start = at
        return mark.join([*parts, text[start:]])

    def _fill(self, messages: list[Message]) -> str:
        try:
            return self._compiled.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._roles
            )
        except Exception as error:  # whatever a stranger's template raises
            raise _refusal(error) from None

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(
            raise_exception=_raise,
            strftime_now=_now,
            namespace=_Namespace,
            dict=_dict,
        )
        return environment.from_string(self._source)


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks words to train on; here it prints what is inside."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's namespace without names such as `__class__`, which reach into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may store `self`
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} is not allowed")


def _unused(text: str) -> str:
    """A private-use character that the text does not hold."""
    there = set(text)
    return next(mark for mark in map(chr, range(0xF0000, 0x10FFFE)) if mark not in there)


def _refusal(error: Exception) -> HspecError:
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return HspecError(f"the model's chat template fails: {reason}", "`--raw` sends the prompt without it")


def _raise(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """A function, because the class itself would lend its methods to the template."""
    return dict(*args, **kwargs)


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
