"""Several processes for one run: `hspec run --gpus 2` starts them, `torchrun -m hspec_cli run …` does it by itself.

Whoever starts them only waits, with no library loaded: when one rank ends, all do.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hspec_cli.failures import INTERRUPTED
from hspec_cli.voice import write
from hspec_profiles.cores import usable_cores
from hspec_profiles.errors import HspecError, UsageError

if TYPE_CHECKING:
    from hspec_cli.run import Run

MEMBER = "from hspec_cli.rank import main; main()"
STORE = "HSPEC_STORE"  # a file by which ranks that were started here meet
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
VISIBLE = "CUDA_VISIBLE_DEVICES"
MIDDLING = 8192  # tokens of a context that nobody named
LOST = 75  # exit code of a rank that has nothing to say but that another one is gone
GRACE = 3.0  # seconds that rank 0 has to put its terminal in order, and that are waited for whoever was lost
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
SHOW_CURSOR = "\x1b[?25h"


def carry_out(run: Run) -> int:
    """The run's exit code: alone, as one of several ranks, or by starting these."""
    member = STORE in os.environ or all(name in os.environ for name in TORCHRUN)
    count = 1 if member else processes(run)
    if run.jsonl and (member or count > 1):
        raise UsageError("`--jsonl` is decoded by one process, and several are to share the model", "`--gpus 1`")
    if member:
        from hspec_cli.rank import finish

        finish(run)
    if count > 1:
        return start([sys.executable, "-P", "-c", MEMBER, json.dumps(asdict(run))], count)
    if run.jsonl:
        from hspec_cli.many import answer_lines

        return answer_lines(run)
    from hspec_cli.answer import answer

    return answer(run)


def processes(run: Run) -> int:
    """How many are asked for, by a flag or a plan; else as many GPUs as this host's profile says are fastest."""
    count = run.gpus or run.ranks
    if count:
        return count
    if run.plan is None:
        return _fastest(run)
    from hspec_offload.plan_file import read_plan

    return max(1, len(read_plan(Path(run.plan).expanduser()).gpus))


def _fastest(run: Run) -> int:
    """Of this host's GPUs, where it was measured and nothing speaks for one: the environment, or the levels.

    The prompt is not known yet: the context that is planned for is the one asked for, or a middling one.
    """
    alone = run.jsonl or run.uses_chimera or "tidal" in f"{run.method} {run.levels}"
    if alone or run.device == "cpu" or ":" in run.device or VISIBLE in os.environ or present() < 2:
        return 1
    from hspec_profiles.profile import saved_profile

    try:
        profile = saved_profile()
        if profile is None or len(profile.gpus) < 2:
            return 1
        from hspec_cli.placement import limits
        from hspec_decoding.checkpoints import hub
        from hspec_decoding.config import ModelConfig
        from hspec_offload.ask import Workload
        from hspec_offload.plan import plan
        from hspec_offload.shape import ModelShape

        raw = hub.read_config(run.model, offline=run.offline, say=lambda _: None)
        model = ModelShape.of(ModelConfig.from_dict(raw), run.model)
        work = Workload(run.ctx or min(model.context, MIDDLING))
        may = limits(run) if run.offload else replace(limits(run), offload="none")
        return max(1, len(plan(profile, model, work, may).gpus))
    except HspecError:  # which the run itself will say
        return 1


def present() -> int:
    """NVIDIA GPUs that the kernel shows; no library is asked."""
    return len([*Path("/dev").glob("nvidia[0-9]*")])


def start(command: Sequence[str], count: int) -> int:
    """Start so many ranks of a command, wait until one has ended, end the others, and return the exit code: rank 0's,
    130 after Ctrl-C, or that of the rank that failed.
    """
    with tempfile.TemporaryDirectory(prefix="hspec-") as folder, _blocked() as usual:
        store = Path(folder) / "store"
        ranks = [_started(command, n, count, store, usual) for n in range(count)]
        try:
            first = _first(ranks)
        finally:
            _end(ranks)
        return _code(first, ranks[first].returncode, count, store)


@contextmanager
def _blocked() -> Iterator[set[int]]:
    """Signals wait until they are asked for; gives those that were blocked before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield set(before)
    finally:
        while signal.sigtimedwait(SIGNALS, 0):
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _started(command: Sequence[str], rank: int, count: int, store: Path, usual: set[int]) -> subprocess.Popen[bytes]:
    """One rank. Only rank 0 has our input and output, and hears of Ctrl-C; none outlives us."""
    library = ctypes.CDLL(None)

    def prepare() -> None:
        library.prctl(DIES_WITH_PARENT, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN if rank else signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)

    nothing = subprocess.DEVNULL if rank else None
    return subprocess.Popen(
        command,
        stdin=nothing,
        stdout=nothing,
        env=_environment(rank, count, store),
        preexec_fn=prepare,
    )


def _environment(rank: int, count: int, store: Path) -> dict[str, str]:
    """Ranks of one host speak over its loopback, and share its cores."""
    chosen = {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(max(1, usable_cores() // count)),
    }
    place = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count, STORE: store}
    known = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return {**chosen, **os.environ, **known, **{name: str(value) for name, value in place.items()}}


def _first(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """The rank whose end is everybody's: one that failed, else rank 0. Ctrl-C that only we heard is passed on."""
    patience = GRACE  # for the one that others have lost
    while True:
        codes = [one.poll() for one in ranks]
        for n, code in enumerate(codes):
            if code not in (None, 0, LOST) or (code == 0 and n == 0) or (code == LOST and patience <= 0):
                return n
        if LOST in codes:
            time.sleep(0.02)
            patience -= 0.02
            continue
        heard = signal.sigtimedwait(SIGNALS, 1.0)
        if heard is None or heard.si_signo == signal.SIGCHLD:
            continue
        if heard.si_signo != signal.SIGINT:
            raise SystemExit(128 + heard.si_signo)
        if heard.si_code <= 0:  # sent by a process to this one; a terminal tells all of them
            ranks[0].send_signal(signal.SIGINT)


def _code(rank: int, code: int, count: int, store: Path) -> int:
    """The exit code of all, from that of the rank that ended; where it could say nothing that is said here."""
    if code == -signal.SIGINT:
        return INTERRUPTED
    if code >= 0 and code != LOST:
        return code
    how = Path(f"{store}.{rank}").read_text() if code == LOST else f"was ended by {signal.Signals(-code).name}"
    why = "memory may have run out" if code == -signal.SIGKILL else "`--debug` may show more"
    write(f"error: rank {rank} of {count} {how}\n\nhint: {why}")
    return 1


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """No rank is left. Rank 0 may have a terminal to put in order, when it notices that it is alone."""
    for one in ranks[1:]:
        one.kill()
    deadline = time.monotonic() + GRACE
    while ranks[0].poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    if ranks[0].poll() is None:
        ranks[0].kill()
        if sys.stderr is not None and sys.stderr.isatty():
            sys.stderr.write(SHOW_CURSOR)
    for one in ranks:
        one.wait()
