"""Decode speed on this GPU: every step beside what its bytes cost, then TriForce beside the fastest plain decoding.

    python benchmarks/gpu.py --target qwen2.5-coder-1.5b.gguf --draft qwen2.5-coder-0.5b.gguf --prose book.md
        [--only steps,triforce,batches,contexts,temperatures,ablation,identity,outputs] [--tokens 122880] [--new 512]

The target is a small model widened to the shape of Llama-2-7B (benchmarks/widen.py): it costs what a 7B model costs
and says what the small one says. Prompts are texts to be continued, as in the TriForce paper: code is the standard
library's own source, prose is the file given. The ceiling comes first: the bytes that a step must read over the
measured copy bandwidth. Plain decoding is one row a pass, in a CUDA graph, without waiting for each token. No speed is
printed for a method whose text differs from plain decoding's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from common import Row, Run, Spent, open_checkpoint, printed, say, seconds_of, sources
from widen import LLAMA2_7B, Widened

from hspec_decoding.build import Parts
from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.engine import BURST, Engine, Request, Settings
from hspec_decoding.events import Emitted, Round
from hspec_decoding.levels import ModelLevel
from hspec_decoding.rules import Draft
from hspec_decoding.sampling import Sampling
from hspec_decoding.sequence import Text
from hspec_decoding.text.tokens import Tokenizer
from hspec_offload.sizes import kv_bytes

PLAIN = Settings(method="autoregressive", device="cuda", dtype="bfloat16")
AUTO = replace(PLAIN, method="auto")
FURTHER = 80_000  # tokens from one part of a document to the next
OUTPUTS = (256, 512, 1024, 2048)
BATCHES = ((2, 56 * 1024), (6, 19 * 1024), (10, 12 * 1024))
ABLATION = {
    "paper, fixed widths": "draft(streaming:256, width=2) > target(retrieval:4096, width=6) > target(full)",
    "paper's stack": "draft > target(retrieval:4096) > target(full)",
    "n-grams only": "ngram > target(full)",
    "draft only": "draft > target(full)",
    "retrieval only": "target(retrieval:4096) > target(full)",
    "streaming for retrieval": "ngram > target(streaming:4096) > target(full)",
    "n-grams, retrieval": "ngram > target(retrieval:4096) > target(full)",
    "n-grams, retrieval, 4-bit weights": "ngram > target(retrieval:4096, w=int4) > target(full)",
    "n-grams, 4-bit KV": "ngram > target(full, kv=int4) > target(full)",
    "draft, 4-bit KV and weights": "draft > target(full, kv=int4, w=int4) > target(full)",
    "auto": "",
}


@dataclass
class Bench:
    """A loaded pair of models, texts to try, and the memory bandwidth that everything is held against."""

    options: argparse.Namespace
    engine: Engine
    tokenizer: Tokenizer
    documents: dict[str, list[int]]
    bandwidth: float  # bytes a second of a copy, read and write counted

    @classmethod
    def load(cls, options: argparse.Namespace) -> Bench:
        small, draft = (open_checkpoint(path) for path in (options.target, options.draft))
        tokenizer = Tokenizer.load(small.directory, small.generation)
        wide = Widened(small, LLAMA2_7B, yarn=4.0, dtype=torch.bfloat16, device="cuda")
        context = options.tokens + max(OUTPUTS) + 8
        started = time.perf_counter()
        engine = Engine.load(cast(Checkpoint, wide), draft, AUTO, context, vocabulary=tokenizer.size)
        torch.cuda.synchronize()
        took = time.perf_counter() - started
        say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; loaded in {took:.0f} s")
        documents = {"code": tokenizer.encode(sources()), "prose": tokenizer.encode(options.prose.read_text())}
        return cls(options, engine, tokenizer, documents, copy_bandwidth())

    def prompt(self, kind: str, part: int = 0, tokens: int | None = None) -> tuple[int, ...]:
        """So many tokens of a document, from its beginning or from some way into it."""
        return tuple(self.documents[kind][part * FURTHER :][: tokens or self.options.tokens])

    def sized(self, context: int) -> None:
        """Make room for other sequences: give the memory back that the engine had for keys and values."""
        old, target, draft = self.engine, self.engine.target, self.engine.draft
        parts = Parts(target, draft, old.parts.quantized)
        old.parts.forget()
        gc.collect()
        torch.cuda.empty_cache()
        self.engine = Engine(target, draft, old.stacks, AUTO, context, parts)

    def run(self, settings: Settings, prompts: Sequence[Sequence[int]], new: int, temperature: float) -> Run:
        """Decode `new` tokens after each prompt, whatever ends a text."""
        engine = self.engine.variant(settings)
        sampling = Sampling(temperature, 0.9 if temperature else 1.0)
        asked = [Request(tuple(prompt), new, sampling=sampling, sequence=i) for i, prompt in enumerate(prompts)]
        texts: dict[int, list[int]] = {i: [] for i in range(len(asked))}
        spent: dict[str, Spent] = {}
        for event in engine.generate(*asked):
            if isinstance(event, Emitted):
                texts[event.sequence] += event.tokens
            elif isinstance(event, Round):
                spent.setdefault(" > ".join(level.name for level in event.levels), Spent()).take(event)
        report = engine.report()
        return Run(texts, report, 1e3 * report.decode_seconds * len(asked) / report.generated_tokens, spent)


def main() -> None:
    options = read_options()
    bench = Bench.load(options)
    say(f"ceiling: copies at {bench.bandwidth / 1e12:.2f} TB/s")
    results: Row = {"gpu": torch.cuda.get_device_name(), "copy_TBs": bench.bandwidth / 1e12}
    printed(options.only, {name: partial(section, bench) for name, section in SECTIONS.items()}, results)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="a small model to widen: GGUF file or checkpoint folder")
    parser.add_argument("--draft", required=True, help="a smaller one with its tokenizer")
    parser.add_argument("--prose", type=Path, required=True, help="a long text")
    parser.add_argument("--tokens", type=int, default=122_880, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=512, help="tokens to generate")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SECTIONS))
    return parser.parse_args()


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy of 4 GiB on the GPU."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source))


# steps


def steps(bench: Bench) -> Iterator[Row]:
    """Single passes against their bytes, at lengths of a cache whose contents do not matter."""
    longest, large = bench.options.tokens, bench.engine.context
    bench.sized(4096)
    for rows in (1, 8, 16, 32):
        yield step(bench, PLAIN, 512, rows)
    bench.sized(large)
    yield step(bench, PLAIN, 30_720, 1)
    for rows in (1, 16, 32):
        yield step(bench, PLAIN, longest, rows)
    for levels in (
        "target(retrieval:4096)",
        "target(retrieval:4096, w=int4)",
        "target(retrieval:4096, w=nf4)",
        "target(kv=int4)",
        "target(kv=int4, w=int4)",
        "draft",
    ):
        for rows in (1, 4, 16):
            yield step(bench, replace(AUTO, levels=f"{levels} > target(full)"), longest, rows, top=False)
    rate = matrix_rate()
    for _ in range(2):  # the first plans for new lengths
        bench.engine.parts.prompts.clear()
        seconds = bench.run(PLAIN, [bench.prompt("code")], 1, 0.0).report.prefill_seconds
        flops = prefill_flops(bench, longest) / seconds
        yield {"step": f"prefill, {longest:,} tokens", "s": seconds, "TFLOPs": flops / 1e12, "share": flops / rate}


def step(bench: Bench, settings: Settings, length: int, rows: int, top: bool = True) -> Row:
    """One pass of `rows` rows behind `length` cached tokens, as a graph is replayed; of the top or the first level."""
    engine = bench.engine.variant(settings)
    engine._begin([Request((0,) * length, rows + 1)])
    text = engine.runs[0].text
    engine.last.view.fed(text, text.tokens[:-1])
    level = engine.last if top else engine.levels.proposers[0]
    assert isinstance(level, ModelLevel)
    if level.view is not engine.last.view:
        engine.last.choices([text], [Draft([])])  # queries to select by
    ms = 1e3 * replayed(level, text, rows)
    floor = 1e3 * bytes_read(level, length) / bench.bandwidth
    name = f"{level.name}, {rows} row{'s'[: rows > 1]}, {length:,} tokens"
    return {"step": name, "ms": ms, "bytes, ms": floor, "ratio": ms / floor}


def replayed(level: ModelLevel, text: Text, rows: int) -> float:
    """GPU seconds of one replay of the graph that `level` checks a block of `rows` tokens with."""
    level.choices([text], [Draft([0] * (rows - 1))])
    level.choices([text], [Draft([0] * (rows - 1))])
    assert level.graphs
    assert level.graphs.last
    return seconds_of(level.graphs.last.graph.replay, 20)


def bytes_read(level: ModelLevel, length: int) -> float:
    """Bytes of weights, keys and values that one pass must read at least."""
    decoder, config = level.decoder, level.decoder.config
    linears = [part[0] for layer in decoder.layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    weights = sum(w.nbytes for w in (*linears, decoder.head))
    tokens, bits = length, 16.0
    if "retrieval" in level.name or "draft" in level.name:
        tokens = 4096 if "retrieval" in level.name else 256
    if "kv=int4" in level.name:
        bits = 4.6
    keys = kv_bytes(config.layers, config.kv_heads, config.head_dim, tokens, 2) * bits / 16
    return float(weights + keys)


def prefill_flops(bench: Bench, tokens: int) -> float:
    """Multiplications and additions of the linear layers and of causal attention."""
    decoder = bench.engine.target
    linears = [part[0] for layer in decoder.layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    products = sum(w.shape[0] * w.shape[1] for w in linears)
    config = decoder.config
    return 2.0 * products * tokens + 2.0 * config.layers * config.heads * config.head_dim * tokens**2


def matrix_rate() -> float:
    """Operations a second of a large bfloat16 product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / seconds_of(lambda: a @ b)


# methods


def plain(bench: Bench, prompts: Sequence[Sequence[int]], new: int, temperature: float) -> Run:
    """The fastest plain decoding, after its graphs have been captured."""
    bench.run(PLAIN, prompts, 2 * BURST, temperature)
    return bench.run(PLAIN, prompts, new, temperature)


def compared(
    bench: Bench, settings: Settings, prompts: Sequence[Sequence[int]], temperature: float, wanted: Run, new: int
) -> Row:
    """Speed of a method over plain decoding, and whether the text is plain decoding's."""
    bench.run(settings, prompts, 64, temperature)
    runs = [bench.run(settings, prompts, new, temperature) for _ in range(bench.options.trials)]
    if any(run.texts != {n: text[:new] for n, text in wanted.texts.items()} for run in runs):
        return {"DIFFERS": "the text is not plain decoding's: no speed is reported"}
    ms, report = statistics.median(run.ms for run in runs), runs[-1].report
    return {
        "ms": ms,
        "plain": wanted.ms,
        "speed-up": wanted.ms / ms,
        "tokens a pass": report.generated_tokens / report.target_passes,
        "accepted": {n.name: round(n.kept / max(1, n.kept + n.refused), 2) for n in report.levels[:-1]},
        "set-up, s": report.setup_seconds,
        "stack": report.stack,
        "rounds": {stack: one.told for stack, one in runs[-1].spent.items()},
        "choices": [(c.stack, c.widths, round(1e3 * c.seconds, 2), c.rounds) for c in report.choices[:3]],
    }


def triforce(bench: Bench) -> Iterator[Row]:
    new = bench.options.new
    for kind, part in (("code", 0), ("prose", 0), ("code", 1), ("prose", 1)):
        for temperature in (0.0, 0.6):
            prompts = [bench.prompt(kind, part)]
            wanted = plain(bench, prompts, new, temperature)
            row = compared(bench, AUTO, prompts, temperature, wanted, new)
            yield {"text": f"{kind} {part}, T {temperature}", **row}
            say(f"    {bench.tokenizer.decode(wanted.texts[0][:40])!r}")


def ablation(bench: Bench) -> Iterator[Row]:
    new = bench.options.new // 2
    for kind in ("code", "prose"):
        prompts = [bench.prompt(kind)]
        wanted = plain(bench, prompts, new, 0.0)
        for name, levels in ABLATION.items():
            settings = replace(AUTO, levels=levels or None, adapt=name != "paper, fixed widths")
            yield {"text": f"{kind}, {name}", **compared(bench, settings, prompts, 0.0, wanted, new)}


def temperatures(bench: Bench) -> Iterator[Row]:
    new = bench.options.new // 2
    for temperature in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2):
        prompts = [bench.prompt("code")]
        wanted = plain(bench, prompts, new, temperature)
        yield {"text": f"code, T {temperature}", **compared(bench, AUTO, prompts, temperature, wanted, new)}


def contexts(bench: Bench) -> Iterator[Row]:
    new = bench.options.new // 2
    for tokens in (bench.options.tokens, 65_536, 32_768, 4096):
        prompts = [bench.prompt("code", 0, tokens)]
        wanted = plain(bench, prompts, new, 0.0)
        yield {"text": f"code, {tokens:,} tokens", **compared(bench, AUTO, prompts, 0.0, wanted, new)}


def outputs(bench: Bench) -> Iterator[Row]:
    prompts = [bench.prompt("code")]
    wanted = plain(bench, prompts, max(OUTPUTS), 0.0)
    for new in OUTPUTS:
        yield {"text": f"code, {new:,} new", **compared(bench, AUTO, prompts, 0.0, wanted, new)}


def batches(bench: Bench) -> Iterator[Row]:
    context, new = bench.engine.context, 256
    for count, tokens in BATCHES:
        bench.sized(tokens + new + 8)
        step = (len(bench.documents["code"]) - tokens) // count
        prompts = [tuple(bench.documents["code"][n * step :][:tokens]) for n in range(count)]
        wanted = plain(bench, prompts, new, 0.0)
        yield {"text": f"code, {count} x {tokens:,}", **compared(bench, AUTO, prompts, 0.0, wanted, new)}
    bench.sized(context)


def identity(bench: Bench) -> Iterator[Row]:
    """Texts of every method against plain decoding's, and where they differ."""
    context, new = bench.engine.context, bench.options.new
    bench.sized(8192 + new + 8)
    methods = {"auto": AUTO} | {name: replace(AUTO, levels=levels) for name, levels in ABLATION.items() if levels}
    for kind, part, tokens in (
        ("code", 0, 8192),
        ("code", 1, 3000),
        ("prose", 0, 8192),
        ("prose", 1, 500),
        ("code", 1, 32),
    ):
        for temperature in (0.0, 0.6, 1.0):
            prompts = [bench.prompt(kind, part, tokens)]
            wanted = bench.run(PLAIN, prompts, new, temperature).texts
            differ = {
                name: next(i for i, (a, b) in enumerate(zip(texts[0], wanted[0], strict=True)) if a != b)
                for name, settings in methods.items()
                if (texts := bench.run(settings, prompts, new, temperature).texts) != wanted
            }
            yield {
                "text": f"{kind} {part}, {tokens} tokens, T {temperature}",
                "methods": len(methods),
                "differ": differ,
            }
    bench.sized(context)


SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "steps": steps,
    "triforce": triforce,
    "batches": batches,
    "contexts": contexts,
    "temperatures": temperatures,
    "ablation": ablation,
    "identity": identity,
    "outputs": outputs,
}

if __name__ == "__main__":
    main()
