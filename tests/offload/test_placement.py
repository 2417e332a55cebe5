"""Placements: what they take, and the CPU's part, against brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import plan_tools
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_tools import GB, ONE, gpus, model, shape

from hspec_offload.ask import Ask, Copies, Limits, Workload, retrieval_budget
from hspec_offload.cost import PIECE
from hspec_offload.machine import machines
from hspec_offload.memory import SLACK, Placement, choices, left, on_device
from hspec_offload.passes import Target
from hspec_offload.placed import devices, layer_runs
from hspec_profiles.profile import HostProfile

LLAMA = shape("llama2-7b-128k")


def ask(profile: HostProfile = ONE, context: int = 4096, copies_of: int = 32) -> Ask:
    """A question about Llama 2 7B on the first GPU."""
    return Ask(next(machines(profile, copies_of)), LLAMA, Workload(context), Limits())


def terms(question: Ask, place: Placement) -> dict[str, int]:
    """Bytes on the GPU by name."""
    return {term.name: term.nbytes for term in on_device(question, place)}


def test_what_is_offloaded_needs_a_ring() -> None:
    assert terms(ask(), Placement(Copies(), 31, 32, pieces=16))["ring of buffers"] == 16 * PIECE
    assert terms(ask(), Placement(Copies(), 32, 31))["ring of buffers"] == 4 * PIECE
    assert "ring of buffers" not in terms(ask(), Placement(Copies(), 32, 32))


def test_a_retrieval_copy_holds_keys_to_choose_by() -> None:
    """A mean key for every eight tokens is a sixteenth of KV: 4 GB at 122,880 tokens."""
    question = ask(context=122_880)
    budget = retrieval_budget(122_880)
    copy = 32 * LLAMA.key_bytes * (budget + 8 + SLACK)
    for scored, means in ((False, 0), (True, 32 * LLAMA.key_bytes * ((122_880 + SLACK) // 16))):
        place = Placement(Copies(budget=budget, scored=scored), 32, 0)
        assert terms(question, place)["retrieval copy"] == copy + means
    assert 4.0 * GB < means < 4.1 * GB


def test_layers_of_the_cpu_are_spread() -> None:
    """Copies for the streamed ones between them can run meanwhile."""
    place = Placement(Copies(small=20), 8, 30, cpu=7, disk=3, cpu_share=0.25)
    runs = layer_runs(ask(), place)
    weights = [run.weights for run in runs for _ in range(run.count)]
    keys = [run.keys for run in runs for _ in range(run.count)]
    copies = [run.copy for run in runs for _ in range(run.count)]
    cpu = [n for n, kind in enumerate(weights) if kind == "cpu"]
    assert len(cpu) == 7
    assert {after - before for before, after in pairwise(cpu)} <= {3, 4}
    assert (weights.count("disk"), weights.count("stream"), weights[24:]) == (3, 14, ["gpu"] * 8)
    assert keys == ["split"] * 2 + ["gpu"] * 30
    assert copies == ["int4"] * 20 + [""] * 12


def test_parts_of_ranks_round_up_within_their_budgets() -> None:
    small = model(layers=7, kv_heads=3)
    for extra in range(300):
        pair = gpus(2 + extra / 1e9, 2 + extra / 1e9)
        *_, machine = machines(pair, 3)
        question = Ask(machine, small, Workload(100_000), Limits(reserve=0))
        for place in choices(question, Copies()):
            assert left(question, place) >= 0
            assert all(device.used <= device.available for device in devices(question, place)[:-1])


@settings(max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(
    plan_tools.cards,
    plan_tools.machines,
    plan_tools.models,
    st.integers(100, 100_000),
    st.sampled_from([1, 16, 64]),
    st.sampled_from([4, 16]),
    st.data(),
)
def test_no_other_part_of_the_cpu_is_faster(
    card: object, host: object, some: object, context: int, rows: int, pieces: int, data: st.DataObject
) -> None:
    """Any number of layers with none or all of KV, any share of KV with none or all of the layers."""
    assert isinstance(some, type(LLAMA))
    weights, keys = (data.draw(st.integers(0, some.layers)) for _ in range(2))
    profile = HostProfile("some", host, (card,))  # type: ignore[arg-type]
    question = Ask(next(machines(profile, some.kv_heads)), some, Workload(context), Limits())
    target = Target(question, Placement(Copies(), weights, keys, pieces=pieces))
    chosen = target.shared_out(rows)
    best, away = target.timed(rows, chosen.cpu, chosen.cpu_share).seconds, some.layers - weights
    shares = [n / 64 for n in range(65)] if keys < some.layers else [0.0]
    others = [(cpu, share) for cpu in range(away + 1) for share in {shares[0], shares[-1]}]
    others += [(cpu, share) for cpu in (0, away) for share in shares]
    for cpu, share in others:
        assert best <= target.timed(rows, cpu, share).seconds * (1 + 1e-9), (cpu, share)


@pytest.mark.parametrize("pinnable", [10 * GB, 200 * GB])
def test_what_cannot_be_pinned_crosses_slower(pinnable: int) -> None:
    profile = replace(ONE, host=replace(ONE.host, pinnable=pinnable))
    made = Target(ask(profile, context=60_000), Placement(Copies(), 32, 0)).timed(1, 0, 0.0)
    assert (made.pcie > 60_000 * 32 * LLAMA.key_bytes / 40e9) == (pinnable < 30 * GB)
