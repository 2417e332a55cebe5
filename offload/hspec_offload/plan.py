"""The planner: where everything goes, by which levels, and how fast it will be. A pure function over frozen records.

Every placement that is worth it is timed (memory.py says which, cost.py how), with every stack of levels that its
copies serve, and the fastest is kept. What is tried does not depend on what the machine has, only what fits does: so
more memory or bandwidth never makes a plan slower, and more context never faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

from hspec_offload.ask import OFFLOAD, Ask, Copies, Limits, Workload, grouped, stacks
from hspec_offload.cost import PIECE, Pass, Prefill
from hspec_offload.fit import asked, does_not_fit, leanest
from hspec_offload.memory import Placement, choices, chunk
from hspec_offload.notes import notes
from hspec_offload.passes import Target, draft_seconds, middle_pass, prefill_of, refresh_seconds, target_pass
from hspec_offload.placed import Device, Layers, devices, layer_runs
from hspec_offload.shape import ModelShape
from hspec_offload.speculation import TARGET, TEXTS, Costs, Level, Levels, Round, fastest, written
from hspec_profiles.errors import DoesNotFit, UsageError

if TYPE_CHECKING:
    from hspec_profiles.profile import HostProfile

BLOCKS = {True: (16, 32, 64), False: (8,)}  # rows of a verify pass, on a GPU and on a CPU


@dataclass(frozen=True)
class Prediction:
    """Seconds. A round is `draft_steps` of the first level, `middle_steps` of the one under the target, `verify` and
    `refresh`.
    """

    seconds_per_token: float  # of a sequence, by the plan's levels, on the plan's text
    plain: Pass  # of plain decoding, placed as is best for that
    plain_layers: tuple[Layers, ...]
    verify: Pass
    prefill: Prefill
    text: str
    tokens_per_pass: float = 1.0
    draft: float = 0.0  # a step of the draft model
    draft_steps: float = 0.0
    middle: Pass | None = None
    middle_steps: float = 0.0
    refresh: float = 0.0  # of a retrieval copy, in each round
    texts: Mapping[str, float] = field(default_factory=dict, hash=False)  # seconds a token by kind of text
    plain_share: float = 0.0  # of KV in RAM that the CPU attends to in plain decoding

    @property
    def speed_up(self) -> float:
        """Over plain decoding."""
        return self.plain.seconds / self.seconds_per_token


@dataclass(frozen=True)
class Plan:
    """Where everything goes and what it is predicted to do. Bytes, tokens."""

    model: str
    profile: str
    context: int
    levels: str  # as `--levels` takes them
    block: int  # rows of the last verifier's pass
    layers: tuple[Layers, ...]
    devices: tuple[Device, ...]
    prediction: Prediction
    prefill_chunk: int
    batch: int = 1
    gpus: tuple[int, ...] = ()  # their numbers in the profile, by rank
    kv_heads: tuple[int, ...] = ()  # that each of them holds
    cpu_share: float = 0.0  # of the tokens of KV in RAM that the CPU attends to
    embedding: str = "host"  # or "gpu"
    key_copy: str = ""  # "int4", "int8": of all keys and values, on the GPU
    ring_pieces: int = 0
    piece_bytes: int = 0
    element: int = 2  # bytes of a weight, key or value of the target
    notes: tuple[str, ...] = ()

    @property
    def resident(self) -> bool:
        """Whether all layers are where they are computed."""
        here = ("gpu", "gpu") if self.gpus else ("cpu", "cpu")
        return all((run.weights, run.keys) == here for run in self.layers)


@dataclass(frozen=True)
class Timed:
    """One way to do it: a placement, levels as they were asked for and in their best round, and what this costs."""

    ask: Ask
    place: Placement
    levels: Levels
    round: Round
    costs: Costs

    @property
    def seconds(self) -> float:
        """Of one token."""
        return self.round.seconds_per_token


def plan(profile: HostProfile, model: ModelShape, work: Workload, limits: Limits = Limits()) -> Plan:
    """The fastest plan. Raises DoesNotFit where there is none, UsageError for what cannot be meant."""
    _check(profile, model, work, limits)
    asks = asked(profile, model, work, limits)
    plain = [timed for ask in asks for timed in _plain(ask)]
    if not plain:
        raise does_not_fit(profile, model, work, limits)
    ways = [timed for ask in asks for timed in _ways(ask)]
    if not ways:
        gpu = bool(asks[0].machine.gpus)
        copies = grouped(stacks(work, gpu=gpu), model.layers, gpu=gpu)
        raise does_not_fit(profile, model, work, limits, leanest(asks[0], copies))
    best = min(ways, key=lambda timed: timed.seconds)
    if limits.ranks is not None and limits.ranks > 1:
        ways += [timed for ask in asked(profile, model, work, replace(limits, ranks=1)) for timed in _ways(ask)]
    return _plan(best, min(plain, key=lambda timed: timed.seconds), ways)


def _check(profile: HostProfile, model: ModelShape, work: Workload, limits: Limits) -> None:
    """Raise for what no host could do."""
    if work.context > model.context:
        raise DoesNotFit(
            f"a context of {work.context:,} tokens is asked for, `{model.name}` holds {model.context:,}",
            f"`--ctx {model.context}` is the most",
        )
    if work.context < 1 or work.batch < 1:
        raise UsageError(f"context and batch must be 1 or more, got {work.context} and {work.batch}")
    if work.text not in TEXTS:
        raise UsageError(f"unknown text: {work.text!r}", "texts are " + ", ".join(TEXTS))
    if limits.offload not in OFFLOAD:
        raise UsageError(f"unknown kind of offloading: {limits.offload!r}", "kinds are " + ", ".join(OFFLOAD))
    there = len(profile.gpus) if limits.gpus is None else len({*limits.gpus} & {*range(len(profile.gpus))})
    if limits.ranks is not None and limits.ranks > max(1, there):
        raise UsageError(f"`--gpus {limits.ranks}` is asked for, the profile `{profile.name}` has {there}")
    if limits.ranks is not None and limits.ranks > model.kv_heads:
        raise UsageError(
            f"`--gpus {limits.ranks}` is asked for, and a plan gives each GPU whole KV heads, of which "
            f"`{model.name}` has {model.kv_heads}"
        )
    if there and limits.gpus != ():
        return
    flags = {"--vram": limits.vram, "--gpu-layers": limits.gpu_layers, "--kv-device": limits.kv_device}
    for flag, value in flags.items():
        if value is not None and value != "cpu":
            none = f"the profile `{profile.name}` has none" if not profile.gpus else "none is used"
            raise UsageError(f"`{flag}` is about a GPU, {none}")


def _plain(ask: Ask) -> Iterator[Timed]:
    """Plain decoding, one row a pass, in every placement."""
    for place in choices(ask, Copies()):
        placed = Target(ask, place).shared_out(1)
        seconds = target_pass(ask, placed, 1).seconds
        costs = Costs({1: seconds}, lambda _level, _rows: 0.0, 0.0)
        yield Timed(ask, placed, (TARGET,), Round((TARGET,), 1, 1.0, seconds), costs)


def _ways(ask: Ask) -> Iterator[Timed]:
    """Every stack in every placement, with its best widths."""
    gpu, accepted = bool(ask.machine.gpus), ask.work.accepted(ask.model, ask.work.text)
    draft = draft_seconds(ask)
    for copies, several in grouped(stacks(ask.work, gpu=gpu), ask.model.layers, gpu=gpu).items():
        if (TARGET,) in several:
            yield from _plain(ask)
        speculating = [levels for levels in several if len(levels) > 1]
        for place in choices(ask, copies) if speculating else ():
            yield from _speculating(ask, place, speculating, accepted, draft)


def _speculating(
    ask: Ask, place: Placement, several: Iterable[Levels], accepted: Mapping[str, float], draft: float
) -> Iterator[Timed]:
    """Stacks that use the same copies, in one placement."""
    target, refresh = Target(ask, place), refresh_seconds(ask, place)
    placed = {rows: target.shared_out(rows) for rows in BLOCKS[bool(ask.machine.gpus)]}
    verify = {rows: target_pass(ask, where, rows).seconds + refresh for rows, where in placed.items()}

    @cache
    def middle(level: Level, rows: int) -> float:
        return middle_pass(ask, place, level, rows).seconds

    costs = Costs(verify, middle, draft)
    for levels in several:
        found = fastest(levels, accepted, costs)
        yield Timed(ask, placed[found.block], levels, found, costs)


def _plan(best: Timed, plain: Timed, ways: Iterable[Timed]) -> Plan:
    """The record of what was found best."""
    ask, place, copies = best.ask, best.place, best.place.copies
    ring = ask.machine.gpus and not place.resident(ask.model)
    return Plan(
        model=ask.model.name,
        profile=ask.machine.name,
        context=ask.work.context,
        batch=ask.work.batch,
        levels=written(best.round.levels),
        block=best.round.block,
        layers=layer_runs(ask, place),
        devices=devices(ask, place),
        prediction=_prediction(best, plain),
        prefill_chunk=chunk(ask),
        gpus=ask.machine.gpus,
        kv_heads=ask.machine.heads,
        cpu_share=place.cpu_share,
        embedding="gpu" if place.embedding or (ask.model.tied and ask.machine.gpus) else "host",
        key_copy=copies.keys,
        ring_pieces=place.pieces if ring else 0,
        piece_bytes=PIECE if ring else 0,
        element=ask.model.element,
        notes=notes(ask, place, [(w.ask.machine, w.place.resident(ask.model), w.seconds) for w in ways]),
    )


def _prediction(best: Timed, plain: Timed) -> Prediction:
    ask, place, made = best.ask, best.place, best.round
    middle = next((level for level in made.levels[-2:-1] if level.name == "target"), None)
    rows = 1 + next((level.width or 0 for level in made.levels[-3:-2]), 0)
    return Prediction(
        seconds_per_token=best.seconds,
        plain=target_pass(plain.ask, plain.place, 1),
        plain_layers=layer_runs(plain.ask, plain.place),
        plain_share=plain.place.cpu_share,
        verify=target_pass(ask, place, made.block),
        prefill=prefill_of(ask, place),
        text=ask.work.text,
        tokens_per_pass=made.tokens,
        draft=best.costs.draft if made.levels[0].name == "draft" else 0.0,
        draft_steps=made.draft_steps,
        middle=middle_pass(ask, place, middle, rows) if middle else None,
        middle_steps=made.middle_steps,
        refresh=refresh_seconds(ask, place),
        texts={text: _seconds_on(text, best) for text in TEXTS},
    )


def _seconds_on(text: str, best: Timed) -> float:
    """Of a token of such a text, by the same levels at their best widths for it."""
    accepted = best.ask.work.accepted(best.ask.model, text)
    return fastest(best.levels, accepted, best.costs).seconds_per_token
