"""`hspec models`: the aliases, and what is already on this machine."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from hspec_cli.show import written
from hspec_cli.words import Command
from hspec_decoding.checkpoints.files import human

if TYPE_CHECKING:
    from hspec_decoding.checkpoints.hub import Alias, CachedModel

EXAMPLES = """\
Examples:
  hspec models
  hspec models --json
  hspec run -m llama3.1-8b "Why is the sky blue?\""""


@dataclass(frozen=True)
class Models(Command):
    """List the names that `hspec run -m` knows, and the models on this machine."""

    json: Annotated[bool, Option("--json", help="Print one JSON document.")] = False
    debug: Annotated[bool, Option("--debug", help="Show tracebacks.")] = False

    def execute(self) -> int:
        """Print the list; 0."""
        from hspec_decoding.checkpoints import hub

        aliases, cached = list(hub.ALIASES.values()), hub.cached()
        print(document(aliases, cached) if self.json else listing(aliases, cached), flush=True)
        return 0


def listing(aliases: Sequence["Alias"], cached: Sequence["CachedModel"]) -> str:
    """Both lists for people."""
    here = {model.name for model in cached if model.complete}
    known = table(
        ("ALIAS", "REPOSITORY", "DRAFT", "HERE", "ABOUT"),
        ((a.name, a.repo, a.draft or "-", "yes" if here & {a.name, a.repo} else "-", a.about) for a in aliases),
    )
    if not cached:
        return f"{known}\n\nNo model is on this machine yet; `hspec run -m ALIAS` brings one."
    stored = table(
        ("ON THIS MACHINE", "SIZE", "PLACE"),
        ((m.name, human(m.bytes) + (not m.complete) * ", incomplete", str(m.where)) for m in cached),
    )
    return f"{known}\n\n{stored}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Left-aligned columns, two spaces apart."""
    lines = [tuple(heads), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def document(aliases: Sequence["Alias"], cached: Sequence["CachedModel"]) -> str:
    """Both lists as JSON."""
    made: dict[str, Any] = {
        "aliases": [{"name": a.name, "repository": a.repo, "draft": a.draft, "about": a.about} for a in aliases],
        "cached": [{"name": m.name, "bytes": m.bytes, "path": str(m.where), "complete": m.complete} for m in cached],
    }
    return written(made)
