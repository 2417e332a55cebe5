"""The target with TidalDecode as the last level: what it says is approximate, and labelled so wherever it is shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hspec_decoding.device import Shape
from hspec_decoding.graphs import Clock, Graphs
from hspec_decoding.levels import _Block
from hspec_decoding.model import Decoder
from hspec_decoding.rules import Draft
from hspec_decoding.sequence import Text
from hspec_decoding.target import Target
from hspec_decoding.tidal import LastView
from hspec_decoding.views import Pass


class TidalTarget(Target):
    """Prompts, and texts that are short, are read densely, in the shapes of the target itself. Decoded tokens are fed
    again so, every so many of them, and their keys written over.
    """

    view: LastView

    def __init__(
        self, name: str, decoder: Decoder, view: LastView, shape: Shape | None, graphs: Graphs | None = None
    ) -> None:
        super().__init__(decoder, view, shape, graphs)
        self.name = name

    def prefill(self, text: Text, chunk: int) -> Iterator[int]:
        yield from super().prefill(text, chunk)
        self.view.confirmed(text)

    def _block(self, texts: Sequence[Text], drafts: Sequence[Draft], clock: Clock) -> _Block:
        for text in texts:
            if self.view.due(text):
                self._correct(text)
        return super()._block(texts, drafts, clock)

    def _correct(self, text: Text) -> None:
        feed = self.view.again(text)
        self._forward([feed], self.view.begin([text], len(feed)))
        self.view.fed(text, feed)
        self.view.confirmed(text)

    def _begin(self, texts: Sequence[Text], feed: Sequence[list[int]]) -> Pass:
        if self.view.pays(texts) and max(map(len, feed)) == 1:
            return self.view.sparsely(texts, 1)
        return super()._begin(texts, feed)
