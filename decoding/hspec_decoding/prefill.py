"""Reading a prompt layer by layer: what is not on the device crosses the bus once, weights and keys alike.

Each layer reads the whole prompt, a chunk at a time, before the next one begins; a row's sums are those of reading
chunk by chunk. Between layers the hidden states of all tokens wait in host memory, [1, tokens, hidden].
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hspec_decoding.cache import Slots
from hspec_decoding.host_view import HostView, Workspace
from hspec_decoding.model import Decoder
from hspec_decoding.rope import rotation
from hspec_decoding.sequence import Text
from hspec_decoding.views import FullView, Layout, Pass, by_lane
from hspec_offload.pinned import pinned


@torch.inference_mode()
def prefill_by_layers(decoder: Decoder, view: FullView, text: Text, chunk: int) -> Iterator[int]:
    """Cache all tokens of a text but the last; the share that has been read so far, in tokens.

    A view of keys in host memory must hold none of them yet.
    """
    feed = view.missing(text)[:-1]
    begin = len(view.held[text.slot])
    if not feed:
        return
    store: Slots = Workspace(view.store, text.slot) if isinstance(view, HostView) else view.store
    slot = 0 if isinstance(view, HostView) else text.slot
    bounds = [(at, min(at + chunk, len(feed))) for at in range(0, len(feed), chunk)]
    passes = [_pass(view, store, slot, begin + start, begin + stop) for start, stop in bounds]
    states = [_to_host(decoder.embed(torch.tensor([feed[slice(*part)]], device=decoder.device))) for part in bounds]
    angles = [rotation(decoder.inverse, decoder.rope_factor, one.positions, decoder.dtype) for one in passes]
    eps = decoder.config.norm_eps
    with decoder.in_turn() as layers:
        for n, layer in enumerate(layers):
            for state, memory, (cos, sin) in zip(states, passes, angles, strict=True):
                x = state.to(decoder.device, non_blocking=True)
                attended = memory.attend(n, layer.before(x, eps), cos, sin, layer.qk_norms)
                state.copy_(layer.after(x, attended, eps), non_blocking=True)
            if isinstance(view, HostView):
                view.store.absorb(n, text.slot, store.keys[n][0], store.values[n][0], len(feed))
            if n + 1 < len(decoder.layers):
                yield begin + len(feed) * (n + 1) // len(decoder.layers)
    if isinstance(view, HostView):
        view.store.absorbed(text.slot, len(feed))
    view.note(passes[-1], text.slot)
    view.fed(text, feed)
    yield begin + len(feed)


def _to_host(state: Tensor) -> Tensor:
    host = pinned(state.shape, state.dtype)
    host.copy_(state, non_blocking=True)
    return host


def _pass(view: FullView, store: Slots, slot: int, start: int, stop: int) -> Pass:
    """Memory of the rows from `start` to `stop` - 1."""
    extent = -(-stop // view.bucket) * view.bucket
    first, ends = (by_lane(store, [slot], [at]) for at in (start, extent))
    layout = Layout([slot], stop - start, [start], first, ends)
    return Pass(view.config, store, layout, windowed=True, record=view.record)
