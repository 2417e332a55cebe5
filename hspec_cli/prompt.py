"""The prompt: piped text first, then files, a blank line, then the argument."""

from __future__ import annotations

import io
import re
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from hspec_cli.voice import Voice
from hspec_cli.words import as_text
from hspec_profiles.errors import UsageError

NOTICE = 3.0  # seconds of a silent pipe before a line says what is waited for
PATIENCE = 600.0  # seconds after which a pipe that never spoke is an error, when there is other text to use
EXAMPLES = 'try `hspec run "Why is the sky blue?"` or `hspec run "Summarize this" < report.txt`'


def read_prompt(argument: str | None, files: Sequence[str], voice: Voice) -> str:
    """The whole prompt as text. Raises UsageError when nothing but white space is there.

    Standard input is read to its end whenever it is not a terminal, as `llm` and `ollama` do. A pipe that
    says nothing is waited for: after NOTICE seconds a line tells so, after PATIENCE seconds it is an error
    where an argument or a file could stand alone. `-` asks for standard input by name, also at a terminal.
    """
    asked = argument == "-" or "-" in files
    words = "" if argument in (None, "-") else as_text(str(argument))
    piped = _stdin(asked, alone=bool(words.strip() or files), voice=voice)
    texts = [piped, *(_file(name, voice) for name in files if name != "-"), words]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise UsageError("the prompt is empty", EXAMPLES)
    return "\n\n".join(texts)


def _stdin(asked: bool, alone: bool, voice: Voice) -> str:
    """What standard input holds, "" where it is closed or a terminal that nobody asked for."""
    stream = sys.stdin
    if stream is None or stream.closed:
        return ""
    if stream.isatty() and not asked:
        if not alone:
            raise UsageError("no prompt was given", EXAMPLES)
        return ""
    if stream.isatty():
        voice.line("type the prompt, Ctrl-D ends it")
    elif not asked:
        _await(stream.buffer, alone, voice)
    return decode(stream.buffer.read(), "standard input", voice)


def _await(stream: BinaryIO, alone: bool, voice: Voice) -> None:
    """Return once `stream` has a byte or its end. Raises UsageError after PATIENCE if `alone`."""
    if _ready(stream, NOTICE):
        return
    voice.line("waiting for text on standard input; `< /dev/null` tells that there is none")
    if not _ready(stream, PATIENCE if alone else None):
        raise UsageError(
            f"no text came on standard input in {PATIENCE:.0f} s",
            "`< /dev/null` uses the other text alone, `-` waits as long as it takes",
        )


def _ready(stream: BinaryIO, seconds: float | None) -> bool:
    """Whether reading would not block, waiting up to `seconds`."""
    try:
        return bool(select.select([stream.fileno()], [], [], seconds)[0])
    except (io.UnsupportedOperation, ValueError):
        return True  # not a file of the system: it cannot be waited for


def _file(name: str, voice: Voice) -> str:
    """Text of the file `name`."""
    try:
        raw = Path(name).expanduser().read_bytes()
    except OSError as failure:
        raise UsageError(f"cannot read `{name}`: {str(failure.strerror).lower()}") from failure
    return decode(raw, f"`{name}`", voice)


def decode(raw: bytes, source: str, voice: Voice) -> str:
    """Text of `raw`: UTF-8 with bad bytes replaced, without byte-order mark, NUL and one last line end.

    What is not valid is noted once, with the offset of the first bad byte.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as wrong:
        voice.note(f"{source} is not valid UTF-8 at byte {wrong.start:,}; such bytes are read as U+FFFD")
        text = raw.decode("utf-8", "replace")
    if "\0" in text:
        voice.note(f"{source} holds {text.count(chr(0)):,} NUL bytes, which are left out")
    text = text.removeprefix("\ufeff").replace("\0", "")
    return re.sub(r"\r?\n\Z", "", text)
