"""Ranks: processes that run one engine together, each with its share of every layer (Megatron-LM, arXiv 1909.08053).

All of them run the same program over the same texts. What they compute apart they exchange by `gather`, so that every
rank holds the same bytes afterwards whatever its hardware is; of what could differ, chosen tokens and measured times,
rank 0's counts. So their programs never take different ways.
"""

from __future__ import annotations

import pickle
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from hspec_kernels.total import total
from hspec_profiles.errors import HspecError, LostRank

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from hspec_decoding.tuner import Plan

START, WAIT = 120.0, 1800.0  # seconds that ranks wait for each other at the start, and in one exchange
LEVELS = 8  # of a stack, at most
STOP = -1  # in place of a plan

T = TypeVar("T")

gather_flat: Callable[[Tensor, Tensor], object] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)


class Ranks:
    """This process among `size` of them, on its device."""

    def __init__(self, rank: int, size: int, device: torch.device, store: Store, *, shared: bool = False) -> None:
        """`shared`: several ranks use one GPU, which NCCL refuses: gloo then carries everything, through the host.

        Raises HspecError where the others do not come in time.
        """
        self.rank, self.size, self.device = rank, size, device
        self.nccl = device.type == "cuda" and not shared
        _meet(store, size)
        backend = "cpu:gloo,cuda:nccl" if self.nccl else "gloo"
        own = device if self.nccl else None
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=WAIT),
            device_id=own,
        )
        self._store = store
        self._told = 0
        self.captures = self.nccl and all(self.all(self._capture()))  # whether CUDA graphs take exchanges

    def _capture(self) -> bool:
        """Whether an exchange can be captured and replayed on this rank."""
        part, graph = torch.ones(1, device=self.device), torch.cuda.CUDAGraph()
        self.gather(part)
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                whole = self.gather(part)
            graph.replay()
            return float(whole.sum()) == self.size
        except (RuntimeError, LostRank):
            return False

    def gather(self, part: Tensor) -> Tensor:
        """Every rank's part [...], in the order of ranks, [size, ...]."""
        out = part.new_empty((self.size, *part.shape))
        with _together():
            gather_flat(out.view(-1), part.contiguous().view(-1))
        return out

    def total(self, part: Tensor, residual: Tensor) -> Tensor:
        """The residual and every rank's part [..., N] added up in the order of ranks: in each pass the same one, of
        however many rows, which a reduction by the network would not promise.
        """
        return total(self.gather(part), residual)

    def joined(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """Columns [..., sizes[rank]] of all ranks beside each other, [..., sum of sizes]."""
        most = max(sizes)
        whole = self.gather(torch.nn.functional.pad(part, (0, most - part.shape[-1])))
        return torch.cat([own[..., :size] for own, size in zip(whole, sizes, strict=True)], dim=-1)

    def first(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, written over this one."""
        with _together():
            dist.broadcast(tensor, 0)
        return tensor

    def same(self, numbers: Sequence[int]) -> list[int]:
        """Rank 0's numbers; every rank has as many."""
        found: list[int] = self.first(torch.tensor(numbers, dtype=torch.int64)).tolist()
        return found

    def plan(self, plan: Plan) -> Plan | None:
        """Rank 0's plan of a round, which its clock led to; None where it decodes no more."""
        pairs = [*zip(plan.levels, plan.widths, strict=True)]
        told = self.same([len(pairs), *(n for pair in pairs for n in pair), *[0] * 2 * (LEVELS - len(pairs))])
        if told[0] == STOP:
            return None
        return type(plan)(tuple(told[1 : 2 * told[0] : 2]), tuple(told[2 : 2 * told[0] + 1 : 2]))

    def stop(self) -> None:
        """Tell the others, who ask for a plan, that there is none: rank 0 decodes no more."""
        if not self.rank:
            self.same([STOP] * (1 + 2 * LEVELS))

    def all(self, own: T) -> list[T]:
        """What every rank has, in their order; slow."""
        found: list[T | None] = [None] * self.size
        with _together():
            dist.all_gather_object(found, own)
        return [one for one in found if one is not None]

    def common(self, own: Sequence[T]) -> list[T]:
        """What every rank has."""
        others = self.all(list(own))
        return [one for one in own if all(one in other for other in others)]

    def tell(self, what: object) -> None:
        """Rank 0: give the others something, however long they have waited for it."""
        self._store.set(self._next(), b64encode(pickle.dumps(what)).decode())

    def told(self) -> object:
        """Another rank: what rank 0 tells next."""
        key = self._next()
        with _together():
            self._store.wait([key], timedelta(days=7))
            return pickle.loads(b64decode(self._store.get(key)))

    def _next(self) -> str:
        self._told += 1
        return f"told {self._told}"

    def end(self) -> None:
        """Return when all ranks are done. NCCL would not let go of the group while graphs hold exchanges."""
        self.all(self.rank)
        if not self.nccl:
            dist.destroy_process_group()


def _meet(store: Store, size: int) -> None:
    """Return when all ranks are here. Raises HspecError where they are not in time."""
    here, deadline = store.add("here", 1), time.monotonic() + START
    while here < size:
        if time.monotonic() > deadline:
            raise HspecError(
                f"only {here} of {size} ranks started within {START:.0f} s",
                "start all of them at the same time, with the same number of them",
            )
        time.sleep(0.02)
        here = store.add("here", 0)


@contextmanager
def _together() -> Iterator[None]:
    """Something that all ranks do. Raises LostRank where one of them is gone."""
    try:
        yield
    except (RuntimeError, OSError) as failure:
        if isinstance(failure, torch.OutOfMemoryError):
            raise
        first = (str(failure).strip().splitlines() or ["no message"])[0]
        raise LostRank(f"could not exchange with the others: {first}") from failure
