"""Keys and values in host memory: what only moves changes no bit, and what the CPU attends to changes nothing else."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from tiny_engine import CPU, answer, answers, engine, prompt, random_decoder
from torch import Tensor

from hspec_decoding.build import Parts
from hspec_decoding.engine import Engine, Request
from hspec_decoding.host_view import KVPlace
from hspec_decoding.model import Decoder
from hspec_decoding.sampling import Sampling
from hspec_kernels.attention import Reach, attend_with_reference
from hspec_kernels.attention.pieces import Pieces
from hspec_offload.host_kv import HostKV, host_attention
from hspec_offload.ring import Ring

UNIT = 256
STACKS = {
    "plain": "target(full)",
    "n-grams": "ngram > target(full)",
    "retrieval": "ngram > target(retrieval:256) > target(full)",
    "streaming": "target(streaming:256) > target(full)",
    "4-bit KV": "ngram > target(full, kv=int4) > target(full)",
    "both": "ngram > target(retrieval:256) > target(full, kv=int8) > target(full)",
}


def offloaded(
    made: Engine,
    away: tuple[bool, ...] = (True, True, True),
    share: float = 0.0,
    piece: int = 1 << 17,
    unit: int = UNIT,
) -> Engine:
    """The same engine with keys and values of some layers in host memory."""
    target = copy.copy(made.target)
    target.ring = Ring(1 << 20, CPU)
    place = KVPlace(away, target.ring, piece, share, unit)
    return Engine(target, made.draft, made.stacks, made.settings, made.context, Parts(target, made.draft, kv=place))


def asked(length: int, temperature: float = 0.0, tokens: int = 40, sequence: int = 0) -> Request:
    return Request(prompt(length, sequence), tokens, sampling=Sampling(temperature, seed=3), sequence=sequence)


@pytest.mark.parametrize("levels", STACKS.values(), ids=STACKS)
@pytest.mark.parametrize("away", [(True, True, True), (True, False, True)], ids=["all", "some"])
def test_moving_changes_nothing(levels: str, away: tuple[bool, ...]) -> None:
    """Prompts that end within a unit and at the edge of one, texts that grow over an edge."""
    here = engine(levels, random_decoder("qwen2"), context=1600)
    there = offloaded(here, away)
    for length, temperature in ((1000, 0.0), (1001, 0.7), (1025, 0.0), (30, 0.7), (1020, 0.0)):
        assert answer(there, asked(length, temperature)) == answer(here, asked(length, temperature))
    store = there.parts.stores["target"]
    assert isinstance(store, HostKV)
    assert store.origins == [1024]


def test_bits_of_hidden_states() -> None:
    """Not only the tokens: a pass gives the very same logits."""
    here = engine("target(full)", random_decoder("llama"), context=1600)
    there = offloaded(here)
    found = []
    for made in (here, there):
        list(made.generate(asked(1000, tokens=30)))
        text = made.runs[0].text
        found.append(made.last.logits([text], [replace_draft([5, 6, 7])])[0])
    assert torch.equal(found[0], found[1])


def replace_draft(tokens: list[int]):  # type: ignore[no-untyped-def]
    from hspec_decoding.rules import Draft

    return Draft(tokens)


def test_batches_and_windows() -> None:
    for family, levels in (("mistral", "ngram > target(full)"), ("llama", STACKS["retrieval"])):
        here = engine(levels, random_decoder(family), context=1400)
        requests = [asked(length, 0.6, sequence=n) for n, length in enumerate((700, 1030, 255))]
        assert answers(offloaded(here), *requests) == answers(here, *requests)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_cpu_attends(share: float) -> None:
    """Sums are merged in another order: the same tokens, and logits within 1e-5; methods agree to the bit."""
    here = engine(STACKS["retrieval"], random_decoder("qwen2"), context=2000)
    there, plain = (
        offloaded(here, share=share),
        offloaded(engine("target(full)", here.target, context=2000), share=share),
    )
    for length in (1300, 1535):
        assert answer(there, asked(length)) == answer(here, asked(length)) == answer(plain, asked(length))
        logits = [e.last.logits([e.runs[0].text], [replace_draft([9] * n)])[0][0] for e, n in ((here, 3), (there, 3))]
        torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5 * float(logits[0].abs().max()))
        again = [e.last.logits([e.runs[0].text], [replace_draft([9] * n)])[0][0] for e, n in ((plain, 0), (there, 3))]
        assert torch.equal(again[0], again[1])
    store = there.parts.stores["target"]
    assert isinstance(store, HostKV)
    assert 0 < store.by_cpu(0) <= store.origins[0] // UNIT


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("run", [1, 2, 3, 8])
def test_every_unit_is_attended_once(share: float, run: int) -> None:
    """Whatever part of a run they make: by the CPU, or carried."""
    store = HostKV(
        1, 1, 16, 20 * UNIT, [None], [True], dtype=torch.float32, device=CPU, ring=Ring(1 << 20, CPU),
        piece_bytes=run * 2 * UNIT * 16 * 4, unit=UNIT, cpu_share=share,
    )  # fmt: skip
    assert store.run == run
    for units in range(21):
        store.origins[0] = units * UNIT
        carried = [one.start // UNIT + n for one in store.carried(0, 0) for n in range(len(one.item.sources[0]))]
        assert [*range(store.by_cpu(0)), *carried] == list(range(units))


def test_a_pass_of_the_cpu_stays_within_a_unit() -> None:
    """What the CPU attends to follows from the first row: a row must not stand behind one of another unit."""
    logits: list[dict[int, Tensor]] = []
    for levels in ("target(full)", "draft > target(full)"):
        made = engine(levels, random_decoder("qwen2"), random_decoder("qwen2"), context=600, adapt=False)
        made = offloaded(made, share=1.0, piece=1, unit=64)
        logits.append(scored(made, asked(250, tokens=90)))
    assert set(range(250, 340)) <= logits[0].keys()
    for position in range(250, 340):
        assert torch.equal(logits[0][position], logits[1][position]), position


def scored(made: Engine, request: Request) -> dict[int, Tensor]:
    """The target's logits of every position, those that became text last."""
    rows: dict[int, Tensor] = {}
    events = made.generate(request)
    next(events)
    score = made.last._score

    def noted(hidden: Tensor, spans: Sequence[slice]) -> list[Tensor]:
        logits = score(hidden, spans)
        rows.update((len(made.runs[0].text) + n, row.clone()) for n, row in enumerate(logits[0]))
        return logits

    made.last._score = noted  # type: ignore[method-assign]
    list(events)
    return rows


@pytest.mark.parametrize(("rows", "group"), [(1, 1), (7, 1), (3, 4), (16, 7)])
def test_host_attention(rows: int, group: int) -> None:
    units = torch.randn(3, 2, 2, 64, 32)
    query = torch.randn(rows, 2 * group, 32)
    out, lse = host_attention(query, units)
    keys, values = (units[:, n].transpose(0, 1).flatten(1, 2)[None] for n in (0, 1))
    zero = torch.zeros(1, dtype=torch.int64)
    wanted, sums = attend_with_reference(query[None], None, keys, values, Reach(zero, zero + 192, rows, (192,)))
    torch.testing.assert_close(out, wanted[0])
    torch.testing.assert_close(lse, sums[0])


def test_pieces_written_over_do_not_matter() -> None:
    """Whatever stands behind the rows' own positions is not looked at."""
    query, first = torch.randn(1, 4, 6, 32), torch.tensor([700])

    def attended(tail: Tensor) -> Tensor:
        pieces = Pieces(query, first, 768, 2, 4096)
        pieces.add(units[:, :, :512], units[:, :, 512:1024], 0, first)
        pieces.add(tail[:, :2], tail[:, 2:], 512, first - 512)
        return pieces.join()[0]

    units = torch.randn(1, 2, 1024, 32)
    tail = torch.randn(1, 4, 512, 32)
    other = tail.clone()
    other[:, :, 192:] = 99.0
    assert torch.equal(attended(tail), attended(other))


def models() -> list[Decoder]:
    return [random_decoder(family) for family in ("llama", "qwen3")]


def test_layers_in_turn_read_what_chunks_read() -> None:
    """A prompt read layer by layer, over several chunks, leaves the same keys."""
    for model in models():
        here = engine("target(full)", model, context=1700)
        there = offloaded(here)
        for made in (here, there):
            list(made.generate(asked(1500, tokens=1)))
        store, whole = there.parts.stores["target"], here.parts.stores["target"]
        assert isinstance(store, HostKV)
        for layer in range(3):
            for n, part in enumerate((whole.keys, whole.values)):
                units = store.units[layer][0, :5, n].transpose(0, 1).flatten(1, 2)
                assert torch.equal(units, part[layer][0, :, :1280])
