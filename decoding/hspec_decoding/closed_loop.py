"""Calibrations tried on texts: real sparse decoding, told what to say, beside what the target says itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from hspec_decoding.model import Decoder
from hspec_decoding.sequence import Text
from hspec_decoding.tidal import Tidal, TidalView
from hspec_decoding.views import FullView

WINDOWS, STEPS = 4, 8  # places of a text where decoding is tried, and tokens at each
VERIFIED = 8  # rows of the verify pass before a place


@dataclass(frozen=True)
class Heard:
    """What sparse decoding says beside dense decoding, over all places: KL(dense || sparse) in nats, its mean and 99th
    percentile, the share of tokens on whose likeliest successor both agree, and what either thinks of the true one.
    """

    kl: float
    worst: float
    agreement: float
    nll: float
    dense_nll: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """Of sparse decoding over that of dense decoding."""
        return float(torch.tensor(self.nll - self.dense_nll).exp())


@dataclass
class Place:
    """Some tokens of a text that are decoded anew: what the target says after each, and its keys and values there."""

    text: Text
    start: int
    logits: Tensor  # float32 [STEPS, V]
    kept: list[tuple[Tensor, Tensor]] = field(repr=False)

    def restore(self, view: FullView) -> None:
        """Put the target's own keys and values back."""
        part = slice(self.start, self.start + len(self.logits))
        for keys, values, (own_keys, own_values) in zip(view.store.keys, view.store.values, self.kept, strict=True):
            keys[self.text.slot, :, part], values[self.text.slot, :, part] = own_keys, own_values


class Trial:
    """Texts whose keys are cached, and places in them."""

    def __init__(self, decoder: Decoder, view: FullView, texts: Sequence[Text], steps: int = STEPS) -> None:
        """`view` holds every text but its last token, and keeps the queries of its passes."""
        self.decoder, self.view, self.texts, self.steps = decoder, view, texts, steps

    def places(self, least: int, windows: int = WINDOWS) -> Iterator[Place]:
        """Places spread over each text, with at least `least` tokens before them; what the target says there."""
        for text in self.texts:
            room = len(text) - 1 - self.steps - least
            for n in range(windows if room >= 0 else 0):
                yield self._place(text, least + room * n // max(1, windows - 1))

    def _place(self, text: Text, start: int) -> Place:
        hidden = self._dense(text, start, self.steps)
        part, store = slice(start, start + self.steps), self.view.store
        pairs = zip(store.keys, store.values, strict=True)
        kept = [(keys[text.slot, :, part].clone(), values[text.slot, :, part].clone()) for keys, values in pairs]
        return Place(text, start, self.decoder.logits(hidden), kept)

    def _dense(self, text: Text, start: int, rows: int) -> Tensor:
        """Hidden states [rows, hidden] of a dense pass over tokens of a text, like one that verifies them."""
        held = self.view.held[text.slot]
        held.reset()
        held.extend(text.tokens[:start])
        tokens = text.tokens[start : start + rows]
        memory = self.view.begin([text], len(tokens))
        return self.decoder.forward(torch.tensor([tokens], device=self.decoder.device), memory)[0]

    def heard(self, tidal: Tidal, places: Sequence[Place], tell: Callable[[], None] = lambda: None) -> Heard:
        """What a way of decoding makes of the places; `tell` is called after each."""
        found: list[Tensor] = []
        for place in places:
            if tidal.way == "fed":
                self._dense(place.text, place.start - VERIFIED, VERIFIED)
            logits = self._sparse(tidal, place)
            place.restore(self.view)
            true = place.text.tokens[place.start + 1 : place.start + 1 + self.steps]
            found.append(_compared(place.logits, logits, torch.tensor(true, device=logits.device)))
            tell()
        kl, agreed, nll, dense = torch.cat(found, 1).cpu()
        worst = float(kl.quantile(0.99))
        return Heard(float(kl.mean()), worst, float(agreed.mean()), float(nll.mean()), float(dense.mean()), len(kl))

    def _sparse(self, tidal: Tidal, place: Place) -> Tensor:
        """Logits [steps, V] of tokens decoded one by one."""
        text = Text(place.text.slot, 0, place.text.tokens[: place.start + 1])
        view = TidalView(self.decoder.config, self.view, tidal, len(self.view.held))
        view.prepare([text])
        said = []
        for token in place.text.tokens[place.start : place.start + self.steps]:
            memory = view.begin([text], 1)
            said.append(self.decoder.forward(torch.tensor([[token]], device=self.decoder.device), memory)[0, 0])
            view.fed(text, [token])
        return self.decoder.logits(torch.stack(said))


def _compared(dense: Tensor, sparse: Tensor, true: Tensor) -> Tensor:
    """[4, steps]: KL, agreement, and negative log-likelihoods of the true tokens, sparse and dense."""
    ours, theirs = sparse.log_softmax(-1), dense.log_softmax(-1)
    kl = F.kl_div(ours, theirs, reduction="none", log_target=True).nan_to_num(0.0).sum(-1)
    agreed = (ours.argmax(-1) == theirs.argmax(-1)).float()
    nll, own = (F.nll_loss(law, true, reduction="none") for law in (ours, theirs))
    return torch.stack((kl, agreed, nll, own))
