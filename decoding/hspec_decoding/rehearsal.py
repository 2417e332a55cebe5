"""Passes that decoding will mostly replay are captured before it begins, and timed."""

from __future__ import annotations

from collections.abc import Sequence

from hspec_decoding.build import Levels
from hspec_decoding.levels import ModelLevel
from hspec_decoding.ngram import NGram
from hspec_decoding.sequence import Text
from hspec_decoding.tuner import Average, Tuner


def rehearse(levels: Levels, tuner: Tuner, texts: Sequence[Text]) -> None:
    """Capture them, and tell the tuner how long they take; without graphs nothing is done. Texts stay as they are."""
    last = levels.last
    asked = dict(last.view.recorded)  # the prompt's own queries, by which levels are about to select
    for rows in (1, 4, 16, 32) if levels.proposers and not last.rows else (1,):
        seconds = last.rehearse(texts, rows)
        if seconds is not None:
            tuner.target[rows - 1] = Average(seconds, 1)
    last.view.recorded = asked
    for n, level in enumerate(levels.proposers):
        if isinstance(level, ModelLevel):
            first = any(chain[:1] == (n,) for chain in levels.chains)
            for rows in (16, 4, 1) if first else (1, 32, 16, 4):
                seconds = level.rehearse(texts, rows)
            if seconds is not None:
                tuner.cost[n] = Average(seconds, 1)
        elif last.graphs and isinstance(level, NGram):
            tuner.cost[n] = Average(0.0, 1)
