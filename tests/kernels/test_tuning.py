"""Tuned launch shapes: only those that give the same bits, only on a GPU, kept in a file that may be broken."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import config
from torch import Tensor

from hspec_decoding import launches
from hspec_decoding.launches import Store, matrices, tune_launches
from hspec_kernels.linear import kernel, quantize, tuning, whole_linear
from hspec_kernels.linear.chosen import TUNED_BLOCKS, TUNED_LAUNCHES, Matrix
from hspec_kernels.linear.kernel import FEW, Blocks, blocks
from hspec_kernels.linear.quantized_kernel import LAUNCHES, Launch, launch_for, quantized_linear
from hspec_kernels.linear.tuning import TILE, candidates, choose, tune

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SIZES = [(FEW, 896), (4_096, 4_096), (4_096, 11_008), (12_288, 4_096), (32_000, 4_096), (151_936, 896)]
LARGE, SMALL = (
    Matrix(GPU, torch.bfloat16, None, 4_096, 11_008, TILE),
    Matrix(GPU, torch.float16, "int4", 896, 896, TILE),
)


@pytest.fixture(autouse=True)
def _untuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is known before a test, nor after it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HSPEC_TUNE", raising=False)
    before = dict(TUNED_BLOCKS), dict(TUNED_LAUNCHES)
    forget()
    yield
    forget()
    TUNED_BLOCKS.update(before[0])
    TUNED_LAUNCHES.update(before[1])


def forget() -> None:
    TUNED_BLOCKS.clear()
    TUNED_LAUNCHES.clear()


class Fake:
    """Seconds by shape, or by shape and rows; what is not listed takes 1."""

    def __init__(self, times: dict[Any, float], different: tuple[Any, ...] = ()) -> None:
        self.times, self.different = times, different
        self.asked: list[tuple[Any, int]] = []

    def seconds(self, shape: Any, rows: int) -> float:
        self.asked.append((shape, rows))
        return self.times.get((shape, rows), self.times.get(shape, 1.0))

    def equal(self, shape: Any) -> bool:
        return shape not in self.different


def chosen(fake: Fake) -> Any:
    return choose(["default", "a", "b"], fake.seconds, fake.equal)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("fake", "wanted"),
    [
        (Fake({}), "default"),
        (Fake({"a": 0.98}), "default"),
        (Fake({"a": 0.96}), "a"),
        (Fake({"a": 0.96, "b": 0.9}), "b"),
        (Fake({"a": 0.96, "b": 0.9}, different=("b",)), "a"),
        (Fake({"a": 0.96, ("b", 1): 0.9, ("b", TILE): 1.1}), "a"),
        (Fake({("a", 1): 0.9, ("a", TILE): 1.01}), "default"),
        (Fake({"a": float("inf"), "b": float("inf")}), "default"),
        (Fake(dict.fromkeys(("default", "a", "b"), float("inf"))), "default"),
    ],
)
def test_the_default_unless_another_is_clearly_faster(fake: Fake, wanted: str) -> None:
    assert chosen(fake) == wanted


def test_what_is_faster_must_be_so_twice() -> None:
    """The first measurement of the default may be of a GPU that has just woken up."""
    fake = Fake({"a": 0.9})
    first = iter([1.0])
    slow = fake.seconds
    fake.seconds = lambda shape, rows: next(first, 0.9) if shape == "default" else slow(shape, rows)  # type: ignore[method-assign]
    assert chosen(fake) == "default"


@pytest.mark.parametrize("tile", [16, 32, 64])
@pytest.mark.parametrize(("outputs", "inner"), SIZES)
def test_candidates_share_what_fixes_the_sums(outputs: int, inner: int, tile: int) -> None:
    default, *others = candidates(Matrix(GPU, torch.bfloat16, None, outputs, inner, tile))
    assert default == blocks(outputs, inner, tile)
    assert others
    assert default not in others
    for other in others:
        assert isinstance(other, Blocks)
        assert other.chains == default.chains
        assert other.chains == 1 or (other.k, other.warps) == (default.k, default.warps)
        assert other.k % 16 == 0


@pytest.mark.parametrize("form", LAUNCHES)
@pytest.mark.parametrize("tile", [16, 32, 64])
@pytest.mark.parametrize(("outputs", "inner"), SIZES)
def test_candidates_for_4_bits_share_it_too(form: str, outputs: int, inner: int, tile: int) -> None:
    default, *others = candidates(Matrix(GPU, torch.bfloat16, form, outputs, inner, tile))
    assert default == launch_for(form, outputs, inner, tile)
    assert others
    for other in others:
        assert isinstance(other, Launch)
        assert (other.k, other.split, other.decode, other.swap) == (
            default.k,
            default.split,
            default.decode,
            default.swap,
        )
        by_four = [(launch.n if launch.swap else tile) >= 64 and launch.warps >= 4 for launch in (default, other)]
        assert by_four[0] == by_four[1]  # wgmma on Hopper, or mma


@pytest.fixture
def _in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted dots add up along K as accumulators of tensor cores do: from its beginning to its end."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:  # noqa: ARG001
        total = d.data.copy()
        for k in range(a.data.shape[-1]):
            total += a.data[..., :, k, None].astype(total.dtype) * b.data[..., k, None, :].astype(total.dtype)
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


def random(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="of the interpreter")
@pytest.mark.usefixtures("on_triton", "_in_order")
@pytest.mark.parametrize("outputs", [48, FEW + 16])
def test_candidates_give_equal_bits(outputs: int) -> None:
    """Of several sums an output and of one, of which K is no multiple of most steps; gated too."""
    shapes = candidates(Matrix(CPU, torch.float32, None, outputs, 544, TILE))
    x, weight, bias = random(3, 544), random(48, 544), random(48)

    def product(shape: Any, gated: bool = False) -> Tensor:
        return whole_linear(x, weight, bias, None, TILE, shape, gated)

    wanted, gated = product(shapes[0]), product(shapes[0], gated=True)
    torch.testing.assert_close(wanted, x @ weight.T + bias, atol=1e-4, rtol=1e-4)
    for shape in shapes[1:]:
        assert torch.equal(product(shape), wanted)
        assert torch.equal(product(shape, gated=True), gated)
    assert not torch.equal(product(Blocks(16, 64, 4, 2, 2)), wanted)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of the interpreter")
@pytest.mark.usefixtures("on_triton", "_in_order")
@pytest.mark.parametrize("form", LAUNCHES)
def test_candidates_for_4_bits_give_equal_bits(form: str) -> None:
    shapes = candidates(Matrix(CPU, torch.float32, form, 70, 640, TILE))
    x, weight = random(3, 640), quantize(random(70, 640), form)

    def product(shape: Any) -> Tensor:
        return quantized_linear(x, weight, None, None, TILE, shape)

    wanted = product(shapes[0])
    assert all(torch.equal(product(shape), wanted) for shape in shapes[1:])
    assert not torch.equal(product(shapes[0]._replace(split=1)), wanted)  # type: ignore[call-arg]


@pytest.mark.usefixtures("on_triton")
def test_tuned_shapes_are_launched(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Of the very matrix only: by its device, types, sizes and tile."""

    def unknown(outputs: int, *_: int) -> Blocks:
        raise LookupError(outputs)

    dtype = torch.float16
    x, weight = (random(n, 64).to(device, dtype) for n in (3, 40))
    wanted = whole_linear(x, weight, None, None, TILE)
    tuning.use({Matrix(x.device, dtype, None, 40, 64, TILE): blocks(40, 64, TILE)})
    monkeypatch.setattr(kernel, "blocks", unknown)
    assert torch.equal(whole_linear(x, weight, None, None, TILE), wanted)
    for rows, matrix, tile in ((x, weight, 32), (x, weight[:39], TILE), (x[:, :32], weight[:, :32], TILE)):
        with pytest.raises(LookupError):
            whole_linear(rows, matrix, None, None, tile)


def test_the_budget_ends_between_measurements() -> None:
    """What was not measured whole is not told; what memory lacks room for is passed over."""
    clock = iter(range(1000))
    huge = SMALL._replace(outputs=1 << 20)

    def trial(of: Matrix) -> Fake:
        if of == huge:
            raise torch.OutOfMemoryError
        return Fake({})

    asked = len(candidates(SMALL))
    found = tune([huge, SMALL, LARGE], asked + 2, trial, lambda: next(clock))
    assert found == {SMALL: candidates(SMALL)[0]}
    assert tune([LARGE, SMALL], -1, trial) == {}


def test_shapes_come_back_from_the_file(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "launches.json", "one GPU")
    found = {LARGE: candidates(LARGE)[2], SMALL: candidates(SMALL)[1]}
    assert store.known([LARGE, SMALL]) == {}
    assert store.keep({LARGE: found[LARGE]}) is None
    assert store.keep({SMALL: found[SMALL]}) is None
    assert store.known([LARGE, SMALL]) == found
    assert store.known([LARGE._replace(device=torch.device("cuda", 1))]) != {}
    for other in (LARGE._replace(outputs=4_095), LARGE._replace(dtype=torch.float16), LARGE._replace(form="nf4")):
        assert store.known([other, LARGE._replace(tile=32), LARGE._replace(inner=4_096)]) == {}
    other_gpu = Store(store.path, "another GPU")
    assert other_gpu.known([LARGE, SMALL]) == {}
    assert other_gpu.keep({LARGE: candidates(LARGE)[0]}) is None
    assert store.known([LARGE, SMALL]) == found
    assert [path.name for path in store.path.parent.iterdir()] == ["launches.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"one GPU": 3}',
        '{"one GPU": {"whole 4096 x 11008, bfloat16, tile 16": [1]}}',
        "\udcff",
        "[" * 99_999,
    ],
)
def test_a_broken_file_is_written_anew(tmp_path: Path, text: str) -> None:
    store = Store(tmp_path / "launches.json", "one GPU")
    store.path.write_bytes(text.encode(errors="surrogateescape"))
    assert store.known([LARGE]) == {}
    assert store.keep({LARGE: candidates(LARGE)[1]}) is None
    assert store.known([LARGE]) == {LARGE: candidates(LARGE)[1]}


def test_only_shapes_that_give_the_same_bits_are_taken_from_the_file(tmp_path: Path) -> None:
    """Those of another version of hspec may not."""
    few = LARGE._replace(outputs=FEW)
    store = Store(tmp_path / "launches.json", "one GPU")
    for of, shape in ((few, blocks(few.outputs, few.inner, TILE)._replace(chains=2)), (LARGE, Blocks(32, 24, 4, 4))):
        assert store.keep({of: shape}) is None
        assert store.known([of]) == {}
    kept = json.loads(store.path.read_text())
    kept["one GPU"] = {key: {**fields, "more": 1} for key, fields in kept["one GPU"].items()}
    store.path.write_text(json.dumps(kept))
    assert store.known([few, LARGE]) == {}


def test_a_file_that_cannot_be_written_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    failure = Store(tmp_path / "file" / "launches.json", "one GPU").keep({LARGE: candidates(LARGE)[0]})
    assert failure in ("Not a directory", "File exists")


def never(*_: Any) -> Any:
    raise AssertionError


def test_nothing_is_tuned_off_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "tune", never)
    monkeypatch.setattr(launches, "Store", never)
    notes: list[str] = []
    tune_launches(config(), None, ["int4"], 276, torch.float16, CPU, notes)
    tune_launches(config(), None, [], 276, torch.float32, GPU, notes)
    monkeypatch.setattr(tuning, "interpreted", lambda: True)
    tune_launches(config(), None, [], 276, torch.float16, GPU, notes)
    monkeypatch.setattr(tuning, "interpreted", lambda: False)
    monkeypatch.setenv("HSPEC_TUNE", "0")
    tune_launches(config(), None, [], 276, torch.float16, GPU, notes)
    assert not notes
    assert not TUNED_BLOCKS


@pytest.mark.skipif(torch.cuda.is_available(), reason="of the interpreter")
def test_the_interpreter_is_known() -> None:
    assert tuning.interpreted()


def test_what_is_known_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A note tells what was measured; a later start takes it from the file and measures what is new to it."""
    asked: list[list[Matrix]] = []

    def measured(products: Iterable[Matrix], budget: float) -> dict[Matrix, Any]:
        asked.append(list(products))
        assert budget == launches.SECONDS * (2 if len(asked) == 1 else 1)
        return {of: candidates(of)[1] for of in asked[-1][: 2 if len(asked) == 2 else None]}

    monkeypatch.setattr(tuning, "interpreted", lambda: False)
    monkeypatch.setattr(tuning, "tune", measured)
    monkeypatch.setattr(launches, "gpu_name", lambda _: "one GPU")
    target, draft, notes = config(), config(hidden_size=32, num_attention_heads=2), list[str]()
    for forms in ([], ["int4"], ["int4"], ["int4"]):
        forget()
        tune_launches(target, draft, forms, 200, torch.bfloat16, GPU, notes)
    whole = matrices(target, [None], 200, torch.bfloat16, GPU)
    assert set(asked[0]) == {*whole, *matrices(draft, [None], 200, torch.bfloat16, GPU)}
    assert {of.form for of in asked[1]} == {"int4"}
    assert asked[2] == asked[1][2:]
    assert len(asked) == len(notes) == 3
    assert f"shapes of {len(asked[0])} products were tuned in" in notes[0]
    assert "HSPEC_TUNE=0" in notes[0]
    assert f"of 2 of {len(asked[1])} products" in notes[1]
    assert {of: candidates(of)[1] for of in whole}.items() <= TUNED_BLOCKS.items()
    assert {of.form for of in TUNED_LAUNCHES} == {"int4"}


def test_the_matrices_of_a_model() -> None:
    """As the decoder stacks them; those that no 4-bit format takes stay in their own."""
    raw = config(hidden_size=96, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    found = matrices(raw, [None, "nf4"], 200, torch.bfloat16, GPU)
    sizes = [(256, 96), (96, 128), (256, 96), (96, 128), (200, 96)]
    assert [of[3:5] for of in found if of.form is None] == list(dict.fromkeys(sizes))
    assert [of[3:5] for of in found if of.form] == [(96, 128)]
