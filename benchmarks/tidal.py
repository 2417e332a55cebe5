"""TidalDecode's speed: attention alone, decoding, and drafts that are verified, each beside our own fastest dense one.

    python benchmarks/tidal.py --target qwen2.5-coder-1.5b.gguf --shape llama2-7b --yarn 4
        [--only attention,decode,lossless] [--tokens 102400] [--long 122880] [--budgets 512,4096] [--full 0,1,2,12]

The target is a small model, widened to a larger shape where one is named (benchmarks/widen.py). The ceiling comes
first: the bytes that a pass must read over the measured copy bandwidth. Plain decoding is one row a pass, in a CUDA
graph where there is a GPU. Rows of `decode` are APPROXIMATE, and say how far their text is plain decoding's; no speed
is printed for a lossless row whose text differs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from common import Row, open_checkpoint, printed, say, seconds_of, sources
from widen import SHAPES, Widened

from hspec_decoding.cache import KVStore
from hspec_decoding.calibration import Calibration, find
from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.config import ModelConfig
from hspec_decoding.engine import Engine, Request, Settings
from hspec_decoding.events import Emitted
from hspec_decoding.rope import rotation
from hspec_decoding.sequence import Text
from hspec_decoding.text.tokens import Tokenizer
from hspec_decoding.tidal import Tidal, TidalPass
from hspec_decoding.views import FullView, Pass
from hspec_offload.sizes import kv_bytes

PLAIN = Settings(method="autoregressive")
LOSSLESS = (
    "target(tidal:{}) > target(full)",
    "target(tidal:{}, w=int4) > target(full)",
    "target(tidal-fed:{}) > target(full)",
    "ngram > target(tidal:{}) > target(full)",
)


@dataclass
class Bench:
    """A loaded model, a text to go on, and the memory bandwidth that everything is held against."""

    options: argparse.Namespace
    engine: Engine
    document: list[int]
    bandwidth: float  # bytes a second of a copy, read and write counted

    @classmethod
    def load(cls, options: argparse.Namespace) -> Bench:
        small = open_checkpoint(options.target)
        tokenizer, model, config = Tokenizer.load(small.directory, small.generation), small, small.config
        calibration = found(config, options.full)
        if options.shape:
            dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
            wide = Widened(small, SHAPES[options.shape], yarn=options.yarn, dtype=dtype, device=options.device)
            model, calibration = cast(Checkpoint, wide), replace(calibration, way="pooled", heads=None)
        context = max(options.tokens, options.long) + options.new + 8
        settings = replace(PLAIN, device=options.device)
        engine = Engine.load(model, None, settings, context, vocabulary=tokenizer.size)
        engine.parts.calibration = calibration
        say(f"{where(engine)}, torch {torch.__version__}; {calibration.words}")
        text = options.text.read_text() if options.text else sources()
        return cls(options, engine, tokenizer.encode(text[: 8 * context]), copy_bandwidth(engine.target.device))

    def run(self, levels: str | None, tokens: int) -> tuple[list[int], float, Engine]:
        """What levels, or else plain decoding, say after a prompt of so many tokens, and seconds a token."""
        settings = replace(self.engine.settings, levels=levels, exact=levels is not None)
        engine, said = self.engine.variant(settings), list[int]()
        for event in engine.generate(Request(tuple(self.document[:tokens]), self.options.new)):
            if isinstance(event, Emitted):
                said += event.tokens
        report = engine.report()
        return said, report.decode_seconds / report.generated_tokens, engine

    def timed(self, levels: str | None, tokens: int) -> tuple[list[int], float, Engine]:
        """The same after a warm-up, the median of the trials."""
        self.run(levels, tokens)
        runs = [self.run(levels, tokens) for _ in range(self.options.trials)]
        if any(said != runs[0][0] for said, _, _ in runs):
            raise SystemExit(f"{levels or 'plain decoding'} said different things in different trials")
        return runs[0][0], statistics.median(seconds for _, seconds, _ in runs), runs[0][2]

    def tidal(self, budget: int) -> Tidal:
        """What the target reads under a budget."""
        assert self.engine.parts.calibration is not None
        return Tidal(self.engine.target.config, self.engine.parts.calibration, budget)

    def floor(self, tidal: Tidal | None, tokens: int, *, weights: bool) -> float:
        """Seconds that the bytes of a pass take: keys and values, and weights where they count."""
        decoder, config = self.engine.target, self.engine.target.config
        read = tidal.read(tokens) if tidal else tokens
        linears = [part[0] for layer in decoder.layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        others = sum(tensor.nbytes for tensor in (*linears, decoder.head)) if weights else 0
        token = kv_bytes(config.layers, config.kv_heads, config.head_dim, 1, decoder.dtype.itemsize)
        return (read * token + others) / self.bandwidth


def found(config: ModelConfig, full: Sequence[int] | None) -> Calibration:
    """The calibration of the small model, or layers that were named."""
    return find(config) if full is None else Calibration(tuple(full), source="named")


def main() -> None:
    options = read_options()
    bench = Bench.load(options)
    say(f"ceiling: copies at {bench.bandwidth / 1e9:,.0f} GB/s")
    results: Row = {"host": where(bench.engine), "copy_GBs": bench.bandwidth / 1e9, "shape": options.shape}
    assert bench.engine.parts.calibration is not None
    results["full"] = bench.engine.parts.calibration.full
    printed(options.only, {name: partial(section, bench) for name, section in SECTIONS.items()}, results)


def read_options() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return list(map(int, text.split(",")))

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="GGUF file or checkpoint folder")
    parser.add_argument("--shape", choices=SHAPES, help="widen it to this shape")
    parser.add_argument("--yarn", type=float, help="stretch its positions")
    parser.add_argument("--text", type=Path, help="a long text; Python's own sources otherwise")
    parser.add_argument("--tokens", type=int, default=102_400, help="tokens of a prompt")
    parser.add_argument("--long", type=int, default=122_880, help="the same for lossless drafts")
    parser.add_argument("--new", type=int, default=256, help="tokens to generate")
    parser.add_argument("--budgets", type=numbers, default=[512, 4096])
    parser.add_argument("--full", type=numbers, help="layers that read all keys, instead of the calibrated ones")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SECTIONS))
    return parser.parse_args()


def where(engine: Engine) -> str:
    """The device's name."""
    return torch.cuda.get_device_name(engine.target.device) if engine.device != "cpu" else "CPU"


def clocked(work: Callable[[], object], device: torch.device) -> float:
    """Median seconds of `work`, on a GPU as a graph."""
    if device.type == "cpu":
        times = []
        for _ in range(5):
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
        return statistics.median(times)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        work()  # compiles the kernels
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return seconds_of(graph.replay, 20)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.ones(1 << (32 if device.type == "cuda" else 28), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / clocked(lambda: target.copy_(source), device)


def attention(bench: Bench) -> Iterator[Row]:
    """Attention of one token, of all layers, with selection, over keys that are random."""
    decoder, tokens = bench.engine.target, bench.options.tokens
    config, device = decoder.config, decoder.device
    store = KVStore(config, 1, tokens + 1, dtype=decoder.dtype, device=device)
    for part in (*store.keys, *store.values):
        part.normal_()
    view, text = FullView(config, store, 1), Text(0, 0, [0] * tokens)
    view.fed(text, text.tokens[:-1])
    size = (config.heads + 2 * config.kv_heads) * config.head_dim
    stacked = torch.randn(1, 1, size, device=device, dtype=decoder.dtype)

    def layers(memory: Pass) -> None:
        memory = memory.moved(memory.layout)  # a graph computes what it derives from the layout itself
        memory.numbers = numbers
        cos, sin = rotation(decoder.inverse, decoder.rope_factor, memory.positions, decoder.dtype)
        for layer in range(config.layers):
            memory.attend(layer, stacked, cos, sin, decoder.layers[layer].qk_norms)

    whole = view.begin([text], 1)
    numbers = whole.numbers
    with torch.inference_mode():
        full = clocked(partial(layers, whole), device)
        floor = bench.floor(None, tokens, weights=False)
        yield {"attention": f"dense, {tokens:,} tokens", "ms": 1e3 * full, "bytes, ms": 1e3 * floor}
        for budget in bench.options.budgets:
            tidal = bench.tidal(budget)
            seconds = clocked(partial(layers, TidalPass(config, store, whole.layout, tidal)), device)
            least = bench.floor(tidal, tokens, weights=False)
            row = {"attention": f"tidal, budget {budget:,}", "ms": 1e3 * seconds, "bytes, ms": 1e3 * least}
            yield {**row, "times dense": full / seconds, "bytes allow": floor / least}


def decode(bench: Bench) -> Iterator[Row]:
    """Decoding by TidalDecode alone."""
    tokens = bench.options.tokens
    wanted, plain, _ = bench.timed(None, tokens)
    floor = bench.floor(None, tokens, weights=True)
    yield {"decode": f"dense, {tokens:,} tokens", "ms": 1e3 * plain, "bytes, ms": 1e3 * floor}
    for budget in bench.options.budgets:
        said, seconds, _ = bench.timed(f"target(tidal:{budget})", tokens)
        least = bench.floor(bench.tidal(budget), tokens, weights=True)
        row = {"decode": f"APPROXIMATE, budget {budget:,}", "ms": 1e3 * seconds, "bytes, ms": 1e3 * least}
        same = next((n for n, (a, b) in enumerate(zip(said, wanted, strict=True)) if a != b), len(wanted))
        yield {**row, "times dense": plain / seconds, "bytes allow": floor / least, "same tokens first": same}


def lossless(bench: Bench) -> Iterator[Row]:
    """TidalDecode as a draft that the target verifies."""
    tokens = bench.options.long
    _, plain, _ = bench.timed(None, tokens)
    wanted, exact, _ = bench.timed("target(full)", tokens)
    yield {"lossless": f"dense, {tokens:,} tokens", "ms": 1e3 * min(plain, exact)}
    for budget in bench.options.budgets:
        for levels in (form.format(budget) for form in LOSSLESS):
            said, seconds, engine = bench.timed(levels, tokens)
            if said != wanted:
                yield {"lossless": levels, "DIFFERS": "the text is not plain decoding's: no speed is reported"}
                continue
            report = engine.report()
            row = {"lossless": levels, "ms": 1e3 * seconds, "times dense": min(plain, exact) / seconds}
            kept = {one.name: round(one.kept / max(1, one.kept + one.refused), 3) for one in report.levels[:-1]}
            yield {**row, "tokens a pass": report.generated_tokens / report.target_passes, "accepted": kept}


SECTIONS = {"attention": attention, "decode": decode, "lossless": lossless}


if __name__ == "__main__":
    main()
