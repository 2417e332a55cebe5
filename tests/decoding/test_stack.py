"""The grammar of stacks, what methods stand for, and the budgets filled in."""

from __future__ import annotations

import pytest
import tiny_engine
import torch
from hypothesis import given
from hypothesis import strategies as st

from hspec_decoding.build import Parts, build_levels, resolve
from hspec_decoding.config import ModelConfig
from hspec_decoding.load import affordable, worthwhile
from hspec_decoding.stack import (
    FORMATS,
    LONGEST,
    METHODS,
    PLAIN,
    VIEWS,
    Spec,
    Stack,
    candidates,
    method,
    parse,
    written,
)
from hspec_profiles.errors import UsageError

widths = st.none() | st.integers(1, LONGEST)
budgets = st.none() | st.integers(64, 1 << 24)
ngram = st.builds(Spec, st.just("ngram"), width=widths)
draft = st.builds(Spec, st.just("draft"), st.just("streaming"), budgets, widths)
formats = st.none() | st.sampled_from(FORMATS["w"])
partial = st.builds(Spec, st.just("target"), st.sampled_from(["streaming", "retrieval"]), budgets, widths, formats)
copied = st.builds(Spec, st.just("target"), st.just("full"), st.none(), widths, formats, st.sampled_from(FORMATS["kv"]))
last = st.builds(Spec, st.just("target"), st.just("full"), width=widths)
stacks = st.tuples(st.lists(ngram, max_size=1), st.lists(draft | partial | copied, max_size=4), last).map(
    lambda parts: (*parts[0], *parts[1], parts[2])
)


@given(stack=stacks)
def test_what_is_written_reads_back(stack: Stack) -> None:
    assert parse(written(stack)) == stack


@given(stack=stacks, spaces=st.sampled_from(["", " ", "\t", "  \n"]))
def test_spaces_do_not_matter(stack: Stack, spaces: str) -> None:
    text = written(stack).replace(" ", "")
    for sign in ">(),:=":
        text = text.replace(sign, f"{spaces}{sign}{spaces}")
    assert parse(text) == stack


def test_views_have_defaults() -> None:
    assert parse("ngram>draft>target(retrieval)>target") == (
        Spec("ngram"),
        Spec("draft", "streaming"),
        Spec("target", "retrieval"),
        *PLAIN,
    )
    assert parse("draft(width=3) > target(width=5, streaming:64) > target(full)")[:2] == (
        Spec("draft", "streaming", None, 3),
        Spec("target", "streaming", 64, 5),
    )


@pytest.mark.parametrize(
    ("text", "column", "says"),
    [
        ("", 1, "expected a level"),
        ("   ", 4, "expected a level"),
        ("medusa > target", 1, "one of target, draft, ngram"),
        ("ngram > ngram > target", 9, "first level"),
        ("draft > ngram > target", 9, "first level"),
        ("target(full) > target(full)", 16, "nothing may follow"),
        ("ngram > target(full) > target(retrieval)", 24, "nothing may follow"),
        ("ngram", 6, "the last level must be"),
        ("ngram > target(retrieval:64)", 29, "the last level must be"),
        ("ngram > ", 9, "expected a level"),
        ("ngram target", 7, "expected `>`"),
        ("ngram > target(full", 20, "expected `)`"),
        ("ngram > target()", 16, "one of full, streaming, retrieval, w=FORMAT, kv=FORMAT, width=N"),
        ("ngram(full) > target", 7, "one of width=N"),
        ("draft(retrieval) > target", 7, "one of streaming, width=N"),
        ("target(retrieval:63) > target", 18, "a number from 64 to 16777216"),
        ("target(retrieval:) > target", 18, "a number from 64"),
        ("target(retrieval:x) > target", 18, "a number from 64"),
        ("target(full:64)", 12, "takes no budget"),
        ("draft(width=0) > target", 13, "from 1 to 63"),
        ("draft(width=64) > target", 13, "from 1 to 63"),
        ("draft(width) > target", 12, "expected `=`"),
        ("draft(width=2,) > target", 15, "one of streaming, width=N"),
        ("target(w=int8) > target", 10, "expected for `w` one of nf4, int4"),
        ("target(kv=nf4) > target", 11, "expected for `kv` one of int4, int8"),
        ("target(kv) > target", 10, "expected `=`"),
        ("target(retrieval, kv=int4) > target", 26, "its view is `full`"),
        ("draft(w=nf4) > target", 7, "one of streaming, width=N"),
        ("target(w=nf4)", 14, "the last level must be"),
        ("draft; target", 6, "unexpected character"),
        ("draft > tärget", 9, "expected a level"),
    ],
)
def test_errors_point_at_the_column(text: str, column: int, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert caught.value.message.startswith(f"--levels, column {column}: ")
    assert says in caught.value.message
    assert repr(text) in caught.value.message
    assert "target(full)" in (caught.value.hint or "")


@given(text=st.text(st.sampled_from("ntargedfulrm():>,=:1 6²٣"), max_size=30))
def test_anything_else_is_refused_in_one_way(text: str) -> None:
    try:
        parse(text)
    except UsageError as error:
        column = int(error.message.split("column ")[1].split(":")[0])
        assert 1 <= column <= len(text) + 1


# methods


@pytest.mark.parametrize("has_draft", [False, True])
def test_methods_are_stacks(has_draft: bool) -> None:
    for name in METHODS:
        stack = method(name, draft=has_draft)
        assert parse(written(stack)) == stack
        assert any(spec.name == "draft" for spec in stack) == (has_draft and name in ("auto", "triforce"))
    assert method("autoregressive", draft=has_draft) == PLAIN
    assert method("auto", draft=has_draft) == method("triforce", draft=has_draft)


@pytest.mark.parametrize("has_draft", [False, True])
def test_candidates_are_stacks(has_draft: bool) -> None:
    stacks = candidates(draft=has_draft)
    assert [parse(written(stack)) for stack in stacks] == stacks
    assert len(set(stacks)) == len(stacks)
    assert any(spec.name == "draft" for stack in stacks for spec in stack) == has_draft


LLAMA2_7B = tiny_engine.config(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32, intermediate_size=11008
)


@pytest.mark.parametrize(
    ("model", "context", "middles"),
    [
        (tiny_engine.config(), 100_000, set()),  # a pass takes no time anyhow
        (LLAMA2_7B, 2048, {"target(retrieval:256, w=int4)"}),  # weights are all
        (LLAMA2_7B, 16, {"target(full, w=int4)"}),
        (
            LLAMA2_7B,
            122_880,
            {
                "target(retrieval:4096)",
                "target(retrieval:4096, w=int4)",
                "target(full, kv=int4, w=int4)",
                "target(full, kv=int4)",
            },
        ),
    ],
)
def test_middle_levels_have_clearly_less_to_read(model: ModelConfig, context: int, middles: set[str]) -> None:
    stacks = [resolve(stack, context, budget=None, keep=False) for stack in candidates(draft=True)]
    kept = worthwhile(list(dict.fromkeys(stacks)), model, context, torch.bfloat16)
    assert {str(spec) for stack in kept for spec in stack[:-1] if spec.name == "target"} == middles
    assert resolve(parse("ngram > target(full)"), context, budget=None, keep=False) in kept


@pytest.mark.parametrize(("room", "copies"), [(0, set()), (13e9, {"w=int4"}), (40e9, {"w=int4", "kv=int4"})])
def test_copies_must_find_place(room: float, copies: set[str]) -> None:
    stacks = [resolve(stack, 122_880, budget=None, keep=False) for stack in candidates(draft=False)]
    kept = affordable(stacks, LLAMA2_7B, 122_880, torch.bfloat16, int(room))
    specs = {spec for stack in kept for spec in stack}
    assert {f"w={s.weights}" for s in specs if s.weights} | {f"kv={s.kv}" for s in specs if s.kv} == copies
    assert resolve(parse("ngram > target(full)"), 122_880, budget=None, keep=False) in kept


def test_an_unknown_method_is_told_the_others() -> None:
    with pytest.raises(UsageError, match="'medusa'") as caught:
        method("medusa", draft=False)
    assert all(name in (caught.value.hint or "") for name in METHODS)


def test_every_view_can_be_written() -> None:
    for name, views in VIEWS.items():
        for view in views or ("",):
            text = f"{name}({view})" if view else name
            stack = parse(text if view == "full" else f"{text} > target(full)")
            assert (stack[0].name, stack[0].view or "") == (name, view)


# budgets and widths


@pytest.mark.parametrize(("context", "budget"), [(1000, 256), (4000, 496), (16_000, 2000), (131_072, 4096)])
def test_retrieval_takes_a_share_of_the_context(context: int, budget: int) -> None:
    stack = resolve(method("triforce", draft=True), context, budget=None, keep=False)
    assert written(stack) == f"draft(streaming:256) > target(retrieval:{budget}) > target(full)"
    assert budget % 8 == 0


def test_retrieval_of_everything_is_left_out_unless_asked_for() -> None:
    stack = method("triforce", draft=False)
    assert written(resolve(stack, 256, budget=None, keep=False)) == "ngram > target(full)"
    assert written(resolve(stack, 900, budget=900, keep=False)) == "ngram > target(full)"
    assert written(resolve(stack, 256, budget=None, keep=True)) == "ngram > target(retrieval:256) > target(full)"


def test_budgets_written_in_the_stack_win() -> None:
    stack = resolve(parse("target(retrieval:64) > target(retrieval) > target"), 9999, budget=512, keep=True)
    assert [spec.budget for spec in stack] == [64, 512, None]


@pytest.mark.parametrize("budget", [1, 23])
def test_a_budget_too_small_is_refused(budget: int) -> None:
    with pytest.raises(UsageError, match=f"at least 24 tokens: {budget}"):
        resolve(method("triforce", draft=False), 9999, budget=budget, keep=True)


@pytest.mark.parametrize(("gamma", "widths"), [(None, [3, None]), (9, [3, 9])])
def test_gamma_is_the_width_under_the_target(gamma: int | None, widths: list[int | None]) -> None:
    stack = resolve(parse("ngram(width=3) > target(retrieval) > target(full)"), 4096, budget=None, keep=True)
    parts = Parts(tiny_engine.random_decoder(), None)
    levels = build_levels([stack], parts, context=4096, sequences=1, select="verify-fed", shape=None, gamma=gamma)
    assert levels.fixed == widths
    assert levels.chains == [(0, 1)]


def test_levels_are_shared_by_their_stacks() -> None:
    stacks = [resolve(stack, 100_000, budget=None, keep=False) for stack in candidates(draft=False)]
    parts = Parts(tiny_engine.random_decoder(), None)
    levels = build_levels(stacks[:4], parts, context=512, sequences=1, select="verify-fed", shape=None)
    assert [level.name for level in levels.proposers] == [
        "ngram",
        "target(retrieval:4096)",
        "target(retrieval:4096, w=int4)",
    ]
    assert levels.chains == [(0, 1), (1,), (0, 2), (2,)]
