"""Bytes that a model takes, and how they are said."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hspec_offload.sizes import human, kv_bytes, tensor_bytes


def test_published_numbers() -> None:
    """Llama 2 7B keeps 512 KiB a token in 16 bits, 64 GiB at 131,072 tokens; Llama 3.1 8B a quarter of that."""
    assert kv_bytes(32, 32, 128, 1, 2) == 512 * 1024
    assert kv_bytes(32, 32, 128, 131_072, 2) == 64 << 30
    assert kv_bytes(32, 8, 128, 131_072, 2) == 16 << 30
    assert kv_bytes(40, 40, 128, 1, 2) == 800 * 1024


def test_tensors() -> None:
    assert tensor_bytes([(3, 4), (5,), ()], 2) == (12 + 5 + 1) * 2
    assert tensor_bytes([], 4) == 0


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (98_362_432, "98.4 MB"),
        (270_000_000, "270 MB"),
        (15_200_000_000, "15.2 GB"),
        (68_719_476_736, "68.7 GB"),
        (1.5e12, "1.5 TB"),
        (2e16, "20000 TB"),
    ],
)
def test_human(nbytes: float, said: str) -> None:
    assert human(nbytes) == said


@given(nbytes=st.integers(1, 10**14))
@settings(max_examples=500, deadline=None, derandomize=True)
def test_human_is_near_and_short(nbytes: int) -> None:
    """Never more than 1 % off, never more than three digits before the point where a larger unit would do."""
    number, unit = human(nbytes).split(" ")
    size = {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]
    assert abs(float(number) * size - nbytes) <= 0.05 * size + 0.01 * nbytes
    assert re.fullmatch(r"\d{1,3}(\.\d)?", number)
