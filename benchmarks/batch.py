"""Batches: prompts decoded together as `hspec run --jsonl` does it, TriForce beside plain decoding in the same batch.

    python benchmarks/batch.py --target qwen2.5-coder-1.5b.gguf --draft qwen2.5-coder-0.5b.gguf
        [--only prompts,turns,plain] [--prompts 6] [--tokens 19456] [--new 256] [--sequences 32] [--short 2048]

The target is a small model widened to the shape of Llama-2-7B (benchmarks/widen.py); prompts are parts of the standard
library's source, to be continued. The ceiling comes first: the bytes that a pass must read, of weights and of the keys
and values of all sequences, over the measured copy bandwidth. "plain" is many short sequences against that. "turns" is
twice as many prompts as slots, of limits that differ, so that some leave and others join. No speed is told of a method
whose texts differ from plain decoding's. The last line is JSON.

`--shape none --device cpu --dtype float32`, a small model and small numbers are a rehearsal.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from common import Row, open_checkpoint, printed, say, seconds_of, sources
from widen import SHAPES, Widened

from hspec_decoding.build import Parts
from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.engine import Engine, Request, Settings
from hspec_decoding.events import Emitted, Report
from hspec_decoding.inventory import weight_bytes
from hspec_decoding.text.tokens import Tokenizer
from hspec_offload.sizes import human, kv_bytes

WARM = 16  # tokens of a run before those that are timed


@dataclass
class Ran:
    """What a batch said, and its numbers."""

    texts: dict[int, list[int]]
    report: Report

    @property
    def ms(self) -> float:
        """Of a token of the whole batch, prompts not counted."""
        return 1e3 * self.report.decode_seconds / self.report.generated_tokens


@dataclass
class Bench:
    """A loaded pair of models, a text, and the bandwidth that everything is held against."""

    options: argparse.Namespace
    engine: Engine
    code: list[int]
    bandwidth: float  # bytes a second of a copy, read and write counted

    @classmethod
    def load(cls, options: argparse.Namespace) -> Bench:
        small, draft = open_checkpoint(options.target), open_checkpoint(options.draft) if options.draft else None
        tokenizer = Tokenizer.load(small.directory, small.generation)
        target, dtype = small, getattr(torch, options.dtype)
        if options.shape != "none":
            wide = Widened(small, SHAPES[options.shape], yarn=4.0, dtype=dtype, device=options.device)
            target = cast(Checkpoint, wide)
        settings = Settings(device=options.device, dtype=options.dtype)
        context, started = options.tokens + options.new + 8, time.perf_counter()
        engine = Engine.load(target, draft, settings, context, vocabulary=tokenizer.size, sequences=options.prompts)
        say(f"{engine.device}, torch {torch.__version__}; loaded in {time.perf_counter() - started:.0f} s")
        return cls(options, engine, tokenizer.encode(sources()), copy_bandwidth(engine.target.device))

    def sized(self, context: int) -> None:
        """Make room for other sequences: give the memory back that the engine had for keys and values."""
        old = self.engine
        old.parts.forget()
        gc.collect()
        if old.target.device.type == "cuda":
            torch.cuda.empty_cache()
        parts = Parts(old.target, old.draft, old.parts.quantized)
        self.engine = Engine(old.target, old.draft, old.stacks, old.settings, context, parts)

    def prompts(self, count: int, tokens: int) -> list[tuple[int, ...]]:
        """From places all over the text."""
        step = (len(self.code) - tokens) // count
        return [tuple(self.code[n * step :][:tokens]) for n in range(count)]

    def run(self, method: str, prompts: Sequence[tuple[int, ...]], limits: Sequence[int], size: int) -> Ran:
        """Decode so many tokens after each prompt, whatever ends a text, `size` at a time."""
        engine = self.engine.variant(Settings(method=method, device=self.options.device, dtype=self.options.dtype))
        asked = iter([Request(p, n, sequence=i) for i, (p, n) in enumerate(zip(prompts, limits, strict=True))])
        texts: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
        for event in engine.serve(lambda _wait: next(asked, None), size):
            if isinstance(event, Emitted):
                texts[event.sequence] += event.tokens
        return Ran(texts, engine.report())

    def floor(self, length: float, count: int) -> float:
        """Milliseconds that the bytes of one plain pass take, of `count` sequences of `length` tokens."""
        decoder = self.engine.target
        config, element = decoder.config, decoder.dtype.itemsize
        keys = kv_bytes(config.layers, config.kv_heads, config.head_dim, round(length * count), element)
        return 1e3 * (weight_bytes(decoder) + keys) / self.bandwidth


def main(argv: Sequence[str] | None = None) -> None:
    options = read_options(argv)
    bench = Bench.load(options)
    say(f"ceiling: copies at {human(bench.bandwidth)}/s")
    results: Row = {"device": bench.engine.device, "copy_TBs": bench.bandwidth / 1e12}
    printed(options.only, {name: partial(section, bench) for name, section in SECTIONS.items()}, results)


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="a small model to widen: GGUF file or checkpoint folder")
    parser.add_argument("--draft", help="a smaller one with its tokenizer")
    parser.add_argument("--shape", choices=(*SHAPES, "none"), default="llama2-7b", help="none: the model as it is")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=["triforce", "auto"])
    parser.add_argument("--prompts", type=int, default=6, help="long ones, at a time")
    parser.add_argument("--tokens", type=int, default=19_456, help="of each")
    parser.add_argument("--sequences", type=int, default=32, help="short ones, at a time")
    parser.add_argument("--short", type=int, default=2048, help="tokens of each")
    parser.add_argument("--new", type=int, default=256, help="tokens to generate")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SECTIONS))
    return parser.parse_args(argv)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.empty(1 << (32 if device.type == "cuda" else 27), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    if device.type == "cuda":
        return 2 * source.nbytes / seconds_of(lambda: target.copy_(source))
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return 2 * source.nbytes / statistics.median(seconds[1:])


def medians(bench: Bench, method: str, prompts: Sequence[tuple[int, ...]], limits: Sequence[int], size: int) -> Ran:
    """The trial of median speed, after a short run in which passes are captured; texts must be the same in all."""
    bench.run(method, prompts, [min(WARM, limit) for limit in limits], size)
    trials = sorted((bench.run(method, prompts, limits, size) for _ in range(bench.options.trials)), key=lambda r: r.ms)
    middle = trials[len(trials) // 2]
    return Ran({}, middle.report) if any(ran.texts != middle.texts for ran in trials) else middle


def compared(
    bench: Bench, name: str, prompts: Sequence[tuple[int, ...]], limits: Sequence[int], size: int
) -> Iterator[Row]:
    """Each method beside plain decoding, in batches of the same sequences."""
    plain = medians(bench, "autoregressive", prompts, limits, size)
    for method in bench.options.methods:
        ran = medians(bench, method, prompts, limits, size)
        if not plain.texts or ran.texts != plain.texts:
            yield {"batch": name, "method": method, "DIFFERS": "texts are not plain decoding's: no speed is told"}
            continue
        report = ran.report
        yield {
            "batch": name,
            "method": method,
            "ms a token": ran.ms,
            "plain": plain.ms,
            "speed-up": plain.ms / ran.ms,
            "tokens a pass, all together": report.generated_tokens / report.target_passes,
            "accepted": {n.name: round(n.kept / max(1, n.kept + n.refused), 2) for n in report.levels[:-1]},
            "set-up, s": report.setup_seconds,
            "stack": report.stack,
        }


def prompts(bench: Bench) -> Iterator[Row]:
    """Long prompts, all at once."""
    count, tokens, new = bench.options.prompts, bench.options.tokens, bench.options.new
    name = f"code, {count} x {tokens:,}"
    yield {"batch": name, "bytes of a plain pass, ms": bench.floor(tokens + new / 2, count)}
    yield from compared(bench, name, bench.prompts(count, tokens), [new] * count, count)


def turns(bench: Bench) -> Iterator[Row]:
    """Twice as many prompts as are decoded at a time, of limits that differ."""
    size, tokens, new = bench.options.prompts, bench.options.tokens, bench.options.new
    limits = [new - n * new // (4 * size) for n in range(2 * size)]
    name = f"code, {2 * size} x {tokens:,} in {size} slots"
    yield from compared(bench, name, bench.prompts(2 * size, tokens), limits, size)


def plain(bench: Bench) -> Iterator[Row]:
    """Many short sequences by plain decoding, against their bytes."""
    count, tokens, new = bench.options.sequences, bench.options.short, bench.options.new
    bench.sized(tokens + new + 8)
    floor, name = bench.floor(tokens + new / 2, count), f"plain, {count} x {tokens:,}"
    yield {"batch": name, "bytes of a pass, ms": floor}
    ran = medians(bench, "autoregressive", bench.prompts(count, tokens), [new] * count, count)
    if not ran.texts:
        yield {"batch": name, "DIFFERS": "texts of two runs are not the same: no speed is told"}
        return
    ms = ran.ms * count
    yield {"batch": name, "ms a pass": ms, "share of bytes / bandwidth": floor / ms, "tokens/s": 1e3 / ran.ms}


SECTIONS = {"prompts": prompts, "turns": turns, "plain": plain}

if __name__ == "__main__":
    main()
