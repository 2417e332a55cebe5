"""`hspec bench`: the methods side by side on this host."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from typer import Option

from hspec_cli.bench.suite import MODEL as SUITE_MODEL
from hspec_cli.bench.suite import NAME as SUITE
from hspec_cli.placement import Ram, Vram, place_option
from hspec_cli.run import DTYPES, SHORT_DTYPES, device_name
from hspec_cli.words import Command, choice, real, whole
from hspec_decoding.stack import METHODS, parse
from hspec_profiles.errors import DoesNotFit, HspecError, UsageError

if TYPE_CHECKING:
    from hspec_cli.bench.defaults import Asked
    from hspec_cli.bench.records import Result
    from hspec_cli.voice import Voice

DIFFERS = 1  # exit code where a text is not plain decoding's
EXTRA = ("hf", "hf-offloaded", "one-row")
WAYS = (*METHODS, *EXTRA)
TEXTS = ("code", "prose")
EMBEDDED = "smollm2-135m"

Kind = TypeVar("Kind")

what_option, model_option, output_option = (
    partial(Option, rich_help_panel=heading) for heading in ("What to measure", "Model", "Output")
)

EXAMPLES = """\
Examples:
  hspec bench
  hspec bench --report bench.html --json > bench.json
  hspec bench -m llama3.1-8b --methods auto,triforce --contexts 4096,32768 --temps 0,0.6 -n 256 --trials 5
  hspec bench -m ./my-model --methods triforce,hf --prompt-file book.txt --contexts 8192
  hspec bench --suite triforce-paper -m llama2-7b-128k
  hspec bench --compare old.json new.json

Plain decoding is always among the methods; texts are compared with its own. Exit codes: 0 done,
1 failed or a text differs, 2 usage, 3 does not fit, 130 interrupted."""


def listed(flag: str, one: Callable[[str], Kind]) -> Any:
    """A parser of words with commas between them."""

    def parse(word: str) -> list[Kind]:
        words = [part.strip() for part in word.split(",") if part.strip()]
        if not words:
            raise UsageError(f"`{flag}` needs at least one value, got '{word}'")
        return list(dict.fromkeys(map(one, words)))

    return parse


@dataclass(frozen=True)
class Bench(Command):
    """Measure methods, contexts and temperatures beside plain decoding on this host."""

    methods: Annotated[
        Any,
        what_option(
            "--methods",
            parser=listed("--methods", choice("--methods", WAYS)),
            metavar="NAMES",
            help=f"With commas: {', '.join(WAYS)}; tidal is APPROXIMATE.  [default: triforce, and auto on a GPU]",
        ),
    ] = None
    levels: Annotated[
        list[str] | None,
        what_option("--levels", metavar="LEVELS", help="A level stack as a method of its own (repeatable)."),
    ] = None
    contexts: Annotated[
        Any,
        what_option(
            "--contexts",
            "-c",
            parser=listed("--contexts", whole("--contexts", 1)),
            metavar="TOKENS",
            help="Tokens of the prompts, with commas.  [default: what this host does in 3 minutes]",
        ),
    ] = None
    temps: Annotated[
        Any,
        what_option(
            "--temps",
            parser=listed("--temps", real("--temps", 0)),
            metavar="T",
            help="Temperatures, with commas.  [default: 0,0.6]",
        ),
    ] = None
    batch: Annotated[
        Any,
        what_option(
            "--batch",
            parser=listed("--batch", whole("--batch", 1, 1024)),
            metavar="N",
            help="Sequences decoded together, with commas.  [default: 1]",
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        what_option(
            "--max-tokens",
            "-n",
            parser=whole("--max-tokens", 2),
            metavar="TOKENS",
            help="Tokens to generate.  [default: by the speed of this host, 256 with --contexts]",
        ),
    ] = None
    trials: Annotated[
        int | None,
        what_option("--trials", parser=whole("--trials", 1), metavar="N", help="[default: by the speed of this host]"),
    ] = None
    fresh: Annotated[
        bool,
        what_option("--fresh", help="Read the prompt anew in every trial, not only in the first of each method."),
    ] = False
    text: Annotated[
        str,
        what_option(
            "--text", parser=choice("--text", TEXTS), metavar="KIND", help="Python's own: code or prose (its manual)."
        ),
    ] = "code"
    prompt_file: Annotated[
        str | None, what_option("--prompt-file", metavar="FILE", help="A text to cut prompts from instead.")
    ] = None
    suite: Annotated[
        str | None,
        what_option(
            "--suite",
            parser=choice("--suite", (SUITE,)),
            metavar="NAME",
            help=f"{SUITE}: the paper's settings, each row beside the published figure.",
        ),
    ] = None
    model: Annotated[
        str | None,
        model_option("--model", "-m", metavar="MODEL", envvar="HSPEC_MODEL", help="As for `hspec run`."),
    ] = None
    draft_model: Annotated[
        str | None,
        model_option("--draft-model", "-md", metavar="MODEL", envvar="HSPEC_DRAFT_MODEL", help="Small model, or none."),
    ] = None
    dtype: Annotated[
        str,
        model_option("--dtype", parser=choice("--dtype", DTYPES, SHORT_DTYPES), metavar="TYPE", envvar="HSPEC_DTYPE"),
    ] = "auto"
    device: Annotated[str, model_option("--device", parser=device_name, metavar="DEVICE", envvar="HSPEC_DEVICE")] = (
        "auto"
    )
    offline: Annotated[bool, model_option("--offline", envvar="HSPEC_OFFLINE", help="Never use the network.")] = False
    offload: Annotated[
        bool, place_option("--offload", help="Keep in RAM, or on the disk, what the GPU has no room for.")
    ] = False
    vram: Vram = None
    ram: Ram = None
    top_p: Annotated[
        float,
        what_option("--top-p", parser=real("--top-p", 0.01, 1), metavar="P", help="At temperatures above 0."),
    ] = 0.9
    seed: Annotated[int, what_option("--seed", parser=whole("--seed", 0, 2**63 - 1), metavar="N")] = 0
    json: Annotated[bool, output_option("--json", help="Print one JSON document instead of tables.")] = False
    csv: Annotated[bool, output_option("--csv", help="Print a CSV table instead.")] = False
    markdown: Annotated[bool, output_option("--markdown", help="Print Markdown tables instead.")] = False
    report: Annotated[
        str | None,
        output_option("--report", metavar="FILE.html", help="Write a page with plots too; it needs nothing else."),
    ] = None
    compare: Annotated[
        tuple[str, str] | None,
        output_option("--compare", metavar="OLD.json NEW.json", help="Tell what changed beyond the noise; no run."),
    ] = None
    quiet: Annotated[bool, output_option("--quiet", "-q", help="Say nothing but errors on stderr.")] = False
    debug: Annotated[bool, output_option("--debug", help="Show tracebacks.")] = False

    @property
    def target(self) -> str:
        """The model that was asked for, else the suite's, else the embedded one."""
        return self.model or (SUITE_MODEL if self.suite else EMBEDDED)

    @property
    def asked(self) -> Asked:
        """Cases as they were asked for."""
        from hspec_cli.bench.defaults import EFFORTS, TEMPERATURES, Asked

        contexts = tuple(self.contexts) if self.contexts else None
        new, trials = EFFORTS[0] if contexts else (None, None)
        return Asked(
            contexts,
            self.max_tokens or new,
            tuple(self.temps) if self.temps else TEMPERATURES if contexts else None,
            tuple(self.batch) if self.batch else (1,),
            self.trials or trials,
        )

    def execute(self) -> int:
        """Print the figures; 0, or 1 where a text that should be plain decoding's is not. Raises HspecError."""
        if sum((self.json, self.csv, self.markdown)) > 1:
            raise UsageError("`--json`, `--csv` and `--markdown` all say what to print", "give one of them")
        if self.compare:
            return self._compare(*self.compare)
        for levels in self.levels or ():
            parse(levels)
        if self.suite and (self.contexts or self.batch or self.temps or self.methods or self.levels):
            raise UsageError(f"`--suite {SUITE}` has contexts, batches, temperatures and methods of its own")
        self._check_report()
        return self._measure()

    def _check_report(self) -> None:
        """Raise before anything is measured where a report could not be written."""
        if self.report is None:
            return
        from hspec_cli.bench.report.drawing import check

        check()
        folder = Path(self.report).expanduser().resolve().parent
        if not folder.is_dir():
            raise UsageError(f"`--report {self.report}`: there is no folder `{folder}`")

    def _measure(self) -> int:
        from hspec_cli.answer import calm_libraries
        from hspec_cli.bench.session import Session
        from hspec_cli.failures import INTERRUPTED
        from hspec_cli.output import only_the_answer
        from hspec_cli.progress import progress
        from hspec_cli.voice import Voice

        voice = Voice(self.quiet)
        calm_libraries(self)  # type: ignore[arg-type]
        with only_the_answer(), progress(voice) as shown:
            result = Session(self, voice, shown).run()
        print(self._written(result), flush=True)
        self._report(result, voice)
        if result.interrupted:
            return INTERRUPTED
        for case, row in result.differing:
            where = row.difference.words if row.difference else ""
            print(f"error: {row.method}, {case.words}: the text is not plain decoding's: {where}", file=sys.stderr)
        if result.differing:
            return DIFFERS
        return 0 if any(row.trials for outcome in result.outcomes for row in outcome.rows) else DoesNotFit.exit_code

    def _written(self, result: Result) -> str:
        from hspec_cli.bench import document, table

        if self.json:
            return document.as_json(result)
        if self.csv:
            return document.as_csv(result)
        return document.as_markdown(result) if self.markdown else table.listing(result)

    def _report(self, result: Result, voice: Voice) -> None:
        if self.report is None:
            return
        from hspec_cli.bench.report.page import page

        try:
            Path(self.report).expanduser().write_text(page(result), "utf-8")
        except OSError as failure:
            raise HspecError(f"cannot write `{self.report}`: {str(failure.strerror).lower()}") from failure
        voice.line(f"report in {self.report}")

    def _compare(self, old: str, new: str) -> int:
        from hspec_cli.bench.compare_text import as_json, as_markdown, listing
        from hspec_cli.bench.document import load

        before, after = load(old), load(new)
        if self.csv:
            raise UsageError("`--compare` prints a table, `--json` or `--markdown`")
        made = as_json if self.json else as_markdown if self.markdown else listing
        print(made(before, after), flush=True)
        return 0
