"""The target's own text: many rows at once, one token of each a step, never waiting for the host.

All rows stand at the same position, so a step needs no lengths and one captured graph serves every row; what a row must
say (a prompt, the header of the next turn) is written ahead of it, and where nothing is written the target decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hspec_decoding.config import ModelConfig
from hspec_decoding.model import Decoder, Norms
from hspec_decoding.sampling import Sampling
from hspec_decoding.training.target import split
from hspec_decoding.training.texts import Prompt, Turns
from hspec_kernels.sample import choose, stream
from hspec_offload.ring import Item

EXTENT = 128  # slots by which the keys that are looked at grow: a graph for each
PERIOD, REPEATED = 32, 64  # a row that says the same up to 32 tokens over and over is ended after 64 tokens of it
FREE = -1  # a place where the target decides
ASKING = 1.0  # temperature of questions: rows that begin alike part there, whatever their answers' is


class Step:
    """Memory of a pass of one token of every row, at the position `at` [1] that is read on the device."""

    def __init__(self, config: ModelConfig, keys: list[Tensor], values: list[Tensor], at: Tensor, extent: int) -> None:
        """`keys`, `values` by layer [B, HK, S, D]; rows see the first `extent` slots up to their own."""
        self.config, self.keys, self.values, self.at, self.extent = config, keys, values, at, extent
        self.positions = at.expand(len(keys[0]), 1)
        self.slots = torch.arange(extent, device=at.device)

    def items(self, layer: int) -> Sequence[Item]:  # noqa: ARG002
        """Nothing comes from a ring."""
        return ()

    def attend(self, layer: int, stacked: Tensor, cos: Tensor, sin: Tensor, norms: Norms) -> Tensor:
        """Queries, keys and values [B, 1, (H + 2 HK) D] -> [B, 1, H, D]."""
        query, key, value = split(self.config, stacked, cos, sin, norms)
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(2, self.at, key.transpose(1, 2))
        values.index_copy_(2, self.at, value.transpose(1, 2))
        batch, _, heads, dim = query.shape
        grouped = query.view(batch, keys.shape[1], -1, dim) * dim**-0.5
        scores = grouped @ keys[:, :, : self.extent].transpose(-1, -2)
        hidden = self.slots > self.at
        window = self.config.windows[layer]
        if window is not None:
            hidden = hidden | (self.slots <= self.at - window)
        chances = scores.float().masked_fill(hidden, float("-inf")).softmax(-1).to(values.dtype)
        attended: Tensor = chances @ values[:, :, : self.extent]
        return attended.view(batch, 1, heads, dim)


class Sampler:
    """Makes rows of a fixed length with one decoder; its memory is that of one shard."""

    def __init__(self, decoder: Decoder, turns: Turns, rows: int, length: int) -> None:
        self.decoder, self.turns, self.rows, self.length = decoder, turns, rows, length
        config, device = decoder.config, decoder.device
        shape = (rows, config.kv_heads, -(-length // EXTENT) * EXTENT, config.head_dim)
        self.keys, self.values = (
            [torch.zeros(shape, dtype=decoder.dtype, device=device) for _ in range(config.layers)] for _ in range(2)
        )
        scripts = turns.to_answer, turns.to_question
        ends = turns.ends_question, turns.ends_answer
        self.scripts = _padded(scripts, device)  # by whether an answer ended
        self.ends = _padded(ends, device)
        self.stop = min(turns.ends_answer, default=None)
        width = length + self.scripts.shape[1]
        self.tokens = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self.own = torch.zeros(rows, width, dtype=torch.bool, device=device)
        self.answering = torch.zeros(rows, dtype=torch.int64, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.options = torch.zeros(2, rows, 4, device=device)  # of questions, of answers
        self.streams = torch.zeros(rows, dtype=torch.int64, device=device)
        self.back = torch.arange(REPEATED + PERIOD, device=device)
        self.ahead = torch.arange(2, 2 + self.scripts.shape[1], device=device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def shard(self, prompts: Sequence[Prompt], seed: int) -> Iterator[int]:
        """Write a row for each prompt into `tokens` and `own`; tells the steps done, of `length` - 1.

        The same prompts and seed give the same rows, whatever was made before.
        """
        self._begin(prompts, seed)
        for step in range(self.length - 1):
            self._step(-(-(step + 1) // EXTENT) * EXTENT)
            if step % EXTENT == EXTENT - 1:
                self.decoder.finish()
            yield step + 1

    def result(self) -> tuple[Tensor, Tensor]:
        """int32 [rows, length] on the host, and which of them the target chose by itself."""
        tokens, own = self.tokens[:, : self.length].int().cpu(), self.own[:, : self.length].cpu()
        return tokens.contiguous(), own.contiguous()

    def _begin(self, prompts: Sequence[Prompt], seed: int) -> None:
        written = torch.full(self.tokens.shape, FREE)
        for row, prompt in enumerate(prompts):
            written[row, : len(prompt.tokens)] = torch.tensor(prompt.tokens)
        self.tokens.copy_(written)
        self.own.zero_()
        self.answering.copy_(torch.tensor([int(prompt.answering) for prompt in prompts]))
        options = [[Sampling(t).options for t in (ASKING, prompt.temperature)] for prompt in prompts]
        self.options.copy_(torch.stack([torch.stack(pair) for pair in options], 1))
        self.streams.copy_(torch.tensor([stream(seed, row) for row in range(len(prompts))]))
        self.at.zero_()

    @torch.inference_mode()
    def _step(self, extent: int) -> None:
        if self.decoder.device.type != "cuda":
            self._advance(extent)
        elif extent in self.graphs:
            self.graphs[extent].replay()
        else:
            self._advance(extent)  # compiles the kernels, and is a step like any other
            self.decoder.finish()
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self.graphs.values())).pool() if self.graphs else None
            with torch.cuda.graph(graph, pool=pool):
                self._advance(extent)
            self.graphs[extent] = graph

    def _advance(self, extent: int) -> None:
        """One token of every row."""
        memory = Step(self.decoder.config, self.keys, self.values, self.at, extent)
        hidden = self.decoder.forward(self.tokens.index_select(1, self.at), memory)
        logits = self.decoder.logits(hidden[:, 0])
        asking, answering = self.options
        options = torch.where(self.answering[:, None] == 1, answering, asking)
        chosen = choose(logits, options, self.streams, (self.at + 1).expand(self.rows)).clamp(min=0)
        written = self.tokens.index_select(1, self.at + 1)[:, 0]
        free = written == FREE
        decided = free
        if self.stop is not None:
            looping = free & self._looping()
            chosen, decided = torch.where(looping, self.stop, chosen), free & ~looping
        token = torch.where(free, chosen, written)
        self.tokens.index_copy_(1, self.at + 1, token[:, None])
        self.own.index_copy_(1, self.at + 1, decided[:, None])
        ended = free & (token[:, None] == self.ends[self.answering]).any(1)
        script, places = self.scripts[self.answering], self.at + self.ahead
        there = self.tokens.index_select(1, places)
        self.tokens.index_copy_(1, places, torch.where(ended[:, None] & (script != FREE), script, there))
        self.answering.bitwise_xor_(ended.long())
        self.at.add_(1)

    def _looping(self) -> Tensor:
        """Rows whose last tokens, all of them the target's own, repeat what stands a few before."""
        places = (self.at - self.back).clamp(min=0)
        recent, own = self.tokens.index_select(1, places), self.own.index_select(1, places)
        before = recent.unfold(1, REPEATED, 1)[:, 1:]  # [B, PERIOD, REPEATED], shifted by 1 to PERIOD tokens
        return (before == recent[:, None, :REPEATED]).all(-1).any(-1) & own.all(-1)


def _padded(lists: Sequence[Iterable[int]], device: torch.device) -> Tensor:
    """int64 [n, longest], filled up with FREE."""
    parts = [torch.tensor([*some], dtype=torch.int64) for some in lists]
    return pad_sequence(parts, batch_first=True, padding_value=FREE).to(device)
