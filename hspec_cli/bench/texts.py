"""Real texts that every Python has, and prompts cut from them."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

from hspec_profiles.errors import UsageError

CODE, PROSE = "code", "prose"
ABOUT = {
    CODE: "source code of Python's standard library",
    PROSE: "prose of Python's own documentation",
}
LEAST = 64  # tokens of a text that prompts can be cut from
LETTERS = 6  # at most, of a token of such texts, on average

Encode = Callable[[str], list[int]]


def code() -> str:
    """Modules of the standard library, one after the other: 10 MB."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.name)
    return "\n\n".join(f"# {path.name}\n{path.read_text('utf-8', 'replace')}" for path in files)


def prose() -> str:
    """What `help()` says of the language: 0.5 MB of English."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read(kind: str, file: str | None) -> tuple[str, str]:
    """A text and what to call it. Raises UsageError for a file that cannot be read."""
    if file is None:
        return (prose() if kind == PROSE else code()), ABOUT[kind]
    try:
        return Path(file).expanduser().read_text("utf-8", "replace"), f"`{file}`"
    except OSError as failure:
        raise UsageError(f"cannot read `{file}`: {str(failure.strerror).lower()}") from failure


def tokens_of(text: str, wanted: int, encode: Encode) -> list[int]:
    """At least `wanted` tokens of the text's beginning, or all it has; no more of it is encoded than needed."""
    letters = wanted * LETTERS
    tokens = encode(text[:letters])
    return tokens if len(tokens) >= wanted or letters >= len(text) else encode(text)


def prompts(document: Sequence[int], context: int, batch: int) -> list[tuple[int, ...]]:
    """`batch` pieces of `context` tokens, from places spread over the document.

    Raises UsageError when it is too short to give different ones.
    """
    spare = len(document) - context
    if spare < batch - 1:
        several = f"{batch} different prompts" if batch > 1 else "a prompt"
        raise UsageError(
            f"the text has {len(document):,} tokens, {several} of {context:,} cannot be cut from it",
            "give a longer `--prompt-file`, or smaller `--contexts`",
        )
    step = min(context, spare // max(1, batch - 1)) if batch > 1 else 0
    return [tuple(document[n * step : n * step + context]) for n in range(batch)]
