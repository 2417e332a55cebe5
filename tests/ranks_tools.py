"""Several processes over gloo for tests: each runs the same cases as one rank, and leaves what it found in a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import tiny_engine
import torch
from safetensors.torch import save_file
from torch._C._distributed_c10d import FileStore

from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.engine import Engine
from hspec_decoding.events import Emitted
from hspec_decoding.options import Request, Settings
from hspec_decoding.ranks import Ranks
from hspec_decoding.sampling import Sampling
from hspec_decoding.tuner import Tuner
from hspec_offload import host_kv
from hspec_offload.plan_file import read_plan

CONTEXT, TOKENS = 200, 16
CPU = torch.device("cpu")


def write(folder: Path, family: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    """A tiny random model of a family as a checkpoint."""
    shape = tiny_engine.config(family, **overrides)
    raw = {"model_type": family, **tiny_engine.SHAPE, **tiny_engine.FAMILIES[family], **overrides}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tiny_engine.weights(shape, seed), folder / "model.safetensors")
    return folder


def run(case: Mapping[str, Any], ranks: Ranks | None = None) -> list[list[int]]:
    """The tokens of every answer of a case: of one request a temperature, or of all of them as a batch.

    The draft of a case may be another one on every rank; `until` closes the first rank's engine after so many tokens.
    """
    drafts = case.get("drafts", [None])
    draft = drafts[(ranks.rank if ranks else 0) % len(drafts)]
    device = str(ranks.device) if ranks else "cpu"
    settings = Settings(**{"device": device, "dtype": "float32", **case["settings"]})
    plan = read_plan(Path(case["plan"])) if "plan" in case else None
    engine = Engine.load(
        Checkpoint.open(Path(case["model"])),
        Checkpoint.open(Path(draft)) if draft else None,
        settings,
        CONTEXT,
        plan=plan,
        ranks=ranks,
    )
    requests = [
        Request(tiny_engine.prompt(case.get("length", 120), n), TOKENS, sampling=Sampling(t, seed=n), sequence=n)
        for n, t in enumerate(case.get("temperatures", (0.8,)))
    ]
    calls = [requests] if case.get("batch") else [[replace(one)] for one in requests]
    found: dict[int, list[int]] = {request.sequence: [] for request in requests}
    for call in calls:
        events = engine.generate(*call)
        for event in events:
            if isinstance(event, Emitted):
                found[event.sequence] += event.tokens
            if (ranks is None or not ranks.rank) and 0 < case.get("until", 0) <= len(found[call[0].sequence]):
                events.close()  # type: ignore[attr-defined]
    return list(found.values())


def start(
    folder: Path, cases: Mapping[str, Mapping[str, Any]], size: int = 2, device: str = "cpu"
) -> list[dict[str, list[list[int]]]]:
    """What every rank found for every case; GPUs are shared where there are too few."""
    folder.mkdir()
    (folder / "cases.json").write_text(json.dumps(cases))
    code = "import sys; import ranks_tools; ranks_tools.member(*sys.argv[1:])"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    argv: Sequence[str] = [sys.executable, "-c", code, str(folder), device, str(size)]
    ranks = [subprocess.Popen([*argv, str(rank)], env=environment, stderr=subprocess.PIPE) for rank in range(size)]
    errors = [rank.communicate(timeout=300)[1].decode() for rank in ranks]
    assert not [rank.returncode for rank in ranks if rank.returncode], "\n".join(errors)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def small_units() -> None:
    """Units of keys and values in host memory that a short prompt fills."""
    host_kv.UNIT, host_kv.UNIT_BYTES = 32, 1


def member(folder: str, kind: str, size: str, rank: str) -> None:
    """The program of a rank. All but the first have clocks that say anything."""
    torch.set_num_threads(1)
    small_units()
    device, shared = CPU, False
    if kind == "cuda":
        device, shared = (
            torch.device("cuda", int(rank) % torch.cuda.device_count()),
            torch.cuda.device_count() < int(size),
        )
        torch.cuda.set_device(device)
    ranks = Ranks(int(rank), int(size), device, FileStore(f"{folder}/store", int(size)), shared=shared)
    if ranks.rank:
        learn, random = Tuner.learn, Random(0)

        def confused(self: Tuner, plan: Any, used: Any, drafted: int, seconds: float) -> None:
            wrong = [replace(one, seconds=one.seconds * random.uniform(0, 5)) for one in used]
            learn(self, plan, wrong, drafted, seconds * random.uniform(0, 5))

        Tuner.learn = confused  # type: ignore[method-assign]
    cases = json.loads(Path(folder, "cases.json").read_text())
    found = {name: run(case, ranks) for name, case in cases.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    ranks.end()
    os._exit(0)
