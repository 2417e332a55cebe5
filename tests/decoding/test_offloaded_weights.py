"""Weights outside the device: what only moves changes no bit, and the CPU's layers are the same layers."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_engine
import tiny_models
import torch
from tiny_engine import CONTEXT, CPU, scores
from torch import Tensor

import hspec_decoding.host_weights
from hspec_decoding.build import Parts
from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.cpu_layer import CPULayer, row_unit
from hspec_decoding.engine import Engine, Request
from hspec_decoding.host_view import KVPlace
from hspec_decoding.host_weights import FEW, HostDecoder, HostLinear, WeightPlace, joined
from hspec_decoding.load import load_decoder
from hspec_decoding.model import Decoder, Layer
from hspec_decoding.sampling import Sampling
from hspec_kernels.linear import Quantized
from hspec_offload.placed import Layers
from hspec_offload.plan import Plan
from hspec_offload.ring import PIECE, Ring

MIXES = {
    "streamed": ("stream", "stream", "stream"),
    "one here": ("stream", "stream", "gpu"),
    "from the disk": ("disk", "disk", "gpu"),
    "all kinds": ("disk", "cpu", "stream"),
    "the CPU": ("cpu", "cpu", "cpu"),
    "the CPU between": ("gpu", "cpu", "stream"),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"mlp_bias": True, "attention_bias": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
}
ROOMY, TIGHT = 1 << 18, 52_000  # bytes of a ring: the latter has matrices in pieces
WIDE = {"intermediate_size": 512}
PIECES = ([], [1, 8, 8, 8], [70, 64, 3, 1], [65, 16, 16])


def place(weights: tuple[str, ...], ring: Ring | None, copies: tuple[bool, ...] = (), **options: Any) -> WeightPlace:
    return WeightPlace(weights, copies or (False,) * len(weights), ring=ring, **options)


def poisoned(nbytes: int) -> Ring:
    made = Ring(nbytes, CPU)
    made.arena.fill_(255)  # NaN in any precision
    return made


def offloaded(
    family: str,
    where: tuple[str, ...],
    *,
    ring: int = ROOMY,
    copies: tuple[bool, ...] = (),
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> HostDecoder:
    """The decoder that `random_decoder` gives, with its layers elsewhere."""
    shape = tiny_engine.config(family, **overrides)
    made = tiny_engine.weights(shape)
    where_to = place(where, poisoned(ring), copies)
    return HostDecoder(shape, made.__getitem__, place=where_to, dtype=dtype, device=CPU, context=CONTEXT)


def pieces_of(model: Decoder) -> set[int]:
    """In how many pieces the matrices of a decoder cross."""
    products = (p for layer in model.layers for p in (layer.qkv, layer.out, layer.gate_up, layer.down))
    return {len(product.pieces) for product in products if isinstance(product, HostLinear)}


# bits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("where", MIXES.values(), ids=MIXES)
def test_logits_are_those_of_the_resident_decoder(family: str, where: tuple[str, ...]) -> None:
    """In passes of few rows and of many, one after the other through the same ring."""
    here = tiny_engine.random_decoder(family, **FAMILIES[family])
    there = offloaded(family, where, **FAMILIES[family])
    tokens = tiny_engine.prompt(150)
    for pieces in PIECES:
        assert torch.equal(scores(there, tokens, pieces), scores(here, tokens, pieces))


@pytest.mark.parametrize("where", [MIXES["streamed"], MIXES["all kinds"]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_larger_than_the_ring_comes_in_pieces(where: tuple[str, ...], dtype: torch.dtype) -> None:
    here = tiny_engine.random_decoder("llama", 0, dtype, **FAMILIES["llama"], **WIDE)
    there = offloaded("llama", where, ring=24_000 * dtype.itemsize, dtype=dtype, **FAMILIES["llama"], **WIDE)
    assert pieces_of(there) >= {1, 2, 4}
    tokens = tiny_engine.prompt(150)
    for pieces in ([1, 8, 8, 8], [70, 64, 3, 1]):
        assert torch.equal(scores(there, tokens, pieces), scores(here, tokens, pieces))


def test_pieces_on_a_gpu_have_outputs_enough() -> None:
    """The kernel shares out the sums of a product with few outputs: pieces of one with many must not be such."""
    from hspec_kernels.linear.kernel import FEW as KERNELS

    assert FEW == KERNELS
    loader = hspec_decoding.host_weights.HostLoader.__new__(hspec_decoding.host_weights.HostLoader)
    loader.device, loader.dtype = torch.device("cuda", 0), torch.bfloat16
    for outputs in (2048, 2304, 4096, 5120, 22016, 55296):
        for ring in (1 << 20, 1 << 22, 1 << 24):
            loader._ring = poisoned(ring)
            for gated in (False, True):
                cut = loader._cut([torch.empty(outputs, 512)], gated=gated)
                assert sorted(row for ranges in cut for rows in ranges for row in rows) == list(range(outputs))
                sizes = {sum(map(len, ranges)) for ranges in cut}
                assert sizes == {outputs} or min(sizes) > FEW
                assert all(len(ranges) == 1 + gated for ranges in cut)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_of_large_matrices_find_room(dtype: torch.dtype) -> None:
    """Those of 32B and 70B models, also in twice the bytes."""
    loader = hspec_decoding.host_weights.HostLoader.__new__(hspec_decoding.host_weights.HostLoader)
    loader.device, loader.dtype = torch.device("cuda", 0), dtype
    loader._ring = Ring(4 * PIECE, torch.device("meta"))
    for hidden, ffn in ((5120, 27_648), (8192, 28_672)):
        for outputs, inputs in ((hidden, ffn), (2 * ffn, hidden), (3 * hidden, hidden)):
            cut = loader._cut([torch.empty(outputs, inputs, dtype=dtype, device="meta")], gated=outputs == 2 * ffn)
            most = max(sum(map(len, ranges)) for ranges in cut)
            assert most * inputs * dtype.itemsize <= loader._ring.nbytes


def test_rows_that_lie_below_each_other_are_not_copied() -> None:
    arena = torch.arange(96, dtype=torch.float32)
    a, b, c = arena[:24].view(4, 6), arena[24:60].view(6, 6), arena[66:].view(5, 6)
    assert joined([a, b], torch.float32).data_ptr() == a.data_ptr()
    for some in ([a], [a, b], [a, c], [b, a]):
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(joined(some, dtype), torch.cat(some).to(dtype))


# layer by layer


@pytest.mark.parametrize("where", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("ring", [ROOMY, TIGHT])
def test_layers_in_turn_are_those_of_the_resident_decoder(where: tuple[str, ...], ring: int) -> None:
    here = tiny_engine.random_decoder("qwen2")
    there = offloaded("qwen2", where, ring=ring)
    assert there.offloaded
    for _ in range(2):
        with there.in_turn() as layers:
            for found, wanted in zip(layers, here.layers, strict=True):
                assert type(found) is Layer
                for name in ("qkv", "out", "gate_up", "down"):
                    assert all(map(torch.equal, parts(found, name), parts(wanted, name)))
                assert not found.items(1)


def parts(layer: Layer, name: str) -> list[Tensor]:
    return [tensor for tensor in getattr(layer, name) if tensor is not None]


@pytest.mark.parametrize("where", [("stream", "stream", "gpu"), ("stream", "cpu", "gpu"), ("disk", "stream", "stream")])
@pytest.mark.parametrize("keys", [(False,) * 3, (True, True, False)], ids=["keys here", "keys away"])
def test_texts_are_those_of_the_resident_engine(where: tuple[str, ...], keys: tuple[bool, ...]) -> None:
    """Weights, and weights with keys and values, through one ring."""
    levels = "ngram > target(retrieval:256) > target(full)"
    here = tiny_engine.engine(levels, tiny_engine.random_decoder("qwen2"), context=1600)
    target = offloaded("qwen2", where, ring=1 << 20)
    assert target.ring is not None
    kv = KVPlace(keys, target.ring, 1 << 17, 0.0, 256) if any(keys) else None
    there = Engine(target, None, here.stacks, here.settings, here.context, Parts(target, None, kv=kv))
    for n, temperature in enumerate((0.0, 0.8)):
        request = Request(tiny_engine.prompt(700, n), 24, sampling=Sampling(temperature, seed=3))
        assert tiny_engine.answer(there, request) == tiny_engine.answer(here, request)


# the CPU's part


@pytest.fixture(params=[(8, False), (16, True)], ids=["multiples", "always as many"])
def _filled_up(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """As for a GPU: the CPU's layers fill up their rows."""
    make = HostDecoder._by_cpu

    def made(self: HostDecoder, layer: Layer) -> Layer:
        cpu = make(self, layer)
        assert isinstance(cpu, CPULayer)
        return replace(cpu, unit=request.param[0], fixed=request.param[1])

    monkeypatch.setattr(HostDecoder, "_by_cpu", made)


@pytest.mark.usefixtures("_filled_up")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_the_cpu_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    model = offloaded("llama", MIXES["the CPU"], dtype=dtype)
    layer = model.layers[0]
    x, heads = torch.randn(2, 32, 64).to(dtype), torch.randn(2, 32, 4, 16).to(dtype)
    before, after = layer.before(x, 1e-5), layer.after(x, heads, 1e-5)
    for start, rows in ((0, 1), (3, 1), (31, 1), (0, 7), (8, 8), (5, 9), (15, 17), (2, 25)):
        some = slice(start, start + rows)
        assert torch.equal(layer.before(x[:1, some], 1e-5), before[:1, some])
        assert torch.equal(layer.after(x[1:, some], heads[1:, some], 1e-5), after[1:, some])


def test_the_cpu_has_few_rows_only() -> None:
    model = offloaded("llama", MIXES["the CPU between"])
    streamed = len(model.layers[2].items(1))
    assert [len(layer.items(64)) for layer in model.layers] == [0, 0, streamed]
    assert [len(layer.items(65)) for layer in model.layers] == [0, streamed, streamed]


def test_rows_that_this_cpu_must_be_given() -> None:
    model = tiny_engine.random_decoder("llama")
    assert row_unit(model.layers[0], model.config, torch.float32) == (8, False)

    class Picky(Layer):
        """More than 16 rows are added up in another order."""

        def before(self, x: Tensor, eps: float) -> Tensor:
            return super().before(x, eps) + (1e-6 if len(x) % 16 else 0.0)

    class Fickle(Layer):
        """Every number of rows in an order of its own."""

        def before(self, x: Tensor, eps: float) -> Tensor:
            return super().before(x, eps) + 1e-4 * len(x)

    assert row_unit(Fickle(**vars(model.layers[0])), model.config, torch.float32) == (32, True)
    layer = Picky(**vars(model.layers[0]))
    assert row_unit(layer, model.config, torch.float32) == (16, False)


# copies in 4 bits


@pytest.mark.parametrize("form", ["int4", "nf4"])
def test_copies_are_those_of_the_resident_decoder(form: str) -> None:
    """Of layers that have none in the plan the target's own serve, which then are on the device."""
    here = tiny_engine.random_decoder("llama", intermediate_size=128)
    wanted = here.quantized(form)
    where = ("stream", "disk", "cpu")
    found = offloaded("llama", where, intermediate_size=128).quantized(form)
    assert not found.offloaded
    tokens = tiny_engine.prompt(60)
    assert torch.equal(scores(found, tokens, [1, 8]), scores(wanted, tokens, [1, 8]))
    assert isinstance(found.head, Quantized)


def test_a_part_of_the_layers_may_have_copies() -> None:
    model = offloaded("llama", ("stream", "gpu", "gpu"), copies=(True, True, False), intermediate_size=128)
    found = model.quantized("int4")
    assert found.layers[2] is model.layers[2]
    assert [isinstance(layer.qkv[0], Quantized) for layer in found.layers[:2]] == [True, True]  # type: ignore[index]
    assert found.head is model.head
    small = model.quantized("int4")
    before = model._ring.carried if model._ring else 0
    scores(small, tiny_engine.prompt(9), [])
    assert model._ring is not None
    assert model._ring.carried == before


def test_a_middle_level_leaves_the_targets_ring_alone() -> None:
    """What was put ahead for the next pass of the target is kept while a copy drafts."""
    tokens, carried = tiny_engine.prompt(8), []
    for drafts in (False, True):
        model = offloaded("llama", MIXES["streamed"], intermediate_size=128)
        small = model.quantized("int4")
        assert model.ring is not None
        for _ in range(3):
            scores(model, tokens, [])
            if drafts:
                scores(small, tokens, [])
        carried.append(model.ring.carried)
    assert carried[0] == carried[1]


# checkpoints


def planned(*weights: str) -> Plan:
    """A plan of one run for each layer."""
    layers = tuple(Layers(n, n, kind) for n, kind in enumerate(weights))
    made = Plan.__new__(Plan)
    for name, value in {"layers": layers, "embedding": "host"}.items():
        object.__setattr__(made, name, value)
    return made


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_checkpoint_is_loaded_to_where_the_plan_says(tmp_path: Path, stored: torch.dtype) -> None:
    """Also where its precision is not that of the run."""
    tiny_models.model(tmp_path, "qwen2", tokenizer=False, dtype=stored, shards=True)
    seen: list[tuple[int, int]] = []
    made = [
        load_decoder(
            Checkpoint.open(tmp_path),
            torch.float32,
            CPU,
            context=512,
            vocabulary=None,
            plan=plan,
            ring=ring,
            progress=lambda *at: seen.append(at),
        )
        for plan, ring in (
            (None, None),
            (planned("stream", "disk", "cpu", "gpu"), poisoned(1 << 18)),
            (planned("disk", "disk", "cpu", "cpu"), None),
        )
    ]
    assert seen == [(n, 4) for n in range(1, 5)] * 3
    tokens = tiny_engine.prompt(90)
    wanted = scores(made[0], tokens, [70, 8])
    assert type(made[0]) is Decoder
    assert isinstance(made[1].layers[2], CPULayer)
    assert type(made[2].layers[2]) is Layer
    for model in made[1:]:
        assert torch.equal(scores(model, tokens, [70, 8]), wanted)


def test_a_disk_is_asked_before_and_told_afterwards(tmp_path: Path) -> None:
    tiny_models.model(tmp_path, "llama", tokenizer=False)
    checkpoint = Checkpoint.open(tmp_path)
    said: list[str] = []
    config = checkpoint.config
    where = place(("disk",) * 4, poisoned(ROOMY), expect=lambda names: said.extend(f"expect {n}" for n in names))
    model = HostDecoder(
        config,
        checkpoint.tensor,
        place=where,
        dtype=torch.float32,
        device=CPU,
        context=512,
        release=lambda names: said.extend(f"release {n}" for n in names),
    )
    assert not [line for line in said if "proj" in line]  # nothing but norms and embeddings was read
    scores(model, tiny_engine.prompt(8), [])
    proj = "model.layers.1.self_attn.q_proj.weight"
    assert said.index(f"expect {proj}") < said.index(f"release {proj}")
    checkpoint.expect([proj])
    checkpoint.release([proj])
    scores(model, tiny_engine.prompt(8), [])


def test_broken_weights_are_found_where_they_are() -> None:
    for where in MIXES.values():
        model = offloaded("qwen3", where)
        assert model.non_finite() is None
        broken = tiny_engine.weights(tiny_engine.config("qwen3"))
        broken["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
        there = HostDecoder(
            tiny_engine.config("qwen3"),
            broken.__getitem__,
            place=place(where, poisoned(ROOMY)),
            dtype=torch.float32,
            device=CPU,
            context=CONTEXT,
        )
        assert there.non_finite() == "layer 1"


def test_the_host_holds_weights_once() -> None:
    """Beside them there is never more than a matrix while they are loaded."""
    shape = tiny_engine.config("llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=12)
    file = torch.ones(1 << 20)

    def read(name: str) -> Tensor:
        size = torch.Size(shape.tensors()[name])
        return file[: size.numel()].view(size)

    weights = sum(4 * torch.Size(size).numel() for size in shape.tensors().values())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    HostDecoder(
        shape,
        read,
        place=place(("stream", "cpu") * 6, Ring(1 << 22, CPU)),
        dtype=torch.float32,
        device=CPU,
        context=512,
    )
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown <= 1.05 * weights + (1 << 22)
