"""What one of several ranks holds of a model: whole KV heads with their queries, columns and rows of the MLP, a part of
the vocabulary (Megatron-LM, arXiv 1909.08053, section 3). Embedding and norms are on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import gcd
from pathlib import Path

import torch

from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.config import ModelConfig
from hspec_decoding.model import Decoder
from hspec_decoding.ranks import Ranks
from hspec_offload.plan import Plan
from hspec_profiles.errors import UsageError

UNIT = 128  # columns of an MLP that stay together, where there are enough: whole blocks of 4-bit weights


@dataclass(frozen=True)
class Share:
    """One rank's part, in heads, columns and rows. Where ranks are more than KV heads, several hold the same one."""

    rank: int
    heads: range
    kv_heads: range
    ffn: range
    weights: tuple[int, ...]  # by which all that is not in heads is shared out

    def vocabulary(self, tokens: int) -> range:
        """Rows of the head, of `tokens`."""
        return cut(tokens, self.weights)[self.rank]

    def local(self, config: ModelConfig) -> ModelConfig:
        """The model as this rank computes it."""
        return replace(config, heads=len(self.heads), kv_heads=len(self.kv_heads), ffn_size=len(self.ffn))


def cut(total: int, weights: Sequence[int], unit: int = 1) -> list[range]:
    """`total` in ranges of whole units, in proportion to the weights; the last one has what is left over."""
    units = total // unit
    ends = [units * sofar // sum(weights) * unit for sofar in accumulate(weights)]
    return [range(*span) for span in pairwise([0, *ends[:-1], total])]


def shares(config: ModelConfig, ranks: int, kv_heads: Sequence[int] | None = None) -> list[Share]:
    """Every rank's part: KV heads as a plan gives them, or as many for all. Raises UsageError for too many ranks."""
    most = min(config.heads, config.ffn_size, config.vocab_size)
    if ranks > most:
        raise UsageError(
            f"{ranks} ranks cannot share a model of {config.heads} attention heads: each needs one",
            f"`--gpus {most}` is the most",
        )
    if ranks > config.kv_heads:
        weights, heads = (1,) * ranks, _queries(config, ranks)
    else:
        weights = tuple(kv_heads or map(len, cut(config.kv_heads, (1,) * ranks)))
        if len(weights) != ranks or sum(weights) != config.kv_heads or min(weights) < 1:
            given = " + ".join(map(str, weights))
            raise UsageError(
                f"the plan shares out {given} KV heads to {len(weights)} GPUs, {ranks} ranks share {config.kv_heads}",
                "make another plan",
            )
        group = config.heads // config.kv_heads
        heads = [(range(own.start * group, own.stop * group), own) for own in cut(config.kv_heads, weights)]
    unit = gcd(config.ffn_size, UNIT)
    while config.ffn_size // unit < sum(weights):
        unit //= 2
    ffn = cut(config.ffn_size, weights, unit)
    return [Share(rank, *heads[rank], ffn[rank], weights) for rank in range(ranks)]


def _queries(config: ModelConfig, ranks: int) -> list[tuple[range, range]]:
    """Where ranks are more than KV heads: several hold the same one, each with some of its queries."""
    group, found = config.heads // config.kv_heads, list[tuple[range, range]]()
    for head, own in enumerate(cut(ranks, (1,) * config.kv_heads)):
        for part in cut(group, (1,) * len(own)):
            found.append((range(head * group + part.start, head * group + part.stop), range(head, head + 1)))
    return found


@dataclass(frozen=True)
class Shard(Checkpoint):
    """A checkpoint as one rank sees it: its slices of the same files, which `whole` knows, a config of their sizes.

    Rows are views of the mapped file, columns are copied out of it; so each byte is read once by the rank it is for.
    """

    whole: Checkpoint = field(kw_only=True)
    share: Share = field(kw_only=True)
    vocabulary: int = field(kw_only=True)  # rows of the head that anybody wants

    @classmethod
    def of(cls, whole: Checkpoint, ranks: Ranks, plan: Plan | None, vocabulary: int) -> tuple[Shard, int]:
        """This rank's part, and the rows of its head. Raises UsageError where the model cannot be shared so."""
        share = shares(whole.config, ranks.size, plan.kv_heads if plan else None)[ranks.rank]
        return cls.cut(whole, share, vocabulary), len(share.vocabulary(vocabulary))

    @classmethod
    def cut(cls, whole: Checkpoint, share: Share, vocabulary: int) -> Shard:
        """The share's part of a checkpoint."""
        config = share.local(whole.config)
        return cls(Path(), {}, config, {}, {}, whole=whole, share=share, vocabulary=vocabulary)

    def preflight(self) -> None:
        self.whole.preflight()

    def release(self, names: Iterable[str]) -> None:
        self.whole.release(names)

    def expect(self, names: Iterable[str]) -> None:
        self.whole.expect(names)

    def tensor(self, name: str) -> torch.Tensor:
        tensor, share, dim = self.whole.tensor(name), self.share, self.config.head_dim
        *_, of, kind = name.split(".")
        if name == "lm_head.weight":
            rows = share.vocabulary(min(self.vocabulary, len(tensor)))
        elif of in ("q_proj", "k_proj", "v_proj"):
            heads = share.heads if of == "q_proj" else share.kv_heads
            rows = range(heads.start * dim, heads.stop * dim)
        elif of in ("gate_proj", "up_proj"):
            rows = share.ffn
        elif of in ("o_proj", "down_proj") and kind == "weight":
            ends = range(share.heads.start * dim, share.heads.stop * dim) if of == "o_proj" else share.ffn
            return tensor[:, ends.start : ends.stop].contiguous()
        elif of in ("o_proj", "down_proj"):
            return tensor if share.rank == 0 else torch.zeros_like(tensor)  # added once
        else:
            return tensor
        return tensor[rows.start : rows.stop]


def share_out(decoder: Decoder, ranks: Ranks, share: Share) -> Decoder:
    """Have a decoder that read its share work together with the others."""
    decoder.ranks = ranks
    decoder.layers = [layer.together(ranks) for layer in decoder.layers]
    rows = min(decoder.config.vocab_size, decoder.vocabulary)
    decoder.spans = tuple(map(len, cut(rows, share.weights)))
    if decoder.config.tied:
        own = share.vocabulary(rows)
        decoder.head = decoder.embedding[own.start : own.stop]
    return decoder
