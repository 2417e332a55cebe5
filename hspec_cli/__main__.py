"""`python -m hspec_cli` is `hspec`."""

from hspec_cli.main import entry

entry()
