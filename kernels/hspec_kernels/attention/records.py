"""What the attention kernels are given: pointers (p_) and strides (s_), which Triton takes as tuples."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Rows(NamedTuple):
    """The query [B, R, H, D] and what its rows see of a tail; a field that is None is not there."""

    p_query: Tensor
    s_query: tuple[int, ...]
    p_first: Tensor
    p_start: Tensor | None
    p_tree: Tensor | None
    window: int | None


class Store(NamedTuple):
    """Keys and values [S, HK, C, D], and where among the S each sequence is."""

    p_k: Tensor
    s_k: tuple[int, ...]
    p_v: Tensor
    s_v: tuple[int, ...]
    p_slot: Tensor


class Chunks(NamedTuple):
    """Chunks chosen for each KV head [B, HK, N], and how many of them are live [B]."""

    p_index: Tensor
    s_index: tuple[int, ...]
    p_count: Tensor


class Codes(NamedTuple):
    """Words of quantized keys and values, pairs of scale and minimum, the places of the sequences and their tokens."""

    p_k: Tensor
    p_v: Tensor
    p_kscale: Tensor
    p_vscale: Tensor
    p_slot: Tensor
    p_whole: Tensor


class Parts(NamedTuple):
    """What programs found: means [B * HK, parts, R * G, D] and the log2 of their weights [B * HK, parts, R * G]."""

    p_mean: Tensor
    p_lse: Tensor


class Output(NamedTuple):
    """[B, R, H, D], log-sum-exps [B, R, H], and counters, one for each head's tile."""

    p_out: Tensor
    s_out: tuple[int, ...]
    p_lse: Tensor
    p_done: Tensor | None
