"""The command line's words and the commands that they make."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import Annotated

import typer
from typer.main import get_command

from hspec_cli import __version__, words
from hspec_cli.bench.command import EXAMPLES as BENCH_EXAMPLES
from hspec_cli.bench.command import Bench
from hspec_cli.models import EXAMPLES as MODELS_EXAMPLES
from hspec_cli.models import Models
from hspec_cli.plan import EXAMPLES as PLAN_EXAMPLES
from hspec_cli.plan import Plan
from hspec_cli.profile import EXAMPLES as PROFILE_EXAMPLES
from hspec_cli.profile import Profile
from hspec_cli.replay import EXAMPLES as REPLAY_EXAMPLES
from hspec_cli.replay import Replay
from hspec_cli.run import EXAMPLES as RUN_EXAMPLES
from hspec_cli.run import Run
from hspec_cli.train import CHIMERA_EXAMPLES, DRAFT_EXAMPLES, Chimera, Draft

EXAMPLES = """\
Examples:
  hspec run "Why is the sky blue?"
  hspec run "Summarize this" < report.txt
  hspec profile
  hspec plan -m llama2-7b-128k --profile 2x-rtx-4090
  hspec bench
  hspec models"""

app = typer.Typer(rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})
words.add(app, "run", Run, epilog=RUN_EXAMPLES)
words.add(app, "profile", Profile, epilog=PROFILE_EXAMPLES)
words.add(app, "plan", Plan, epilog=PLAN_EXAMPLES)
words.add(app, "replay", Replay, epilog=REPLAY_EXAMPLES)
words.add(app, "bench", Bench, epilog=BENCH_EXAMPLES)
words.add(app, "models", Models, epilog=MODELS_EXAMPLES)
train = typer.Typer(rich_markup_mode=None, help="Train a draft for a model, from text that the model makes itself.")
words.add(train, "chimera", Chimera, epilog=CHIMERA_EXAMPLES)
words.add(train, "draft", Draft, epilog=DRAFT_EXAMPLES)
app.add_typer(train, name="train")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"hspec {__version__}")
        raise typer.Exit


@app.callback(epilog=f"\b\n{EXAMPLES}")
def _hspec(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run long-context language models on consumer GPUs: losslessly, and fast by hierarchical speculation."""


def parse(argv: list[str]) -> words.Command | int:
    """The command that `argv` asks for, or the exit code of a help text or a completion, which is then printed.

    Raises UsageError, or an exception of the parser's own with a `format_message`.
    """
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            parsed = get_command(app).main(args=argv or ["--help"], prog_name="hspec", standalone_mode=False)
    finally:
        print(said.getvalue(), end="", flush=True)
    return parsed if isinstance(parsed, words.Command) else int(parsed or 0)
