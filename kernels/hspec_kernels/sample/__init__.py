"""The coupled sample of rows of logits: the token of the best sum of filtered logit and keyed Gumbel noise."""

from __future__ import annotations

import torch
from torch import Tensor

from hspec_kernels.pdl import pdl_options
from hspec_kernels.sample.reference import choose_reference, filtered, gumbel, gumbel_of, mix, stream
from hspec_kernels.shapes import on_triton, power_of_two

__all__ = ["choose", "choose_reference", "filtered", "gumbel", "gumbel_of", "mix", "stream"]

TILE = 2048  # tokens of one program
BLOCK = 32  # tokens whose largest logit alone top-k looks at first
HEAD = 256  # blocks that it then looks into; where more may hold its floor, it reads the row again and again
FRONT = 16  # candidates kept of a tile
CHAIN = 16  # candidates of a row whose mass is found by all programs together


def choose(logits: Tensor, options: Tensor, streams: Tensor, positions: Tensor) -> Tensor:
    """The token that each row of logits chooses, by the noise of its own sequence and position.

    logits    [N, V]   float32, rows may be further apart than V; -inf is a token without a chance
    options   [4]      float32: temperature, top-p, top-k, min-p; top-k 0, top-p 1 and min-p 0 drop nothing;
              [B, 4]   of the first N / B rows, of the next as many, and so on
    streams   [N]      int64, `stream` of a row's sequence
    positions [N]      int64
    -> tokens [N]      int64; -1 for a row that holds NaN or +inf, or nothing finite

    Temperature 0 takes the largest logit, of equal ones the first. Options are read on the device, so that a captured
    graph serves them all.
    """
    if not on_triton(logits):
        return choose_reference(logits, options, streams, positions)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        rows = logits if logits.stride(1) == 1 else logits.contiguous()
        _choose(rows, options.contiguous(), streams.contiguous(), positions.contiguous(), tokens)
    return tokens


def _choose(logits: Tensor, options: Tensor, streams: Tensor, positions: Tensor, tokens: Tensor) -> None:
    from hspec_kernels.sample import kernel

    (rows, size), step = logits.shape, logits.stride(0)
    each = rows * 4 // options.numel()  # rows that share their options
    tiles = -(-size // TILE)
    blocks = tiles * (TILE // BLOCK)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=logits.device)

    whole, level, total = scratch(blocks), scratch(2), scratch(tiles)
    head, count = scratch(HEAD, dtype=torch.int32), scratch(tiles, dtype=torch.int32)
    fronts = scratch(tiles, FRONT), scratch(tiles, FRONT), scratch(tiles, FRONT, dtype=torch.int32)
    chain = scratch(CHAIN, tiles), scratch(CHAIN, dtype=torch.int32), scratch(dtype=torch.int32)
    grid, noise = (tiles, rows), (streams, positions)
    early = pdl_options(logits.device)

    kernel.maxima_kernel[grid](logits, whole, step, size, TILE=TILE, BLOCK=BLOCK, num_warps=8, **early)
    kernel.level_kernel[(rows,)](
        logits,
        whole,
        options,
        head,
        level,
        tokens,
        step,
        size,
        each,
        blocks,
        BB=power_of_two(blocks),
        BLOCK=BLOCK,
        HEAD=HEAD,
        TILE=TILE,
        num_warps=16,
        **early,
    )
    front = {"TILE": TILE, "FRONT": FRONT, "num_warps": 8}
    kernel.front_kernel[grid](logits, options, *noise, level, total, count, *fronts, step, size, each, **front, **early)
    shape = {"TILE": TILE, "BT": power_of_two(tiles), "CHAIN": CHAIN}
    kernel.mass_kernel[grid](
        logits, options, level, count, *fronts, *chain, step, size, each, **shape, FRONT=FRONT, num_warps=8, **early
    )
    kernel.choose_kernel[(rows,)](
        logits, options, *noise, level, total, *chain, tokens, step, size, each, tiles, **shape, num_warps=8, **early
    )
