"""The target's text on disk: shards that are made one by one, of which some rows are held out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load as loads
from safetensors.torch import save as saved
from torch import Tensor

from hspec_decoding.chimera.files import replace
from hspec_decoding.config import ModelConfig
from hspec_decoding.model import Decoder
from hspec_decoding.training.sampler import EXTENT, Sampler
from hspec_decoding.training.texts import Turns, prompts
from hspec_profiles.errors import HspecError

HELD = 50  # one row in so many is held out
MOST_ROWS = {"cuda": 1024, "cpu": 32}
ROOM = 0.6  # share of the free memory that a shard's keys, values and logits may take
MARK = "corpus.json"


@dataclass(frozen=True)
class Wanted:
    """What text to make: everything that it depends on but the target's weights."""

    target: str  # a checksum of them
    tokens: int
    rows: int  # of a shard
    length: int  # tokens of a row
    seed: int
    texts: str  # a hash of the texts that excerpts are cut from

    @property
    def shards(self) -> int:
        return -(-self.tokens // (self.rows * self.length))


def rows_for(
    directory: Path, config: ModelConfig, tokens: int, length: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Rows of a shard: as many as are fast and fit beside the weights, no more than are wanted; those of the shards
    that are there already, whatever is free now.
    """
    mark = directory / MARK
    if mark.exists():
        return int(json.loads(mark.read_text("utf-8"))["rows"])
    rows = min(MOST_ROWS[device.type], -(-tokens // length))
    if device.type != "cuda":
        return rows
    slots = -(-length // EXTENT) * EXTENT
    keys = 2 * config.layers * config.kv_heads * config.head_dim * slots * dtype.itemsize
    free = torch.cuda.mem_get_info(device)[0] * ROOM
    return max(1, min(rows, int(free / (keys + 12 * config.vocab_size))))


def make(
    directory: Path,
    wanted: Wanted,
    target: Decoder,
    turns: Turns,
    texts: Sequence[Sequence[int]],
    tell: Callable[[int, int], None],
) -> Corpus:
    """The corpus in a directory, its missing shards made now; `tell` is told (tokens made, tokens).

    Raises HspecError where the directory holds another one.
    """
    _check(directory, wanted)
    sampler: Sampler | None = None
    each = wanted.rows * wanted.length
    for number in range(wanted.shards):
        path = _path(directory, number)
        if path.exists():
            continue
        sampler = sampler or Sampler(target, turns, wanted.rows, wanted.length)
        seed = wanted.seed * 1_000_003 + number
        for step in sampler.shard(prompts(turns, texts, wanted.rows, wanted.length, seed), seed):
            tell(number * each + step * wanted.rows, wanted.shards * each)
        tokens, own = sampler.result()
        replace(path, saved({"tokens": tokens, "own": own}))
    if sampler is not None and target.device.type == "cuda":
        del sampler  # with its graphs, whose memory is theirs alone until it is given back
        torch.cuda.empty_cache()
    return Corpus.read(directory, wanted)


def _check(directory: Path, wanted: Wanted) -> None:
    """Leave a mark of what is made here, or refuse to go on with something else."""
    mark = directory / MARK
    if not mark.exists():
        directory.mkdir(parents=True, exist_ok=True)
        replace(mark, json.dumps(asdict(wanted)).encode())
        return
    known = json.loads(mark.read_text("utf-8"))
    other = [name for name, value in asdict(wanted).items() if known.get(name) != value]
    if other:
        raise HspecError(
            f"`{directory}` holds text that was made with other settings: {', '.join(other)}",
            "repeat the command that began it, or give another `--out`",
        )


def _path(directory: Path, number: int) -> Path:
    return directory / f"text-{number:04}.safetensors"


@dataclass(frozen=True)
class Batch:
    """Rows of text, int64 [b, S], and which tokens the target chose by itself, bool [b, S]."""

    tokens: Tensor
    own: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(self.tokens.to(device), self.own.to(device))


@dataclass(frozen=True)
class Corpus:
    """All rows, in memory: int32 [N, S] and bool [N, S]."""

    tokens: Tensor
    own: Tensor
    seed: int

    @classmethod
    def read(cls, directory: Path, wanted: Wanted) -> Corpus:
        """Every shard. Raises HspecError for one that cannot be read."""
        parts = []
        for number in range(wanted.shards):
            path = _path(directory, number)
            try:
                parts.append(loads(path.read_bytes()))
            except Exception as why:
                raise HspecError(f"`{path}` cannot be read: {why}", "delete it: it is made again") from None
        tokens, own = (torch.cat([part[name] for part in parts]) for name in ("tokens", "own"))
        return cls(tokens, own, wanted.seed)

    @property
    def held(self) -> Tensor:
        """Numbers of the rows that are held out, at least one; every one has a prompt of its own."""
        return torch.arange(0, len(self.tokens), min(HELD, max(1, len(self.tokens))))

    @property
    def rows(self) -> Tensor:
        """Numbers of the others."""
        kept = torch.ones(len(self.tokens), dtype=torch.bool)
        kept[self.held] = False
        return kept.nonzero()[:, 0]

    def counts(self, vocabulary: int) -> Tensor:
        """How often the target chose each token, in rows that are not held out; int64 [vocabulary]."""
        rows = self.rows
        return torch.bincount(self.tokens[rows][self.own[rows]].long(), minlength=vocabulary)

    def batch(self, step: int, size: int) -> Batch:
        """The rows of a step: every pass over the corpus is in an order of its own, whatever was asked before."""
        rows = self.rows
        places = torch.arange(step * size, (step + 1) * size)
        found = torch.empty(size, dtype=torch.int64)
        for turn in sorted({*(places // len(rows)).tolist()}):
            order = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.seed * 7919 + turn))]
            mine = places // len(rows) == turn
            found[mine] = order[places[mine] % len(rows)]
        return self._of(found)

    def held_out(self, size: int, most: int) -> Iterator[Batch]:
        """Up to `most` rows that are held out, `size` at a time."""
        for some in torch.split(self.held[:most], size):
            yield self._of(some)

    def _of(self, rows: Tensor) -> Batch:
        return Batch(self.tokens[rows].long(), self.own[rows])


def frequent(counts: Tensor, size: int, always: frozenset[int]) -> Tensor:
    """The `size` most frequent tokens, with some that are always among them: int64 [size] in ascending order.

    Of tokens that were never seen the lowest are taken: they were merged first.
    """
    scored = counts.clone()
    scored[sorted(always)] = scored.sum() + 1
    return torch.argsort(scored, descending=True, stable=True)[:size].sort().values
