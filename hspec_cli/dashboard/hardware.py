"""The sections of a view about the machine: its memory, its rates, where the layers are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

from hspec_cli.dashboard.glyphs import Glyphs, safe
from hspec_cli.dashboard.parts import DIM, HEADING, LABEL, LIT, NARROW, WIDE_ENOUGH
from hspec_cli.dashboard.parts import label as heading
from hspec_cli.dashboard.state import State
from hspec_decoding.events import DeviceMemory, MemoryPart
from hspec_offload.sizes import human

HUES = ("blue", "magenta", "cyan", "green", "yellow", "red")
WORDS = {
    "gpu": "GPU",
    "4bit": "4 bits",
    "streamed": "streamed",
    "host": "streamed",
    "cpu": "CPU",
    "split": "split",
    "disk": "disk",
}
RATES = (("GPU memory", "gpu_bytes", "gpu"), ("PCIe", "link_bytes", "link"), ("RAM", "ram_bytes", "ram"))


def memory(devices: Sequence[DeviceMemory], width: int, glyphs: Glyphs) -> tuple[list[Text], Text, list[Text]]:
    """A bar for each device, what the shades stand for, and for each device that with its bytes."""
    names = list(dict.fromkeys(part.name for device in devices for part in device.parts))
    signs = {name: (glyphs.shades[n % len(glyphs.shades)], HUES[n % len(HUES)]) for n, name in enumerate(names)}
    bars = [_device(device, width, signs) for device in devices]
    legends = [_legend([(p.name, f" {human(p.nbytes)}") for p in _sorted(d)], width, signs) for d in devices]
    return bars, _legend([(name, "") for name in names], width, signs), legends


def _sorted(device: DeviceMemory) -> list[MemoryPart]:
    """The largest first."""
    return sorted(device.parts, key=lambda part: -part.nbytes)


def _device(device: DeviceMemory, width: int, signs: Mapping[str, tuple[str, str]]) -> Text:
    used = sum(part.nbytes for part in device.parts)
    words = f" {human(used)} of {human(device.available)}"
    name = f"{safe(device.name.split(' (')[0])[: LABEL - 1]:<{LABEL}}"
    cells = min(40, width - len(words) - LABEL)
    if cells < 4:
        return Text.assemble((name.strip(), HEADING), f" {human(used)}, {used / max(1, device.available):.0%}")
    made, end, drawn = Text.assemble((name, HEADING)), 0, 0
    for part in device.parts:
        end += part.nbytes
        place = round(cells * min(1.0, end / max(1, device.available)))
        sign, hue = signs[part.name]
        made.append(sign * (place - drawn), hue)
        drawn = place
    return made.append("." * (cells - drawn), DIM).append(words)


def _legend(words: Sequence[tuple[str, str]], width: int, signs: Mapping[str, tuple[str, str]]) -> Text:
    """Signs with what they stand for, as many of the first as there is room for."""
    made = Text(" " * LABEL if width >= NARROW else "")
    for name, size in words:
        told = f" {safe(name)}{size}"
        if made.cell_len + len(told) + 1 > width:
            break
        made.append(signs[name][0], signs[name][1]).append(f"{told}  ")
    made.rstrip()
    return made


def rates(state: State, width: int, glyphs: Glyphs) -> list[Text]:
    """What is read and carried a second, beside what was measured to be possible: on one line, and on a line each."""
    known = [(name, state.recent(what), getattr(state.expected, ceiling)) for name, what, ceiling in RATES]
    some = [(name, rate, most) for name, rate, most in known if rate]
    rows = [_rate(name, rate, most, width, glyphs) for name, rate, most in some]
    if not rows or width < NARROW:
        return [*rows[:1], *rows]
    brief = [f"{name} {human(rate)}/s" + (f" of {human(most)}/s" if most else "") for name, rate, most in some]
    if len(", ".join(brief)) > width - LABEL:
        brief = [f"{name} {f'{rate / most:.0%}' if most else f'{human(rate)}/s'}" for name, rate, most in some]
    return [rows[0] if len(rows) == 1 else Text.assemble(heading("reads"), ", ".join(brief)), *rows]


def _rate(name: str, rate: float, most: float | None, width: int, glyphs: Glyphs) -> Text:
    if width < NARROW:
        return Text(f"{name.split()[0]} {human(rate)}/s" + (f" {rate / most:.0%}" if most else ""))
    if most is None:
        hint = (" (`hspec profile` measures how fast it could)", DIM)
        return Text.assemble(heading("reads"), f"{name} {human(rate)}/s", hint if width >= WIDE_ENOUGH else "")
    words = f" {rate / most:4.0%} of {human(most)}/s, {name}"
    cells = max(3, min(32, width - LABEL - 26))
    return Text.assemble(heading("reads"), (glyphs.bar(rate / most, cells), "blue"), words)


def layer_map(state: State, width: int, glyphs: Glyphs) -> tuple[list[Text], Text]:
    """Where each layer's weights, keys and values are, the one in flight lit; and what the signs stand for."""
    layers = state.placed.layers if state.placed else ()
    rows: dict[str, list[str]] = {
        "weights": [layer.weights for layer in layers],
        "KV": [layer.keys for layer in layers],
    }
    drawn = [_cells(name, places, state.in_flight, width, glyphs) for name, places in rows.items()]
    if any(layer.copy for layer in layers):
        rows["copy"] = ["4bit" if layer.copy else "" for layer in layers]
        drawn.append(_cells("copy", rows["copy"], None, width, glyphs))
    kinds = dict.fromkeys(place for places in rows.values() for place in places if place)
    words = {glyphs.layers[kind]: WORDS[kind] for kind in kinds}
    legend = [f"{glyphs.flight} {state.in_flight} in flight"] * (state.in_flight is not None)
    legend += [f"{glyph} {word}" for glyph, word in words.items()]
    if len(drawn) == 2 and drawn[0].cell_len + drawn[1].cell_len + 3 <= width:
        drawn = [Text.assemble(drawn[0], "   ", drawn[1])]
    return drawn, Text(f"{f'all {len(layers)}:':<{LABEL}}" + "  ".join(legend))


def _cells(name: str, places: Sequence[str], lit: int | None, width: int, glyphs: Glyphs) -> Text:
    """A cell a layer, or for as many as must share one."""
    label = heading(name) if width >= NARROW else (f"{name[0]} ", HEADING)
    each = -(-len(places) // max(1, width - len(label[0])))
    made = Text.assemble(label)
    for first in range(0, len(places), max(1, each)):
        if lit is not None and first <= lit < first + each:
            made.append(glyphs.flight, LIT)
        else:
            made.append(glyphs.layers.get(places[first], " "))
    return made
