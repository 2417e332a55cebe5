"""`hspec run`: answer one prompt."""

import re
from dataclasses import dataclass
from typing import Annotated

from typer import Argument, Option

from hspec_cli.words import Command, choice, real, whole
from hspec_decoding.stack import METHODS
from hspec_decoding.stack import parse as parse_levels
from hspec_profiles.errors import UsageError

RULES = ("coupled", "rejection")
SELECTIONS = ("verify-fed", "paper")
DTYPES = ("auto", "float32", "bfloat16", "float16")
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
MODEL, TEXT, SPECULATION, SAMPLING, OUTPUT = "Model", "Prompt", "Speculation", "Sampling", "Output"

EXAMPLES = """\
Examples:
  hspec run "Why is the sky blue?"
  hspec run "Summarize this report" < report.txt
  hspec run -m llama2-7b-128k --method triforce -f report.txt "Summarize it" --stats
  git diff | hspec run -m ./my-model "Write a commit message" --temp 0.7 --seed 1 --json

Piped text comes first, then files, then the PROMPT. Exit codes: 0 done, 1 failed, 2 usage,
3 does not fit, 130 interrupted, 141 the reader of a pipe went away."""


def device_name(word: str) -> str:
    """A parser of device names."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", word):
        raise UsageError(f"`--device` must be auto, cpu, cuda or cuda:N, got '{word}'")
    return word


@dataclass(frozen=True)
class Run(Command):
    """Answer one prompt: PROMPT, text on standard input, or both."""

    prompt: Annotated[
        str | None,
        Argument(metavar="PROMPT", help="What to ask, after the piped text; `-` is standard input itself."),
    ] = None
    file: Annotated[
        list[str] | None,
        Option("--file", "-f", metavar="FILE", rich_help_panel=TEXT, help="Add a file's text (repeatable)."),
    ] = None
    system: Annotated[
        str | None, Option("--system", "-s", metavar="TEXT", rich_help_panel=TEXT, help="System prompt.")
    ] = None
    raw: Annotated[
        bool,
        Option("--raw", rich_help_panel=TEXT, help="No chat template: the model continues the text as it is."),
    ] = False
    model: Annotated[
        str,
        Option(
            "--model",
            "-m",
            metavar="MODEL",
            envvar="HSPEC_MODEL",
            rich_help_panel=MODEL,
            help="An alias (`hspec models`), a directory, a GGUF file or a Hugging Face id.",
        ),
    ] = "smollm2-135m"
    ctx: Annotated[
        int | None,
        Option(
            "--ctx",
            "-c",
            parser=whole("--ctx", 1),
            metavar="TOKENS",
            rich_help_panel=MODEL,
            help="Context to make room for.  [default: prompt and -n, at most what the model holds]",
        ),
    ] = None
    dtype: Annotated[
        str,
        Option(
            "--dtype",
            parser=choice("--dtype", DTYPES, SHORT_DTYPES),
            metavar="TYPE",
            envvar="HSPEC_DTYPE",
            rich_help_panel=MODEL,
            help="Type of weights and cache: auto, float32, bfloat16, float16 (fp32, bf16, fp16).",
        ),
    ] = "auto"
    device: Annotated[
        str,
        Option(
            "--device",
            parser=device_name,
            metavar="DEVICE",
            envvar="HSPEC_DEVICE",
            rich_help_panel=MODEL,
            help="auto, cpu, cuda or cuda:N.",
        ),
    ] = "auto"
    offline: Annotated[
        bool,
        Option("--offline", envvar="HSPEC_OFFLINE", rich_help_panel=MODEL, help="Never use the network."),
    ] = False
    trust_remote_code: Annotated[
        bool,
        Option(
            "--trust-remote-code",
            rich_help_panel=MODEL,
            help="Accepted as elsewhere, though hspec never runs the code of a model repository.",
        ),
    ] = False
    method: Annotated[
        str,
        Option(
            "--method",
            parser=choice("--method", tuple(METHODS)),
            metavar="METHOD",
            rich_help_panel=SPECULATION,
            help="auto (TriForce, plain decoding where that is faster), triforce or autoregressive.",
        ),
    ] = "auto"
    levels: Annotated[
        str | None,
        Option(
            "--levels",
            metavar="LEVELS",
            rich_help_panel=SPECULATION,
            help="The level stack itself, cheapest first: 'ngram > target(retrieval) > target(full)'.",
        ),
    ] = None
    rule: Annotated[
        str,
        Option(
            "--rule",
            parser=choice("--rule", RULES),
            metavar="RULE",
            rich_help_panel=SPECULATION,
            help="Acceptance rule: coupled or rejection.",
        ),
    ] = "coupled"
    select: Annotated[
        str,
        Option(
            "--select",
            parser=choice("--select", SELECTIONS),
            metavar="WAY",
            rich_help_panel=SPECULATION,
            help="What the retrieval cache holds: verify-fed (refreshed by every target pass) or paper.",
        ),
    ] = "verify-fed"
    exact: Annotated[
        bool,
        Option(
            "--exact/--no-exact",
            rich_help_panel=SPECULATION,
            help="One fixed shape of work, so that every method prints the same text to the last bit.",
        ),
    ] = True
    draft_model: Annotated[
        str | None,
        Option(
            "--draft-model",
            "-md",
            metavar="MODEL",
            envvar="HSPEC_DRAFT_MODEL",
            rich_help_panel=SPECULATION,
            help="Small model with the same vocabulary, or none. Default: the alias's own, if it has one.",
        ),
    ] = None
    budget: Annotated[
        int | None,
        Option(
            "--budget",
            parser=whole("--budget", 1),
            metavar="TOKENS",
            rich_help_panel=SPECULATION,
            help="Tokens the retrieval cache may hold.",
        ),
    ] = None
    gamma: Annotated[
        int | None,
        Option(
            "--gamma",
            "--num-draft-tokens",
            parser=whole("--gamma", 1, 63),
            metavar="TOKENS",
            rich_help_panel=SPECULATION,
            help="Tokens proposed per block, 1 to 63. Default: adapted while it runs.",
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        Option(
            "--max-tokens",
            "-n",
            parser=whole("--max-tokens", 1),
            metavar="TOKENS",
            rich_help_panel=SAMPLING,
            help="Most tokens of the answer.  [default: 512]",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        Option(
            "--temp",
            "--temperature",
            parser=real("--temp", 0),
            metavar="T",
            rich_help_panel=SAMPLING,
            help="0 is greedy. Default of this and the next two: the model's generation config, else greedy.",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        Option(
            "--top-p",
            parser=real("--top-p", 0, 1),
            metavar="P",
            rich_help_panel=SAMPLING,
            help="Keep the likeliest tokens up to mass P.",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        Option(
            "--top-k",
            parser=whole("--top-k", 0),
            metavar="K",
            rich_help_panel=SAMPLING,
            help="Keep the K likeliest tokens; 0: all.",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        Option(
            "--min-p",
            parser=real("--min-p", 0, 1),
            metavar="P",
            rich_help_panel=SAMPLING,
            help="Keep tokens with P times the best's mass.",
        ),
    ] = None
    seed: Annotated[
        int,
        Option(
            "--seed",
            parser=whole("--seed", 0, 2**63 - 1),
            metavar="N",
            rich_help_panel=SAMPLING,
            help="The same seed gives the same text.",
        ),
    ] = 0
    stop: Annotated[
        list[str] | None,
        Option(
            "--stop",
            metavar="TEXT",
            rich_help_panel=SAMPLING,
            help="End the answer before this text (repeatable).",
        ),
    ] = None
    json: Annotated[
        bool, Option("--json", rich_help_panel=OUTPUT, help="Print one JSON document instead of streaming.")
    ] = False
    stats: Annotated[bool, Option("--stats", rich_help_panel=OUTPUT, help="Add a table of the levels to stderr.")] = (
        False
    )
    quiet: Annotated[bool, Option("--quiet", "-q", rich_help_panel=OUTPUT, help="Say nothing but errors.")] = False
    verbose: Annotated[bool, Option("--verbose", "-v", rich_help_panel=OUTPUT, help="Say more on stderr.")] = False
    debug: Annotated[bool, Option("--debug", rich_help_panel=OUTPUT, help="Show tracebacks.")] = False

    def execute(self) -> int:
        """Print the answer; 0, or 130 when interrupted. Raises HspecError for what fails."""
        self._check()
        from hspec_cli.answer import answer

        return answer(self)

    @property
    def uses_draft(self) -> bool:
        """Whether a draft model, where there is one, has a part in the levels."""
        if self.levels is None:
            return self.method != "autoregressive"
        return any(level.name == "draft" for level in parse_levels(self.levels))

    def _check(self) -> None:
        """Raise UsageError for words that contradict each other, before anything is read."""
        if self.levels is not None:
            parse_levels(self.levels)
        if self.levels is not None and self.method != "auto":
            raise UsageError("`--levels` and `--method` both name the level stack", "give one of them")
        if self.raw and self.system is not None:
            raise UsageError("`--system` needs the chat template that `--raw` turns off", "drop one of them")
        if "" in (self.stop or ()):
            raise UsageError("`--stop` must not be empty")
