"""The cost of a pass, checked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_tools import GB, ONE, gpus, model, shape

from hspec_offload.cost import BESIDE, PIECE, SHARED, STREAM, Work, attention_rate, prefill, product_rate, timed
from hspec_offload.machine import Machine, machines
from hspec_profiles.profile import Gpu, Host, HostProfile

LLAMA = shape("llama2-7b-128k")
MACHINE = next(machines(ONE, 32))


def test_sizes_of_llama_2_7b() -> None:
    """6.74 billion weights, 512 KiB of KV a token."""
    assert LLAMA.weight_bytes == pytest.approx(2 * 6.738e9, rel=1e-3)
    assert LLAMA.key_bytes * LLAMA.layers == 512 * 1024


def test_streaming_alone_costs_the_bus() -> None:
    made = timed(Work(1, linear=10 * GB, streamed=10 * GB), MACHINE, LLAMA)
    assert made.pcie == pytest.approx(10 / (55 * STREAM))
    assert made.seconds == pytest.approx((10 * GB + PIECE) / (55e9 * STREAM))
    assert made.memory < made.pcie
    assert made.stall == made.cpu == 0


def test_bus_and_cpu_share_the_memory_of_the_host() -> None:
    """Measured with 16 rows: a fifth of the keys attended by the CPU is 1.24 times as fast as copies alone."""
    alone = timed(Work(16, keys=64 * GB, streamed=64 * GB), MACHINE, LLAMA)
    keys = 0.2 * 64 * GB
    both = timed(Work(16, keys=64 * GB - keys, streamed=64 * GB - keys, cpu_keys=keys), MACHINE, LLAMA)
    assert both.dram == pytest.approx(64 / (90 * SHARED))
    assert alone.seconds / both.seconds == pytest.approx(1.24, rel=0.02)
    more = timed(Work(16, keys=32 * GB, streamed=32 * GB, cpu_keys=32 * GB), MACHINE, LLAMA)
    assert more.seconds == pytest.approx(32 / (40 * BESIDE), rel=0.02)


def test_layers_on_gpu_and_cpu_wait_for_each_other() -> None:
    made = timed(Work(1, linear=4 * GB, cpu_linear=8 * GB, overhead=1e-3), MACHINE, LLAMA)
    assert made.seconds == pytest.approx(made.memory + made.cpu + 1e-3)
    assert made.cpu == pytest.approx(8 / 90)


def test_copies_stall_when_the_ring_is_full() -> None:
    """Ten layers on the CPU, each for longer than the ring takes to fill."""
    work = Work(4, linear=8 * GB, streamed=8 * GB, cpu_linear=8 * GB, cpu_layers=10)
    made = timed(replace(work, ring=PIECE), MACHINE, LLAMA)
    each = 0.8 * GB / (BESIDE * product_rate(MACHINE, 4))
    assert made.stall == pytest.approx(10 * (each - PIECE / (55e9 * STREAM)))
    assert timed(replace(work, ring=4 * PIECE), MACHINE, LLAMA).stall < made.stall
    assert made.seconds == pytest.approx(made.pcie + made.stall, rel=0.01)
    many = timed(replace(work, rows=16, ring=16 * PIECE), MACHINE, LLAMA)
    assert many.seconds == pytest.approx(many.pcie + many.cpu, rel=0.01)  # with more rows they take turns anyway
    beside = Work(16, keys=GB, streamed=GB, streamed_keys=GB, cpu_keys=GB / 2, key_layers=32, ring=4 * PIECE)
    assert timed(beside, MACHINE, LLAMA).stall == 0  # its own keys are carried meanwhile


def test_rows_cost_the_cpu() -> None:
    assert product_rate(MACHINE, 1) == product_rate(MACHINE, 8) == 90e9
    assert product_rate(MACHINE, 64) == pytest.approx(90e9 / 8)
    assert attention_rate(MACHINE, LLAMA, 1) == 68e9
    assert attention_rate(MACHINE, LLAMA, 16) == 40e9
    assert attention_rate(MACHINE, LLAMA, 64) == 10e9
    grouped = replace(LLAMA, kv_heads=8)
    assert attention_rate(MACHINE, grouped, 1) == 34e9
    assert attention_rate(MACHINE, grouped, 16) == 20e9


def test_pageable_memory_is_slower() -> None:
    pinned = timed(Work(1, linear=GB, streamed=GB), MACHINE, LLAMA)
    half = timed(Work(1, linear=GB, streamed=GB, pinned=0.5), MACHINE, LLAMA)
    assert half.pcie == pytest.approx((pinned.pcie + 1 / 20) / 2)


def test_prefill_counts_its_crossings() -> None:
    """A prompt is read layer by layer: weights cross once, keys and values once, to the host."""
    keys = float(LLAMA.layers * LLAMA.key_bytes * 4 * 4096)
    made = prefill(MACHINE, LLAMA, 4 * 4096, 4096, batch=1, weights=0.0, keys=keys, disk=0.0, pinned=1.0)
    assert (made.key_crossings, made.weight_crossings, made.tokens) == (1, 1, 4 * 4096)
    assert made.pcie == pytest.approx(keys / 55e9)
    twice = prefill(MACHINE, LLAMA, 4 * 4096, 4096, batch=2, weights=0.0, keys=keys, disk=0.0, pinned=1.0)
    assert twice.seconds == 2 * made.seconds


class TestMachines:
    """GPUs that share a pass."""

    def test_the_whole_is_as_fast_as_its_slowest_rank(self) -> None:
        *_, pair = machines(gpus(24, 24), 8)
        assert pair.heads == (4, 4)
        assert pair.link == 2 * 55e9
        assert pair.copy == 2 * 4.23e12
        slow = replace(gpus(24, 24), gpus=(gpus(24).gpus[0], replace(gpus(24).gpus[0], to_device=11e9)))
        uneven = max((m for m in machines(slow, 6) if m.ranks == 2), key=lambda m: m.link)
        assert uneven.heads == (5, 1)
        assert uneven.link == pytest.approx(66e9)

    def test_links_may_share_an_upstream(self) -> None:
        *_, pair = machines(replace(gpus(24, 24), both_links=6e10), 8)
        assert pair.link == 6e10

    @pytest.mark.parametrize("heads", [1, 2, 7, 8, 32])
    @pytest.mark.parametrize("count", [2, 3, 4, 5])
    def test_heads_are_whole(self, heads: int, count: int) -> None:
        host = replace(gpus(24), gpus=tuple(gpus(24 + i).gpus[0] for i in range(count)))
        together = [m for m in machines(host, heads) if m.ranks > 1]
        assert bool(together) == (heads >= count)
        for made in together:
            assert sum(made.heads) == heads
            assert min(made.heads) >= 1
            parts = [made.part(1001, rank) for rank in range(count)]
            assert 1001 <= sum(parts) <= 1001 + count

    def test_equal_cards_are_tried_once(self) -> None:
        assert [m.gpus for m in machines(gpus(24, 24), 8)] == [(0,), (0, 1)]
        assert [m.gpus for m in machines(gpus(24, 12), 2)] == [(0,), (1,), (0, 1)]

    def test_what_is_unknown_is_guessed_and_told(self) -> None:
        bare = HostProfile("bare", Host("cpu", 4, GB), (Gpu("card", GB, GB, pcie_generation=4, pcie_width=8),))
        made: Machine = next(machines(bare, 8))
        assert made.link == pytest.approx(8 * 1.58e9)
        assert made.attention < made.dram
        assert {"PCIe to the GPU", "GPU memory", "reading RAM", "disk"} <= set(made.assumed)
        assert not next(machines(ONE, 8)).assumed


def test_operations_of_a_pass() -> None:
    small = model(layers=2, hidden=512, kv_heads=8)
    weights = 2 * small.layer_bytes / 2 + 32_000 * 512
    assert small.operations(3, 100) == pytest.approx(3 * (2 * weights + 4 * 8 * 64 * 100 * 2))
