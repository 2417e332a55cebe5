"""The entry point: parse the words, carry out the command, put every failure into words.

It imports next to nothing by itself, so that Ctrl-C is in good hands from the first moment.
"""

from __future__ import annotations

import sys

from hspec_cli.interrupt import one_is_enough


def main(argv: list[str] | None = None) -> int:
    """Carry out one command line (without the program's name) and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    with one_is_enough():
        try:
            from hspec_cli.parser import parse

            command = parse(argv)
            return command if isinstance(command, int) else command.execute()
        except (Exception, KeyboardInterrupt) as failure:
            from hspec_cli.failures import report

            return report(failure, debug="--debug" in argv)


def entry() -> None:
    """The console script."""
    code = main()
    from hspec_cli.output import settle

    settle()
    sys.exit(code)
