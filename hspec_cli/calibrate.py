"""`hspec calibrate`: which layers of a model should read all keys under TidalDecode, found on texts, shown and kept."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from hspec_cli.run import DTYPES, SHORT_DTYPES, device_name
from hspec_cli.words import Command, choice, whole
from hspec_profiles.errors import UsageError

if TYPE_CHECKING:
    from hspec_cli.progress import Progress
    from hspec_cli.voice import Voice
    from hspec_decoding.calibrate import Found, Tried
    from hspec_decoding.checkpoints.checkpoint import Checkpoint
    from hspec_decoding.closed_loop import Heard
    from hspec_decoding.text.tokens import Tokenizer

LENGTH = {"cpu": 4096, "cuda": 32_768}  # tokens of a text
TEXTS = 3  # that nobody named: code, prose, records
SHOWN = 8  # rows of the table

EXAMPLES = """\
Examples:
  hspec calibrate -m qwen2.5-coder-1.5b
  hspec calibrate -m ./my-model --text book.txt --text code.py --tokens 32768
  hspec calibrate -m llama3.1-8b --layers 5 --json > calibration.json

Without --text the texts are Python's own sources and manual, and records to be found again.
`hspec run --method tidal` takes up by itself what was found."""


@dataclass(frozen=True)
class Calibrate(Command):
    """Find the layers that read all keys under TidalDecode, and the heads whose lists the others read; keep them."""

    model: Annotated[
        str, Option("--model", "-m", metavar="MODEL", envvar="HSPEC_MODEL", help="As for `hspec run`.")
    ] = "smollm2-135m"
    text: Annotated[
        list[str] | None, Option("--text", "-f", metavar="FILE", help="A text to calibrate on (repeatable).")
    ] = None
    tokens: Annotated[
        int | None,
        Option(
            "--tokens",
            parser=whole("--tokens", 1024),
            metavar="N",
            help="Tokens of each text.  [default: 4,096, on a GPU 32,768, at most what the model holds]",
        ),
    ] = None
    layers: Annotated[
        int,
        Option("--layers", parser=whole("--layers", 2), metavar="K", help="Layers that read all keys."),
    ] = 4
    dtype: Annotated[
        str,
        Option(
            "--dtype",
            parser=choice("--dtype", DTYPES, SHORT_DTYPES),
            metavar="TYPE",
            envvar="HSPEC_DTYPE",
            help="As for `hspec run`.",
        ),
    ] = "auto"
    device: Annotated[
        str,
        Option("--device", parser=device_name, metavar="DEVICE", envvar="HSPEC_DEVICE", help="As for `hspec run`."),
    ] = "auto"
    offline: Annotated[bool, Option("--offline", envvar="HSPEC_OFFLINE", help="Never use the network.")] = False
    json: Annotated[bool, Option("--json", help="Print one JSON document.")] = False
    quiet: Annotated[bool, Option("--quiet", "-q", help="Say nothing on stderr but errors.")] = False
    debug: Annotated[bool, Option("--debug", help="Show tracebacks.")] = False

    def execute(self) -> int:
        """Print what was found; 0. Raises HspecError for models and texts that cannot be calibrated on."""
        from hspec_cli.answer import calm_libraries
        from hspec_cli.output import only_the_answer
        from hspec_cli.progress import progress
        from hspec_cli.voice import Voice

        voice = Voice(self.quiet)
        calm_libraries(self)  # type: ignore[arg-type]
        with only_the_answer() as output, progress(voice) as shown:
            work = Work.of(self, voice, shown)
            found, seconds = work.done()
            kept, path = work.keep(found, seconds)
            shown.close()
            output.write(kept if self.json else listing(found, work, seconds, output.terminal) + "\n")
        voice.line(f"kept in {path}; `hspec run -m {self.model} --method tidal` takes it up")
        return 0


@dataclass(frozen=True)
class Work:
    """A model in memory-to-be and the texts to calibrate it on."""

    words: Calibrate
    shown: Progress
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    texts: dict[str, list[int]]  # tokens by name
    device: Any  # torch.device
    dtype: Any  # torch.dtype

    @classmethod
    def of(cls, words: Calibrate, voice: Voice, shown: Progress) -> Work:
        """Everything but the weights. Raises HspecError for what can be known before they are read."""
        from hspec_cli.prepare import Files
        from hspec_decoding.device import pick_device, pick_dtype
        from hspec_decoding.load import check_memory
        from hspec_offload.ask import Limits

        notes: list[str] = []
        device = pick_device(words.device, notes)
        dtype = pick_dtype(words.dtype, device)
        files = Files(words.offline, False, voice, shown)
        config = files.config(words.model)
        tokens = words.tokens or min(LENGTH[device.type], config.context)
        if tokens > config.context:
            raise UsageError(f"`--tokens` asks for {tokens:,}, `{words.model}` holds {config.context:,}")
        model = files.model(words.model)
        texts = read(words.text or [], tokens, model.tokenizer.encode)
        check_memory([config], sum(map(len, texts.values())), dtype, device, Limits())
        for note in notes:
            voice.note(note)
        return cls(words, shown, model.open(), model.tokenizer, texts, device, dtype)

    @property
    def length(self) -> int:
        """Tokens of the longest text."""
        return max(map(len, self.texts.values()))

    @property
    def budget(self) -> int:
        """Tokens that a sparse layer reads, as for a run of this length."""
        from hspec_decoding.build import tidal_budget

        return tidal_budget(self.length)

    def done(self) -> tuple[Found, float]:
        """Load the model and calibrate it; the seconds of the latter."""
        from hspec_cli.interrupt import check
        from hspec_decoding.calibrate import calibrate
        from hspec_decoding.load import load_decoder

        def tell(what: str, done: int, total: int) -> None:
            check()
            self.shown.update(what, done, total)

        decoder = load_decoder(
            self.checkpoint,
            self.dtype,
            self.device,
            context=self.length,
            vocabulary=self.tokenizer.size,
            progress=lambda done, total: tell("layers loaded", done, total),
        )
        started = time.perf_counter()
        found = calibrate(decoder, list(self.texts.values()), size=self.words.layers, budget=self.budget, tell=tell)
        return found, time.perf_counter() - started

    def keep(self, found: Found, seconds: float) -> tuple[str, Path]:
        """Save the calibration with its figures; what was saved, and where."""
        from dataclasses import replace

        from hspec_decoding.calibration import document, save

        figures = {
            "model": self.words.model,
            "texts": {name: len(tokens) for name, tokens in self.texts.items()},
            "budget": self.budget,
            "seconds": round(seconds, 1),
            "dtype": str(self.dtype).removeprefix("torch."),
            "tried": [{"full": t.calibration.full, "way": t.calibration.way, **rounded(t.heard)} for t in found.tried],
            "fed": rounded(found.fed),
            "captured": {
                way: [[round(c, 3) for c in row] for row in t.tolist()] for way, t in found.table.shares.items()
            },
            "importance": [round(weight, 4) for weight in found.table.weights.tolist()],
        }
        source = f"hspec calibrate on {len(self.texts)} texts of {self.length:,} tokens, budget {self.budget}"
        best = replace(found.best, source=source)
        return document(best, figures), save(self.checkpoint.config, best, figures)


def rounded(heard: Heard) -> dict[str, float]:
    """What was heard, to be written."""
    return {name: round(value, 5) for name, value in {**vars(heard), "perplexity": heard.perplexity}.items()}


def read(files: list[str], tokens: int, encode: Callable[[str], list[int]]) -> dict[str, list[int]]:
    """The texts by name, of so many tokens at most. Raises UsageError for files that cannot be read."""
    from hspec_cli.bench import texts

    if files:
        return {file: texts.tokens_of(texts.read(texts.PROSE, file)[0], tokens, encode)[:tokens] for file in files}
    made = {kind: texts.tokens_of(texts.read(kind, None)[0], tokens, encode)[:tokens] for kind in texts.ABOUT}
    return {**made, "records": records(tokens, encode)}


def records(tokens: int, encode: Callable[[str], list[int]]) -> list[int]:
    """Numbers by name, all of them said again and again in other orders: what comes can only be looked up."""
    chance = random.Random(0)

    def line() -> str:
        return f"The number of box {chance.randrange(10**4):04} is {chance.randrange(10**8):08}.\n"

    each = len(encode(line()))
    lines = said = [line() for _ in range(max(1, tokens // 2 // each))]
    while len(said) * each < 2 * tokens:
        said = [*said, *chance.sample(lines, len(lines))]
    return encode("".join(said))[:tokens]


def listing(found: Found, work: Work, seconds: float, terminal: bool) -> str:
    """The best of what was tried, for people; without escape codes where it is not for a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stderr, force_terminal=terminal, highlight=False, markup=False, emoji=False)
    console.width = min(console.width, 100)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("layers that read all keys", no_wrap=True)
    table.add_column("lists", no_wrap=True)
    for head in ("KL, mean", "99th pct", "same token", "perplexity"):
        table.add_column(head, justify="right", no_wrap=True)
    for n, tried in enumerate(found.tried[:SHOWN]):
        table.add_row(*row(tried), style="bold" if n == 0 else "")
    table.add_row("none, drafts only", "fed", *numbers(found.fed), style="dim")
    with console.capture() as captured:
        texts = f"{len(work.texts)} texts of {work.length:,} tokens"
        console.print(Text(f"{work.words.model}, {texts}, budget {work.budget}, {seconds:.0f} s"))
        console.print(table)
        console.print(Text(f"beside dense decoding, {found.fed.tokens} tokens, told what to say", "dim"))
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def row(tried: Tried) -> tuple[str, ...]:
    """A calibration in words, and its figures."""
    return " ".join(map(str, tried.calibration.full)), tried.calibration.way, *numbers(tried.heard)


def numbers(heard: Heard) -> tuple[str, ...]:
    """Divergence in nats, its 99th percentile, agreement, perplexity over dense decoding's."""
    return f"{heard.kl:.4f}", f"{heard.worst:.2f}", f"{heard.agreement:.1%}", f"{heard.perplexity - 1:+.1%}"
