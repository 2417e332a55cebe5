"""Triton kernels against their torch references: ragged sizes, every grouping, outputs poisoned with NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hspec_kernels.attention import Reach, attend_reference, attend_split
from hspec_kernels.linear import Quantized, gated_linear, linear, linear_reference, quantize
from hspec_kernels.mlp import silu_mul, silu_mul_reference
from hspec_kernels.norm import rms_norm, rms_norm_reference
from hspec_kernels.rope import rope_append, rope_append_reference
from hspec_kernels.total import total, total_reference

pytestmark = pytest.mark.usefixtures("on_triton")

# Interpreted bfloat16 products are wrong in Triton itself, so bfloat16 is for GPUs.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def error(found: Tensor, wanted: Tensor) -> float:
    """Root mean square of the difference over that of what is wanted."""
    difference = (found.double() - wanted.double()).square().mean().sqrt()
    return float(difference / wanted.double().square().mean().sqrt())


def random(*size: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "rows"),
    [
        (4, 1, 64, 1),
        (2, 4, 80, 3),
        (1, 8, 96, 5),
        (2, 7, 128, 16),
        (2, 1, 256, 2),
        pytest.param(1, 8, 128, 33, marks=pytest.mark.long),
    ],
)
def test_attention(dtype: torch.dtype, kv_heads: int, group: int, dim: int, rows: int, device: torch.device) -> None:
    """Two sequences of their own lengths, in slots out of order; keys that nobody sees are NaN."""
    query = random(2, rows, kv_heads * group, dim, device=device, dtype=dtype)
    keys, values = (random(3, kv_heads, 700 + i, dim, device=device, dtype=dtype)[:, :, :700] for i in range(2))
    keys[:, :, 640:], values[:, :, 640:] = float("nan"), float("nan")
    slots, first = torch.tensor([2, 0], device=device), torch.tensor([600, 5], device=device)
    for window in (None, 100):
        reach = Reach(slots, first, rows, (640, 5 + rows), window)
        found, lse = attend_split(query, keys, values, reach)
        exact = attend_reference(query.float(), keys.float(), values.float(), reach)
        assert error(found, exact) < BOUND[dtype]
        assert lse.isfinite().all()


def test_attention_rows_do_not_depend_on_their_neighbours(device: torch.device) -> None:
    """To the bit: neither on how many there are, nor on the extent, nor across the edge of a split."""
    query, (keys, values) = random(1, 16, 8, 64, device=device), (random(1, 2, 800, 64, device=device),) * 2
    slot = torch.tensor([0], device=device)
    whole = attend_split(query, keys, values, Reach(slot, torch.tensor([500], device=device), 16, (516,)))[0]
    for row in range(16):
        reach = Reach(slot, torch.tensor([500 + row], device=device), 1, (1024,))
        assert torch.equal(attend_split(query[:, row : row + 1], keys, values, reach)[0], whole[:, row : row + 1])


def test_log_sum_exp_joins_parts(device: torch.device) -> None:
    """Attention over two halves of the keys, joined by their log-sum-exps, is attention over all of them."""
    query, keys, values = (random(1, n, m, 64, device=device) for n, m in ((1, 2), (2, 512), (2, 512)))
    slot, last = torch.tensor([0], device=device), torch.tensor([255], device=device)
    whole = attend_split(query, keys, values, Reach(slot, 2 * last + 1, 1, (512,)))[0]
    halves = [
        attend_split(query, keys[:, :, at : at + 256], values[:, :, at : at + 256], Reach(slot, last, 1, (256,)))
        for at in (0, 256)
    ]
    weights = torch.stack([lse for _, lse in halves]).softmax(0)
    joined = sum(part * weight[..., None] for (part, _), weight in zip(halves, weights, strict=True))
    assert error(joined, whole) < 1e-5


@pytest.fixture(params=[0, 2048], ids=["one sum", "chains"])
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Outputs up to which products are of several sums."""
    monkeypatch.setattr("hspec_kernels.linear.kernel.FEW", request.param)
    return int(request.param)


def test_what_a_sum_runs_over_is_the_same_for_every_number_of_rows() -> None:
    """Interpreted products cannot tell: NumPy's own order of sums changes with the size of a tile."""
    from hspec_kernels.linear.kernel import FEW, blocks

    assert len({(cut.chains, cut.k) for cut in (blocks(FEW, 896, tile) for tile in (16, 32, 64))}) == 1
    assert {blocks(outputs, 896, tile).chains for outputs in (FEW + 1, 8192, 32_000) for tile in (16, 32, 64)} == {1}


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inner"), [(40, 48), (100, 130), (33, 576)])
@pytest.mark.parametrize("rows", [1, 16, 33, 150])
def test_linear(dtype: torch.dtype, outputs: int, inner: int, rows: int, device: torch.device) -> None:
    """With and without bias and residual; rows depend neither on each other nor on how many they are."""
    if device.type == "cuda" and dtype == torch.float32:
        return  # float32 is not for this kernel on a GPU
    x, weight = (random(n, inner, device=device, dtype=dtype) for n in (rows, outputs))
    bias, residual = random(outputs, device=device, dtype=dtype), random(rows, outputs, device=device, dtype=dtype)
    for more in ((None, None), (bias, residual)):
        exact = linear_reference(x.float(), weight.float(), *(None if t is None else t.float() for t in more))
        found = linear(x, weight, *more)
        assert error(found, exact) < BOUND[dtype]
    if rows <= 16 or device.type == "cuda":  # interpreted tiles of other sizes are other products of NumPy's
        assert torch.equal(linear(x[:1], weight, bias, residual[:1]), found[:1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["whole", "int4", "nf4"])
@pytest.mark.parametrize("biased", [False, True])
def test_gated_linear(dtype: torch.dtype, kind: str, biased: bool, few: int, device: torch.device) -> None:
    """To the bit as the product and the gate in two kernels, for each number of rows."""
    if (device.type == "cuda" and dtype == torch.float32) or (kind != "whole" and few):
        return
    made, bias = random(140, 192, device=device, dtype=dtype), random(140, device=device, dtype=dtype)
    weight: Tensor | Quantized = made if kind == "whole" else quantize(made, kind)
    x = random(16, 192, device=device, dtype=dtype)
    found = gated_linear(x, weight, bias if biased else None)
    assert found.shape == (16, 70)
    assert torch.equal(found, silu_mul(linear(x, weight, bias if biased else None)))
    assert torch.equal(gated_linear(x[3:4], weight, bias if biased else None), found[3:4])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 3, 1000), (3, 2, 2048)])
def test_total(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """To the bit: in one order, whatever the shape, and rounded once."""
    parts, residual = random(*shape, device=device, dtype=dtype), random(*shape[1:], device=device, dtype=dtype)
    assert torch.equal(total(parts, residual), total_reference(parts, residual))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 576, 1000])
def test_norm_and_gate(dtype: torch.dtype, size: int, device: torch.device) -> None:
    x, weight = random(2, 3, size, device=device, dtype=dtype), random(size, device=device, dtype=dtype)
    exact = rms_norm_reference(x.float(), weight.float(), 1e-5)
    assert error(rms_norm(x, weight, 1e-5), exact) < BOUND[dtype]
    assert error(silu_mul(x), silu_mul_reference(x.float())) < BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (6, 2, 80), (7, 1, 96)])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_append(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, normed: bool, device: torch.device
) -> None:
    """Queries come back rotated; of the cache only the rows' own slots change, values untouched by rotation."""
    stacked = random(2, 3, (heads + 2 * kv_heads) * dim, device=device, dtype=dtype)
    angles = random(2, 3, dim // 2, device=device).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    weights = random(2, dim, device=device, dtype=dtype)
    norms = (weights[0], weights[1], 1e-6) if normed else None
    slots, first = torch.tensor([2, 0], device=device), torch.tensor([7, 1], device=device)
    before = random(3, kv_heads, 20, dim, device=device, dtype=dtype)
    found, wanted = [before.clone(), before.clone()], [before.float().clone(), before.float().clone()]
    query = rope_append(stacked, cos, sin, *found, slots, first, norms)
    precise = norms and (norms[0].float(), norms[1].float(), norms[2])
    exact = rope_append_reference(stacked.float(), cos.float(), sin.float(), *wanted, slots, first, precise)
    assert error(query, exact) < BOUND[dtype]
    assert error(found[0], wanted[0]) < BOUND[dtype]
    assert torch.equal(found[1].float(), wanted[1])
    assert torch.equal(found[0][1], before[1])
