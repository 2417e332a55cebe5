"""CUDA graphs: a pass of a fixed shape, captured once and replayed with new tokens, positions, lengths and sampling."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from hspec_decoding.model import Decoder
from hspec_decoding.sampling import Sampling
from hspec_decoding.views import Layout, Pass, Recorded
from hspec_kernels.attention import SPLIT
from hspec_kernels.sample import choose, stream

Key = tuple[object, ...]
NOISE = 2  # rows of a pass's input that say which noise its rows are drawn with


@dataclass
class Clock:
    """Seconds to leave out of a measurement: what is done once and never again."""

    left_out: float = 0.0


@dataclass(frozen=True)
class Noise:
    """How the rows of a pass are sampled: sequence b, keyed `keys[b]`, by `samplings[b]`; its row 0 chooses the token
    at `after[b]`.
    """

    samplings: Sequence[Sampling]
    keys: Sequence[int]
    after: Sequence[int]

    @property
    def numbers(self) -> list[list[int]]:
        """[NOISE, B]"""
        return [[stream(s.seed, key) for s, key in zip(self.samplings, self.keys, strict=True)], list(self.after)]


class Mark:
    """A point that a device comes to in its own time, after what the host has asked of it so far."""

    def __init__(self, device: torch.device) -> None:
        self.host = time.perf_counter()
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self.event.record()

    def until(self, later: Mark) -> float:
        """Seconds of the device from here to a mark that the host has waited for."""
        if self.event is None or later.event is None:
            return later.host - self.host
        return float(self.event.elapsed_time(later.event)) / 1e3


@dataclass(frozen=True)
class Ahead:
    """Tokens that a chain of passes chooses while the host goes on."""

    chosen: Tensor  # int64 [B, steps], -1 where logits are no numbers
    asked: Mark  # behind the chain
    tell: Callable[[list[list[int]], float], None]  # is given the tokens, and the seconds that they came after `asked`
    masks: Tensor | None = None  # int64 [B, R], those of a tree whose nodes the tokens are

    def places(self, b: int, length: int) -> list[int]:
        """Numbers below 0 that stand for the first `length` tokens of sequence b."""
        first = b * self.chosen.shape[1]
        return [~place for place in range(first, first + length)]

    def put(self, tokens: Tensor) -> None:
        """Write the tokens over what stands for them; where logits were no numbers any will do."""
        tokens.copy_(torch.where(tokens < 0, self.chosen.take((~tokens).clamp(min=0)), tokens).clamp(min=0))

    def plant(self, masks: Tensor) -> None:
        """Write the masks over those of a layout, [rows, B]."""
        if self.masks is not None:
            batch, rows = self.masks.shape
            masks[:rows, :batch] = self.masks.T

    def wait(self, clock: Clock, *others: Tensor) -> list[list[list[int]]]:
        """Wait for the tokens, and tell them, and for `others` [A, C] that were asked for since: what these hold.

        The clock leaves out the seconds that the tokens took.
        """
        done = Mark(self.chosen.device)
        *found, chosen = fetched(*others, self.chosen)
        late = max(0.0, time.perf_counter() - self.asked.host - self.asked.until(done))
        clock.left_out += late
        self.tell(chosen, late)
        return found


def fetched(*tensors: Tensor) -> list[list[list[int]]]:
    """What int64 tensors [A, C] hold; the host waits once for all of them."""
    numbers = iter(torch.cat([tensor.flatten() for tensor in tensors]).tolist())
    return [[list(islice(numbers, tensor.shape[1])) for _ in range(len(tensor))] for tensor in tensors]


class Graph(Protocol):
    """Something that was captured."""

    def replay(self) -> None:
        """Do it again."""
        ...


@dataclass(frozen=True)
class Results:
    """What a pass gives; of a captured one, valid until its next replay."""

    logits: Tensor  # float32 [B, rows, vocabulary]
    chosen: Tensor  # int64 [B, rows], -1 where logits are no numbers
    recorded: list[Recorded] | None
    features: Tensor | None = None  # as a pass's


@dataclass(frozen=True)
class Captured:
    """One graph with the tensors that it writes and reads."""

    graph: Graph
    results: Results
    inputs: Tensor  # int64 [2 + windows + NOISE + rows, B]: the layout's numbers, the noise's, then the tokens


class Graphs:
    """The graphs of one decoder. What they were captured with stays in place as long as they do."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.captured: dict[Key, Captured] = {}
        self.last: Captured | None = None  # replayed last
        self.samplings: dict[int, Sequence[Sampling]] = {}  # by the number of sequences, as what follows
        self.options: dict[int, Tensor] = {}  # [B, 4], read by the graphs of as many

    def replay(
        self, tokens: Sequence[Sequence[int]], memory: Pass, noise: Noise, clock: Clock, ahead: Ahead | None = None
    ) -> Results:
        """Run a pass of `tokens` [B, rows], of which some may stand for those that are `ahead`."""
        self._sample_by(noise.samplings)
        layout = rounded(memory.layout)
        numbers = torch.tensor([*layout.numbers, *noise.numbers, *map(list, zip(*tokens, strict=True))])
        if ahead is not None:
            numbers = numbers.to(self.decoder.device, non_blocking=True)
            ahead.put(numbers[-layout.rows :])
        captured = self._ready(lambda: numbers, memory, layout, clock)
        captured.inputs.copy_(numbers, non_blocking=True)
        if ahead is not None:
            ahead.plant(captured.inputs[len(layout.numbers) - layout.rows :])
        captured.graph.replay()
        memory.features = captured.results.features
        return captured.results

    def chain(
        self,
        tokens: Sequence[Sequence[int]],
        memory: Pass,
        noise: Noise,
        fed: Sequence[int],
        steps: int,
        clock: Clock,
    ) -> tuple[Tensor, Pass]:
        """A pass of `tokens`, of which sequence b's first `fed[b]` count, and after it `steps - 1` of the token that
        was chosen last; all that were chosen, [B, steps], and the last pass, whose features are those of all steps.
        """
        # Rows that fill up a block are repetitions: those of the steps too, whatever the block has room for.
        rows = memory.layout.rows if memory.layout.padded else 1
        after = [at + n for at, n in zip(noise.after, fed, strict=True)]
        layout = memory.layout.behind(fed, rows)
        last = torch.tensor([n - 1 for n in fed])[:, None].to(self.decoder.device, non_blocking=True)
        first = self.replay(tokens, memory, noise, clock)
        chosen = [first.chosen.gather(1, last)[:, 0]]
        features = (
            [] if first.features is None else [first.features[torch.arange(len(fed), device=last.device), last[:, 0]]]
        )
        for step in range(steps - 1):
            stepped = rounded(layout.behind([step] * len(fed), rows))
            drawn = replace(noise, after=[at + step for at in after])
            numbers = torch.tensor([*stepped.numbers, *drawn.numbers])
            token = chosen[-1].clamp(min=0).expand(rows, -1)
            memory = memory.moved(stepped)
            captured = self._ready(partial(_joined, numbers, token), memory, stepped, clock)
            captured.inputs[: len(numbers)].copy_(numbers, non_blocking=True)
            captured.inputs[len(numbers) :] = token
            captured.graph.replay()
            chosen.append(captured.results.chosen[:, 0].clone())
            if captured.results.features is not None:
                features.append(captured.results.features[:, 0].clone())
        memory.features = torch.stack(features, 1) if features else None
        return torch.stack(chosen, 1), memory

    def _sample_by(self, samplings: Sequence[Sampling]) -> None:
        size = len(samplings)
        if samplings != self.samplings.get(size):
            self.samplings[size] = samplings
            options = torch.stack([sampling.options for sampling in samplings])
            self.options.setdefault(size, torch.zeros_like(options, device=self.decoder.device)).copy_(options)

    def _ready(self, numbers: Callable[[], Tensor], memory: Pass, layout: Layout, clock: Clock) -> Captured:
        """The graph of a pass, captured now where there is none yet."""
        key = (memory.key, len(layout.slots), layout.rows, str(layout.extent))
        if key not in self.captured:
            self.decoder.finish()
            started = time.perf_counter()
            self.captured[key] = self._capture(numbers().to(self.decoder.device), memory, layout)
            self.decoder.finish()
            clock.left_out += time.perf_counter() - started
        self.last = self.captured[key]
        if memory.recorded is not None:
            memory.recorded[:] = self.last.results.recorded or []
        return self.last

    def _capture(self, inputs: Tensor, memory: Pass, layout: Layout) -> Captured:
        said = len(layout.numbers)

        def run() -> Results:
            static = memory.moved(layout)
            static.numbers, static.captured = inputs[:said], True
            hidden = forward(self.decoder, inputs[said + NOISE :].T, static)
            logits = self.decoder.logits(hidden)
            streams = inputs[said, :, None].expand(-1, layout.rows).reshape(-1)
            positions = inputs[said + 1, :, None] + static.behind
            chosen = choose(logits.flatten(0, 1), self.options[len(layout.slots)], streams, positions.reshape(-1))
            if self.decoder.ranks:
                chosen = self.decoder.ranks.first(chosen)
            return Results(logits, chosen.view(-1, layout.rows), static.recorded, static.features)

        return Captured(*_recorded(run, self.decoder.device), inputs)


def _recorded(run: Callable[[], Results], device: torch.device) -> tuple[Graph, Results]:
    """A graph that does what `run` does, and the tensors that its replays write."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        run()  # compiles the kernels; writes what the replay will write again
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Meanwhile a thread of NCCL's may look at events of its own.
    with torch.inference_mode(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = run()
    return graph, results


def forward(decoder: Decoder, tokens: Tensor, memory: Pass) -> Tensor:
    """Final hidden states [B, R, hidden] of token ids; what the pass is to note of the others stays with it."""
    found = decoder.forward(tokens, memory, memory.entering)
    if not memory.entering:
        return found
    memory.features = found
    return found[..., -decoder.config.hidden_size :].contiguous()


def _joined(numbers: Tensor, tokens: Tensor) -> Tensor:
    return torch.cat((numbers.to(tokens.device), tokens))


def rounded(layout: Layout) -> Layout:
    """The layout with its extents rounded up to few different ones: a bound costs nothing, a capture does."""
    extent = {
        window: [SPLIT << max(0, -(-max(ends) // SPLIT) - 1).bit_length()] * len(ends)
        for window, ends in layout.extent.items()
    }
    return replace(layout, extent=extent)
