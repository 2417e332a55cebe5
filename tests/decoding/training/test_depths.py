"""The training-time test: what a drafted row sees, where gradients go, what is counted."""

from __future__ import annotations

import math

import pytest
import tiny_engine
import torch
import torch.nn.functional as F
from torch import Tensor

from hspec_decoding.chimera import files
from hspec_decoding.chimera.config import VARIANTS, ChimeraConfig
from hspec_decoding.model import Decoder
from hspec_decoding.training.corpus import Batch
from hspec_decoding.training.depths import Depths, attended
from hspec_decoding.training.target import Said, checksum, said, weights

K, S, WINDOW, SINKS = 4, 24, 7, 2


@pytest.fixture
def target() -> Decoder:
    return tiny_engine.random_decoder()


def student(target: Decoder, vocabulary: int = 200, **changes: object) -> Depths:
    torch.manual_seed(1)
    sizes = {"depths": K, "window": WINDOW, "sinks": SINKS, "vocabulary": vocabulary, **changes}
    config = ChimeraConfig.for_target(target.config, **sizes)
    made = Depths(files.made(config, torch.randperm(320)[:vocabulary].sort().values, target), 320)
    for parameter in made.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return made


def batch(rows: int = 3, seed: int = 0) -> Batch:
    tokens = torch.randint(320, (rows, S), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens, torch.ones_like(tokens, dtype=torch.bool))


def by_a_full_mask(made: Depths, text: Batch, heard: Said, gaps: Tensor) -> list[Tensor]:
    """All depths' rows beside each other under one (K T)² mask, written down from what decoding does."""
    heads, c, span = made.heads, made.heads.config, S - K - 1
    tokens, first = text.tokens, text.tokens[:, :1]
    states, last = heads.fused(heard.features[:, :span]), heard.features[:, :span, -c.hidden :]
    seen = torch.zeros(K * span, K * span, dtype=torch.bool)
    for i in range(K):
        for t in range(span):
            row = seen[i * span + t]
            for s in range(t + 1):  # the verified text's rows, as depth 0's own row t sees them
                row[s] = s < SINKS or s > t - WINDOW
            for j in range(1, i + 1):  # and the rows that were drafted on the way
                row[j * span + t] = True
    keys, values, found = list[Tensor](), list[Tensor](), list[Tensor]()
    for i in range(K):
        shifted = torch.cat((first, tokens), 1)
        trigrams = torch.stack([shifted[:, i + n : i + n + span] for n in range(3)], -1)
        at = torch.arange(span)
        positions = torch.where(at < SINKS, at, at + gaps[:, None]) + i
        u = heads.encoded(trigrams)
        query, key, value = heads.project(u, states, positions)
        keys.append(key)
        values.append(value)
        every_key, every_value = (torch.cat(some, 1).repeat_interleave(2, 2) for some in (keys, values))
        scores = torch.einsum("bthd,bshd->bhts", query, every_key) / math.sqrt(c.head_dim)
        mask = seen[i * span : (i + 1) * span, : every_key.shape[1]]
        chances = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        states = heads.finish(u, states, torch.einsum("bhts,bshd->bthd", chances, every_value))
        found.append(heads.logits(states, last, i))
    return found


@torch.no_grad()
def test_drafted_rows_see_each_other_and_the_window_alone(target: Decoder) -> None:
    made, text = student(target), batch()
    heard, gaps = said(target, text.tokens, made.entering), torch.tensor([0, 1, 900])
    ours = [row.logits for row in made.rows(text, heard, gaps, train=False)]
    for mine, theirs in zip(ours, by_a_full_mask(made, text, heard, gaps), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_row_of_every_depth_counts_in_attention() -> None:
    """The reference hid the drafted rows from each other: here each of their values comes through."""
    torch.manual_seed(0)
    pairs = [torch.randn(1, 5, 2, 8) for _ in range(8)]
    query, seen = torch.randn(1, 5, 4, 8), torch.ones(5, 5).tril().bool()
    before = attended(query, pairs, seen)
    for place in range(1, 8, 2):
        other = [part + (n == place) for n, part in enumerate(pairs)]
        changed = (attended(query, other, seen) != before).any(-1).any(-1)
        assert changed.all()
    moved = [*pairs[:3], pairs[3].clone(), *pairs[4:]]
    moved[3][:, 2] += 1
    assert (attended(query, moved, seen) != before).any(-1).any(-1)[0].tolist() == [False, False, True, False, False]


def test_every_depth_and_every_part_receives_gradient(target: Decoder) -> None:
    made, text = student(target), batch()
    heard = said(target, text.tokens, made.entering)
    made(text, heard, 0).backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name
        assert float(parameter.grad.abs().sum()) > 0, name
    for depth in range(K):
        assert float(made.heads.residual_out.grad[depth].abs().sum()) > 0  # type: ignore[index]


def test_later_depths_teach_through_the_chain(target: Decoder) -> None:
    """The loss of the last depth alone reaches what only depth 0 uses."""
    made, text = student(target), batch()
    heard = said(target, text.tokens, made.entering)
    last = [row.loss for row in made.rows(text, heard, torch.zeros(3, dtype=torch.int64), train=True)][-1]
    last.backward()
    assert float(made.heads.fuse.weight.grad.abs().sum()) > 0  # type: ignore[union-attr]


def test_recomputing_changes_neither_loss_nor_gradient(target: Decoder) -> None:
    made, text = student(target), batch()
    heard, gaps = said(target, text.tokens, made.entering), torch.zeros(3, dtype=torch.int64)
    grads = []
    for train in (True, False):
        made.zero_grad()
        loss = sum((row.loss for row in made.rows(text, heard, gaps, train=train)), torch.zeros(()))
        loss.backward()
        grads.append([loss.detach(), *(parameter.grad.clone() for parameter in made.parameters())])  # type: ignore[union-attr]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_loss_is_the_cross_entropy_to_the_targets_law(target: Decoder) -> None:
    made, text = student(target, vocabulary=320), batch()
    heard, gaps = said(target, text.tokens, made.entering), torch.zeros(3, dtype=torch.int64)
    law = target.logits(heard.features[..., -64:]).softmax(-1)
    for depth, row in enumerate(made.rows(text, heard, gaps, train=False)):
        span = S - K - 1
        want = -(law[:, 1 + depth : 1 + depth + span] * row.logits.log_softmax(-1)).sum()
        torch.testing.assert_close(row.loss, want)
        assert int(row.counted) == 3 * span


def test_what_pads_a_text_touches_neither_it_nor_others(target: Decoder) -> None:
    """Rows of different lengths: each has its own padding, whatever stands there."""
    made, whole = student(target), batch()
    lengths = [S, S - 6, S - 11]
    own = torch.arange(S) < torch.tensor(lengths)[:, None]
    found = []
    for filler in (0, 77):
        text = Batch(torch.where(own, whole.tokens, filler), own)
        heard = said(target, text.tokens, made.entering)
        made.zero_grad()
        loss = made(text, heard, 0)
        loss.backward()
        found.append([loss.detach(), *(parameter.grad.clone() for parameter in made.parameters())])  # type: ignore[union-attr]
        rows = [*made.rows(text, heard, torch.zeros(3, dtype=torch.int64), train=False)]
        inside = torch.isin(heard.likeliest, made.heads.vocabulary)
        for depth, row in enumerate(rows):
            want = sum(int(inside[b, 1 + depth : n - 1].sum()) for b, n in enumerate(lengths[1:], 1))
            want += int(inside[0, 1 + depth : S - K + depth].sum())
            assert int(row.counted) == want
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_positions_the_target_would_leave_the_vocabulary_at_do_not_count(target: Decoder) -> None:
    made, text = student(target, vocabulary=40), batch()
    heard = said(target, text.tokens, made.entering)
    row = next(iter(made.rows(text, heard, torch.zeros(3, dtype=torch.int64), train=False)))
    inside = torch.isin(heard.likeliest[:, 1 : S - K], made.heads.vocabulary)
    assert 0 < int(row.counted) == int(inside.sum()) < inside.numel()


def test_figures_count_what_a_step_would_keep(target: Decoder) -> None:
    made = student(target, vocabulary=320)
    text = batch(2, seed=3)
    heard = said(target, text.tokens, made.entering)
    figures, span = made.figures(text, heard), S - K - 1
    rows = [row.logits for row in made.rows(text, heard, torch.zeros(2, dtype=torch.int64), train=False)]
    chain = tree = agreed = 0
    for b in range(2):
        for t in range(span):
            ranks = []
            for depth in range(K):
                order = rows[depth][b, t].argsort(descending=True).tolist()
                ranks.append(order.index(int(text.tokens[b, t + 2 + depth])) + 1)
                agreed += depth == 0 and order[0] == int(heard.likeliest[b, t + 1])
            chain += 1 + next((n for n, rank in enumerate(ranks) if rank > 1), K)
            tree += 1 + next((n for n in range(K) if math.prod(ranks[: n + 1]) > 3), K)
    assert int(figures.steps) == 2 * span
    assert (int(figures.chain), int(figures.tree), int(figures.agreed[0])) == (chain, tree, agreed)
    assert figures.asked.tolist() == [2 * span] * K


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_train(target: Decoder, variant: str) -> None:
    made, text = student(target, **VARIANTS[variant](target.config)), batch()
    heard = said(target, text.tokens, made.entering)
    made(text, heard, 0).backward()
    assert float(made.heads.fuse.weight.grad.abs().sum()) > 0  # type: ignore[union-attr]
    if variant == "medusa":  # heads of their own, which know nothing of the token before
        other = Batch(text.tokens.flip(1), text.own)
        gaps = torch.zeros(3, dtype=torch.int64)
        pairs = zip(made.rows(text, heard, gaps, train=False), made.rows(other, heard, gaps, train=False), strict=True)
        assert all(torch.equal(a.logits, b.logits) for a, b in pairs)


def test_the_target_is_frozen_and_its_checksum_sees_every_bit(target: Decoder) -> None:
    made, text = student(target), batch()
    assert not any(tensor.requires_grad for tensor in weights(target))
    assert not {id(tensor) for tensor in weights(target)} & {id(parameter) for parameter in made.parameters()}
    before, copy = checksum(target), [tensor.clone() for tensor in weights(target)]
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1)
    made(text, said(target, text.tokens, made.entering), 0).backward()
    optimizer.step()
    assert checksum(target) == before
    assert all(torch.equal(a, b) for a, b in zip(copy, weights(target), strict=True))
    for tensor in weights(target):
        place = tensor.view(torch.uint8).view(-1)
        place[-1] ^= 1
        assert checksum(target) != before
        place[-1] ^= 1
    swapped = target.layers[0].mlp_norm
    swapped[[0, 1]] = swapped[[1, 0]]
    assert checksum(target) != before
    swapped[[0, 1]] = swapped[[1, 0]]
    assert checksum(target) == before


def test_what_the_target_says_is_what_it_says_while_decoding(target: Decoder) -> None:
    text = batch(1)
    heard = said(target, text.tokens, ())
    decoded = tiny_engine.scores(target, text.tokens[0].tolist(), [5, 3])
    torch.testing.assert_close(F.linear(heard.features[0], target.head), decoded, rtol=1e-4, atol=1e-4)  # type: ignore[arg-type]
    assert torch.equal(heard.likeliest[0], decoded.argmax(-1))


def test_bfloat16_products_keep_float32_gradients(target: Decoder) -> None:
    """As on a GPU: products in 16 bits, weights and their gradients in 32."""
    made, text = student(target), batch()
    heard = said(target, text.tokens, made.entering)
    whole = made(text, heard, 0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = made(text, heard, 0)
    loss.backward()
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(whole.detach()), rel=0.05)
    assert {parameter.grad.dtype for parameter in made.parameters()} == {torch.float32}  # type: ignore[union-attr]
