"""How the kernels cut their work."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hspec_kernels.attention.prefix import Chosen, Prefix, Quantized
from hspec_kernels.attention.reach import Reach
from hspec_kernels.shapes import power_of_two, shared_memory, stages

SPLIT = 1024  # keys that one program of the kernel reads, at absolute positions
SHORT, SHORT_SPLIT = 16_384, 256  # the same for caches of at most so many slots, and for tails
CHOSEN_SPLIT = 256  # tokens of chosen chunks that one program reads
LARGEST_TILE = 64  # packed rows of one program
STEP = 64  # keys of one step of a program
CODED_STEP = 128  # the same of a quantized copy; divides its groups


@dataclass(frozen=True)
class Cut:
    """The shape of a launch: splits and keys fix the order of a row's sums, the rest is a matter of speed."""

    split: int  # slots that one program reads
    prefix_split: int  # tokens of a prefix that one program reads
    rows: int  # packed rows of one program
    keys: int  # keys of one step
    coded_keys: int  # the same of a quantized copy
    warps: int
    stages: int  # steps whose keys are under way at once
    apart: bool = False  # steps that need no mask get a loop of their own
    fused: bool = False  # the last program of a head's tile joins the parts, in an order of its own
    registers: int | None = None  # at most so many a thread


def cut_of(query: Tensor, prefix: Prefix | None, keys: Tensor, reach: Reach, tile: int) -> Cut:
    """For rows [B, R, H, D] over a prefix and the slots of a cache [S, HK, C, D]: the same for up to `tile` rows."""
    packed = max(tile, query.shape[1]) * (query.shape[2] // keys.shape[1])
    if isinstance(prefix, Quantized):
        return _coded(query, prefix, packed)
    return _slots(query, prefix, keys, reach, packed)


def _slots(query: Tensor, prefix: Chosen | None, keys: Tensor, reach: Reach, packed: int) -> Cut:
    whole, width = max(16, power_of_two(query.shape[-1])), query.element_size()
    block = _tile(query, packed, whole)
    long = keys.shape[2] > SHORT
    split = SPLIT if long and prefix is None and reach.start is None else SHORT_SPLIT
    wanted = 4 if whole * width <= 256 and (long or block > 16) else 2
    step, deep = _steps(query, block, whole, wanted, 2) if prefix is None else _steps(query, block, whole, 4, 3)
    apart = long or reach.tree is not None
    return Cut(split, CHOSEN_SPLIT, block, step, CODED_STEP, warps=4, stages=deep, apart=apart)


def _coded(query: Tensor, prefix: Quantized, packed: int) -> Cut:
    """Codes are made numbers once for 64 rows where products read their factors from shared memory, else for 16."""
    kv = prefix.kv
    whole, words = (max(16, power_of_two(size)) for size in (kv.dim, kv.keys.shape[-1]))
    split = SPLIT if kv.capacity > SHORT else SHORT_SPLIT
    if query.is_cuda and query.element_size() > 2:
        return Cut(SHORT_SPLIT, split, 16, STEP // 4, CODED_STEP // 4, warps=4, stages=2)
    if packed > 32 and _shared_factors(query, LARGEST_TILE):
        step, _ = _steps(query, LARGEST_TILE, whole, 2, 2)
        return Cut(SHORT_SPLIT, split, LARGEST_TILE, step, CODED_STEP // 2, warps=8, stages=3)
    warps = min(8, max(2, words // 8))
    step, _ = _steps(query, 16, whole, 2, 2)
    deep = 3
    if query.is_cuda:
        deep = 1 + stages(2 * CODED_STEP * words * 2 + 1024 * (16 // kv.bits), 2, query.device, 64 * whole + 16_384)
    return Cut(SHORT_SPLIT, split, 16, step, CODED_STEP, warps, deep, registers={4: 168, 8: 128}.get(warps))


def _tile(query: Tensor, packed: int, whole: int) -> int:
    """Packed rows of one program: fewer where sums of so many would not stay in registers."""
    largest = LARGEST_TILE
    if query.is_cuda and query.element_size() > 2:
        largest = 16
    elif query.is_cuda and whole >= 256 and not _shared_factors(query, largest):
        largest = 32
    return min(largest, max(16, power_of_two(packed)))


def _steps(query: Tensor, block: int, whole: int, wanted: int, least: int) -> tuple[int, int]:
    """Keys of one step and stages: as wanted, or what shared memory holds, of shorter steps where that is too few."""
    if not query.is_cuda:
        return STEP, wanted
    width = query.element_size()
    step = STEP if width == 2 or whole < 256 else 16
    held = 0 if _shared_factors(query, block) else 1  # stages whose keys are in registers already

    def fixed(step: int) -> int:
        return block * (whole + step) * width + 2048

    while step > 16 and (least - held) * 2 * step * whole * width + fixed(step) > shared_memory(query.device):
        step //= 2
    return step, held + stages(2 * step * whole * width, wanted - held, query.device, fixed(step))


def _shared_factors(query: Tensor, block: int) -> bool:
    """Whether products of so many rows read their factors from shared memory: those of warp groups do."""
    return block >= 64 and (not query.is_cuda or _capability(query.device) in (9, 10))


@cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]
