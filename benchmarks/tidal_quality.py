"""What TidalDecode loses: needles found, perplexity, divergence from dense decoding, per budget.

    python benchmarks/tidal_quality.py --model qwen2.5-coder-1.5b.gguf --yarn 4 --prose book.md
        [--only needles,forced] [--lengths 32768,122880] [--depths 0.1,0.3,0.5,0.7,0.9] [--cases 6]
        [--budgets 512,1024,2048,4096] [--ways tidal,tidal-pooled]

`needles`: a value of at least 20 tokens is hidden at a depth of a long text and asked for at its end. All of it is
written by sparse passes, the first token too. Dense decoding's own score is told; what counts is how many of the values
that it finds are found. `forced`: passages of code and prose, token by token, each told what came in truth: KL from
dense decoding, agreement on the likeliest token, perplexity over dense decoding's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from common import Row, open_checkpoint, printed, say, sources
from widen import stretched

from hspec_decoding.build import Parts
from hspec_decoding.cache import KVStore
from hspec_decoding.calibration import find
from hspec_decoding.closed_loop import Trial
from hspec_decoding.engine import PREFILL, Engine, Request, Settings
from hspec_decoding.events import Emitted
from hspec_decoding.sequence import Text
from hspec_decoding.stack import PLAIN
from hspec_decoding.text.tokens import Tokenizer
from hspec_decoding.tidal import Tidal
from hspec_decoding.views import FullView

ENOUGH = 50  # needles that dense decoding must find, for the rest to say something
LEAST = 20  # tokens of a value
ASK = "The long number of the lighthouse is:"


@dataclass(frozen=True)
class Bench:
    """A loaded model and texts."""

    options: argparse.Namespace
    engine: Engine
    tokenizer: Tokenizer
    documents: dict[str, list[int]]

    @classmethod
    def load(cls, options: argparse.Namespace) -> Bench:
        checkpoint = open_checkpoint(options.model)
        if options.yarn:
            checkpoint = replace(checkpoint, config=stretched(checkpoint.config, options.yarn))
        tokenizer = Tokenizer.load(checkpoint.directory, checkpoint.generation)
        context = max(options.lengths) + 64
        settings = Settings(method="autoregressive", device=options.device, dtype=options.dtype)
        engine = Engine.load(checkpoint, None, settings, context, vocabulary=tokenizer.size)
        say(f"{engine.device}, {engine.dtype}; {find(checkpoint.config).words}")
        texts = {"code": sources(), **({"prose": options.prose.read_text()} if options.prose else {})}
        return cls(
            options, engine, tokenizer, {kind: tokenizer.encode(text[: 8 * context]) for kind, text in texts.items()}
        )

    def said(self, levels: str, prompt: Sequence[int], new: int) -> list[int]:
        """What levels write after a prompt."""
        engine, said = self.engine.variant(replace(self.engine.settings, levels=levels)), list[int]()
        for event in engine.generate(Request(tuple(prompt), new)):
            if isinstance(event, Emitted):
                said += event.tokens
        return said


def main() -> None:
    options = read_options()
    bench = Bench.load(options)
    results: Row = {"model": Path(options.model).stem, "device": bench.engine.device, "dtype": bench.engine.dtype}
    printed(options.only, {name: partial(section, bench) for name, section in SECTIONS.items()}, results)


def read_options() -> argparse.Namespace:
    def several(text: str) -> list[int]:
        return list(map(int, text.split(",")))

    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="GGUF file or checkpoint folder")
    parser.add_argument("--yarn", type=float, help="stretch its positions")
    parser.add_argument("--prose", type=Path, help="a long text")
    parser.add_argument("--lengths", type=several, default=[32_768, 122_880], help="tokens of a text")
    parser.add_argument("--depths", type=lambda text: list(map(float, words(text))), default=[0.1, 0.3, 0.5, 0.7, 0.9])
    parser.add_argument("--cases", type=int, default=6, help="values at each length and depth, in each kind of text")
    parser.add_argument("--budgets", type=several, default=[512, 1024, 2048, 4096])
    parser.add_argument("--ways", type=words, default=["tidal"], help="tidal, tidal-heads, tidal-pooled")
    parser.add_argument("--windows", type=int, default=16, help="passages of a text")
    parser.add_argument("--steps", type=int, default=64, help="tokens of a passage")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--only", type=words, default=list(SECTIONS))
    return parser.parse_args()


# needles


def needles(bench: Bench) -> Iterator[Row]:
    """Dense decoding's score and, of what it finds, the share that each budget finds, by length and in all."""
    options = bench.options
    forms = [f"target({way}:{budget})" for budget in options.budgets for way in options.ways]
    total, found = 0, dict.fromkeys(forms, 0)
    for length in options.lengths:
        cases = [(kind, depth, n) for kind in bench.documents for depth in options.depths for n in range(options.cases)]
        dense, here = 0, dict.fromkeys(forms, 0)
        for kind, depth, number in cases:
            prompt, value = hidden(bench, kind, length, depth, number)
            if bench.said("target(full)", prompt, len(value)) == value:
                dense += 1
                for form in forms:
                    here[form] += bench.said(form, prompt, len(value)) == value
        total, found = total + dense, {form: found[form] + here[form] for form in forms}
        yield {"needles": f"{length:,} tokens", "dense": f"{dense} of {len(cases)}", **shares(here, dense)}
    few = "" if total >= ENOUGH else f"fewer than {ENOUGH}: choose other lengths and depths"
    yield {"needles": "in all", "dense": total, **shares(found, total), **({"TOO FEW": few} if few else {})}


def shares(found: dict[str, int], dense: int) -> Row:
    """Of the values that dense decoding finds."""
    return {f"{form} APPROXIMATE": f"{count} of {dense}" for form, count in found.items()}


def hidden(bench: Bench, kind: str, length: int, depth: float, number: int) -> tuple[list[int], list[int]]:
    """A prompt of about so many tokens that asks for a value, and the value's tokens."""
    encode, chance = bench.tokenizer.encode, random.Random(f"{length} {depth} {number}")
    value = " " + "".join(chance.choice("0123456789") for _ in range(24))
    while len(encode(value)) < LEAST:
        value += chance.choice("0123456789")
    ask, answered = encode(f"\n{ASK}"), encode(f"\n{ASK}{value}")
    same = next((n for n, (a, b) in enumerate(zip(ask, answered, strict=False)) if a != b), len(ask))
    needle, document = [*answered, *encode(".\n")], bench.documents[kind]
    room = length - len(needle) - same
    start = chance.randrange(max(1, len(document) - room))
    text, at = document[start : start + room], int(depth * room)
    return [*text[:at], *needle, *text[at:], *answered[:same]], answered[same:]


# told what came


def forced(bench: Bench) -> Iterator[Row]:
    """Divergence at places spread over the second half of each text."""
    options, decoder = bench.options, bench.engine.target
    bench.engine.parts.forget()
    for length in options.lengths:
        for kind, document in bench.documents.items():
            text = Text(0, 0, document[:length])
            store = KVStore(decoder.config, 1, len(text), dtype=decoder.dtype, device=decoder.device)
            view, chunk = FullView(decoder.config, store, 1), PREFILL[decoder.device.type]
            for start in range(0, len(text) - 1, chunk):
                part = text.tokens[start : min(start + chunk, len(text) - 1)]
                decoder.forward(torch.tensor([part], device=decoder.device), view.begin([text], len(part)))
                view.fed(text, part)
            trial = Trial(decoder, view, [text], options.steps)
            places = list(trial.places(length // 2, options.windows))
            for budget in options.budgets:
                for way in options.ways:
                    tidal = Parts(decoder, None).tidal(replace(PLAIN[0], view=way, budget=budget))
                    yield {"forced": f"{kind}, {length:,} tokens", **told(trial, tidal, way, places)}


def told(trial: Trial, tidal: Tidal, way: str, places: Sequence[object]) -> Row:
    """One budget."""
    heard = trial.heard(tidal, places)  # type: ignore[arg-type]
    row = {"APPROXIMATE": f"{way}:{tidal.budget}", "KL": round(heard.kl, 5), "99th": round(heard.worst, 3)}
    over = round(100 * (heard.perplexity - 1), 2)
    return {**row, "same token": round(heard.agreement, 4), "perplexity, %": over, "tokens": heard.tokens}


SECTIONS = {"needles": needles, "forced": forced}

if __name__ == "__main__":
    main()
