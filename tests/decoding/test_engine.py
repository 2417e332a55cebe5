"""The engine from checkpoints on: what it refuses, what it tells, and what must not change its text."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import tiny_engine
import tiny_models
import torch
from tiny_engine import answer, answers, prompt, random_decoder

from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.engine import Engine, Request, Settings
from hspec_decoding.events import Emitted, Event, Finished, Placed, Prefilled, Round
from hspec_decoding.load import check_memory, choose_stacks
from hspec_decoding.sampling import Sampling
from hspec_decoding.tuner import PLAIN
from hspec_profiles.errors import DoesNotFit, HspecError, UsageError

Written = Callable[..., Checkpoint]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A tiny model on disk, each kind written once."""
    root, made = tmp_path_factory.mktemp("models"), dict[str, Checkpoint]()

    def write(family: str = "llama", **overrides: Any) -> Checkpoint:
        name = "-".join([family, *(f"{key}{value}" for key, value in overrides.items())])
        if name not in made:
            made[name] = Checkpoint.open(tiny_models.model(root / name, family, tokenizer=False, **overrides))
        return made[name]

    return write


def load(target: Checkpoint, draft: Checkpoint | None = None, context: int = 300, **options: Any) -> Engine:
    settings = {"device": "cpu", "dtype": "float32", "adapt": False, **options}
    return Engine.load(target, draft, Settings(**settings), context)


# loading


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_triforce_from_checkpoints(written: Written, family: str) -> None:
    """With a draft of another shape and without one: what the target says alone."""
    target, draft = written(family), written("llama", num_hidden_layers=2, hidden_size=32, seed=1)
    asked = Request(prompt(120), 50, sampling=Sampling(0.8, top_p=0.9, seed=3))
    alone = answer(load(target, method="autoregressive"), asked)
    for small in (None, draft):
        run = load(target, small, method="triforce", budget=32)
        assert run.stack.startswith("draft(" if small else "ngram")
        assert answer(run, asked) == alone


def test_progress_is_told_by_layers(written: Written) -> None:
    told: list[tuple[int, int]] = []
    settings = Settings(method="triforce", device="cpu", dtype="float32")
    Engine.load(written(), written(seed=1), settings, 64, progress=lambda done, of: told.append((done, of)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_draft_that_the_stack_has_no_use_for_is_not_read(written: Written) -> None:
    run = load(written(), written(seed=1), method="autoregressive")
    assert run.parts.draft is None


def test_dtype_and_device_are_told(written: Written) -> None:
    run = load(written(), dtype="bf16", method="autoregressive")
    assert (run.dtype, run.device, run.stack) == ("bfloat16", "cpu", "target(full)")


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("size", [288, 340])
def test_vocabularies_padded_differently(written: Written, size: int, rule: str) -> None:
    """Embeddings have rows beyond the tokenizer's 276 ids, the target's 320, the draft's fewer or more."""
    target, draft = written(), written(vocab_size=size)
    asked = Request(prompt(60), 150, sampling=Sampling(1.5, seed=1))
    asked = Request(tuple(token % 276 for token in asked.prompt), 150, sampling=asked.sampling)

    def run(small: Checkpoint | None, **options: Any) -> Engine:
        settings = Settings(device="cpu", dtype="float32", rule=rule, **options)
        return Engine.load(target, small, settings, 300, vocabulary=276)

    said, _ = answer(run(draft, levels="draft > target(full)"), asked)
    assert len(said) == 150
    assert max(said) < 276
    if rule == "coupled":
        assert said == answer(run(None, method="autoregressive"), asked)[0]


def test_a_draft_of_fewer_ids_does_not_limit_the_text(written: Written) -> None:
    """A draft that lacks ids which the target may produce is refused, or it is not seen in the text."""
    target, draft = written(), written(vocab_size=200)
    asked = Request(tuple(token % 200 for token in prompt(60)), 100, sampling=Sampling(1.5, seed=1))
    alone = answer(load(target, method="autoregressive"), asked)
    assert max(alone[0]) >= 200
    try:
        run = load(target, draft, levels="draft > target(full)")
    except HspecError:
        return
    assert answer(run, asked) == alone


# refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rule": "typical"}, "--rule"),
        ({"select": "random"}, "--select"),
        ({"gamma": 0}, "--gamma"),
        ({"gamma": 64}, "--gamma"),
        ({"budget": 8}, "--budget"),
        ({"method": "medusa"}, "medusa"),
        ({"levels": "draft > target(full)"}, "no draft model"),
        ({"levels": "target(retrieval"}, "column"),
    ],
)
def test_settings_that_cannot_be_meant(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        choose_stacks(Settings(**options), 4000, draft=False, gpu=False)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (Request((), 5), "from 1 to 99 tokens: 0"),
        (Request((5,) * 100, 5), "from 1 to 99 tokens: 100"),
        (Request((5,), 0), "1 or more: 0"),
    ],
)
def test_requests_that_cannot_be_meant(asked: Request, says: str) -> None:
    run = tiny_engine.engine("target", random_decoder(), context=100)
    with pytest.raises(UsageError, match=says):
        answer(run, asked)


def test_what_does_not_fit_is_told_with_a_context_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint is true: that context is accepted, one token more is not."""
    shape, cpu = tiny_engine.config(), torch.device("cpu")
    monkeypatch.setattr("hspec_decoding.load.usable_ram", lambda: 2_000_000)
    with pytest.raises(DoesNotFit, match=r"this host has 1\.9 MB to use") as caught:
        check_memory([shape], 100_000, torch.float32, cpu)
    longest = int((caught.value.hint or "").split("--ctx ")[1].rstrip("`"))
    check_memory([shape], longest, torch.float32, cpu)
    with pytest.raises(DoesNotFit):
        check_memory([shape], longest + 1, torch.float32, cpu)
    check_memory([shape], longest + 100, torch.bfloat16, cpu)
    with pytest.raises(DoesNotFit):
        check_memory([shape, shape], longest, torch.float32, cpu)
    monkeypatch.setattr("hspec_decoding.load.usable_ram", lambda: 1000)
    with pytest.raises(DoesNotFit) as caught:
        check_memory([shape], 1, torch.float32, cpu)
    assert "smaller model" in (caught.value.hint or "")


@pytest.mark.parametrize("levels", ["target(full)", "target(streaming:64) > target(full)"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_stop_the_run(levels: str, bad: float) -> None:
    shape = tiny_engine.config()
    made = tiny_engine.weights(shape)
    made["model.layers.1.mlp.down_proj.weight"][3, 5] = bad
    run = tiny_engine.engine(levels, tiny_engine.decoder(shape, made), adapt=False)
    with pytest.raises(HspecError, match="non-finite logits after 100 tokens: layer 1 holds NaN or infinite weights"):
        answer(run, Request(prompt(100), 10, sampling=Sampling(1.0)))


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_draft_that_is_not_finite_changes_nothing(rule: str) -> None:
    """It is stopped by its name, or what it proposes is of no use; it is no internal error."""
    shape = tiny_engine.config()
    made = tiny_engine.weights(shape, seed=1)
    made["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    draft = tiny_engine.decoder(shape, made)
    asked = Request(prompt(100), 10, sampling=Sampling(1.0))
    run = tiny_engine.engine("draft > target", random_decoder(), draft, rule=rule, adapt=False)
    try:
        said, _ = answer(run, asked)
    except HspecError:
        return
    assert rule == "rejection" or said == answer(tiny_engine.engine("target", random_decoder()), asked)[0]


# told


def test_events_are_the_run() -> None:
    """Prefill up to the whole prompt, then rounds with their tokens, then the end."""
    run = tiny_engine.engine("ngram > target(retrieval:64) > target(full)", random_decoder(), adapt=False)
    events: list[Event] = list(run.generate(Request(prompt(1200), 30, sequence=4)))
    prefilled = [event for event in events if isinstance(event, Prefilled)]
    assert [(event.done, event.total, event.sequence) for event in prefilled] == [
        (512, 1200, 4),
        (1024, 1200, 4),
        (1199, 1200, 4),
        (1200, 1200, 4),
    ]
    rounds = [event for event in events if isinstance(event, Round)]
    emitted = [event for event in events if isinstance(event, Emitted)]
    assert [len(event.tokens) for event in emitted][:-1] == [event.kept + 1 for event in rounds][:-1]
    assert sum(len(event.tokens) for event in emitted) == 30
    assert all(event.widths == (6, 6) for event in rounds)
    assert [event for event in events if isinstance(event, Finished)] == [Finished("length", 4)]
    assert [type(event) for event in events[-3:]] == [Emitted, Finished, Round]


def test_the_report_is_the_sum_of_the_rounds() -> None:
    run = tiny_engine.engine("ngram > target(retrieval:64) > target(full)", random_decoder(), adapt=False)
    rounds = [e for e in run.generate(Request(prompt(300), 60, sampling=Sampling(0.5, seed=8))) if isinstance(e, Round)]
    report = run.report()
    assert (report.prompt_tokens, report.generated_tokens, report.seed) == (300, 60, 8)
    assert [level.name for level in report.levels] == ["ngram", "target(retrieval:64)", "target(full)"]
    assert report.stack == " > ".join(level.name for level in report.levels)
    middle, last = report.levels[1:]
    assert (middle.proposed, middle.kept) == (sum(r.proposed for r in rounds), sum(r.kept for r in rounds))
    assert (last.proposed, last.kept, last.passes) == (60, 60, len(rounds))
    assert report.target_passes == len(rounds)
    assert report.decode_seconds >= sum(r.seconds for r in rounds) > 0
    assert report.prefill_seconds > 0


def test_rounds_tell_what_each_level_did() -> None:
    run = tiny_engine.engine("ngram > target(retrieval:64) > target(full)", random_decoder(), adapt=False)
    rounds = [event for event in run.generate(Request(prompt(300), 40)) if isinstance(event, Round)]
    for level in run.report().levels:
        told = [did for done in rounds for did in done.levels if did.name == level.name]
        counts = ("proposed", "kept", "refused", "passes") if level.name != "target(full)" else ("kept", "passes")
        for count in counts:
            assert sum(getattr(did, count) for did in told) == getattr(level, count)
    assert all(done.seconds >= sum(did.seconds for did in done.levels) for done in rounds)


def test_placed_tells_what_memory_holds_and_rounds_what_they_read() -> None:
    decoder = random_decoder()
    run = tiny_engine.engine("target(full)", decoder)
    where, *_, last = [e for e in run.generate(Request(prompt(300), 9)) if isinstance(e, Placed | Round)]
    assert isinstance(where, Placed)
    assert len(where.layers) == decoder.config.layers
    assert {(layer.weights, layer.keys) for layer in where.layers} == {("cpu", "cpu")}
    (memory,) = where.devices
    held = {part.name: part.nbytes for part in memory.parts}
    store = run.parts.stores["target"]
    token = store.nbytes // store.capacity
    weights = held["weights, 32 bits"] + held["head"]
    shapes = decoder.config.tensors().values()
    assert weights + held["embedding"] == sum(4 * math.prod(shape) for shape in shapes)
    assert held["KV cache"] == store.nbytes < memory.available
    assert isinstance(last, Round)
    assert (last.gpu_bytes, last.link_bytes) == (0, 0)
    assert weights < last.ram_bytes <= weights + token * 310
    assert last.plain == pytest.approx(last.promised, rel=0.9)


def test_a_report_of_a_run_that_was_stopped_early() -> None:
    run = tiny_engine.engine("ngram > target(full)", random_decoder())
    opened = run.generate(Request(prompt(1200), 10))
    assert next(event for event in opened if isinstance(event, Prefilled)) == Prefilled(512, 1200)
    opened.close()
    report = run.report()
    assert (report.prompt_tokens, report.generated_tokens, report.target_passes) == (1200, 0, 0)
    assert report.prefill_seconds > report.decode_seconds == 0


def test_a_second_report_does_not_add_to_the_first() -> None:
    run = tiny_engine.engine("ngram > target(full)", random_decoder())
    for length in (50, 20):
        answer(run, Request(prompt(length), 10))
        assert (run.report().prompt_tokens, run.report().generated_tokens) == (length, 10)


@pytest.mark.parametrize("levels", ["ngram > target", "target(streaming:64) > target", "draft > target"])
def test_nothing_is_drafted_that_could_not_be_used(levels: str) -> None:
    run = tiny_engine.engine(levels, random_decoder(), random_decoder(), adapt=False)
    answer(run, Request(prompt(50), 1))
    assert run.report().levels[0].proposed == 0
    answer(run, Request(prompt(50), 5))
    assert run.report().levels[0].kept <= run.report().levels[0].proposed <= 4 + 3 + 2 + 1


def test_falling_back_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hspec_decoding.tuner.Tuner.plan", lambda _: PLAIN)
    run = tiny_engine.engine("ngram > target(full)", random_decoder())
    answer(run, Request(prompt(50), 20))
    note = run.report().note
    assert note is not None
    assert note.startswith("speculation measured slower than plain decoding (")
    assert note.endswith("20 of 20 rounds were plain")
    plain = tiny_engine.engine("target(full)", random_decoder())
    answer(plain, Request(prompt(50), 20))
    assert plain.report().note is None


# the same again


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("levels", ["draft > target(retrieval:64) > target(full)", "ngram > target(full)"])
def test_one_seed_one_text(rule: str, levels: str) -> None:
    """On an engine that has been used before, and under the coupled rule while widths follow the time of day."""

    def run() -> Engine:
        adapt = rule == "coupled"
        return tiny_engine.engine(levels, random_decoder(), random_decoder("llama", 1), rule=rule, adapt=adapt)

    def asked(seed: int, sequence: int = 0) -> Request:
        return Request(prompt(100), 40, sampling=Sampling(1.0, seed=seed), sequence=sequence)

    first = run()
    texts = [tuple(answer(first, asked(seed))[0]) for seed in (1, 2, 1, 3)]
    assert texts[0] == texts[2] == tuple(answer(run(), asked(1))[0])
    assert len(set(texts)) == 3
    assert tuple(answer(first, asked(1, sequence=1))[0]) not in texts


def test_texts_of_a_batch_are_drawn_independently() -> None:
    run = tiny_engine.engine("target(full)", random_decoder())
    asked = [Request(prompt(50), 20, sampling=Sampling(1.0), sequence=i) for i in range(4)]
    assert len({tuple(tokens) for tokens, _ in answers(run, *asked)}) == 4
