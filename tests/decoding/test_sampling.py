"""Filters against a plain reference and transformers, the coupled sample against its law, and the rules' edges."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from exact import chi_square, distance, law, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hspec_decoding.sampling import Sampling, SeededDraws, accept, agree, choose, filtered, probabilities
from hspec_profiles.errors import UsageError

NEVER = float("-inf")


def logits_of(rows: int, size: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * spread


# options


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": math.nan},
        {"top_k": -1},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"min_p": math.nan},
        {"seed": -1},
        {"seed": 1 << 63},
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any]) -> None:
    name = next(iter(options)).replace("_", "-")
    with pytest.raises(UsageError, match=f"^{name} must be "):
        Sampling(**options)


# filters


def reference(row: Sequence[float], sampling: Sampling) -> dict[int, float]:
    """What a row's filters keep, in float64, one token at a time."""
    kept = sorted(range(len(row)), key=lambda i: -row[i])
    kept = [i for i in kept if row[i] > NEVER]
    scaled = {i: (row[i] - row[kept[0]]) / sampling.temperature for i in kept}
    if sampling.top_k:
        kept = [i for i in kept if scaled[i] >= scaled[kept[min(sampling.top_k, len(kept)) - 1]]]
    total, mass, nucleus = sum(math.exp(scaled[i]) for i in kept), 0.0, []
    for i in kept:
        if mass >= sampling.top_p and scaled[i] < scaled[nucleus[-1]]:
            break
        nucleus.append(i)
        mass += math.exp(scaled[i]) / total
    least = math.log(sampling.min_p) if sampling.min_p else NEVER
    nucleus = [i for i in nucleus if scaled[i] >= least]
    total = sum(math.exp(scaled[i]) for i in nucleus)
    return {i: math.exp(scaled[i]) / total for i in nucleus}


options = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.8, 1.0, 1.7]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 50, 10_000]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)


@given(row=st.lists(st.integers(-40, 40), min_size=1, max_size=30), sampling=options)
def test_filters_keep_what_the_reference_keeps(row: list[int], sampling: Sampling) -> None:
    """Logits on a grid, so that ties are common and no mass falls on a border by rounding alone."""
    values = [value * 0.2437 for value in row]
    found = probabilities(torch.tensor([values]), sampling)[0]
    wanted = reference(values, sampling)
    assert {i for i, p in enumerate(found.tolist()) if p > 0} == wanted.keys()
    assert all(abs(float(found[i]) - p) < 1e-5 for i, p in wanted.items())


@pytest.mark.parametrize("size", [300, 1000])
@pytest.mark.parametrize("spread", [0.01, 3.0])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999])
def test_nucleus_of_large_vocabularies(size: int, spread: float, top_p: float) -> None:
    """Flat rows have a nucleus of more tokens than the head that is sorted first; they may stand beside sharp ones."""
    rows = logits_of(4, size, spread=spread)
    rows[1] *= 100
    sampling = Sampling(temperature=0.7, top_p=top_p)
    for row, found in zip(rows.double().tolist(), filtered(rows, sampling), strict=True):
        kept = int((found > NEVER).sum())
        assert abs(kept - len(reference(row, sampling))) <= 1 + size // 500, "more than rounding explains"
        assert set(found.topk(kept).indices.tolist()) == set(torch.tensor(row).topk(kept).indices.tolist())


@given(sampling=options, seed=st.integers(0, 1000))
@settings(max_examples=60)
def test_filters_are_those_of_transformers(sampling: Sampling, seed: int) -> None:
    from transformers.generation import logits_process as theirs

    rows = logits_of(3, 40, seed)
    wanted = theirs.TemperatureLogitsWarper(sampling.temperature)(None, rows)
    if sampling.top_k:
        wanted = theirs.TopKLogitsWarper(sampling.top_k)(None, wanted)
    if sampling.top_p < 1:
        wanted = theirs.TopPLogitsWarper(sampling.top_p)(None, wanted)
    if sampling.min_p:
        wanted = theirs.MinPLogitsWarper(sampling.min_p)(None, wanted)
    torch.testing.assert_close(filtered(rows, sampling), wanted - wanted.amax(-1, keepdim=True), rtol=1e-5, atol=1e-5)


def test_ties_are_kept_together() -> None:
    row = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    for sampling in (Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.4), Sampling(1.0, min_p=1.0)):
        assert (filtered(row, sampling)[0] > NEVER).tolist() == [False, True, True, True, False]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-9), Sampling(1e-6)])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_the_likeliest_token_alone(sampling: Sampling, rows: int) -> None:
    logits = logits_of(rows, 500)
    assert choose(logits, sampling, [0] * rows, range(rows)) == logits.argmax(-1).tolist()
    assert torch.equal(probabilities(logits, sampling).argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-12, 1e-30, 1e-38, 5e-324])
def test_temperatures_near_0_are_greedy(temperature: float) -> None:
    """However small: no overflow, no NaN, no other token."""
    logits = logits_of(8, 200)
    more: dict[str, Any]
    for more in ({}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        sampling = Sampling(temperature, **more)
        assert choose(logits, sampling, [0] * 8, range(8)) == logits.argmax(-1).tolist()
        laws = probabilities(logits, sampling)
        assert torch.equal(laws.argmax(-1), logits.argmax(-1))
        torch.testing.assert_close(laws.amax(-1), torch.ones(8))


def test_greedy_ties_go_to_the_first() -> None:
    """In every place of a block, and in a vocabulary that is searched in parts."""
    logits = torch.zeros(8, 50_000)
    logits[:, [40_000, 777, 49_999]] = 1.0
    assert choose(logits, Sampling(), [0] * 8, range(8)) == [777] * 8
    assert choose(logits[:1], Sampling(), [0], [0]) == [777]
    assert probabilities(logits, Sampling())[:, 777].tolist() == [1.0] * 8


def test_impossible_tokens_are_never_chosen() -> None:
    logits = torch.full((400, 6), NEVER)
    logits[:, 2], logits[:, 5] = -50.0, -51.0
    for sampling in (Sampling(1.0), Sampling(1.0, top_p=0.99), Sampling(5.0, top_k=4), Sampling(1.0, min_p=0.01)):
        assert set(choose(logits, sampling, [0] * 400, range(400))) == {2, 5}
    logits[:, 5] = NEVER
    assert set(choose(logits, Sampling(1.0, top_p=0.9), [0] * 400, range(400))) == {2}


@pytest.mark.parametrize("threads", [1, 4])
def test_a_row_is_filtered_as_it_is_alone(threads: int) -> None:
    """To the bit, also where top-p falls exactly on a token's mass: else the block's length would change the text."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for seed in range(4):
            logits = logits_of(8, 151_936, seed)
            scaled = logits / 0.8
            masses = (scaled.topk(200).values - scaled.logsumexp(-1, keepdim=True)).exp().cumsum(-1)
            for row, rank in itertools.product(range(8), (3, 90, 199)):
                sampling = Sampling(0.8, top_p=float(masses[row, rank]))
                alone, beside = filtered(logits[row : row + 1], sampling)[0], filtered(logits, sampling)[row]
                assert torch.equal(alone, beside), (seed, row, rank)
    finally:
        torch.set_num_threads(before)


# the coupled sample


def drawn(row: Tensor, sampling: Sampling, keys: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Samples [N] of one law, by many positions."""
    found: list[int] = []
    for start in range(0, len(keys), 1000):
        part = slice(start, start + 1000)
        found += choose(row.expand(len(keys[part]), -1), sampling, keys[part], positions[part])
    return torch.tensor(found)


def p_value(samples: Tensor, wanted: Tensor) -> float:
    counts = torch.bincount(samples, minlength=len(wanted)).double()
    return chi_square(counts[None], wanted[None].double() * len(samples))


N = 10_000
VARYING = {
    "positions": (0, [0] * N, range(N)),
    "late positions": (1, [3] * N, range(120_000, 120_000 + N)),
    "sequences": (2, range(N), [77] * N),
    "both": (3, [i // 100 for i in range(N)], [i % 100 for i in range(N)]),
}


@pytest.mark.parametrize("varying", VARYING)
@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}])
def test_choose_draws_from_the_law(varying: str, options: dict[str, float]) -> None:
    seed, keys, positions = VARYING[varying]
    row = torch.tensor([0.3, 2.0, 1.1, -1.0, 0.9, 1.5, NEVER, -2.5])
    sampling = Sampling(**options, seed=seed)
    assert p_value(drawn(row, sampling, keys, positions), probabilities(row[None], sampling)[0]) > 1e-3


def test_choose_draws_from_the_law_over_seeds() -> None:
    row = torch.tensor([[0.3, 2.0, 1.1, -1.0, 0.9]])
    found = torch.tensor([choose(row, Sampling(1.0, seed=seed), [0], [5])[0] for seed in range(5000)])
    assert p_value(found, row[0].softmax(-1)) > 1e-3


def test_a_large_vocabulary_and_its_rare_tokens() -> None:
    """Ten thousand tokens with a hundredth of the mass together: the noise reaches far enough into its tail."""
    row = torch.full((10_002,), math.log(1e-2 / 10_000))
    row[0], row[1] = math.log(0.7), math.log(0.29)
    found = drawn(row, Sampling(1.0), [0] * 10_000, range(10_000)).clamp(max=2)
    assert p_value(found, torch.tensor([0.7, 0.29, 0.01])) > 1e-3


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("seed", 0, 0), ("seed", 0, 1)),
        (("seed", 0, 0), ("seed", 1, 0)),
        (("seed", 0, 0), ("other seed", 0, 0)),
        (("seed", 1, 0), ("other seed", 0, 0)),
    ],
)
def test_samples_are_independent(first: tuple[str, int, int], second: tuple[str, int, int]) -> None:
    """Across positions, sequences and seeds that are neighbours: pairs follow the product of their laws."""
    row = torch.tensor([0.5, 0.0, 1.0])

    def samples(which: str, key: int, ahead: int) -> Tensor:
        sampling = Sampling(1.0, seed=11 + (which == "other seed"))
        return drawn(row, sampling, [key] * N, range(ahead, N + ahead))

    pairs = samples(*first) * 3 + samples(*second)
    product = torch.outer(row.softmax(-1), row.softmax(-1)).flatten()
    assert p_value(pairs, product) > 1e-3


def test_tokens_of_one_position_have_independent_noise() -> None:
    """Which token wins among the first three does not tell which wins among the last three."""
    first = drawn(torch.tensor([0.0] * 3 + [NEVER] * 3), Sampling(1.0), [0] * 6000, range(6000))
    last = drawn(torch.tensor([NEVER] * 3 + [0.0] * 3), Sampling(1.0), [0] * 6000, range(6000))
    assert p_value(first * 3 + last - 3, torch.full((9,), 1 / 9)) > 1e-3


def test_rows_do_not_know_their_neighbours() -> None:
    logits = logits_of(8, 300)
    sampling = Sampling(0.9, top_p=0.9, seed=4)
    together = choose(logits, sampling, [7] * 8, range(30, 38))
    assert together == [choose(logits[i : i + 1], sampling, [7], [30 + i])[0] for i in range(8)]
    assert together == choose(logits.flip(0), sampling, [7] * 8, range(37, 29, -1))[::-1]


def test_vocabularies_share_the_noise_of_their_common_tokens() -> None:
    logits = logits_of(200, 50)
    wider = torch.cat((logits, torch.full((200, 30), NEVER)), dim=1)
    args = (Sampling(1.0), [0] * 200, range(200))
    assert choose(logits, *args) == choose(wider, *args)


# the rejection rule


def test_seeded_draws_follow_their_weights() -> None:
    draws, weights = SeededDraws(5, 0), torch.tensor([0.1, 0.0, 0.5, 2.4])
    found = torch.tensor([draws.choice(weights) for _ in range(N)])
    assert p_value(found, weights / weights.sum()) > 1e-3
    coins = torch.tensor([int(draws.coin(0.3)) for _ in range(N)])
    assert p_value(coins, torch.tensor([0.7, 0.3])) > 1e-3
    assert draws.coin(1.0)
    assert not draws.coin(0.0)


def test_seeded_draws_are_streams_of_their_own() -> None:
    def start(seed: int, key: int) -> tuple[int, ...]:
        draws = SeededDraws(seed, key)
        return tuple(draws.choice(torch.ones(100)) for _ in range(8))

    starts = [start(seed, key) for seed in (0, 1, 2, (1 << 63) - 1) for key in (0, 1, 2, 1 << 40)]
    assert len(set(starts)) == len(starts)
    assert start(1, 2) == start(1, 2)


def test_equal_laws_are_always_kept() -> None:
    same = normal([1, 0, 2])
    found = law(lambda draws: tuple(accept([draws.choice(same)], [same], [same, normal([1, 0, 0])], draws)))
    assert found.keys() == {(0, 0), (2, 0)}


def test_nothing_drafted() -> None:
    own = normal([1, 2, 3])
    found = law(lambda draws: tuple(accept([], [], [own], draws)))
    assert distance(found, {(0,): 1 / 6, (1,): 2 / 6, (2,): 3 / 6}) < 1e-6


def test_a_law_that_the_target_excludes_is_always_refused() -> None:
    assert law(lambda draws: tuple(accept([0, 0], [normal([1, 0])] * 2, [normal([0, 1])] * 3, draws))) == {(1,): 1.0}


# the coupled rule


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), min_size=7, max_size=7))
def test_agree_keeps_what_the_target_says(draft: list[int], chosen: list[int]) -> None:
    """The result is a prefix of the target's own tokens, one longer than the draft is right."""
    found = agree(draft, chosen[: len(draft) + 1])
    right = next((i for i, (a, b) in enumerate(zip(draft, chosen, strict=False)) if a != b), len(draft))
    assert found == chosen[: right + 1]


def test_every_token_can_be_chosen() -> None:
    seen = Counter(drawn(torch.zeros(17), Sampling(1.0), [0] * 3000, range(3000)).tolist())
    assert seen.keys() == set(range(17))
