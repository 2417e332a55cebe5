"""From limits to a plan, from a plan to an engine: what is chosen, what is refused, and that the text is the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import plan_tools
import pytest
import tiny_models
import torch
from plan_tools import GB, GIB
from tiny_engine import answer, prompt

from hspec_decoding.beside import Meter
from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.config import ModelConfig
from hspec_decoding.device import CPU_SHAPE, GPU_SHAPE, Shape
from hspec_decoding.engine import Engine, Request, Settings
from hspec_decoding.events import LevelReport, LevelRound, Report, Round
from hspec_decoding.load import check_memory
from hspec_decoding.place import Asked, check_plan, check_room, offered, placed, planned_shape, planned_stacks, serves
from hspec_decoding.sampling import Sampling
from hspec_decoding.stack import METHODS, PLAIN, parse
from hspec_offload import host_kv
from hspec_offload.ask import Limits
from hspec_offload.plan import Plan
from hspec_offload.words import elsewhere
from hspec_profiles.errors import DoesNotFit, UsageError
from hspec_profiles.profile import HostProfile

CONTEXT = 300
CPU = torch.device("cpu")
# a card with room for the ring and little else, whose host is slow or fast at computing
CARD = plan_tools.gpus(0.6)
SLOW = replace(CARD, host=replace(CARD.host, attention=1e6, attention_rows=1e6, product=1e6))
TWENTY_FOUR = plan_tools.gpus(24 * GIB / GB)
FAST = plan_tools.gpus(0.6, to_device=1e5, to_host=1e5)


def big(name: str = "llama2-7b-128k") -> ModelConfig:
    from hspec_decoding.checkpoints import hub

    return ModelConfig.from_dict(hub.read_config(name, offline=True, say=print))


def seven_b(context: int, draft: bool = False, **settings: Any) -> Asked:
    small = (big("llama-68m"), "llama-68m") if draft else None
    return Asked((big(), "llama2-7b-128k"), small, Settings(**settings), context, prompt=context - 256)


# --- plans -------------------------------------------------------------------------------------------------------


def test_what_fits_is_resident_though_it_may_be_offloaded() -> None:
    made = placed(plan_tools.ONE, seven_b(8192), Limits())
    assert made.resident
    assert elsewhere(made) == ""
    assert made.prediction.prefill.tokens == 8192 - 256


@pytest.mark.parametrize("limits", [Limits(kv_device="cpu"), Limits(gpu_layers=8)])
def test_what_the_user_wants_elsewhere_is_elsewhere(limits: Limits) -> None:
    assert not placed(plan_tools.ONE, seven_b(8192), limits).resident


def test_a_named_stack_is_the_plans() -> None:
    """For a method alone the planner may take a copy of the weights in 4 bits."""
    levels = "ngram > target(full, kv=int4, w=int4) > target(full)"
    made = placed(TWENTY_FOUR, seven_b(60_000, levels=levels), Limits())
    assert [replace(spec, width=None) for spec in parse(made.levels)] == list(parse(levels))
    for method, kinds in (("autoregressive", ("target(full)",)), ("triforce", ("ngram", "target(retrieval:4096"))):
        made = placed(plan_tools.gpus(12), seven_b(60_000, method=method), Limits())
        assert all(kind in made.levels for kind in kinds), made.levels
    assert "w=int4" in made.levels
    with pytest.raises(DoesNotFit, match=r"GPU 0 .* 4-bit copy 3\.7 GB") as caught:
        placed(plan_tools.gpus(8), seven_b(60_000, method="triforce"), Limits())
    assert "`--method auto`" in (caught.value.hint or "")


@pytest.mark.parametrize("gamma", [3, 14])
def test_a_width_that_the_user_set_is_planned_with(gamma: int) -> None:
    made = placed(TWENTY_FOUR, seven_b(60_000, method="triforce", gamma=gamma), Limits())
    assert parse(made.levels)[-2].width == gamma


@pytest.mark.parametrize("method", [name for name in METHODS if "tidal" not in name])
@pytest.mark.parametrize("draft", [False, True])
def test_every_stack_on_offer_can_be_planned(method: str, draft: bool) -> None:
    for stack in offered(Settings(method=method), 4096, draft=draft, gpu=True):
        assert stack[-1:] == PLAIN
        assert draft or all(spec.name != "draft" for spec in stack)


@pytest.mark.parametrize("asked", [{"method": "tidal"}, {"levels": "target(tidal, w=int4) > target(full)"}])
def test_tidal_levels_are_planned_where_everything_fits(asked: dict[str, str]) -> None:
    """They need the target's own keys, and copies of its weights as others do; nothing of that may be elsewhere."""
    made = placed(plan_tools.ONE, seven_b(8192, **asked), Limits())
    assert made.resident
    copied = any(term.name == "weights, 4-bit copy" for device in made.devices for term in device.terms)
    assert copied is ("levels" in asked)
    with pytest.raises(UsageError, match="on the device") as caught:
        placed(TWENTY_FOUR, seven_b(60_000, **asked), Limits())
    assert "triforce" in (caught.value.hint or "")


def test_auto_keeps_to_the_copies_of_the_plan() -> None:
    made = placed(TWENTY_FOUR, seven_b(122_880), Limits())
    assert made.key_copy == "int4"
    first, *others = planned_stacks(made, Settings(), 122_880, draft=True)
    assert first == tuple(replace(spec, width=None) for spec in parse(made.levels))
    assert others
    for stack in others:
        middle = stack[-2]
        assert all(spec.name != "draft" for spec in stack), "no draft model was planned for"
        assert middle.name == "ngram" or (middle.kv, middle.weights) == ("int4", "int4")
    assert not serves(made, parse("ngram > target(retrieval:4096, w=int4) > target(full)"))


def test_levels_without_copies_are_refused() -> None:
    made = placed(TWENTY_FOUR, seven_b(122_880), Limits())
    levels = "ngram > target(retrieval:4096) > target(full)"
    with pytest.raises(UsageError, match="no copies"):
        planned_stacks(made, Settings(levels=levels), 122_880, draft=False)
    assert planned_stacks(made, Settings(method="autoregressive"), 122_880, draft=False) == [PLAIN]
    with_draft = replace(made, levels=made.levels.replace("ngram(width=15)", "draft(streaming:256)"))
    with pytest.raises(UsageError, match="there is no draft model"):
        planned_stacks(with_draft, Settings(), 122_880, draft=False)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "other"}, "`other`, not `llama2-7b-128k`"),
        ({"layers": ()}, "0 layers"),
        ({"context": 4096}, "4,096 tokens, not 8,192"),
        ({"element": 4}, "32 bits, not 16"),
        ({"batch": 2}, "2 sequences"),
        ({"gpus": (0, 1)}, "2 GPUs"),
        ({"model": "other", "batch": 2}, "`other`.*; 2 sequences"),
    ],
)
def test_a_plan_for_something_else_is_refused(change: dict[str, Any], says: str) -> None:
    asked = seven_b(8192)
    made = placed(plan_tools.ONE, asked, Limits())
    check_plan(made, asked)
    with pytest.raises(UsageError, match=says):
        check_plan(replace(made, **change), asked)


def test_less_memory_than_planned_with_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made = placed(TWENTY_FOUR, seven_b(60_000), Limits())
    monkeypatch.setattr("hspec_decoding.place.usable_ram", lambda: 90 * GB)
    check_room(made, CPU)
    monkeypatch.setattr("hspec_decoding.place.usable_ram", lambda: GB)
    with pytest.raises(DoesNotFit, match=r"into RAM, where 1\.0 GB are free") as caught:
        check_room(made, CPU)
    assert "--ram" in (caught.value.hint or "")
    monkeypatch.setattr("hspec_decoding.place.usable_ram", lambda: 90 * GB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * GB, 24 * GB))
    with pytest.raises(DoesNotFit, match=r"into GPU 0.* 10\.0 GB are free"):
        check_room(made, torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("ram", "says"),
    [
        (90, "`--offload` keeps in RAM what has no room there; the longest context without is 1"),
        (20, "longest context"),
    ],
)
def test_without_offloading_the_flag_is_named_where_it_would_help(
    monkeypatch: pytest.MonkeyPatch, ram: int, says: str
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (24 * GB, 24 * GB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "card")
    monkeypatch.setattr("hspec_decoding.load.usable_ram", lambda: ram * GB)
    with pytest.raises(DoesNotFit, match=r"GPU 0 \(card\) has 22\.8 GB") as caught:
        check_memory([big()], 122_880, torch.bfloat16, torch.device("cuda", 0))
    assert says in (caught.value.hint or "")
    assert ("--offload" in (caught.value.hint or "")) == (ram == 90)
    with pytest.raises(DoesNotFit, match=r"has 8\.6 GB"):
        check_memory([big()], 4096, torch.bfloat16, torch.device("cuda", 0), Limits(vram=8 * GIB, reserve=0))


def test_words() -> None:
    made = placed(TWENTY_FOUR, seven_b(122_880), Limits())
    away = sum(run.count for run in made.layers if run.weights == "stream")
    weights, keys = f"weights of {away} layers in host memory", "all KV in host memory"
    assert elsewhere(made) == f"{weights} and {keys}, {made.cpu_share:.0%} attended by the CPU"
    runs = [replace(run, weights="stream", keys="stream") for run in made.layers]
    assert elsewhere(replace(made, layers=tuple(runs))) == "weights of all 32 layers and all KV in host memory"
    first = replace(runs[0], last=0, weights="disk")
    rest = replace(runs[0], first=1, last=31, weights="gpu", keys="gpu")
    one = replace(made, layers=(first, rest))
    assert elsewhere(one) == "weights of 1 layer on the disk and KV of 1 layer in host memory"


def test_longer_blocks_are_padded() -> None:
    """Those that the kernels add up in one order whatever their length need not be, unless the CPU attends too."""
    made = placed(TWENTY_FOUR, seven_b(122_880), Limits())
    assert made.cpu_share
    for block in (1, 16, 32, 64):
        assert planned_shape(replace(made, block=block), GPU_SHAPE) == Shape(block, 1, padded=True)
    made = replace(made, cpu_share=0.0)
    for block, expected in ((16, GPU_SHAPE), (32, GPU_SHAPE), (64, Shape(64, 1, padded=True))):
        assert planned_shape(replace(made, block=block), GPU_SHAPE) == expected
    assert planned_shape(replace(made, block=64), CPU_SHAPE) == CPU_SHAPE
    assert planned_shape(None, GPU_SHAPE) == GPU_SHAPE


# --- engines -----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of keys and values that a short prompt fills."""
    monkeypatch.setattr(host_kv, "UNIT", 32)
    monkeypatch.setattr(host_kv, "UNIT_BYTES", 1)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A tiny model whose weights are larger than nothing."""
    return Checkpoint.open(tiny_models.model(tmp_path_factory.mktemp("models") / "target", tokenizer=False))


def tiny_plan(checkpoint: Checkpoint, profile: HostProfile, levels: str | None = None, **limits: Any) -> Plan:
    """A plan of a card for the tiny model in float32."""
    settings = Settings(levels=levels, method="auto" if levels else "autoregressive")
    asked = Asked((checkpoint.config, "tiny"), None, settings, CONTEXT, element=4)
    return placed(profile, asked, Limits(reserve=0, **limits))


def load(checkpoint: Checkpoint, plan: Plan | None = None, **options: Any) -> Engine:
    settings = {"device": "cpu", "dtype": "float32", "adapt": False, **options}
    return Engine.load(checkpoint, None, Settings(**settings), CONTEXT, plan=plan)


ASKED = Request(prompt(150), 60, sampling=Sampling(0.8, seed=3))
Answer = tuple[list[int], str]


@pytest.fixture(scope="module")
def alone(written: Checkpoint) -> Answer:
    """What plain decoding says, everything resident."""
    return answer(load(written, method="autoregressive"), ASKED)


STREAMED, SMALL = "ngram > target(full)", "ngram > target(full, w=int4, kv=int4) > target(full)"
PLACEMENTS: dict[str, tuple[HostProfile, dict[str, Any]]] = {
    "weights streamed": (SLOW, {"gpu_layers": 1, "kv_device": "gpu"}),
    "all streamed": (SLOW, {"gpu_layers": 0, "kv_device": "cpu"}),
    "keys streamed": (SLOW, {"gpu_layers": 4, "kv_device": "cpu"}),
    "weights on the CPU": (FAST, {"gpu_layers": 1, "kv_device": "gpu"}),
    "keys on the CPU": (FAST, {"gpu_layers": 4, "kv_device": "cpu"}),
}


@pytest.mark.parametrize("levels", [None, STREAMED, SMALL])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_text_is_that_of_the_resident_run(
    written: Checkpoint, alone: Answer, placement: str, levels: str | None
) -> None:
    profile, limits = PLACEMENTS[placement]
    made = tiny_plan(written, profile, levels, **limits)
    kinds = {run.weights for run in made.layers} | {run.keys for run in made.layers}
    assert kinds & ({"stream", "split"} if profile is SLOW else {"cpu"}), made.layers
    options: dict[str, Any] = {"levels": levels} if levels else {"method": "autoregressive"}
    run = load(written, made, **options)
    assert run.plan is made
    assert answer(run, ASKED) == alone
    if levels == SMALL:
        assert answer(run.variant(Settings(method="autoregressive", adapt=False)), ASKED) == alone


def test_auto_adapts_among_what_the_plan_has_copies_for(written: Checkpoint, alone: Answer) -> None:
    made = tiny_plan(written, SLOW, SMALL, gpu_layers=0, kv_device="cpu")
    run = load(written, made, adapt=True)
    assert len(run.stacks) > 1
    assert answer(run, ASKED) == alone
    assert "kv=int4" in run.stack
    with pytest.raises(UsageError, match="no copies"):
        load(written, made, levels="target(retrieval:64) > target(full)")


def test_weights_that_ram_has_no_room_for_stay_on_the_disk(written: Checkpoint, alone: Answer) -> None:
    asked = Asked((written.config, "tiny"), None, Settings(method="autoregressive"), CONTEXT, element=4)
    room = next(
        made
        for nbytes in range(2_000_000, 0, -50_000)
        if "disk" in str((made := placed(plan_tools.NONE, asked, Limits(ram=nbytes, reserve=0))).layers)
    )
    assert "on the disk" in elsewhere(room)
    assert any("read from the disk in every pass, which is slow" in note for note in room.notes)
    run = load(written, room, method="autoregressive")
    assert answer(run, ASKED) == alone


def test_a_plan_that_keeps_everything_resident_changes_nothing(written: Checkpoint, alone: Answer) -> None:
    made = tiny_plan(written, CARD)
    assert made.resident
    run = load(written, made, method="triforce", budget=64)
    assert run.parts.kv is None
    assert run.stack == load(written, method="triforce", budget=64).stack
    assert answer(run, ASKED) == alone


# --- predicted beside measured -----------------------------------------------------------------------------------


def rounds(plan: Plan, count: int) -> Iterator[Round]:
    """Rounds in which everything takes twice as long as predicted."""
    told = plan.prediction
    assert told.middle
    names = [str(replace(spec, width=None)) for spec in parse(plan.levels)]
    verify = 2 * (told.verify.seconds + told.refresh)
    for _ in range(count):
        levels = (
            LevelRound(names[0], 20, 18, 1, 10, 0.0),
            LevelRound(names[1], 20, 18, 1, 10, 20 * told.middle.seconds),
            LevelRound(names[2], 19, 19, 0, 1, verify),
        )
        yield Round(20, 18, (4, 20), 20 * told.middle.seconds + verify, levels)


def test_predictions_stand_beside_measurements() -> None:
    made = placed(TWENTY_FOUR, seven_b(122_880), Limits())
    meter = Meter(made)
    for event in [*rounds(made, 5), Round(0, 0, (), 9.0, (LevelRound("target(full)", 1, 1, 0, 1, 9.0),))]:
        meter.take(event)
    report = Report(122_880 - 256, 96, 3.0, 99.0, (LevelReport("target(full)", 96, 96, 6, 9.0),), made.levels, 0)
    figures = {figure.name: figure for figure in meter.figures_of(report)}
    assert set(figures) == {"token", "middle step", "verify pass", "prefill"}
    for name in ("token", "middle step", "verify pass"):
        assert figures[name].ratio == pytest.approx(2, rel=0.01), name
    assert figures["prefill"].predicted == made.prediction.prefill.seconds
    other = {figure.name: figure for figure in meter.figures_of(replace(report, prompt_tokens=99))}
    assert other["prefill"].predicted is None, "the prediction is for another prompt"
    few = {figure.name: figure for figure in meter.figures_of(replace(report, generated_tokens=1000))}
    assert few["token"].predicted is None, "most of the run was done otherwise"
    assert few["token"].measured == pytest.approx(0.099)


def test_plain_decoding_has_its_own_prediction() -> None:
    made = placed(TWENTY_FOUR, seven_b(122_880, method="autoregressive"), Limits())
    meter = Meter(made)
    for _ in range(4):
        meter.take(Round(0, 0, (), 1.0, (LevelRound("target(full)", 1, 1, 0, 1, 1.0),)))
    report = Report(9, 4, 3.0, 4.0, (LevelReport("target(full)", 4, 4, 4, 4.0),), "target(full)", 0)
    token, verify, _ = meter.figures_of(report)
    assert token.predicted == verify.predicted == made.prediction.verify.seconds
    assert token.measured == verify.measured == 1.0
