"""Decode speed on this CPU: hspec's plain decoding beside transformers, TriForce beside plain decoding.

    python benchmarks/cpu.py [--tokens 4000] [--new 96] [--trials 3]        (about 4 minutes on 2 cores)

The document is source code that every Python has. Everything runs in one process on the same weights, precision and
threads, trials interleaved, medians reported with their spread. The ceiling is what the bytes of one token take at
the measured read bandwidth of memory. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import transformers

from hspec_decoding.checkpoints import hub
from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.device import pick_device, pick_dtype
from hspec_decoding.engine import Engine, Request, Settings
from hspec_decoding.events import Emitted
from hspec_decoding.text.tokens import Tokenizer
from hspec_offload.sizes import kv_bytes

Program = Callable[[list[int], int], tuple[list[int], float]]  # (prompt, new tokens) -> tokens, tokens a second

DOCUMENT = Path(argparse.__file__)
PLAIN = Settings(method="autoregressive", device="cpu")
RUNS = {
    "plain (fixed shape)": PLAIN,
    "plain (1 row)": replace(PLAIN, exact=False),
    "triforce": replace(PLAIN, method="triforce"),
}


def main() -> None:
    options = read_options()
    directory = hub.fetch("smollm2-135m", offline=True, say=lambda line: print(line, file=sys.stderr), progress=None)
    checkpoint = Checkpoint.open(directory)
    prompt = Tokenizer.load(directory, checkpoint.generation).encode(DOCUMENT.read_text())[: options.tokens]
    dtype = pick_dtype("auto", pick_device("cpu", []))
    context = len(prompt) + options.new
    engines = {name: Engine.load(checkpoint, None, settings, context) for name, settings in RUNS.items()}
    programs: dict[str, Program] = {name: partial(ours, engine) for name, engine in engines.items()}
    for kind in dict.fromkeys((dtype, torch.float32)):
        rival = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=kind).eval()
        programs[f"transformers {kind}"] = partial(theirs, rival)

    floor = seconds_of_bytes(checkpoint, dtype, len(prompt))
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"SmolLM2-135M in {dtype}, prompt {len(prompt):,} tokens of {DOCUMENT.name}, {options.new} new, greedy")
    print(f"ceiling {1 / floor:6.1f} tokens/s (bytes of one token at the measured read bandwidth)")

    for program in programs.values():
        program(prompt[:64], 8)  # warm up
    texts, speeds = measure(programs, prompt, options)
    if texts["plain (1 row)"] != texts["plain (fixed shape)"]:
        print("note: plain decoding one row at a time met a numeric tie and printed another text")
    if texts["triforce"] != texts["plain (fixed shape)"]:
        raise SystemExit("triforce and plain decoding disagree: no speed-up is reported")
    report(engines, speeds, floor)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000, help="tokens of the document")
    parser.add_argument("--new", type=int, default=96, help="tokens to generate")
    parser.add_argument("--trials", type=int, default=3)
    return parser.parse_args()


def seconds_of_bytes(checkpoint: Checkpoint, dtype: torch.dtype, tokens: int) -> float:
    """Seconds to read the weights and the keys and values of `tokens` tokens once."""
    config = checkpoint.config
    weights = sum(torch.Size(shape).numel() for shape in config.tensors().values()) * dtype.itemsize
    cache = kv_bytes(config.layers, config.kv_heads, config.head_dim, tokens, dtype.itemsize)
    block = torch.ones(1 << 28, dtype=torch.float32)
    rate = max(block.nbytes / clocked(block.sum) for _ in range(5))
    return (weights + cache) / rate


def clocked(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def ours(engine: Engine, prompt: list[int], new: int) -> tuple[list[int], float]:
    """Tokens, and tokens a second after the first."""
    tokens: list[int] = []
    for event in engine.generate(Request(tuple(prompt), new)):
        if isinstance(event, Emitted):
            tokens += event.tokens
    return tokens, len(tokens) / engine.report().decode_seconds


class Clock(transformers.generation.streamers.BaseStreamer):
    """Notes when each token arrives."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, value: object) -> None:  # noqa: ARG002
        self.at.append(time.perf_counter())

    def end(self) -> None:
        pass


def theirs(model: transformers.PreTrainedModel, prompt: list[int], new: int) -> tuple[list[int], float]:
    clock, ids = Clock(), torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        streamer=clock,
    )
    first, last = clock.at[1], clock.at[-1]  # the prompt itself is streamed first
    return out[0, len(prompt) :].tolist(), (new - 1) / (last - first)


def measure(
    programs: dict[str, Program], prompt: list[int], options: argparse.Namespace
) -> tuple[dict[str, list[int]], dict[str, list[float]]]:
    """Texts, and tokens a second of every trial, the programs in turn."""
    texts: dict[str, list[int]] = {}
    speeds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(options.trials):
        for name, program in programs.items():
            texts[name], speed = program(prompt, options.new)
            speeds[name].append(speed)
    return texts, speeds


def report(engines: dict[str, Engine], speeds: dict[str, list[float]], floor: float) -> None:
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    for name, values in speeds.items():
        share = f"{100 * medians[name] * floor:4.0f} % of the ceiling"
        print(f"{name:20} {medians[name]:6.1f} tokens/s ({min(values):.1f} to {max(values):.1f}), {share}")
    rival = max(speed for name, speed in medians.items() if name.startswith("transformers"))
    ratios = {
        "plain / best transformers": medians["plain (fixed shape)"] / rival,
        "triforce / plain (fixed shape)": medians["triforce"] / medians["plain (fixed shape)"],
        "triforce / plain (1 row)": medians["triforce"] / medians["plain (1 row)"],
    }
    for name, ratio in ratios.items():
        print(f"{name:32} {ratio:5.2f} x")
    run = engines["triforce"].report()
    for level in run.levels:
        print(f"  {level.name}: {level.proposed} proposed, {level.kept} kept, {level.passes} passes")
    levels = [vars(level) for level in run.levels]
    record = {"speeds": speeds, "ratios": ratios, "ceiling": 1 / floor, "stack": run.stack, "levels": levels}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({**record, **versions, "threads": torch.get_num_threads(), "seed": 0}))


if __name__ == "__main__":
    main()
