"""Measures which launch shape of a product is the fastest on a GPU, of those that add up in the same order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

from hspec_kernels.linear import whole_linear
from hspec_kernels.linear.chosen import TUNED_BLOCKS, TUNED_LAUNCHES, Matrix
from hspec_kernels.linear.kernel import DEEP, MIDDLE, NARROW, WIDE, Blocks, blocks
from hspec_kernels.linear.quantized import BLOCK, GROUP, Quantized
from hspec_kernels.linear.quantized_kernel import Launch, launch_for, quantized_linear

__all__ = ["TILE", "Matrix", "candidates", "choose", "interpreted", "tune", "use"]

Shape = Blocks | Launch

TILE = 16  # rows of the tiles that are tuned: those of every step but the widest
MARGIN = 0.03  # share of the default's time that another shape must save
COLD = 4  # times the L2 cache: bytes of weights that take turns
MOST = 1 << 16  # outputs measured at most: with more, all GPUs are as full
LAUNCHED, REPEATED = 8, 5  # products of a measurement at least, and measurements

# With one sum an output, the step is free: it goes through K in the same order. Less shared memory than the defaults
# take lets several programs share a multiprocessor of a consumer card.
WHOLE = (
    WIDE,
    MIDDLE,
    NARROW,
    DEEP,
    Blocks(16, 256, 4, 4),
    Blocks(32, 256, 4, 3),
    Blocks(64, 64, 4, 5),
    Blocks(64, 128, 4, 4),
    Blocks(128, 64, 4, 3),
)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, where times mean nothing."""
    return bool(triton.knobs.runtime.interpret)


def candidates(of: Matrix) -> list[Shape]:
    """Launch shapes that give the same bits, the default first."""
    if of.form:
        launch = launch_for(of.form, of.outputs, of.inner, of.tile)
        return [launch, *_near(launch, of.tile)]
    default = blocks(of.outputs, of.inner, of.tile)
    if default.chains > 1:
        return [default, *(default._replace(n=n, stages=s) for n, s in ((8, 3), (8, 6), (16, 3)))]
    return list(dict.fromkeys([default, *WHOLE]))


def _near(launch: Launch, tile: int) -> list[Launch]:
    """Launches of other sizes that the same instructions add up."""
    n, warps = launch.n, launch.warps
    sizes = ((n, 2 * warps), (n // 2, warps), (2 * n, warps), (2 * n, 2 * warps))
    others = [launch._replace(n=n, warps=warps) for n, warps in sizes]
    return [other for other in others if _by_warpgroups(other, tile) == _by_warpgroups(launch, tile)]


def _by_warpgroups(launch: Launch, tile: int) -> bool:
    """Whether Hopper multiplies by four warps together: whether it then rounds alike is not known."""
    return launch.warps >= 4 and (launch.n if launch.swap else tile) >= 64


def choose(
    shapes: Sequence[Shape], seconds: Callable[[Shape, int], float], equal: Callable[[Shape], bool], tile: int = TILE
) -> Shape:
    """The default, which is the first, unless another takes at least 3 % less time with one row and no more with a
    full tile, twice, and gives the same bits.

    `seconds(shape, rows)` measures.
    """
    default = shapes[0]
    once = {shape: seconds(shape, 1) for shape in shapes}
    for shape in sorted(shapes[1:], key=once.__getitem__):
        if not once[shape] < (1 - MARGIN) * once[default]:
            break
        again = ((1, 1 - MARGIN), (tile, 1.0))
        if all(seconds(shape, rows) <= share * seconds(default, rows) for rows, share in again) and equal(shape):
            return shape
    return default


class Trial(Protocol):
    """What `tune` measures a product by."""

    def seconds(self, shape: Shape, rows: int) -> float:
        """Of one product of so many rows; infinite where the shape cannot be launched."""
        ...

    def equal(self, shape: Shape) -> bool:
        """Whether the bits are those of the default."""
        ...


def tune(
    matrices: Iterable[Matrix],
    budget: float,
    trial: Callable[[Matrix], Trial] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[Matrix, Shape]:
    """The shapes chosen for matrices, the first ones first, as far as `budget` seconds reach: each is measured with all
    its candidates or left out. Those that GPU memory lacks room for are left out too.
    """
    deadline = clock() + budget
    found: dict[Matrix, Shape] = {}

    def chosen(of: Matrix) -> Shape:
        tried = (trial or OnGpu)(of)

        def seconds(shape: Shape, rows: int) -> float:
            if clock() > deadline:
                raise TimeoutError
            return tried.seconds(shape, rows)

        return choose(candidates(of), seconds, tried.equal, of.tile)

    for of in matrices:
        try:
            found[of] = chosen(of)
        except torch.OutOfMemoryError:
            continue
        except TimeoutError:
            break
    return found


def use(found: dict[Matrix, Shape]) -> None:
    """Launch products in the shapes that were found, from now on; captured graphs keep theirs."""
    for of, shape in found.items():
        if isinstance(shape, Launch):
            TUNED_LAUNCHES[of] = shape
        else:
            TUNED_BLOCKS[of] = shape


class OnGpu:
    """A product timed on its GPU, over weights that take turns so that the L2 cache does not serve them."""

    def __init__(self, of: Matrix) -> None:
        self.of, self.default = of, candidates(of)[0]
        self.random = torch.Generator(of.device).manual_seed(0)
        outputs = min(MOST, -(-of.outputs // 16) * 16)  # a vocabulary of an odd size is not compiled for by itself
        cache = torch.cuda.get_device_properties(of.device).L2_cache_size
        count = max(1, -(-COLD * cache // self._nbytes(outputs)))
        make = partial(_quantized, of.form) if of.form else _whole
        self.weights: list[Tensor | Quantized] = [make(outputs, of, self.random) for _ in range(count)]
        self.rows = _normal((of.tile, of.inner), of, self.random)

    def _nbytes(self, outputs: int) -> int:
        return outputs * self.of.inner // 2 if self.of.form else 2 * outputs * self.of.inner

    def seconds(self, shape: Shape, rows: int) -> float:
        """Median over replays of a graph of products, by the GPU's own clock."""
        try:
            graph, count = self._captured(shape, rows)
        except torch.OutOfMemoryError:
            raise
        except (triton.TritonError, RuntimeError):
            return float("inf")
        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATED + 1)]  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.of.device):
            graph.replay()
            events[0].record()
            for event in events[1:]:
                graph.replay()
                event.record()
            events[-1].synchronize()
        spans: list[float] = [start.elapsed_time(end) for start, end in pairwise(events)]  # ms
        return median(spans) / 1e3 / count

    def _captured(self, shape: Shape, rows: int) -> tuple[Any, int]:
        """A graph of products with all weights in turn, and how many they are."""
        turns = [self.weights[i % len(self.weights)] for i in range(max(LAUNCHED, len(self.weights)))]
        with torch.cuda.device(self.of.device), torch.inference_mode():
            self._product(self.weights[0], shape, rows)  # compiles
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for weight in turns:
                    self._product(weight, shape, rows)
        return graph, len(turns)

    def equal(self, shape: Shape) -> bool:
        """Whether a row and a full tile come out as by default, to the bit."""

        def product(shape: Shape, rows: int) -> Tensor:
            return self._product(self.weights[0], shape, rows)

        return all(torch.equal(product(shape, rows), product(self.default, rows)) for rows in (1, self.of.tile))

    def _product(self, weight: Tensor | Quantized, shape: Shape, rows: int) -> Tensor:
        x = self.rows[:rows]
        if isinstance(weight, Quantized):
            assert isinstance(shape, Launch)
            return quantized_linear(x, weight, None, None, self.of.tile, shape)
        assert isinstance(shape, Blocks)
        return whole_linear(x, weight, None, None, self.of.tile, shape)


def _normal(size: tuple[int, ...], of: Matrix, random: torch.Generator) -> Tensor:
    return torch.empty(size, dtype=of.dtype, device=of.device).normal_(generator=random)


def _whole(outputs: int, of: Matrix, random: torch.Generator) -> Tensor:
    return _normal((outputs, of.inner), of, random)


def _quantized(form: str, outputs: int, of: Matrix, random: torch.Generator) -> Quantized:
    """Weights of random codes, laid out as `Quantized` says."""
    blocks = -(-of.inner // BLOCK)
    int4 = form == "int4"
    codes = (blocks, outputs, BLOCK // 2) if int4 else (outputs, of.inner // 2)
    scales = (2 * blocks, outputs, 2) if int4 else (of.inner // GROUP, outputs)
    return Quantized(
        form,
        torch.empty(codes, dtype=torch.uint8, device=of.device).random_(256, generator=random),
        torch.empty(scales, dtype=torch.bfloat16 if int4 else torch.float32, device=of.device).normal_(
            generator=random
        ),
        (outputs, of.inner),
        of.dtype,
    )
