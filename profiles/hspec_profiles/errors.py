"""What can go wrong, as a person reads it: one sentence, a hint, an exit code.

It lives in the lowest package so that every layer above can raise it; the command line prints it in one place.
"""


class HspecError(Exception):
    """A run that failed (exit 1): `message` is one sentence with the numbers, `hint` names what helps."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(HspecError):
    """A command that cannot be meant (exit 2)."""

    exit_code = 2


class DoesNotFit(HspecError):
    """A model, context or copy that some device or disk has no room for (exit 3)."""

    exit_code = 3


class LostRank(HspecError):
    """One of several processes that work together is gone (exit 1): whoever started them says so."""
