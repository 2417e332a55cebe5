"""Two GPUs against one in the same run: what sharing a model brings, and whether it says the same.

    hspec profile
    python benchmarks/two_gpus.py --target qwen2.5-coder-1.5b.gguf --draft qwen2.5-coder-0.5b.gguf --prose book.md
        [--only ceiling,resident,offload,identity,killed] [--context 122880] [--new 256] [--vram 24GiB] [--ranks 2]

The model is widened to the shape of Llama-2-7B, as in benchmarks/offload.py. Rank 0 measures alone first, then with the
others, on the same prompt of code. No speed is told for a method whose text is not that of plain decoding on as many
GPUs; how far the texts of one and of two GPUs agree is counted. The ceilings come first: what copies within a GPU, over
each link alone and over all links at once reach, and what one exchange takes. The last line is JSON.

`--shape none --device cpu --profile 2x-rtx-4090` is a rehearsal by two processes on the CPU.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from common import Row, measured, say, seconds_of
from gpu import copy_bandwidth
from torch._C._distributed_c10d import FileStore

import offload
from hspec_cli.launch import STORE, start
from hspec_cli.rank import leave
from hspec_decoding.engine import Engine, Request, Settings
from hspec_decoding.events import Emitted
from hspec_decoding.ranks import Ranks
from hspec_decoding.sampling import Sampling
from hspec_offload.pinned import pinned
from hspec_offload.plan import Plan
from hspec_offload.words import elsewhere
from offload import BLOCK, WARM, Ran, Where

REACH = {"plain": 1.75, "method": 1.5, "verify pass": 1.7, "over plain": 12.0}
PHASES = {"load": None, "prefill": "Prefilled", "decode": "Emitted"}  # and the record that says it has begun
SAMPLED = (0.0, 0.7)  # temperatures that texts are compared at
SECTIONS = ("ceiling", "resident", "offload", "identity", "killed")


class Bench(offload.Bench):
    """The same models and texts, for one GPU or for all ranks."""

    ranks: Ranks

    def alone(self, section: Callable[[], Any]) -> Any:
        """What rank 0 finds while the others wait; None for them."""
        found = None if self.ranks.rank else section()
        self.ranks.all(0)
        return found

    def limited(self, kind: str, several: bool) -> Where:
        """Limits and lengths of a kind, for all ranks or for the first."""
        where, count = self.where(kind), self.ranks.size if several else 1
        return replace(where, limits=replace(where.limits, gpus=tuple(range(count)), ranks=count))

    @contextmanager
    def engine(self, plan: Plan | None, where: Where, settings: Settings, several: bool) -> Iterator[Engine]:
        """An engine of all ranks or of this one, warmed up; its memory is given back at the end."""
        made = Engine.load(
            self.target,
            self.draft,
            settings,
            where.context,
            vocabulary=self.tokenizer.size,
            plan=plan,
            limits=where.limits if plan else replace(where.limits, vram=None),
            ranks=self.ranks if several else None,
        )
        prompt, new = WARM
        self.run(made, self.documents["code"][-min(prompt, where.prompt // 2) :], min(new, self.options.new))
        try:
            yield made
        finally:
            made.parts.forget()
            vars(made).clear()
            gc.collect()
            if not self.rehearsal:
                torch.cuda.empty_cache()

    def each(self, section: Callable[[bool], Any]) -> tuple[Any, Any]:
        """What one GPU finds, then all of them."""
        return self.alone(lambda: section(False)), section(True)


def ceiling(bench: Bench) -> Iterator[Row]:
    """Bytes a second within this GPU, over its link alone and beside the others; microseconds of an exchange."""
    ranks, copies = bench.ranks, Copies(bench)
    if not bench.rehearsal:
        yield {"copies within each GPU, GB/s": [round(one / 1e9) for one in ranks.all(copy_bandwidth())]}
    links = ranks.all(copies.in_turn())
    together = ranks.all(copies.at_once())
    yield {"link alone, GB/s": [round(one, 1) for one in links], "at once": [round(one, 1) for one in together]}
    shares = sum(together) < 0.8 * sum(links)
    yield {"links": "share an upstream" if shares else "are independent", "ratio": sum(together) / sum(links)}
    for rows in (1, 16, 4096):
        part = torch.zeros(rows, bench.target.config.hidden_size, device=ranks.device, dtype=copies.dtype)
        yield {"exchange of rows": rows, "us": 1e6 * timed(bench, lambda part=part: ranks.total(part, part))}  # type: ignore[misc]


class Copies:
    """Copies from pinned memory to this rank's device."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.dtype = bench, getattr(torch, bench.options.dtype)
        size = (1 << 24) if bench.rehearsal else (1 << 30)
        self.source = pinned(size)
        self.target = torch.empty(size // 16, dtype=torch.uint8, device=bench.ranks.device)

    def rate(self) -> float:
        """GB a second."""

        def copies() -> None:
            for part in self.source.split(len(self.target)):
                self.target.copy_(part, non_blocking=True)

        return self.source.nbytes / timed(self.bench, copies) / 1e9

    def in_turn(self) -> float:
        """One rank after the other."""
        found = 0.0
        for rank in range(self.bench.ranks.size):
            if rank == self.bench.ranks.rank:
                found = self.rate()
            self.bench.ranks.all(0)
        return found

    def at_once(self) -> float:
        """All ranks at the same time."""
        self.bench.ranks.all(0)
        return self.rate()


def timed(bench: Bench, work: Callable[[], object]) -> float:
    """Seconds of some work on this rank's device."""
    if not bench.rehearsal:
        return seconds_of(work)
    work()
    began = time.perf_counter()
    for _ in range(10):
        work()
    return (time.perf_counter() - began) / 10


def resident(bench: Bench) -> Iterator[Row]:
    """Everything on the GPUs: plain decoding, and the best that `auto` finds, on code."""
    plain, auto = bench.settings(method="autoregressive"), bench.settings()

    def both(several: bool) -> tuple[Ran, Ran]:
        where = bench.limited("kv", several)
        with bench.engine(None, where, auto, several) as engine:
            prompt = bench.prompt("code", where)
            return bench.run(engine.variant(plain), prompt, bench.options.new), bench.run(
                engine.variant(auto), prompt, bench.options.new
            )

    yield from compared(*bench.each(both))


def compared(one: tuple[Ran, Ran] | None, two: tuple[Ran, Ran]) -> Iterator[Row]:
    """Plain decoding and a method on one GPU and on all of them."""
    if one is None:
        return
    for name, n in (("plain", 0), ("method", 1)):
        if one[n].tokens != one[0].tokens[: len(one[n].tokens)] or two[n].tokens != two[0].tokens[: len(two[n].tokens)]:
            yield {"what": name, "DIFFERS": "the text is not plain decoding's: no speed is reported"}
            continue
        yield {
            "what": name,
            "levels": two[n].report.stack,
            "one, ms": one[n].ms,
            "all, ms": two[n].ms,
            "times faster": one[n].ms / two[n].ms,
            "reach": REACH[name],
            "equal tokens": equal(one[n].tokens, two[n].tokens),
        }


def equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Leading tokens that agree."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def offloaded(bench: Bench) -> Iterator[Row]:
    """Keys and values in RAM under a cap of each GPU, on code: verify passes, plain decoding and the method."""
    few = min(bench.options.plain, bench.options.new)

    def measure(several: bool, settings: Settings, new: int) -> tuple[Ran, str]:
        where = bench.limited("kv", several)
        plan = bench.plan(where, settings, "code")
        with bench.engine(plan, where, settings, several) as engine:
            return bench.run(engine, bench.prompt("code", where), new), f"{plan.levels}; {elsewhere(plan)}"

    block = bench.settings(levels=BLOCK, gamma=15, adapt=False)
    found: dict[str, tuple[Any, Any]] = {}
    for name, settings, new in (
        ("verify pass", block, few),
        ("plain", bench.settings(method="autoregressive"), few),
        ("method", bench.settings(), bench.options.new),
    ):
        found[name] = bench.each(partial(measure, settings=settings, new=new))
    if found["plain"][0] is None:
        return
    for name, ((one, _), (two, how)) in found.items():
        times = [verify_ms(one), verify_ms(two)] if name == "verify pass" else [one.ms, two.ms]
        row = {"what": name, "one, ms": times[0], "all, ms": times[1], "times faster": times[0] / times[1]}
        reach = {"reach": REACH["verify pass"]} if name == "verify pass" else {}
        yield {**row, **reach, "equal tokens": equal(one.tokens, two.tokens), "how": how}
    plain, method = found["plain"][1][0], found["method"][1][0]
    if equal(plain.tokens, method.tokens) < few:
        yield {"what": "method", "DIFFERS": "the text is not plain decoding's: no speed is reported"}
        return
    yield {"what": "method over plain, all GPUs", "times faster": plain.ms / method.ms, "reach": REACH["over plain"]}


def verify_ms(ran: Ran) -> float:
    """Of a pass of the target over a block."""
    return 1e3 * next(figure.measured for figure in ran.figures if figure.name == "verify pass")


def identity(bench: Bench) -> Iterator[Row]:
    """Short prompts from different places, plain decoding: how many texts of one GPU and of all are the same."""
    plain, new = bench.settings(method="autoregressive"), bench.options.new

    def texts(several: bool) -> list[list[int]]:
        where, found = bench.limited("weights", several), []
        with bench.engine(None, where, plain, several) as engine:
            for n in range(bench.options.prompts):
                for name, temperature in zip(("code", "prose"), SAMPLED, strict=True):
                    prompt = tuple(bench.documents[name][n * where.prompt :][: where.prompt])
                    request = Request(prompt, new, sampling=Sampling(temperature, seed=n))
                    events = engine.generate(request)
                    found.append([token for event in events if isinstance(event, Emitted) for token in event.tokens])
        return found

    one, two = bench.each(texts)
    if one is not None:
        agree = [equal(a, b) for a, b in zip(one, two, strict=True)]
        same = sum(n == len(a) for n, a in zip(agree, one, strict=True))
        yield {"texts": len(one), "the same": same, "tokens": new, "agreeing tokens": agree}


def killed(options: Any) -> Iterator[Row]:
    """A rank is killed in each phase of `hspec run`: seconds until all are gone, the exit code, messages, orphans."""
    with tempfile.TemporaryDirectory() as folder:
        text, record = Path(folder) / "long.txt", Path(folder) / "record"
        text.write_text("def area(width, height):\n    return width * height\n\n" * max(8, options.short // 8))
        flag = ["--ranks", "2", "--device", "cpu"] if options.device == "cpu" else ["--gpus", str(options.ranks)]
        for phase, sign in PHASES.items():
            record.unlink(missing_ok=True)
            words = [
                "run",
                "-m",
                options.target,
                "--raw",
                "-n",
                "2000",
                "-f",
                str(text),
                "--record",
                str(record),
                *flag,
            ]
            with subprocess.Popen(
                [sys.executable, "-m", "hspec_cli", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            ) as run:
                ranks = awaited(lambda run=run: psutil.Process(run.pid).children(), options.ranks)  # type: ignore[misc]
                if sign is None:
                    time.sleep(2)
                while sign and not (record.exists() and sign in record.read_text()) and run.poll() is None:
                    time.sleep(0.02)
                began = time.perf_counter()
                with suppress(psutil.NoSuchProcess):
                    ranks[-1].kill()
                err = run.communicate(timeout=60)[1].decode()
                seconds, alive = time.perf_counter() - began, psutil.wait_procs(ranks, 1)[1]
            row = {"killed in": phase, "seconds": seconds, "exit code": run.returncode}
            yield {**row, "messages": err.count("error:"), "orphans": len(alive)}


def awaited(found: Callable[[], list[psutil.Process]], count: int) -> list[psutil.Process]:
    """So many processes, as soon as they are there."""
    while len(processes := found()) < count:
        time.sleep(0.02)
    return sorted(processes, key=lambda one: one.pid)


def member(options: Any) -> None:
    """The program of a rank; the first one tells."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shared, device = False, torch.device("cpu")
    if options.device != "cpu":
        shared, device = torch.cuda.device_count() < size, torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        options.device = str(device)
    ranks = Ranks(rank, size, device, FileStore(os.environ[STORE], size), shared=shared)
    bench = Bench.open(options)
    bench.ranks = ranks
    name = "CPU" if bench.rehearsal else torch.cuda.get_device_name()
    say(f"{size} × {name}{' (shared)' * shared}, torch {torch.__version__}, profile {bench.profile.name}")
    results: Row = {"device": name, "ranks": size, "shared": shared, "context": options.context, "new": options.new}
    made = {"ceiling": ceiling, "resident": resident, "offload": offloaded, "identity": identity}
    measured(
        [n for n in options.only if n in made], {n: partial(section, bench) for n, section in made.items()}, results
    )
    if rank == 0:
        Path(options.results).write_text(json.dumps(results))
    ranks.end()
    leave(0)


def main() -> None:
    options = offload.read_options(__doc__, SECTIONS, ranks=2, prompts=8)
    if STORE in os.environ:
        member(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        options.results = f"{folder}/results"
        code = start([sys.executable, __file__, *sys.argv[1:], "--results", options.results], options.ranks)
        if code:
            raise SystemExit(code)
        results = json.loads(Path(options.results).read_text())
    measured([n for n in options.only if n == "killed"], {"killed": partial(killed, options)}, results)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
