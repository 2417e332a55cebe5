"""One of several processes that answer together.

Rank 0 is `hspec run` as it always is, with its prompt, its answer and its terminal; the others do the same passes and
say nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hspec_cli.failures import report
from hspec_cli.interrupt import one_is_enough
from hspec_cli.launch import GRACE, LOST, STORE
from hspec_profiles.errors import HspecError, LostRank, UsageError

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

    from hspec_cli.prepare import Job
    from hspec_cli.run import Run
    from hspec_decoding.options import Request, Settings
    from hspec_decoding.ranks import Ranks
    from hspec_offload.plan import Plan

AFTER = 2.0  # seconds by which other ranks let rank 0 say what all of them have to say


@dataclass(frozen=True)
class Seat:
    """Which of the ranks this process is, in all and on this host."""

    rank: int
    size: int
    local: int
    neighbours: int

    @classmethod
    def taken(cls) -> Seat:
        """As the environment says."""
        known = os.environ
        rank, size = int(known["RANK"]), int(known["WORLD_SIZE"])
        return cls(rank, size, int(known.get("LOCAL_RANK", rank)), int(known.get("LOCAL_WORLD_SIZE", size)))


def main() -> None:
    """The main program of a process that was started here; its argument is the run."""
    with one_is_enough():
        from hspec_cli.run import Run

        finish(Run(**json.loads(sys.argv[1])))


def finish(run: Run) -> NoReturn:
    """Take part in the run to its end, and end this process with its exit code."""
    try:
        code = take_part(run)
    except (Exception, KeyboardInterrupt) as failure:
        code = report(failure, debug=run.debug)
    leave(code)


def leave(code: int) -> NoReturn:
    """End this process without asking libraries, which would wait for ranks, or for graphs that hold exchanges."""
    from hspec_cli.output import settle

    settle()
    os._exit(code)


def take_part(run: Run) -> int:
    """Answer as rank 0, or help to. Raises HspecError: where all fail alike rank 0 says it first, and a rank
    that merely lost another one leaves the word to that one, or to whoever started both.
    """
    from hspec_cli.answer import answer, calm_libraries
    from hspec_decoding.device import pick_device
    from hspec_decoding.ranks import Ranks

    calm_libraries(run)
    seat, asked = Seat.taken(), run.gpus or run.ranks
    try:
        if asked not in (None, seat.size):
            raise UsageError(f"{asked} ranks are asked for, {seat.size} were started", "drop `--gpus` and `--ranks`")
        run, shared = own_device(run, seat)
        ranks = Ranks(seat.rank, seat.size, pick_device(run.device, []), _store(seat), shared=shared)
        code = follow(run, ranks) if seat.rank else answer(run, ranks)
        if code == 0:
            ranks.end()
        return code
    except LostRank as lost:
        if STORE in os.environ:
            Path(f"{os.environ[STORE]}.{seat.rank}").write_text(lost.message)
            return LOST
        time.sleep(GRACE)
        raise
    except Exception:
        time.sleep(AFTER if seat.rank else 0)
        raise


def own_device(run: Run, seat: Seat) -> tuple[Run, bool]:
    """The run on this rank's device, and whether ranks share one. Raises UsageError where there are too few GPUs."""
    from hspec_decoding.device import pick_device

    device = pick_device(run.device, [])
    if device.type != "cuda":
        if run.gpus:
            raise UsageError(f"`--gpus {run.gpus}` asks for {run.gpus} GPUs, none can be used", "`--ranks` needs none")
        return run, False
    import torch

    here = torch.cuda.device_count()
    if run.gpus and here < seat.neighbours:
        raise UsageError(f"`--gpus {run.gpus}` asks for {run.gpus} GPUs, {here} can be used", f"`--gpus {here}`")
    index = seat.local % here
    torch.cuda.set_device(index)
    return replace(run, device=f"cuda:{index}"), here < seat.neighbours


def _store(seat: Seat) -> Store:
    """Where the ranks meet. Raises HspecError where they cannot."""
    from datetime import timedelta

    from torch._C._distributed_c10d import FileStore
    from torch.distributed.rendezvous import rendezvous

    from hspec_decoding.ranks import START

    if STORE in os.environ:
        return FileStore(os.environ[STORE], seat.size)
    try:
        store: Store = next(rendezvous("env://", timeout=timedelta(seconds=START)))[0]
    except (RuntimeError, ValueError) as failure:
        first = str(failure).strip().splitlines()[0]
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise HspecError(f"rank {seat.rank} found no rank 0 at {where} within {START:.0f} s: {first}") from None
    return store


@dataclass(frozen=True)
class Work:
    """What rank 0 found out and the others need."""

    draft: str | None
    vocabulary: int
    context: int
    settings: Settings
    plan: Plan | None
    request: Request

    @classmethod
    def of(cls, job: Job, settings: Settings, plan: Plan | None, request: Request, device: torch.device) -> Work:
        """The job, in the precision of rank 0."""
        from hspec_decoding.device import pick_dtype

        dtype = str(pick_dtype(settings.dtype, device)).removeprefix("torch.")
        draft = job.draft_name if job.draft else None
        return cls(draft, job.tokenizer.size, job.context, replace(settings, dtype=dtype), plan, request)


def follow(run: Run, ranks: Ranks) -> int:
    """Do what rank 0 does, without its words."""
    from hspec_cli.placement import limits
    from hspec_decoding.checkpoints import hub
    from hspec_decoding.checkpoints.checkpoint import Checkpoint
    from hspec_decoding.engine import Engine

    def found(name: str) -> Checkpoint:
        directory = hub.fetch(name, offline=run.offline, trust_remote_code=run.trust_remote_code, say=lambda _: None)
        return Checkpoint.open(directory)

    work = ranks.told()
    assert isinstance(work, Work)
    engine = Engine.load(
        found(run.model),
        found(work.draft) if work.draft else None,
        replace(work.settings, device=run.device),
        work.context,
        vocabulary=work.vocabulary,
        plan=work.plan,
        limits=limits(run),
        ranks=ranks,
    )
    for _ in engine.generate(work.request):
        pass
    return 0
