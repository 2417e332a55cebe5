"""Values of options: section D of the cases that users of other tools hit."""

from __future__ import annotations

from pathlib import Path

import case_tools as cases
import pytest
from case_tools import Hspec, document, refused


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("--method", ("auto", "autoregressive", "triforce")),
        ("--rule", ("coupled", "rejection")),
        ("--select", ("paper", "verify-fed")),
        ("--dtype", ("auto", "float32", "bfloat16")),
        ("--device", ("auto", "cpu", "cuda")),
    ],
)
def test_D18_misspelled_value(hspec: Hspec, drafts: dict[str, Path], flag: str, values: tuple[str, ...]) -> None:
    """A value that an option does not know is a usage error that lists those it does."""
    refused(hspec("run", "-m", drafts["target"], flag, "tri-force", "hello"), 2, "tri-force", *values)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--temp", -0.1),
        ("--temp", "nan"),
        ("--temp", "inf"),
        ("--top-p", -0.1),
        ("--top-p", 1.1),
        ("--top-p", "nan"),
        ("--top-k", -1),
        ("--min-p", -0.1),
        ("--min-p", 1.1),
        ("--gamma", 0),
        ("--gamma", -3),
        ("--budget", -1),
        ("--ctx", 0),
        ("--seed", "x"),
        ("--temp", "hot"),
    ],
)
def test_D30_values_out_of_range(hspec: Hspec, drafts: dict[str, Path], flag: str, value: float | str) -> None:
    """A sampling or speculation value out of its range is a usage error that names it."""
    result = hspec("run", "-m", drafts["target"], "--raw", f"{flag}={value}", "hello")
    refused(result, 2, flag.removeprefix("--")[:4], str(value))


@pytest.mark.parametrize("temperature", [0, 0.01, 1, 5])
@pytest.mark.parametrize("more", [("--top-p", 0), ("--top-p", 1), ("--top-k", 0), ("--top-k", 10**6), ("--top-k", 1)])
def test_D30_values_at_the_borders(
    hspec: Hspec,
    monkeypatch: pytest.MonkeyPatch,
    drafts: dict[str, Path],
    temperature: float,
    more: tuple[str, float],
) -> None:
    """Values at the borders of their ranges run; those that leave one token to choose from are greedy."""
    run = [drafts["target"], "--temp", temperature, *more, "-n", 16]
    plain = document(hspec, *run, "--method", "autoregressive")
    with cases.pretending(monkeypatch, beyond=199, width=16):
        got = document(hspec, *run, "--method", "triforce", "--draft-model", drafts["random"])
    cases.speculated(got, proposals=1)
    assert got["tokens"] == plain["tokens"]
    if temperature == 0 or more in (("--top-p", 0), ("--top-k", 1)):
        greedy = document(hspec, drafts["target"], "--method", "autoregressive", "--temp", 0, "-n", 16)
        assert plain["tokens"] == greedy["tokens"]
