"""A plan for people, in 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from hspec_cli.models import table
from hspec_offload.cost import Pass
from hspec_offload.placed import Device, Layers
from hspec_offload.plan import Plan
from hspec_offload.shape import ModelShape
from hspec_offload.sizes import human
from hspec_offload.speculation import milliseconds

WIDTH = 80
LITTLE = 0.002  # share of a pass
WEIGHTS = {
    "gpu": "on the GPU",
    "stream": "RAM, streamed",
    "cpu": "RAM, multiplied by CPU",
    "disk": "disk, streamed",
}
KEYS = {
    "gpu": "on the GPU",
    "stream": "RAM, streamed",
    "cpu": "RAM, attended by CPU",
    "split": "RAM, {:.0%} by CPU",
}
BRIEFLY = {
    "gpu": "on the GPU",
    "stream": "streamed",
    "cpu": "on the CPU",
    "disk": "from the disk",
    "split": "streamed and on the CPU",
}
TERMS = ("pcie", "stall", "memory", "compute", "cpu", "dram", "disk", "overhead")
HEADS = ("PCIe", "stall", "GPU", "compute", "CPU", "DRAM", "disk", "other")


def text(plan: Plan, model: ModelShape, hints: Sequence[str]) -> str:
    """The plan: memory by device, what each layer does, predicted times with their terms, what to change for more."""
    batch = f" in {plan.batch} sequences" * (plan.batch > 1)
    parts = [
        f"{plan.model} ({human(model.weight_bytes)} in 16 bits), {plan.context:,} tokens{batch}, on {plan.profile}",
        memory(plan.devices),
        layers(plan),
        "\n".join(textwrap.wrap(f"levels  {plan.levels}", WIDTH, subsequent_indent=" " * 8)),
        times(plan),
        "\n".join(sentences(plan)),
        "\n".join(listed("notes", plan.notes)),
        "\n".join(listed("for more", hints)),
    ]
    return "\n\n".join(part for part in parts if part)


def memory(devices: Sequence[Device]) -> str:
    """A column for each device, equal GPUs in one."""
    *gpus, host = devices
    columns = [*_columns(gpus), ("RAM", host)]
    names = dict.fromkeys(term.name for device in devices for term in device.terms)
    rows = []
    for name in sorted(names, key="reserve".__eq__):
        sizes = ({term.name: term.nbytes for term in device.terms}.get(name) for _, device in columns)
        rows.append((f"  {name}", *(human(size) if size else "-" for size in sizes)))
    rows.append(("  used", *(human(device.used) for _, device in columns)))
    rows.append(("  of", *(human(device.available) for _, device in columns)))
    return numbers(("memory", *(name for name, _ in columns)), rows)


def _columns(gpus: Sequence[Device]) -> Iterator[tuple[str, Device]]:
    for _, group in groupby(gpus, key=lambda device: (device.available, device.terms)):
        same = list(group)
        first, last = (device.name.split(" (")[0] for device in (same[0], same[-1]))
        yield (first if len(same) == 1 else f"each of {first}-{last.removeprefix('GPU ')}"), same[0]


def numbers(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is words and whose others are numbers."""
    lines = [tuple(heads), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def layers(plan: Plan) -> str:
    """Layers that do the same on one line, then what goes with them."""
    kinds: dict[tuple[str, str, str], list[Layers]] = {}
    for run in plan.layers:
        kinds.setdefault((run.weights, run.copy, run.keys), []).append(run)
    rows = [
        (
            _numbers(runs),
            WEIGHTS[weights],
            "on the GPU" if copy else "-",
            KEYS[keys].format(plan.cpu_share),
        )
        for (weights, copy, keys), runs in kinds.items()
    ]
    made = table(("layers", "16-bit weights", "4-bit copy", "keys and values"), rows)
    place = {"gpu": "on the GPU", "host": "in RAM"}[plan.embedding]
    also = [f"the embedding is {place}"]
    if plan.ring_pieces:
        also.append(f"copies go through a ring of {plan.ring_pieces} × {human(plan.piece_bytes)}")
    if len(plan.kv_heads) > 1:
        also.append(f"KV heads by GPU: {' + '.join(map(str, plan.kv_heads))}")
    return "\n".join([made, *_wrapped("; ".join(also))])


def _numbers(runs: Sequence[Layers]) -> str:
    """Numbers of layers: `0-7`, `0-3, 9`, or how many among which where they are many runs."""
    if len(runs) > 3:
        return f"{sum(run.count for run in runs)} of {runs[0].first}-{runs[-1].last}"
    return ", ".join(f"{run.first}-{run.last}" if run.count > 1 else str(run.first) for run in runs)


def times(plan: Plan) -> str:
    """Every kind of pass in ms, with the terms that are more than next to nothing; they overlap."""
    told = plan.prediction
    passes = [("plain decoding", told.plain)]
    if told.draft:
        passes.append(("draft step", Pass(told.draft)))
    if told.middle:
        passes.append(("middle step", told.middle))
    if told.tokens_per_pass > 1:
        passes.append((f"verify {plan.block} rows", told.verify))
    if told.refresh:
        passes.append(("new selection", Pass(told.refresh)))
    used = [i for i, term in enumerate(TERMS) if any(getattr(made, term) > LITTLE * made.seconds for _, made in passes)]
    rows = [
        (f"  {name}", milliseconds(made.seconds), *(milliseconds(getattr(made, TERMS[i])) for i in used))
        for name, made in passes
    ]
    return numbers(("predicted ms", "pass", *(HEADS[i] for i in used)), rows)


def sentences(plan: Plan) -> Iterator[str]:
    """What the times make together."""
    told, kinds = plan.prediction, dict(plan.prediction.texts)
    speculates = told.tokens_per_pass > 1
    if speculates:
        first = "draft steps" if told.draft else "look-ups"
        steps = [f"{n:.1f} {name}" for n, name in ((told.draft_steps, first), (told.middle_steps, "middle steps")) if n]
        yield from _wrapped(f"a round: {', '.join([*steps, 'one verify pass'])}: {told.tokens_per_pass:.1f} tokens")
        kinds = {told.text: told.seconds_per_token, **kinds}
        each = ", ".join(f"{milliseconds(seconds)} ms a token on {kind}" for kind, seconds in kinds.items())
        gains = ", ".join(f"{told.plain.seconds / seconds:.1f}" for seconds in kinds.values())
        yield from _wrapped(f"{each}: {gains} times plain decoding")
        yield from _wrapped(f"plain decoding, placed by itself: layers by {_briefly(told.plain_layers)}")
    yield from _wrapped(_prefill(plan))


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")


def _prefill(plan: Plan) -> str:
    read = plan.prediction.prefill
    crossing = []
    if any(run.weights != "gpu" for run in plan.layers):
        crossing.append(f"weights {_times(read.weight_crossings)}")
    if any(run.keys != "gpu" for run in plan.layers):
        crossing.append(f"keys and values {_times(read.key_crossings)}")
    bus = f"; what is in RAM crosses the bus: {', '.join(crossing)}" if crossing and plan.kv_heads else ""
    return f"prefill {read.seconds:,.1f} s in chunks of {read.chunk:,} tokens{bus}"


def _times(count: float) -> str:
    return "once" if count == 1 else f"{count:g} times"


def _briefly(layers: Sequence[Layers]) -> str:
    """How many layers do what."""
    told = []
    for what, places in (("weights", [run.weights for run in layers]), ("KV", [run.keys for run in layers])):
        counts = dict.fromkeys(places, 0)
        for run, place in zip(layers, places, strict=True):
            counts[place] += run.count
        told.append(f"{what}: " + ", ".join(f"{count} {BRIEFLY[place]}" for place, count in counts.items()))
    return "; ".join(told)


def listed(heading: str, items: Sequence[str]) -> Iterator[str]:
    """A heading and its items, wrapped."""
    if items:
        yield heading
    for item in items:
        yield from textwrap.wrap(item, WIDTH, initial_indent="  - ", subsequent_indent="    ")
