"""The sampling kernel against its torch reference, token for token, and both against the law that they claim."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl
from exact import chi_square
from torch import Tensor

import hspec_kernels.sample as sample
from hspec_kernels.sample import choose, choose_reference, filtered, gumbel, mix, stream
from hspec_kernels.sample.kernel import gumbel as gumbel_of
from hspec_kernels.sample.kernel import mix as mix_of
from hspec_kernels.sample.reference import bits, uniform

pytestmark = pytest.mark.usefixtures("on_triton")

NEVER = float("-inf")
# Several tiles of a small vocabulary, where candidates of a row or of a tile are cut short.
SMALL = {"TILE": 256, "BLOCK": 16, "HEAD": 32, "FRONT": 8, "CHAIN": 2}
NARROW = {"TILE": 256, "BLOCK": 16, "HEAD": 1, "FRONT": 1, "CHAIN": 8}


@pytest.fixture
def shape(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    for name, value in request.param.items():
        monkeypatch.setattr(sample, name, value)


def logits_of(rows: int, size: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * spread


def noise(rows: int, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    streams = torch.tensor([stream(seed, n % 3) for n in range(rows)], device=device)
    return streams, torch.arange(seed, seed + rows, device=device)


def options(device: torch.device, temperature: float, top_p: float = 1, top_k: int = 0, min_p: float = 0) -> Tensor:
    return torch.tensor([temperature, top_p, top_k, min_p], dtype=torch.float32, device=device)


def agrees(logits: Tensor, by: Tensor, seed: int = 0) -> bool:
    args = (logits, by, *noise(len(logits), logits.device, seed))
    return torch.equal(choose(*args), choose_reference(*args))


MIXED = [(1, 0.9, 5, 0.1), (1, 0.9, 40, 0), (0.6, 1, 200, 0.02), (1.5, 0.3, 0, 0.5), (1, 0.999, 0, 0), (1, 1, 50, 1)]
EDGES = [(1, 1, 10_000, 0), (1e-6, 0.5, 3, 0), (1e-30, 0.9, 0, 0), (3e38, 0.9, 100, 0.1)]


@pytest.mark.parametrize(
    ("shape", "by"),
    [*itertools.product([SMALL, NARROW], MIXED), *itertools.product([{}], EDGES)],
    indirect=["shape"],
    ids=lambda value: str(value) if isinstance(value, tuple) else str(value.get("HEAD", "default")),
)
@pytest.mark.usefixtures("shape")
def test_options_together(by: tuple[float, float, int, float], device: torch.device) -> None:
    """Sharp rows, flat ones, rows with ties, and rows with tokens that have no chance."""
    rows = logits_of(6, 700, seed=by[2])
    rows[1] *= 0.1
    rows[2] = rows[2].round()
    rows[3, torch.arange(700) % 5 != 2] = NEVER
    rows[4] = 2.5
    rows[5, 3:] = NEVER
    assert agrees(rows.to(device), options(device, *by), seed=len(str(by)))


@pytest.mark.parametrize("shape", [{}, SMALL], indirect=True, ids=["default", "small"])
@pytest.mark.usefixtures("shape")
def test_options_of_each_sequence(device: torch.device) -> None:
    """Two rows of each of four; among others one is greedy, and one takes next to nothing out."""
    rows = logits_of(8, 700, spread=2.0).to(device)
    by = torch.stack([options(device, *o) for o in ((0,), (0.7, 0.6), (1.5, 1, 4), (1, 1, 0, 0.3))])
    streams, positions = noise(8, device)
    parts = [slice(2 * b, 2 * b + 2) for b in range(4)]
    alone = torch.cat([choose(rows[at], own, streams[at], positions[at]) for at, own in zip(parts, by, strict=True)])
    assert torch.equal(choose(rows, by, streams, positions), alone)
    assert agrees(rows, by)
    assert not torch.equal(choose(rows, by.flip(0), streams, positions), alone)


@pytest.mark.parametrize("shape", [{"TILE": 16, "BLOCK": 4, "HEAD": 1, "FRONT": 1, "CHAIN": 4}], indirect=True)
@pytest.mark.parametrize("top_p", [pytest.param(0.6, marks=pytest.mark.long), 0.2])
@pytest.mark.usefixtures("shape")
def test_many_candidates(top_p: float, device: torch.device) -> None:
    """Flat rows, with and without ties: most candidates are not among those that tiles and rows list."""
    rows = logits_of(50, 100, spread=0.5)
    rows[35:] = (rows[35:] * 8).round() / 8
    assert agrees(rows.to(device), options(device, 1, top_p))


@pytest.mark.parametrize("shape", [SMALL], indirect=True)
@pytest.mark.parametrize("temperature", [0, 0.3, *(pytest.param(t, marks=pytest.mark.long) for t in (1, 1.5))])
@pytest.mark.usefixtures("shape")
def test_every_combination_of_options(temperature: float, device: torch.device) -> None:
    size = 600
    grid = itertools.product([1, 0.9, 0.3, 1e-6], [0, 1, 5, size], [0, 0.1])
    for seed, (top_p, top_k, min_p) in enumerate(grid):
        by = options(device, temperature, top_p, top_k, min_p)
        assert agrees(logits_of(2, size, seed, 3 if seed % 2 else 1).to(device), by, seed), by.tolist()


@pytest.mark.parametrize("shape", [{}, SMALL], indirect=True, ids=["default", "small"])
@pytest.mark.usefixtures("shape")
def test_the_first_of_equal_logits(device: torch.device) -> None:
    rows = torch.zeros(4, 700)
    for row, places in zip(rows, ([699], [255, 256], [17, 31, 600], [0, 1]), strict=True):
        row[places] = 1
    assert choose(rows.to(device), options(device, 0), *noise(4, device)).tolist() == [699, 255, 17, 0]
    assert choose(-rows.to(device), options(device, 0), *noise(4, device)).tolist() == [0, 0, 0, 2]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("shape", [SMALL], indirect=True)
@pytest.mark.usefixtures("shape")
def test_rows_without_a_choice(temperature: float, device: torch.device) -> None:
    """They say so, and their neighbours are none the worse."""
    rows = logits_of(6, 700)
    rows[0, 300], rows[2, 0], rows[3, 699], rows[5] = float("nan"), float("inf"), -float("nan"), NEVER
    rows[1, :650] = NEVER
    by = options(device, temperature, 0.9, 20)
    found = choose(rows.to(device), by, *noise(6, device))
    assert torch.equal(found, choose_reference(rows.to(device), by, *noise(6, device)))
    assert [token >= 0 for token in found.tolist()] == [False, True, False, False, True, False]
    assert found[1] >= 650


@pytest.mark.parametrize("shape", [{}, SMALL], indirect=True, ids=["default", "small"])
@pytest.mark.usefixtures("shape")
def test_rows_stand_alone(device: torch.device) -> None:
    """Neither the rows beside one nor their number or distance changes it."""
    wide = torch.full((3, 1024), float("nan"))
    wide[:, :1000] = logits_of(3, 1000, spread=1.0)
    rows, (streams, positions) = wide.to(device)[:, :1000], noise(3, device)
    for by in (options(device, 0), options(device, 1.2, 0.8), options(device, 1, 0.9, 60)):
        together = choose(rows, by, streams, positions)
        for n in range(3):
            alone = rows[n : n + 1].clone(), by, streams[n : n + 1], positions[n : n + 1]
            assert torch.equal(choose(*alone), together[n : n + 1])
    assert choose(rows[:0], by, streams[:0], positions[:0]).shape == (0,)
    assert torch.equal(choose(rows.T.contiguous().T, by, streams, positions), together)


@pytest.mark.parametrize("shape", [{"TILE": 16, "BLOCK": 4, "FRONT": 4, "CHAIN": 4}], indirect=True)
@pytest.mark.usefixtures("shape")
def test_one_stream_for_all_rows(device: torch.device) -> None:
    """Expanded rather than repeated: nothing lies behind its one number in memory."""
    logits, by = logits_of(5, 300).to(device), options(device, 0.8, 0.9)
    streams, positions = torch.tensor([[7]], device=device).expand(-1, 5).reshape(-1), torch.arange(5, device=device)
    assert streams.stride() == (0,)
    alone = [choose(logits[n : n + 1], by, streams[:1], positions[n : n + 1]) for n in range(5)]
    assert choose(logits, by, streams, positions).tolist() == torch.cat(alone).tolist()


def test_law(device: torch.device) -> None:
    """Of the reference, with which the interpreted kernel agrees as far as there is time for it."""
    row, by = torch.tensor([2.0, 1.0, 1.0, 0.0, -1.0, -3.0, NEVER, 0.5]), (0.8, 0.9, 7, 0.01)
    count, interpreted = 4000, 4000 if device.type == "cuda" else 40
    rows, positions = row.to(device).repeat(count, 1), torch.arange(count, device=device)
    args = options(device, *by), torch.full((count,), stream(1, 2), device=device), positions
    wanted = choose_reference(rows, *args)
    assert torch.equal(choose(rows[:interpreted], args[0], *(t[:interpreted] for t in args[1:])), wanted[:interpreted])
    law = filtered(row[None], *by).softmax(-1)
    assert chi_square(wanted.bincount(minlength=8).cpu()[None], law * count) > 1e-3


def test_law_of_the_noise() -> None:
    """The best of V standard Gumbel variables at equal logits is uniform; so are positions and sequences together."""
    size, count = 50, 4000
    best = [int(gumbel(stream(seed, key), at, size, CPU).argmax()) for seed, key, at in PLACES[:count]]
    counts = torch.tensor(best).bincount(minlength=size)
    assert chi_square(counts[None], torch.full((1, size), len(best) / size)) > 1e-3
    sharp = torch.tensor([6.0, *([0.0] * (size - 1))])  # where small uniforms decide
    rare = sum(int((gumbel(stream(*place[:2]), place[2], size, CPU) + sharp).argmax()) != 0 for place in PLACES)
    chance = float(1 - sharp.softmax(0)[0])
    counts, expected = torch.tensor([[rare, len(PLACES) - rare]]), torch.tensor([[chance, 1 - chance]]) * len(PLACES)
    assert chi_square(counts, expected) > 1e-3


CPU = torch.device("cpu")
PLACES = list(itertools.product(range(2), range(3), range(1000)))


def test_uniform_is_its_float64_self_rounded() -> None:
    """To a unit in the last place, at either end too, so that the law is the same."""
    random = bits(stream(3, 4), 5, 100_000, CPU)
    small, edges = random >> torch.arange(100_000) % 53, torch.tensor([0, 1, 2, (1 << 53) - 1, (1 << 53) - 2, 1 << 52])
    for these in (random, small, edges):
        exact = (these.double() + 0.5) * 2.0**-53
        found = uniform(these)
        assert ((found.double() - exact).abs() <= exact * 2.0**-23).all()
        assert ((found > 0) & (found < 1)).all()
        assert (-torch.log(-torch.log1p(-found))).isfinite().all()


@triton.jit
def noise_kernel(p_stream, p_out, position, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(p_out + o, gumbel_of(mix_of((tl.load(p_stream) ^ position).to(tl.uint64, bitcast=True)), o))


@pytest.mark.parametrize("key", [0, 1, 2**62 + 12345])
def test_kernel_and_reference_share_their_noise(key: int, device: torch.device) -> None:
    own, size = stream(7, key), 1 << 16
    found = torch.empty(size, device=device)
    noise_kernel[(1,)](torch.tensor([own], device=device), found, 100_003, SIZE=size)
    random = bits(own, 100_003, size, CPU)
    exact = -torch.log(-torch.log1p(-uniform(random).double()))
    double = -torch.log(-torch.log1p(-(random.double() + 0.5) * 2.0**-53))
    for these in (found.cpu(), gumbel(own, 100_003, size, CPU)):
        assert ((these - exact).abs() <= 1e-6 * exact.abs().clamp(min=1)).all()
        assert ((these - double).abs() <= 1e-6 * double)[double > 1].all(), "where noise wins"


def test_streams_are_those_of_splitmix64() -> None:
    """Its published first outputs from state 0."""
    assert [mix(n * 0x9E3779B97F4A7C15 % 2**64) for n in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]
    assert -(2**63) <= stream(2**63 - 1, 5) < 2**63
    assert torch.equal(gumbel(stream(1, 2), 3, 10, CPU), gumbel(stream(1, 2), 3, 20, CPU)[:10])
