"""Sequences that join and leave: each says what it says alone, whoever is decoded beside it."""

from __future__ import annotations

import itertools
from functools import cache

import psutil
import pytest
import tiny_engine
import torch
from tiny_engine import CPU, answer, coming, config, contrary, decoder, gathered, prompt, stuck, weights

from hspec_decoding.cache import KVStore
from hspec_decoding.engine import Engine
from hspec_decoding.events import Emitted, Finished, Prefilled
from hspec_decoding.load import BEYOND, TOGETHER, together
from hspec_decoding.model import Decoder
from hspec_decoding.options import Request
from hspec_decoding.sampling import Sampling
from hspec_decoding.stack import parse
from hspec_kernels.linear import linear
from hspec_profiles.errors import DoesNotFit

STACKS = {
    "plain": "target(full)",
    "n-grams": "ngram > target(full)",
    "draft": "draft > target(full)",
    "triforce": "draft > target(retrieval:64) > target(full)",
    "windows": "ngram > target(streaming:64) > target(full)",
    "4-bit copy": "ngram > target(full, kv=int4) > target(full)",
}
MIXED = [
    Request(prompt(250, 1), 30, sampling=Sampling(), sequence=10, key=7),
    Request(prompt(1, 2), 45, sampling=Sampling(0.8, top_p=0.9, seed=5), sequence=11, key=7),
    Request(prompt(330, 3), 12, sampling=Sampling(1.2, top_k=20), sequence=12),
    Request(prompt(64, 4), 1, sampling=Sampling(0.8, seed=2**62), sequence=13),
    Request(prompt(310, 5), 40, sampling=Sampling(1.0, min_p=0.1), sequence=14, key=2**60),
    Request(prompt(9, 6), 25, sampling=Sampling(), sequence=15),
    Request(prompt(300, 7), 25, frozenset(range(60)), Sampling(1.5), 16),
]


@cache
def model(kind: str | None = None) -> Decoder:
    """A target, or a draft for it."""
    shape = config()
    own = weights(shape, seed=1)
    made = {None: own, "good": own, "contrary": contrary(own), "stuck": stuck(own, 3)}[kind]
    return decoder(shape, made)


def engine(levels: str, draft: str = "good", **settings: object) -> Engine:
    return tiny_engine.engine(levels, model(), model(draft), context=800, **{"adapt": False, **settings})


@cache
def alone(levels: str = "target(full)", rule: str = "coupled", draft: str = "good") -> list[tuple[list[int], str]]:
    """What each of `MIXED` says by itself."""
    return [answer(engine(levels, draft, rule=rule), asked) for asked in MIXED]


@pytest.mark.parametrize(
    ("stack", "draft", "size"),
    [
        *((stack, "good", 3) for stack in STACKS),
        *(("draft", "contrary", 3), ("triforce", "contrary", 3), ("triforce", "stuck", 3)),
        *itertools.product(("plain", "triforce", "4-bit copy"), ("good",), (1,)),
    ],
)
def test_each_says_what_the_target_says_alone(stack: str, draft: str, size: int) -> None:
    """More than there are slots, of all lengths and options, greedy beside hot ones: memory is used again and again."""
    run = engine(STACKS[stack], draft)
    assert gathered(run.serve(coming(MIXED), size), MIXED) == alone()
    report = run.report()
    assert report.prompt_tokens == sum(len(asked.prompt) for asked in MIXED)
    assert report.generated_tokens == sum(len(said) for said, _ in alone())


@pytest.mark.parametrize(("stack", "draft"), [("draft", "contrary"), ("triforce", "good")])
def test_under_the_rejection_rule_too(stack: str, draft: str) -> None:
    """With fixed widths, which a text then depends on."""
    run = engine(STACKS[stack], draft, rule="rejection")
    found = gathered(run.serve(coming(MIXED), 3), MIXED)
    assert found == alone(STACKS[stack], "rejection", draft)
    assert found != alone()


@pytest.mark.parametrize("late", [1, 5, 1000])
def test_those_that_come_late_join(late: int) -> None:
    """A request is waited for only where nothing is decoded, and what is there does not wait for it."""
    waited: list[int] = []
    source, running = coming(MIXED, late), set[int]()

    def take(wait: bool) -> Request | None:
        if wait:
            waited.append(len(running))
        found = source(wait)
        running.update([found.sequence] if found else [])
        return found

    events = []
    for event in engine(STACKS["draft"]).serve(take, 3):
        events.append(event)
        if isinstance(event, Finished):
            running.discard(event.sequence)
    assert gathered(iter(events), MIXED) == alone()
    assert set(waited) == {0}
    assert (len(waited) > len(MIXED)) == (late == 1000), "none of them met another"


def test_the_next_joins_while_others_are_on_their_way() -> None:
    """Never more at once than there are slots, and never fewer while some wait."""
    told = [e for e in engine("target(full)").serve(coming(MIXED), 3) if isinstance(e, Prefilled | Emitted | Finished)]
    open_now: set[int] = set()
    most = 0
    for event in told:
        if isinstance(event, Finished):
            open_now.discard(event.sequence)
        else:
            open_now.add(event.sequence)
        most = max(most, len(open_now))
    began = {e.sequence: n for n, e in reversed(list(enumerate(told))) if isinstance(e, Prefilled)}
    ended = {e.sequence: n for n, e in enumerate(told) if isinstance(e, Finished)}
    assert most == 3
    assert ended[12] < began[14] < ended[10]
    assert list(began) == [asked.sequence for asked in reversed(MIXED)]


@pytest.mark.parametrize("stack", ["plain", "triforce"])
def test_one_that_leaves_frees_its_slot(stack: str) -> None:
    """Nothing is told of it any more; the others say what they say."""
    run = engine(STACKS[stack])
    events = []
    for event in run.serve(coming(MIXED), 2):
        events.append(event)
        if isinstance(event, Emitted) and event.sequence == 11:
            run.leave(11)
    rest = [asked for asked in MIXED if asked.sequence != 11]
    told = [e.sequence for e in events if isinstance(e, Emitted | Finished)]
    assert told.count(11) == 1
    others = (e for e in events if not isinstance(e, Emitted) or e.sequence != 11)
    assert gathered(others, rest) == [one for asked, one in zip(MIXED, alone(), strict=True) if asked in rest]


def test_nothing_to_serve() -> None:
    assert list(engine("target(full)").serve(coming([]), 3)) == []


def test_a_beginning_that_a_slot_has_read_is_not_read_again() -> None:
    """It is that of the prompt last read there; the text is the same."""
    shared = prompt(650, 1)
    first, second = Request(shared, 9, sequence=0), Request((*shared[:600], *prompt(60, 2)), 9, sequence=1)
    run = engine(STACKS["triforce"])
    events = list(run.serve(coming([first, second]), 1))
    assert gathered(iter(events), [first, second]) == [answer(engine("target(full)"), one) for one in (first, second)]
    assert [e.done for e in events if isinstance(e, Prefilled) and e.sequence == 1] == [659, 660]


# what makes it so


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_a_batch_are_those_of_its_sequences(dtype: torch.dtype) -> None:
    """To the bit, in a size where those of more rows are others."""
    made = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(size, generator=made).to(dtype) for size in ((5, 8, 576), (1536, 576), (1536,)))
    assert torch.equal(linear(x, weight, bias), torch.stack([linear(rows, weight, bias) for rows in x]))


def test_memory_is_taken_as_it_is_written() -> None:
    """A batch has room for its longest texts, most of which are short."""
    process = psutil.Process()
    before = process.memory_info().rss
    store = KVStore(config(), 64, 1 << 16, dtype=torch.float32, device=CPU)
    assert store.nbytes > 3e9
    assert not any(bool(keys[:, :, :9].any()) for keys in store.keys)
    store.keys[2][5, 1, 7] = 1.0
    assert process.memory_info().rss - before < 200e6


# room


def test_memory_bounds_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as have room, not one more; what levels keep of each counts, and so does what they keep once."""
    shape = config()
    each = 4 * 2 * shape.layers * shape.kv_heads * shape.head_dim * (1000 + BEYOND)

    def seats(asked: int | None, levels: str = "target(full)", sequences: float = 5.5) -> int:
        room = sequences * each / 0.95 + weights_of
        monkeypatch.setattr("hspec_decoding.load.usable_ram", lambda: int(room))
        return together(asked, [parse(levels)], [shape], 1000, torch.float32, CPU)

    weights_of = 4 * sum(torch.Size(size).numel() for size in shape.tensors().values()) / 0.95
    assert seats(None) == 5
    assert [seats(n) for n in (1, 5)] == [1, 5]
    with pytest.raises(DoesNotFit, match=r"6 sequences of 1,000 tokens need .* are left") as caught:
        seats(6)
    assert "`--batch 5`" in (caught.value.hint or "")
    assert seats(None, "target(full, kv=int4) > target(full)") == 4
    assert seats(None, "target(retrieval:500) > target(full)") == 3
    assert seats(None, sequences=1000) == TOGETHER
    assert seats(40, sequences=1000) == 40
