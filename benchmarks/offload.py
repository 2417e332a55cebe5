"""Models and contexts that do not fit: what offloading costs here, and what speculation makes of it.

    hspec profile                       # what predictions are made from; else the host is measured roughly at once
    python benchmarks/offload.py --target qwen2.5-coder-1.5b.gguf --draft qwen2.5-coder-0.5b.gguf --prose book.md
        [--only streaming,kv,share,weights,peers,prediction,host] [--texts code,prose] [--context 122880] [--new 256]
        [--vram 24GiB] [--small-vram 8GiB] [--short 2048] [--plain 24]

The target is a small model widened to the shape of Llama-2-7B (benchmarks/widen.py). A GPU with more memory is capped:
the planner is told less, and the process is held to it. The denominator is the best plain decoding that the planner
finds under the same cap, layers and keys computed by the CPU among it, for `--plain` tokens; a method's text must be
that of plain decoding in its own placement, as far as that was decoded, or no speed is told. The last line is JSON.

`--shape none --device cpu` runs a tiny model on the CPU, by plans for a card that is not there: a rehearsal.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from common import Row, open_checkpoint, printed, say, seconds_of, sources
from widen import SHAPES, Widened, write

from hspec_cli.bench.hf import Transformers
from hspec_cli.bench.records import Case
from hspec_cli.placement import size
from hspec_decoding.beside import Beside, Meter
from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.engine import Engine, Request, Settings
from hspec_decoding.events import Emitted, Report, Round
from hspec_decoding.place import Asked, placed
from hspec_decoding.text.tokens import Tokenizer
from hspec_offload.ask import Limits
from hspec_offload.pinned import pinned
from hspec_offload.plan import Plan
from hspec_offload.sizes import human
from hspec_offload.words import elsewhere
from hspec_profiles.measure import here
from hspec_profiles.profile import HostProfile, load_profile

BLOCK = "ngram > target(full)"  # verify passes of 16 rows
WARM = (2048, 24)  # tokens of a prompt, and after it, before anything is timed
IDLE = 1e6  # bytes a second of a CPU that is not worth asking


@dataclass
class Ran:
    """A run: its tokens, its numbers, and bytes carried over the bus by the end of every round."""

    tokens: list[int]
    report: Report
    figures: tuple[Beside, ...] = ()
    rounds: list[tuple[Round, int]] = field(default_factory=list)

    @property
    def ms(self) -> float:
        """Of a token."""
        return 1e3 * self.report.decode_seconds / self.report.generated_tokens


@dataclass(frozen=True)
class Where:
    """What may be used, for how much text."""

    limits: Limits
    context: int  # tokens of prompt and answer
    prompt: int


@dataclass
class Bench:
    """Models on disk, texts, the host, and the two kinds of not fitting: keys and values, and weights."""

    options: argparse.Namespace
    target: Checkpoint
    draft: Checkpoint | None
    tokenizer: Tokenizer
    documents: dict[str, list[int]]
    profile: HostProfile

    @classmethod
    def open(cls, options: argparse.Namespace) -> Bench:
        small = open_checkpoint(options.target)
        draft = open_checkpoint(options.draft) if options.draft else None
        tokenizer = Tokenizer.load(small.directory, small.generation)
        target = small
        if options.shape != "none":
            dtype, yarn = getattr(torch, options.dtype), options.yarn or None
            target = cast(
                Checkpoint, Widened(small, SHAPES[options.shape], yarn=yarn, dtype=dtype, device=options.device)
            )
        prose = options.prose.read_text() if options.prose else sources()[::-1]
        documents = {"code": tokenizer.encode(sources()), "prose": tokenizer.encode(prose)}
        profile = load_profile(options.profile) if options.profile else here()
        return cls(options, target, draft, tokenizer, documents, profile)

    @property
    def rehearsal(self) -> bool:
        """Whether there is no card."""
        return bool(self.options.device == "cpu")

    def settings(self, **changes: Any) -> Settings:
        return Settings(device=self.options.device, dtype=self.options.dtype, **changes)

    def where(self, kind: str) -> Where:
        """Limits and lengths of a kind: "kv" or "weights"."""
        options, layers = self.options, self.target.config.layers
        prompt = options.context if kind == "kv" else options.short
        limits = Limits(options.vram if kind == "kv" else options.small_vram, gpus=(0,))
        if self.rehearsal:
            forced = {"kv": (layers, "cpu"), "weights": (layers // 4, "gpu")}[kind]
            limits = Limits(1 << 30, reserve=0, gpu_layers=forced[0], kv_device=forced[1])
        return Where(limits, prompt + options.new + 8, prompt)

    def plan(self, where: Where, settings: Settings, text: str = "prose", profile: HostProfile | None = None) -> Plan:
        """The fastest one for such a text."""
        draft = (self.draft.config, "draft") if self.draft and settings.method != "autoregressive" else None
        element = getattr(torch, self.options.dtype).itemsize
        target = self.target.config, self.options.shape
        asked = Asked(target, draft, settings, where.context, element, where.prompt, text)
        return placed(profile or self.profile, asked, where.limits)

    @contextmanager
    def loaded(self, plan: Plan, where: Where, settings: Settings) -> Iterator[Engine]:
        """An engine that carries a plan out, warmed up; its memory is given back at the end."""
        started = time.perf_counter()
        engine = Engine.load(
            self.target,
            self.draft,
            settings,
            where.context,
            vocabulary=self.tokenizer.size,
            plan=plan,
            limits=where.limits,
        )
        say(f"    loaded in {time.perf_counter() - started:.0f} s: {plan.levels}; {elsewhere(plan) or 'resident'}")
        prompt, new = WARM
        self.run(engine, self.documents["code"][-min(prompt, where.prompt // 2) :], min(new, self.options.new))
        try:
            yield engine
        finally:
            engine.parts.forget()
            vars(engine).clear()  # whoever still has a name for it
            gc.collect()
            if not self.rehearsal:
                torch.cuda.empty_cache()

    def run(self, engine: Engine, prompt: Sequence[int], new: int) -> Ran:
        """Decode `new` tokens, whatever ends the text."""
        meter, tokens, rounds = Meter(engine.plan) if engine.plan else None, list[int](), list[tuple[Round, int]]()
        ring = engine.target.ring
        for event in engine.generate(Request(tuple(prompt), new)):
            if meter:
                meter.take(event)
            if isinstance(event, Emitted):
                tokens += event.tokens
            elif isinstance(event, Round):
                rounds.append((event, ring.carried if ring else 0))
        report = engine.report()
        return Ran(tokens, report, meter.figures_of(report) if meter else (), rounds)

    def prompt(self, text: str, where: Where) -> list[int]:
        return self.documents[text][: where.prompt]


def anonymous() -> int:
    """Bytes of memory of its own that this process holds, pinned or not."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


# --- sections ----------------------------------------------------------------------------------------------------


def streaming(bench: Bench) -> Iterator[Row]:
    """Bytes over the bus a second, averaged over whole rounds of verification, beside single large copies."""
    rate = copy_rate(bench)
    yield {"what": "pinned copies of 64 MB", "GB/s": rate / 1e9}
    for kind in ("weights", "kv"):
        where, settings = bench.where(kind), bench.settings(levels=BLOCK, gamma=15, adapt=False)
        plan = bench.plan(where, settings, profile=without_cpu(bench.profile))
        with bench.loaded(plan, where, settings) as engine:
            ran = bench.run(engine, bench.prompt("code", where), min(bench.options.new, bench.options.plain))
        (_, before), *rounds = ran.rounds
        if not rounds:
            raise SystemExit("`--new` is too small: one round is none")
        carried, seconds = rounds[-1][1] - before, sum(done.seconds for done, _ in rounds)
        row = {
            "what": f"{kind}, {len(rounds)} rounds",
            "GB/s": carried / seconds / 1e9,
            "share": carried / seconds / rate,
        }
        yield {**row, "GB a round": carried / len(rounds) / 1e9}


def copy_rate(bench: Bench) -> float:
    """Bytes a second of 64 MB copies from pinned memory, one behind the other."""
    source = pinned(1 << 30)
    target = torch.empty(1 << 26, dtype=torch.uint8, device=bench.options.device)

    def copies() -> None:
        for part in source.split(len(target)):
            target.copy_(part, non_blocking=True)

    if not bench.rehearsal:
        return source.nbytes / seconds_of(copies)
    started = time.perf_counter()
    copies()
    return source.nbytes / (time.perf_counter() - started)


def without_cpu(profile: HostProfile) -> HostProfile:
    """The same host with a CPU that only copies."""
    return replace(profile, host=replace(profile.host, attention=IDLE, attention_rows=IDLE, product=IDLE))


def compared(bench: Bench, kind: str) -> Iterator[Row]:
    """`auto` beside the best plain decoding under the same cap, on each text."""
    where, auto = bench.where(kind), bench.settings()
    plain = bench.settings(method="autoregressive", exact=False)
    few = min(bench.options.plain, bench.options.new)
    for text in bench.options.texts:
        prompt = bench.prompt(text, where)
        plan = bench.plan(where, plain)
        with bench.loaded(plan, where, plain) as engine:
            best = bench.run(engine, prompt, few)
        yield {"text": text, "levels": "plain decoding", "ms": best.ms, **told(best), "elsewhere": elsewhere(plan)}
        plan, held = bench.plan(where, auto, text), anonymous()
        with bench.loaded(plan, where, auto) as engine:
            ran = bench.run(engine, prompt, bench.options.new)
            row = {
                "text": text,
                "levels": ran.report.stack,
                **method(ran, best),
                **told(ran),
                **memory(bench, plan, held),
            }
            alone = bench.run(engine.variant(replace(plain, exact=True)), prompt, few)
        if ran.tokens[:few] != alone.tokens:
            yield {"text": text, "DIFFERS": "the text is not plain decoding's: no speed is reported"}
        else:
            yield {**row, "as the best plain text": ran.tokens[:few] == best.tokens, "elsewhere": elsewhere(plan)}


def method(ran: Ran, best: Ran) -> Row:
    """Speed over plain decoding, and how it came about."""
    report = ran.report
    return {
        "ms": ran.ms,
        "speed-up": best.ms / ran.ms,
        "tokens a pass": report.generated_tokens / report.target_passes,
        "accepted": {n.name: round(n.kept / max(1, n.kept + n.refused), 2) for n in report.levels[:-1]},
        "prefill, s": report.prefill_seconds,
    }


def told(ran: Ran) -> Row:
    """Seconds predicted, measured and their ratio, of every figure."""
    return {
        "predicted": {
            figure.name: [figure.predicted, figure.measured, figure.ratio and round(figure.ratio, 3)]
            for figure in ran.figures
        }
    }


def memory(bench: Bench, plan: Plan, before: int) -> Row:
    """Bytes held beside those planned: of the host, and of the GPU at their peak."""
    planned = [sum(term.nbytes for term in device.terms if term.name != "reserve") for device in plan.devices]
    row: Row = {"host GB": [(anonymous() - before) / 1e9, planned[-1] / 1e9]}
    if not bench.rehearsal:
        row["GPU GB"] = [torch.cuda.max_memory_allocated() / 1e9, planned[0] / 1e9]
        torch.cuda.reset_peak_memory_stats()
    return row


def share(bench: Bench) -> Iterator[Row]:
    """Verification with the CPU's part in attention and without it, at 16 rows; the parts planned for more rows."""
    where, settings = bench.where("kv"), bench.settings(levels=BLOCK, gamma=15, adapt=False)
    seconds: dict[str, float] = {}
    for name, profile in (("streaming alone", without_cpu(bench.profile)), ("shared", bench.profile)):
        plan = bench.plan(where, settings, profile=profile)
        with bench.loaded(plan, where, settings) as engine:
            ran = bench.run(engine, bench.prompt("code", where), min(bench.options.new, bench.options.plain))
        seconds[name] = next(figure.measured for figure in ran.figures if figure.name == "verify pass")
        yield {
            "pass": name,
            "ms": 1e3 * seconds[name],
            "of KV by the CPU": plan.cpu_share,
            "rows": plan.block,
            **told(ran),
        }
    yield {"pass": "shared", "times faster": seconds["streaming alone"] / seconds["shared"]}
    for width in (31, 63):
        plan = bench.plan(where, replace(settings, gamma=width))
        yield {"rows": plan.block, "of KV by the CPU": plan.cpu_share}


def prediction(bench: Bench) -> Iterator[Row]:
    """From the profile alone beside measured, for both kinds and all texts."""
    for kind in ("weights", "kv"):
        where, settings = bench.where(kind), bench.settings()
        for text in bench.options.texts:
            plan = bench.plan(where, settings, text)
            with bench.loaded(plan, where, settings) as engine:
                ran = bench.run(engine, bench.prompt(text, where), bench.options.new)
            yield {"kind": kind, "text": text, "ms": ran.ms, "stack": ran.report.stack, **told(ran)}


def host(bench: Bench) -> Iterator[Row]:
    """Memory of the host beside what was planned: weights once, keys and values once, and the stated buffers."""
    for kind in ("weights", "kv"):
        where, settings, held = bench.where(kind), bench.settings(), anonymous()
        plan = bench.plan(where, settings)
        with bench.loaded(plan, where, settings) as engine:
            bench.run(engine, bench.prompt("code", where), 2)
            row = memory(bench, plan, held)
        yield {"kind": kind, **row, "terms": {term.name: human(term.nbytes) for term in plan.devices[-1].terms}}


def peers(bench: Bench) -> Iterator[Row]:
    """transformers with accelerate under the same cap: offloaded weights, and its offloaded cache; code."""
    with tempfile.TemporaryDirectory(dir=bench.options.scratch) as folder:
        directory = hf_folder(bench, Path(folder))
        for kind in ("weights", "kv"):
            where, settings = bench.where(kind), bench.settings()
            prompt = bench.prompt("code", where)
            plan = bench.plan(where, settings, "code")
            with bench.loaded(plan, where, settings) as engine:
                ran = bench.run(engine, prompt, bench.options.new)
            other = Capped("hf", directory, bench.options.device, bench.options.dtype, 0, kind == "kv")
            other.cap, case = where.limits.vram or 0, Case(len(prompt), bench.options.peer)
            try:
                texts, trial = other.decode(case, [tuple(prompt)], fresh=True, tick=lambda _share: None)
            except torch.OutOfMemoryError as failure:
                yield {"kind": kind, "ms": ran.ms, "transformers": f"memory ran out: {str(failure)[:80]}"}
                continue
            finally:
                other.close()
            same = next(
                (n for n, (a, b) in enumerate(zip(texts[0], ran.tokens, strict=False)) if a != b), len(texts[0])
            )
            ms = 1e3 * trial.seconds_per_token
            row = {"kind": kind, "ms": ran.ms, "transformers ms": ms, "times faster": ms / ran.ms, "equal tokens": same}
            yield row


class Capped(Transformers):
    """A model that accelerate spreads over so many bytes of the GPU, and RAM."""

    cap = 0

    def _load(self) -> Any:
        from transformers import AutoModelForCausalLM

        spare = 2 << 30 if self.offloaded else 1 << 30
        placed = {"device_map": "auto", "max_memory": {0: self.cap - spare, "cpu": 1 << 40}}
        if self.device == "cpu":
            placed = {}
        made = AutoModelForCausalLM.from_pretrained(
            self.directory, dtype=getattr(torch, self.dtype), local_files_only=True, **placed
        )
        return made.eval()

    def decode(self, *words: Any, **options: Any) -> Any:
        from hspec_cli.bench.energy import Energy

        if "model" not in self.shared:
            self.shared |= {"model": self._load(), "energy": Energy(self.device)}
        self.offloaded = self.offloaded and self.device != "cpu"
        return super().decode(*words, **options)


def hf_folder(bench: Bench, folder: Path) -> Path:
    """The target as a directory that transformers reads."""
    if not isinstance(bench.target, Widened):
        return bench.target.directory
    source = open_checkpoint(bench.options.target)
    write(bench.target, source, folder / "model", say)
    return folder / "model"


SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "streaming": streaming,
    "kv": partial(compared, kind="kv"),
    "share": share,
    "weights": partial(compared, kind="weights"),
    "peers": peers,
    "prediction": prediction,
    "host": host,
}


def main() -> None:
    options = read_options(__doc__, tuple(SECTIONS))
    bench = Bench.open(options)
    name = "CPU" if bench.rehearsal else torch.cuda.get_device_name()
    say(f"{name}, torch {torch.__version__}, profile {bench.profile.name} of {bench.profile.measured_at or 'no date'}")
    results: Row = {"device": name, "profile": bench.profile.name, "context": options.context, "new": options.new}
    printed(options.only, {name: partial(section, bench) for name, section in SECTIONS.items()}, results)


def read_options(description: str | None, sections: Sequence[str], **numbers: int) -> argparse.Namespace:
    """The words of the command line; `numbers` are further ones, with their defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="a small model to widen: GGUF file or checkpoint folder")
    parser.add_argument("--draft", help="a smaller one with its tokenizer")
    parser.add_argument("--prose", type=Path, help="a long text")
    parser.add_argument("--shape", choices=(*SHAPES, "none"), default="llama2-7b", help="`none`: as it is")
    parser.add_argument("--yarn", type=float, default=4.0, help="0: positions as they are")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--profile", help="name or file; by default this host's own")
    parser.add_argument("--context", type=int, default=122_880, help="tokens of a prompt whose KV does not fit")
    parser.add_argument("--short", type=int, default=2048, help="tokens of one where the weights do not")
    parser.add_argument("--new", type=int, default=256, help="tokens to generate")
    parser.add_argument("--plain", type=int, default=24, help="of them by plain decoding")
    parser.add_argument("--peer", type=int, default=6, help="of them by transformers")
    parser.add_argument("--vram", type=size("--vram"), default=24 << 30)
    parser.add_argument("--small-vram", type=size("--small-vram"), default=8 << 30)
    parser.add_argument("--scratch", help="where 14 GB of a model can be written for transformers")
    parser.add_argument("--texts", type=lambda text: text.split(","), default=["code", "prose"])
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(sections))
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
