"""CUDA graphs: a pass of a fixed shape, captured once and replayed with new tokens, positions and lengths."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hspec_decoding.model import Decoder
from hspec_decoding.views import Layout, Pass
from hspec_kernels.attention import SPLIT

Key = tuple[object, ...]


@dataclass(frozen=True)
class _Captured:
    """One graph with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # int64 [2 + windows + rows, B]: the layout's numbers, then the tokens
    logits: Tensor  # float32 [B, rows, vocabulary]
    queries: list[Tensor] | None


class Graphs:
    """The graphs of one decoder. What they were captured with stays in place as long as they do."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.captured: dict[Key, _Captured] = {}

    def prepare(self, tokens: Sequence[Sequence[int]], memory: Pass) -> float:
        """Capture the graph of a pass where there is none yet; the seconds that took."""
        started = time.perf_counter()
        layout = _rounded(memory.layout)
        key = _key(memory, layout)
        if key in self.captured:
            return 0.0
        self.captured[key] = self._capture(_numbers(layout, tokens), memory, layout)
        self.decoder.finish()
        return time.perf_counter() - started

    def logits(self, tokens: Sequence[Sequence[int]], memory: Pass) -> Tensor:
        """Logits [B, rows, vocabulary] of a prepared pass, valid until the next one of its shape."""
        layout = _rounded(memory.layout)
        captured = self.captured[_key(memory, layout)]
        captured.inputs.copy_(_numbers(layout, tokens))
        captured.graph.replay()
        if memory.queries is not None and captured.queries is not None:
            memory.queries[:] = captured.queries
        return captured.logits

    def _capture(self, numbers: Tensor, memory: Pass, layout: Layout) -> _Captured:
        inputs = numbers.to(self.decoder.device)
        first_token = len(layout.numbers)

        def run() -> tuple[Tensor, list[Tensor] | None]:
            static = Pass(memory.config, memory.store, layout, windowed=memory.windowed)
            static.numbers = inputs[:first_token]
            static.queries = None if memory.queries is None else []
            hidden = self.decoder.forward(inputs[first_token:].T, static)
            return self.decoder.logits(hidden), static.queries

        side = torch.cuda.Stream(self.decoder.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.decoder.device))
        with torch.cuda.stream(side):
            run()  # compiles the kernels; writes what the replay will write again
        torch.cuda.current_stream(self.decoder.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits, queries = run()
        return _Captured(graph, inputs, logits, queries)


def _key(memory: Pass, layout: Layout) -> Key:
    return (memory.store, len(layout.slots), layout.rows, str(layout.extent), memory.queries is None)


def _numbers(layout: Layout, tokens: Sequence[Sequence[int]]) -> Tensor:
    """A captured pass's input [2 + windows + rows, B]."""
    return torch.tensor([*layout.numbers, *map(list, zip(*tokens, strict=True))])


def _rounded(layout: Layout) -> Layout:
    """The layout with its extents rounded up to few different ones: a bound costs nothing, a capture does."""
    extent = {
        window: [SPLIT << max(0, -(-max(ends) // SPLIT) - 1).bit_length()] * len(ends)
        for window, ends in layout.extent.items()
    }
    return replace(layout, extent=extent)
