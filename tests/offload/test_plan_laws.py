"""Laws of the planner, on random hosts and models: budgets hold, more is never slower, the longest context is true."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import plan_tools
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hspec_offload.ask import Limits, Workload
from hspec_offload.fit import largest_context
from hspec_offload.plan import Plan, plan
from hspec_offload.shape import ModelShape
from hspec_profiles.errors import DoesNotFit, UsageError
from hspec_profiles.profile import HostProfile

HOST = ("ram", "pinnable", "dram", "attention", "attention_rows", "product", "disk")
GPU = ("free", "copy", "matrix", "to_device", "to_host", "to_device_pageable")
TOGETHER = ("peer", "both_links")
ROUNDING = 1 + 1e-9
few = settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
questions = st.tuples(plan_tools.profiles, plan_tools.models, plan_tools.works, plan_tools.bounds)
Question = tuple[HostProfile, ModelShape, Workload, Limits]


def tried(question: Question) -> Plan | None:
    """The plan, or None where there is none."""
    try:
        return plan(*question)
    except (DoesNotFit, UsageError):
        return None


def not_slower(plan: Plan | None, other: Plan) -> bool:
    """Whether there is a plan, and it predicts no more than the other, also of plain decoding."""
    if plan is None:
        return False
    one, two = plan.prediction, other.prediction
    return (
        one.seconds_per_token <= two.seconds_per_token * ROUNDING and one.plain.seconds <= two.plain.seconds * ROUNDING
    )


@few
@given(questions)
def test_no_budget_is_exceeded(question: Question) -> None:
    made = tried(question)
    if made is None:
        return
    for device in made.devices:
        assert device.used <= device.available, device
        assert all(term.nbytes >= 0 for term in device.terms)
    assert len(made.devices) == len(made.gpus) + 1
    assert sum(run.count for run in made.layers) == question[1].layers
    assert made.prediction.seconds_per_token <= made.prediction.plain.seconds * ROUNDING


@few
@given(questions, st.sampled_from(HOST + GPU + TOGETHER), st.floats(1, 2))
def test_more_is_never_slower(question: Question, what: str, factor: float) -> None:
    """More of one kind of memory or bandwidth."""
    profile, *rest = question

    def more(record: Any) -> Any:
        value = getattr(record, what)
        if value is None:
            return record
        return replace(record, **{what: round(value * factor) if isinstance(value, int) else value * factor})

    made = tried(question)
    if made is None:
        return
    if what in HOST:
        larger = replace(profile, host=more(profile.host))
    elif what in GPU:
        larger = replace(profile, gpus=tuple(map(more, profile.gpus)))
    else:
        larger = more(profile)
    assert not_slower(tried((larger, *rest)), made)


@few
@given(questions, st.floats(0, 1))
def test_less_context_is_never_slower(question: Question, share: float) -> None:
    profile, model, work, limits = question
    made = tried(question)
    if made is not None:
        shorter = replace(work, context=max(1, round(share * work.context)))
        assert not_slower(tried((profile, model, shorter, limits)), made)


@settings(few, max_examples=40)
@given(questions)
def test_the_longest_context_is_true(question: Question) -> None:
    profile, model, work, limits = question
    made, longest = tried(question), largest_context(*question)
    if made is None and not profile.gpus and limits != Limits():
        return  # a mistake, whatever the context
    assert made is None or longest >= work.context
    if longest:
        assert tried((profile, model, replace(work, context=longest), limits))
    if longest < model.context:
        assert not tried((profile, model, replace(work, context=longest + 1), limits))
