"""`hspec run`: answer one prompt, or many."""

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from typer import Argument, Option

from hspec_cli.contradictions import check
from hspec_cli.placement import GpuLayers, KvDevice, OffloadKind, Ram, Reserve, Vram, place_option
from hspec_cli.words import Command, choice, real, tokens_or_share, whole
from hspec_decoding.stack import METHODS, approximate
from hspec_decoding.stack import parse as parse_levels
from hspec_profiles.errors import UsageError

RULES = ("coupled", "rejection")
SELECTIONS = ("verify-fed", "paper")
DTYPES = ("auto", "float32", "bfloat16", "float16")
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

prompt_option, model_option, level_option, sampling_option, output_option = (
    partial(Option, rich_help_panel=heading) for heading in ("Prompt", "Model", "Speculation", "Sampling", "Output")
)

EXAMPLES = """\
Examples:
  hspec run "Why is the sky blue?"
  hspec run "Summarize this report" < report.txt
  hspec run -m llama2-7b-128k --method triforce -f report.txt "Summarize it" --stats
  hspec run -m llama2-7b-128k --method triforce --offload < report.txt
  git diff | hspec run -m ./my-model "Write a commit message" --temp 0.7 --seed 1 --json
  hspec run --jsonl --unordered < prompts.jsonl > answers.jsonl

Piped text comes first, then files, then the PROMPT. Exit codes: 0 done, 1 failed, 2 usage,
3 does not fit, 130 interrupted, 141 the reader of a pipe went away."""


def device_name(word: str) -> str:
    """A parser of device names."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", word):
        raise UsageError(f"`--device` must be auto, cpu, cuda or cuda:N, got '{word}'")
    return word


def nodes(word: str) -> int:
    """A parser of tree sizes; off is none."""
    return 0 if word == "off" else whole("--tree", 1, 63)(word)


@dataclass(frozen=True)
class Run(Command):
    """Answer one prompt: PROMPT, text on standard input, or both; or many of them, with `--jsonl`."""

    prompt: Annotated[
        str | None,
        Argument(metavar="PROMPT", help="What to ask, after the piped text; `-` is standard input itself."),
    ] = None
    file: Annotated[
        list[str] | None,
        prompt_option("--file", "-f", metavar="FILE", help="Add a file's text (repeatable)."),
    ] = None
    system: Annotated[str | None, prompt_option("--system", "-s", metavar="TEXT", help="System prompt.")] = None
    raw: Annotated[
        bool,
        prompt_option("--raw", help="No chat template: the model continues the text as it is."),
    ] = False
    jsonl: Annotated[
        bool,
        prompt_option(
            "--jsonl",
            help='Answer many: a JSON object a line on standard input, {"prompt": …} or {"messages": […]}, maybe with '
            "id, temperature, top_p, top_k, min_p, seed, max_tokens, stop; one a line comes back.",
        ),
    ] = False
    unordered: Annotated[
        bool, prompt_option("--unordered", help="Answers of `--jsonl` as they are finished, not in order.")
    ] = False
    batch: Annotated[
        int | None,
        prompt_option(
            "--batch",
            parser=whole("--batch", 1, 512),
            metavar="N",
            help="Lines of `--jsonl` decoded at a time.  [default: what memory allows, at most 32]",
        ),
    ] = None
    model: Annotated[
        str,
        model_option(
            "--model",
            "-m",
            metavar="MODEL",
            envvar="HSPEC_MODEL",
            help="An alias (`hspec models`), a directory, a GGUF file or a Hugging Face id.",
        ),
    ] = "smollm2-135m"
    ctx: Annotated[
        int | None,
        model_option(
            "--ctx",
            "-c",
            parser=whole("--ctx", 1),
            metavar="TOKENS",
            help="Context to make room for.  [default: prompt and -n, at most what the model holds]",
        ),
    ] = None
    dtype: Annotated[
        str,
        model_option(
            "--dtype",
            parser=choice("--dtype", DTYPES, SHORT_DTYPES),
            metavar="TYPE",
            envvar="HSPEC_DTYPE",
            help="Type of weights and cache: auto, float32, bfloat16, float16 (fp32, bf16, fp16).",
        ),
    ] = "auto"
    device: Annotated[
        str,
        model_option(
            "--device", parser=device_name, metavar="DEVICE", envvar="HSPEC_DEVICE", help="auto, cpu, cuda or cuda:N."
        ),
    ] = "auto"
    gpus: Annotated[
        int | None,
        model_option(
            "--gpus",
            parser=whole("--gpus", 1, 64),
            metavar="N",
            help="GPUs that share the model.  [default: what is fastest by `hspec profile`]",
        ),
    ] = None
    ranks: Annotated[
        int | None,
        model_option(
            "--ranks",
            parser=whole("--ranks", 1, 64),
            metavar="N",
            help="The same with processes that may share a GPU or the CPU: to try things out.",
        ),
    ] = None
    offline: Annotated[
        bool,
        model_option("--offline", envvar="HSPEC_OFFLINE", help="Never use the network."),
    ] = False
    trust_remote_code: Annotated[
        bool,
        model_option(
            "--trust-remote-code", help="Accepted as elsewhere, though hspec never runs the code of a model repository."
        ),
    ] = False
    offload: Annotated[
        bool, place_option("--offload", help="Keep in RAM, or on the disk, what the GPU has no room for.")
    ] = False
    offload_kind: OffloadKind = None
    vram: Vram = None
    ram: Ram = None
    gpu_layers: GpuLayers = None
    kv_device: KvDevice = None
    reserve: Reserve = None
    plan: Annotated[
        str | None,
        place_option("--plan", metavar="FILE", help="Put everything where `hspec plan --json > FILE` says."),
    ] = None
    method: Annotated[
        str,
        level_option(
            "--method",
            parser=choice("--method", tuple(METHODS)),
            metavar="METHOD",
            help="auto (what measures fastest: TriForce, its variants, plain decoding), triforce, chimera (trained "
            "heads: `hspec train chimera`), autoregressive, tidal (APPROXIMATE: TidalDecode, which leaves keys out) or "
            "tidal-lossless (verified).",
        ),
    ] = "auto"
    lossless: Annotated[
        bool, level_option("--lossless", help="With --method tidal: the whole model verifies, and the text is its own.")
    ] = False
    levels: Annotated[
        str | None,
        level_option(
            "--levels",
            metavar="LEVELS",
            help="The level stack itself, cheapest first: 'ngram > target(retrieval:4096, w=nf4) > target(full)'.",
        ),
    ] = None
    rule: Annotated[
        str,
        level_option(
            "--rule", parser=choice("--rule", RULES), metavar="RULE", help="Acceptance rule: coupled or rejection."
        ),
    ] = "coupled"
    select: Annotated[
        str,
        level_option(
            "--select",
            parser=choice("--select", SELECTIONS),
            metavar="WAY",
            help="What the retrieval cache holds: verify-fed (refreshed by every target pass) or paper.",
        ),
    ] = "verify-fed"
    exact: Annotated[
        bool,
        level_option(
            "--exact/--no-exact",
            help="One fixed shape of work, so that every method prints the same text to the last bit.",
        ),
    ] = True
    draft_model: Annotated[
        str | None,
        level_option(
            "--draft-model",
            "-md",
            metavar="MODEL",
            envvar="HSPEC_DRAFT_MODEL",
            help="Small model with the same vocabulary, or none. Default: the alias's own, if it has one.",
        ),
    ] = None
    budget: Annotated[
        Any,
        level_option(
            "--budget",
            parser=tokens_or_share("--budget"),
            metavar="TOKENS",
            help="Tokens that a retrieval cache may hold or a tidal layer read, or a share of the context: 5%.",
        ),
    ] = None
    correct: Annotated[
        int | None,
        level_option(
            "--correct",
            parser=whole("--correct", 0),
            metavar="TOKENS",
            help="With --method tidal, compute the keys of decoded tokens densely again after so many; 0: never.  "
            "[default: 64]",
        ),
    ] = None
    heads: Annotated[
        str | None,
        level_option("--heads", metavar="DIR", help="Chimera's heads. Default: those kept or shipped for the model."),
    ] = None
    tree: Annotated[
        int | None,
        level_option(
            "--tree",
            parser=nodes,
            metavar="NODES",
            help="Nodes of Chimera's trees, 1 to 63, or off for chains. Default: adapted while it runs.",
        ),
    ] = None
    gamma: Annotated[
        int | None,
        level_option(
            "--gamma",
            "--num-draft-tokens",
            parser=whole("--gamma", 1, 63),
            metavar="TOKENS",
            help="Tokens proposed per block, 1 to 63. Default: adapted while it runs.",
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        sampling_option(
            "--max-tokens",
            "-n",
            parser=whole("--max-tokens", 1),
            metavar="TOKENS",
            help="Most tokens of the answer.  [default: 512]",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        sampling_option(
            "--temp",
            "--temperature",
            parser=real("--temp", 0),
            metavar="T",
            help="0 is greedy. Default of this and the next two: the model's generation config, else greedy.",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        sampling_option(
            "--top-p", parser=real("--top-p", 0, 1), metavar="P", help="Keep the likeliest tokens up to mass P."
        ),
    ] = None
    top_k: Annotated[
        int | None,
        sampling_option(
            "--top-k", parser=whole("--top-k", 0), metavar="K", help="Keep the K likeliest tokens; 0: all."
        ),
    ] = None
    min_p: Annotated[
        float | None,
        sampling_option(
            "--min-p", parser=real("--min-p", 0, 1), metavar="P", help="Keep tokens with P times the best's mass."
        ),
    ] = None
    seed: Annotated[
        int,
        sampling_option(
            "--seed", parser=whole("--seed", 0, 2**63 - 1), metavar="N", help="The same seed gives the same text."
        ),
    ] = 0
    id: Annotated[
        str | None,
        sampling_option(
            "--id", metavar="ID", help="Draw as the `--jsonl` line of this id does (or of this number, without one)."
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        sampling_option("--stop", metavar="TEXT", help="End the answer before this text (repeatable)."),
    ] = None
    json: Annotated[
        bool,
        output_option(
            "--json", help="Print one JSON document instead of streaming; with `--jsonl`, a summary as the last line."
        ),
    ] = False
    dashboard: Annotated[
        bool, output_option("--dashboard", help="Watch a live view: text, speed, levels, memory, layers.")
    ] = False
    record: Annotated[
        str | None,
        output_option(
            "--record", metavar="FILE", help="Write the run's events and its text as JSON lines, for `hspec replay`."
        ),
    ] = None
    stats: Annotated[bool, output_option("--stats", help="Add a table of the levels to stderr.")] = False
    quiet: Annotated[bool, output_option("--quiet", "-q", help="Say nothing but errors.")] = False
    verbose: Annotated[bool, output_option("--verbose", "-v", help="Say more on stderr.")] = False
    debug: Annotated[bool, output_option("--debug", help="Show tracebacks.")] = False

    def execute(self) -> int:
        """Print the answer; 0, or 130 when interrupted; 1 where a line of many failed. Raises HspecError for others."""
        check(self)
        from hspec_cli.launch import carry_out

        return carry_out(replace(self, method="tidal-lossless") if self.lossless and self.method == "tidal" else self)

    @property
    def approximate(self) -> bool:
        """Whether the text is only nearly the model's own."""
        return approximate(parse_levels(self.levels)) if self.levels else self.method == "tidal" and not self.lossless

    def budget_of(self, context: int) -> int | None:
        """Tokens of the budget that was asked for."""
        return max(1, round(self.budget * context)) if isinstance(self.budget, float) else self.budget

    @property
    def uses_draft(self) -> bool:
        """Whether a draft model, where there is one, has a part in the levels."""
        if self.levels is None:
            return self.method in ("auto", "triforce")
        return any(level.name == "draft" for level in parse_levels(self.levels))

    @property
    def uses_chimera(self) -> bool:
        """Whether the levels begin with Chimera's heads."""
        if self.levels is None:
            return self.method == "chimera"
        return parse_levels(self.levels)[0].name == "chimera"
