"""Selection of chunks of a KV store in torch: means of their keys, their scores, and the copy of those chosen.

Letters: S slots of the store, HK key/value heads, C tokens of a slot, D head_dim; B sequences, R query rows, H query
heads (H % HK == 0), N chunks chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mean_chunks_reference(
    keys: Tensor, means: Tensor, slots: Tensor, start: Tensor, stop: Tensor, chunk: int, most: int
) -> None:
    """What `mean_chunks` does; `most` is not needed here."""
    del most
    for slot, first, last in zip(slots.tolist(), start.tolist(), stop.tolist(), strict=True):
        if first < last:
            fresh = keys[slot, :, first * chunk : last * chunk].float()
            means[slot, :, first:last] = fresh.reshape(len(fresh), -1, chunk, fresh.shape[-1]).mean(2)


def score_chunks_reference(
    query: Tensor,
    lse: Tensor,
    rows_live: Tensor,
    means: Tensor,
    slots: Tensor,
    count: Tensor,
    extent: int,
    skip: int = 0,
) -> Tensor:
    """What `score_chunks` computes."""
    batch, _, heads, dim = query.shape
    kv_heads = means.shape[1]
    scores = torch.full((batch, kv_heads, extent), float("-inf"), device=query.device)
    for b, (slot, live, held) in enumerate(zip(slots.tolist(), rows_live.tolist(), count.tolist(), strict=True)):
        shape = (live, kv_heads, heads // kv_heads)
        grouped, whole = query[b, :live].float().view(*shape, dim), lse[b, :live].view(*shape, 1)
        inside = slice(skip, min(held, extent))
        logits = torch.einsum("rkgd,kcd->rkgc", grouped, means[slot, :, inside].float()) * dim**-0.5
        scores[b, :, inside] = (logits - whole).exp().sum((0, 2))
    return scores


def gather_chunks_reference(
    keys: Tensor, values: Tensor, index: Tensor, slots: Tensor, out_keys: Tensor, out_values: Tensor, chunk: int
) -> None:
    """What `gather_chunks` does."""
    if keys.dim() == 5:
        keys, values = (units.transpose(1, 2).flatten(2, 3) for units in (keys, values))
    for ours, slot in zip(index, slots.tolist(), strict=True):
        for head, chosen in enumerate(ours):
            n = (chosen >= 0).nonzero()[:, :1]
            token = torch.arange(chunk, device=index.device)
            to, at = (n * chunk + token).flatten(), (chosen[n] * chunk + token).flatten().to(keys.device)
            for source, out in ((keys, out_keys), (values, out_values)):
                out[slot, head, to] = source[slot, head, at].to(out.device)
