"""Chimera beside plain decoding and whatever else drafts, in one harness, on chat and code prompts.

    python benchmarks/chimera.py --target qwen2.5-coder-1.5b.gguf --heads DIR [--medusa DIR] [--ablation NAME=DIR]...
        [--only methods,contexts] [--new 256] [--prompts 4] [--device auto] [--dtype auto]

The ceiling comes first: bytes of a token over the measured bandwidth. Plain decoding is the fastest there is, one row a
pass. All methods say the same text: where one differs that is a tree of 16 bits at a numeric tie, which is counted with
the gap between the two best logits there, or no speed is printed for it. The last line is JSON.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from common import Row, open_checkpoint, printed, say, sources

from hspec_decoding.chimera.files import load as load_heads
from hspec_decoding.chimera.heads import Heads
from hspec_decoding.engine import Engine, Request, Settings
from hspec_decoding.events import Emitted
from hspec_decoding.rules import Draft
from hspec_decoding.sampling import Sampling
from hspec_decoding.text.tokens import Tokenizer
from hspec_kernels.sample import gumbel, stream
from hspec_offload.sizes import kv_bytes

CONTEXTS = (2048, 4096, 8192, 16_384)
TEMPERATURES = (0.0, 0.7)
STATIC = 25  # nodes of the published code's tree
TIE = 0.25  # logits of 16 bits that are nearer than this may change places
QUESTIONS = (
    "Explain how a bicycle stays upright, to a child of ten.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "What should I see in Rome in two days? Give a plan by the hour.",
    "Compare the causes of the First and the Second World War in five points.",
    "Write a Python function that merges two sorted lists, with a docstring and three tests.",
    "Write a class in Python for a bank account with deposits, withdrawals and a history.",
    "How do I read a CSV file and print the mean of every column in Python?",
    "Translate to French and explain the grammar: the children had been playing in the garden.",
)


@dataclass
class Bench:
    """A loaded target, the heads to compare, prompts."""

    options: argparse.Namespace
    engine: Engine
    tokenizer: Tokenizer
    heads: dict[str, Heads]

    @classmethod
    def load(cls, options: argparse.Namespace) -> Bench:
        checkpoint = open_checkpoint(options.target)
        tokenizer = Tokenizer.load(checkpoint.directory, checkpoint.generation)
        settings = Settings(method="autoregressive", device=options.device, dtype=options.dtype)
        context = min(checkpoint.config.context, max(CONTEXTS) + options.new + 1)
        engine = Engine.load(checkpoint, None, settings, context, vocabulary=tokenizer.size)
        named = {
            "chimera": options.heads,
            "medusa": options.medusa,
            **dict(pair.split("=", 1) for pair in options.ablation),
        }
        heads = {name: load_heads(Path(where), engine.target, options.target) for name, where in named.items() if where}
        return cls(options, engine, tokenizer, heads)

    @property
    def methods(self) -> dict[str, tuple[Settings, str | None]]:
        """Settings by name, and which heads they run with."""
        plain = self.engine.settings
        chimera = replace(plain, method="chimera")
        found: dict[str, tuple[Settings, str | None]] = {
            "plain": (replace(plain, exact=False), None),
            "plain, fixed shape": (plain, None),
            "n-gram lookup": (replace(plain, levels="ngram > target(full)"), None),
        }
        for name in self.heads:
            found[name] = chimera, name
        if "chimera" in self.heads:
            found["chimera, chain"] = replace(chimera, tree=0), "chimera"
            found[f"chimera, {STATIC + 1} rows"] = replace(chimera, tree=STATIC, adapt=False), "chimera"
        return found

    def chats(self) -> dict[str, list[tuple[int, ...]]]:
        """Prompts by kind."""
        wanted = self.options.prompts
        code = self.tokenizer.encode(sources())
        chats = [tuple(self.tokenizer.chat(question, None)) for question in QUESTIONS[:wanted]]
        return {"chat": chats, "code": [tuple(code[4000 * n :][:512]) for n in range(wanted)]}

    def run(self, settings: Settings, heads: str | None, prompt: tuple[int, ...], sampling: Sampling) -> Run:
        """Decode to the limit, whatever ends the text."""
        self.engine.parts.heads = self.heads[heads] if heads else None
        engine, tokens = self.engine.variant(settings), list[int]()
        for event in engine.generate(Request(prompt, self.options.new, sampling=sampling)):
            if isinstance(event, Emitted):
                tokens += event.tokens
        report = engine.report()
        first = report.levels[0]
        share = first.kept / max(1, first.kept + first.refused) if len(report.levels) > 1 else None
        return Run(tokens, report.decode_seconds, len(tokens) / max(1, report.levels[-1].passes), share, report.stack)

    def gap(
        self, prompt: Sequence[int], tokens: Sequence[int], other: Sequence[int], sampling: Sampling
    ) -> float | None:
        """Where two texts part, how much the target prefers one's token to the other's; None where they are one."""
        at = next((n for n, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), None)
        if at is None:
            return None
        engine = self.engine.variant(replace(self.engine.settings, exact=False))
        text = (*prompt, *tokens[:at])
        list(engine.generate(Request(text, 1)))
        run = engine.runs[0]
        del run.text.tokens[len(text) :]
        run.text.committed = len(text)
        row = engine.last.logits([run.text], [Draft([])])[0][-1]
        if not sampling.greedy:
            noise = gumbel(stream(sampling.seed, run.text.key), len(text), len(row), row.device)
            row = row + sampling.temperature * noise
        return abs(float(row[tokens[at]] - row[other[at]]))


@dataclass(frozen=True)
class Run:
    """One answer."""

    tokens: list[int]
    seconds: float
    by_pass: float  # tokens a verify pass
    share: float | None  # of the first level's tokens, those kept of those looked at
    stack: str


def methods(bench: Bench) -> Iterator[Row]:
    """Every method on every prompt, in turn, each once to warm up."""
    for temperature in TEMPERATURES:
        sampling = Sampling(temperature, seed=1)
        for kind, prompts in bench.chats().items():
            runs: dict[str, list[Run]] = {}
            for name, (settings, heads) in bench.methods.items():
                bench.run(settings, heads, prompts[0], sampling)
                runs[name] = [bench.run(settings, heads, prompt, sampling) for prompt in prompts]
            yield from rows(bench, runs, prompts, sampling, {"prompts": kind, "T": temperature})


def contexts(bench: Bench) -> Iterator[Row]:
    """Acceptance as a text of code grows longer."""
    code, room = bench.tokenizer.encode(sources()), bench.engine.context
    for tokens in (n for n in CONTEXTS if n + bench.options.new < room):
        prompts = [tuple(code[9000 * n :][:tokens]) for n in range(2)]
        chosen = {name: told for name, told in bench.methods.items() if name == "plain" or told[1]}
        runs = {n: [bench.run(s, h, prompt, Sampling()) for prompt in prompts] for n, (s, h) in chosen.items()}
        yield from rows(bench, runs, prompts, Sampling(), {"context": tokens})


def rows(
    bench: Bench, runs: Mapping[str, list[Run]], prompts: Sequence[tuple[int, ...]], sampling: Sampling, about: Row
) -> Iterator[Row]:
    """A row for each method, its speed beside the fastest plain decoding's."""
    plain = "plain, fixed shape" if "plain, fixed shape" in runs else "plain"
    fastest = min(total(found) for name, found in runs.items() if name.startswith("plain"))
    half = bench.engine.target.dtype.itemsize == 2
    for name, found in runs.items():
        pairs = zip(prompts, runs[plain], found, strict=True)
        gaps = [bench.gap(p, own.tokens, one.tokens, sampling) for p, own, one in pairs]
        parted = [gap for gap in gaps if gap is not None]
        ties = half and all(gap < TIE for gap in parted)
        row: Row = {**about, "method": name, "tokens a pass": statistics.mean(one.by_pass for one in found)}
        shares = [one.share for one in found if one.share is not None]
        if shares:
            row["kept"] = statistics.mean(shares)
        if parted:
            row["texts parted"] = f"{len(parted)} of {len(found)}, gaps to {max(parted):.4f}"
        if not parted or ties:
            row["tokens a second"] = sum(len(one.tokens) for one in found) / total(found)
            row["speed-up"] = fastest / total(found)
        else:
            row["refused"] = "another text than plain decoding's"
        yield row


def total(runs: Sequence[Run]) -> float:
    """Seconds a token."""
    return sum(one.seconds for one in runs) / sum(len(one.tokens) for one in runs)


def bandwidth(device: torch.device) -> float:
    """Bytes a second that are read, measured."""
    block = torch.ones(1 << (30 if device.type == "cuda" else 27), dtype=torch.float32, device=device)

    def seconds() -> float:
        started = time.perf_counter()
        float(block.sum())
        return time.perf_counter() - started

    return block.nbytes / min(seconds() for _ in range(6))


SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {"methods": methods, "contexts": contexts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--heads", help="the directory of Chimera's heads")
    parser.add_argument("--medusa", help="independent heads trained on the same tokens: `hspec train`'s own variant")
    parser.add_argument("--ablation", action="append", default=[], metavar="NAME=DIR", help="further heads")
    parser.add_argument("--new", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--prompts", type=int, default=4, help="of each kind")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--only", type=lambda names: names.split(","), default=list(SECTIONS))
    bench = Bench.load(parser.parse_args())
    target, rate = bench.engine.target, bandwidth(bench.engine.target.device)
    config = target.config
    weights = sum(torch.Size(shape).numel() for shape in config.tensors().values()) * target.dtype.itemsize
    read = weights + kv_bytes(config.layers, config.kv_heads, config.head_dim, 512, target.dtype.itemsize)
    say(f"{bench.engine.device}, {bench.engine.dtype}, torch {torch.__version__}")
    say(f"ceiling of plain decoding: {rate / read:.1f} tokens a second, {read / 1e6:.0f} MB at {rate / 1e9:.1f} GB/s")
    results: Row = {"target": bench.options.target, "device": bench.engine.device, "dtype": bench.engine.dtype}
    results |= {"torch": torch.__version__, "ceiling": rate / read, "new": bench.options.new, "seed": 1}
    printed(bench.options.only, {name: partial(section, bench) for name, section in SECTIONS.items()}, results)


if __name__ == "__main__":
    main()
