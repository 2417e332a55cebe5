"""Failures to words: the one place that says what went wrong, and with which exit code."""

from __future__ import annotations

import errno
import traceback

from hspec_cli import voice
from hspec_profiles.errors import HspecError

INTERRUPTED = 130
BROKEN_PIPE = 141


def report(failure: BaseException, *, debug: bool) -> int:
    """Say `failure` on stderr, with its traceback when `debug`, and return the exit code.

    1 failed, 2 usage, 3 does not fit, 130 interrupted, 141 the reader of a pipe went away, without a word.
    """
    if isinstance(failure, BrokenPipeError):
        return BROKEN_PIPE
    if debug:
        voice.write("".join(traceback.format_exception(failure)).rstrip())
    if isinstance(failure, KeyboardInterrupt) or type(failure).__name__ == "Abort":
        voice.write("hspec: interrupted")
        return INTERRUPTED
    message, hint, code = _words(failure)
    voice.write(f"error: {message}" + (f"\n\nhint: {hint}" if hint else ""))
    return code


def _words(failure: BaseException) -> tuple[str, str | None, int]:
    """One sentence, a hint and the exit code."""
    if isinstance(failure, HspecError):
        return failure.message, failure.hint, failure.exit_code
    if hasattr(failure, "format_message"):  # the parser's; its class moved between versions of typer
        return _usage(str(failure.format_message()))
    if type(failure).__name__ == "OutOfMemoryError":  # torch's, without importing torch
        return "GPU memory ran out", "a smaller `--ctx` or `-n` needs less; `--device cpu` needs none", 3
    if isinstance(failure, MemoryError):
        return "host memory ran out", "a smaller `--ctx` or `-n` needs less, a smaller model too", 3
    if isinstance(failure, OSError) and failure.strerror:
        where = f": `{failure.filename}`" if failure.filename else ""
        hint = (
            "free some space, or put the output and XDG_CACHE_HOME on another disk"
            if failure.errno == errno.ENOSPC
            else None
        )
        return f"{failure.strerror[0].lower()}{failure.strerror[1:]}{where}", hint, 1
    first = (str(failure).strip().splitlines() or ["no message"])[0]
    return f"internal: {type(failure).__name__}: {first}", "`--debug` shows where", 1


def _usage(text: str) -> tuple[str, str | None, int]:
    """The parser's message in our grammar."""
    text = " ".join(text.split()).rstrip(".")
    hint = "`hspec --help` and `hspec COMMAND --help` list what there is"
    if "unexpected extra argument" in text:
        hint = 'put the prompt in quotes: `hspec run "Why is the sky blue?"`'
    return text[:1].lower() + text[1:], hint, 2
