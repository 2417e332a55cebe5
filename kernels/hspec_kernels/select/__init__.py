"""Selection of chunks of a KV store for a sparse copy: means of their keys, their scores, and the copy itself.

Letters: S slots of the store, HK key/value heads, C tokens of a slot, D head_dim; B sequences, R query rows, H query
heads (H % HK == 0), N chunks chosen. Slots and counts are int64 on the device, so that a captured graph serves every
length; what is as many as an argument says only fixes the shape of the work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hspec_kernels.select.reference import (
    gather_chunks_reference,
    mean_chunks_reference,
    score_chunks_reference,
)
from hspec_kernels.shapes import on_triton, power_of_two

__all__ = [
    "gather_chunks",
    "gather_chunks_reference",
    "mean_chunks",
    "mean_chunks_reference",
    "score_chunks",
    "score_chunks_reference",
]

MEANT = 16  # chunks that one program takes the means of in one turn, at most
PROGRAMS = 1024  # of `mean_chunks` for one head; they take turns where there is more to do
PACKED = 16  # packed query rows of one product
WIDE, NARROW = 128, 64  # chunks that one program scores: narrow ones where a chunk's mean is long
COPIED = 32  # tokens that one program copies


def mean_chunks(keys: Tensor, means: Tensor, slots: Tensor, start: Tensor, stop: Tensor, chunk: int, most: int) -> None:
    """Write the mean keys of chunks start[b] .. stop[b] - 1 of the slots, accumulated in float32.

    keys  [S, HK, C, D]
    means [S, HK, C // chunk, D]
    slots, start, stop [B]        int64

    `most` is about the largest stop[b] - start[b]; more chunks than that take longer.
    """
    if not on_triton(means):
        mean_chunks_reference(keys, means, slots, start, stop, chunk, most)
        return
    from hspec_kernels.select.kernel import mean_kernel

    dim, block = keys.shape[3], min(MEANT, power_of_two(most))
    grid = (min(PROGRAMS, max(1, -(-most // block))), keys.shape[1], len(slots))
    mean_kernel[grid](
        keys,
        means,
        slots,
        start,
        stop,
        *keys.stride()[:3],
        *means.stride()[:3],
        CHUNK=chunk,
        D=dim,
        BD=power_of_two(dim),
        BC=block,
        num_warps=4 if block > 4 else 1,
    )


def score_chunks(
    query: Tensor,
    lse: Tensor,
    rows_live: Tensor,
    means: Tensor,
    slots: Tensor,
    count: Tensor,
    extent: int,
    skip: int = 0,
) -> Tensor:
    """Attention mass that the last query rows give to each chunk's mean key, as a share of their whole attention.

    query     [B, R, H, D]
    lse       [B, R, H]       float32, natural log-sum-exp of each row's scores over the keys that it saw
    rows_live [B]             int64, rows of a sequence that count: its first
    means     [S, HK, C', D]
    slots     [B], count [B]  int64, the slot of a sequence and how many of its chunks are scored
    -> scores [B, HK, extent] float32, summed over rows and over the query heads of a KV head; -inf for the first
                              `skip` chunks and from count[b] on
    """
    if not on_triton(query):
        return score_chunks_reference(query, lse, rows_live, means, slots, count, extent, skip)
    from hspec_kernels.select.kernel import score_kernel

    batch, rows, heads, dim = query.shape
    kv_heads = means.shape[1]
    scores = torch.empty(batch, kv_heads, extent, dtype=torch.float32, device=query.device)
    block = WIDE if power_of_two(dim) * query.element_size() <= 256 else NARROW
    score_kernel[(-(-extent // block), kv_heads, batch)](
        query,
        lse,
        rows_live,
        means,
        slots,
        count,
        scores,
        *query.stride()[:3],
        *lse.stride(),
        *means.stride()[:3],
        dim**-0.5 * 1.4426950408889634,
        rows,
        extent,
        skip,
        HK=kv_heads,
        G=heads // kv_heads,
        D=dim,
        BD=power_of_two(dim),
        BM=PACKED,
        BN=block,
        num_warps=4,
        num_stages=1,
    )
    return scores


def gather_chunks(
    keys: Tensor, values: Tensor, index: Tensor, slots: Tensor, out_keys: Tensor, out_values: Tensor, chunk: int
) -> None:
    """Copy chunks index[b, h] of each head, one behind the other, to the start of the same slot of another store.

    keys, values         [S, HK, C, D]     on the device, or in pinned host memory, which is then read where it is; or
                                           [S, U, HK, T, D], units of T tokens, a multiple of `chunk`
    index                [B, HK, N]        int64 numbers of chunks; -1 leaves the place as it is
    slots                [B]               int64
    out_keys, out_values [S', HK, C', D]   C' >= N * chunk
    """
    if not on_triton(out_keys):
        gather_chunks_reference(keys, values, index, slots, out_keys, out_values, chunk)
        return
    from hspec_kernels.select.kernel import gather_kernel

    batch, kv_heads, wanted = index.shape
    dim, unit = keys.shape[-1], keys.shape[3] if keys.dim() == 5 else 0
    index = index if index.stride(2) == 1 else index.contiguous()
    gather_kernel[(-(-wanted * chunk // COPIED), kv_heads, batch)](
        keys,
        values,
        index,
        slots,
        out_keys,
        out_values,
        *_strides(keys),
        *_strides(values),
        *index.stride()[:2],
        *out_keys.stride()[:3],
        *out_values.stride()[:3],
        wanted,
        CHUNK=chunk,
        UNIT=unit,
        D=dim,
        BD=power_of_two(dim),
        BT=COPIED,
        num_warps=4,
    )


def _strides(store: Tensor) -> tuple[int, ...]:
    """From one sequence, unit, head and token of a store to the next."""
    strides = store.stride()[:-1]
    return strides if len(strides) == 4 else (strides[0], 0, *strides[1:])
