"""Levels as data, and the widths that are fastest in worlds whose costs are known."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from plan_tools import model

from hspec_decoding.stack import parse
from hspec_offload.ask import Workload, grouped, retrieval_budget, stacks
from hspec_offload.speculation import TARGET, TEXTS, Costs, Level, brought, fastest, milliseconds, written
from hspec_profiles.errors import UsageError

NGRAM, DRAFT = Level("ngram"), Level("draft", "streaming", 256)
RETRIEVAL, SMALL = Level("target", "retrieval", 4096), Level("target", "full", weights="nf4", kv="int4")
KEPT = {"ngram": 0.5, "draft": 0.6, "retrieval": 0.9, "full int4 nf4": 0.9}


def costs(verify: float = 1.0, middle: float = 0.1, draft: float = 0.01, blocks: Sequence[int] = (16, 64)) -> Costs:
    """A world with these seconds of a pass."""
    return Costs(dict.fromkeys(blocks, verify), lambda _level, _rows: middle, draft)


def test_tokens_of_a_block() -> None:
    chance = random.Random(0)

    def block(kept: float, width: int) -> int:
        return next((n for n in range(width) if chance.random() >= kept), width) + 1

    for kept, width in ((0.3, 4), (0.9, 15), (0.99, 63)):
        simulated = sum(block(kept, width) for _ in range(20_000)) / 20_000
        assert brought(kept, width) == pytest.approx(simulated, rel=0.03)
    assert brought(1.0, 7) == 8
    assert brought(0.0, 7) == 1


def test_a_round_by_hand() -> None:
    """Draft > middle > target with fixed widths: each middle pass takes two drafted tokens."""
    levels = (Level("draft", "streaming", 256, width=2), Level("target", "retrieval", 4096, width=6), TARGET)
    made = fastest(levels, KEPT, costs(blocks=(16,)))
    tokens = 1 + 0.6 + 0.36
    assert made.middle_steps == pytest.approx(6 / tokens)
    assert made.draft_steps == pytest.approx(2 * 6 / tokens)
    assert made.seconds == pytest.approx(1 + 6 / tokens * (0.1 + 0.02))
    assert made.tokens == pytest.approx(brought(0.9, 6))
    assert written(made.levels) == "draft(streaming:256, width=2) > target(retrieval:4096, width=6) > target(full)"


def test_dear_verify_passes_make_long_blocks() -> None:
    widths = [fastest((RETRIEVAL, TARGET), KEPT, costs(verify=v)).levels[0].width for v in (0.2, 1.0, 20.0)]
    assert widths == sorted(widths)  # type: ignore[type-var]
    assert fastest((RETRIEVAL, TARGET), KEPT, costs(verify=100.0)).block == 64


def test_block_that_is_cheaper_wins() -> None:
    world = Costs({16: 1.0, 64: 3.0}, lambda _level, _rows: 0.01, 0.01)
    assert fastest((RETRIEVAL, TARGET), {"retrieval": 0.5}, world).block == 16
    assert fastest((RETRIEVAL, TARGET), {"retrieval": 0.995}, world).block == 64


def test_plain_decoding_is_one_token_a_pass() -> None:
    made = fastest((TARGET,), {}, costs())
    assert (made.tokens, made.seconds, made.levels) == (1.0, 1.0, (TARGET,))


def test_three_levels_below_the_target() -> None:
    made = fastest((NGRAM, RETRIEVAL, SMALL, TARGET), KEPT, costs())
    assert [level.name for level in made.levels] == ["ngram", "target", "target", "target"]
    assert all(level.width for level in made.levels[:-1])


@pytest.mark.parametrize("draft", [None, model(layers=2)])
@pytest.mark.parametrize("gpu", [True, False])
def test_what_is_tried_is_in_the_grammar(draft: object, gpu: bool) -> None:
    tried = stacks(Workload(30_000, draft=draft), gpu=gpu)  # type: ignore[arg-type]
    assert (TARGET,) in tried
    for levels in tried:
        assert [str(spec) for spec in parse(written(levels))] == [str(level) for level in levels]
        assert all(level.kind in kinds for level in levels[:-1] for kinds in TEXTS.values())
    assert any(level.weights for levels in tried for level in levels) == gpu
    assert any(levels[0].name == "draft" for levels in tried) == (draft is not None)


def test_stacks_share_their_copies() -> None:
    groups = grouped(stacks(Workload(30_000), gpu=True), 32, gpu=True)
    assert sum(copies.small == 32 for copies in groups) == 3
    assert all(copies.budget in (0, retrieval_budget(30_000)) for copies in groups)
    assert any(copies.needs_keys for copies in groups)


def test_stacks_that_were_asked_for() -> None:
    work = Workload(30_000, stacks=((Level("target", "retrieval"), TARGET),))
    assert stacks(work, gpu=True)[0][0].budget == 3744
    with pytest.raises(UsageError, match="no draft model"):
        stacks(Workload(100, stacks=((DRAFT, TARGET),)), gpu=True)


def test_small_drafts_guess_less() -> None:
    target = model(layers=24, hidden=4096)
    small, fair = model(layers=1, hidden=512, kv_heads=2), model(layers=8, hidden=2048)
    assert Workload(9, draft=small).accepted(target, "prose")["draft"] == 0.35
    assert Workload(9, draft=fair).accepted(target, "prose")["draft"] == 0.78
    assert Workload(9, draft=fair, acceptance={"draft": 0.5}).accepted(target, "code")["draft"] == 0.5


@pytest.mark.parametrize(("seconds", "said"), [(0, "-"), (0.001234, "1.23"), (0.01234, "12.3"), (1.234, "1,234")])
def test_milliseconds(seconds: float, said: str) -> None:
    assert milliseconds(seconds) == said
