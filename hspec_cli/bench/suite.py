"""The settings of the TriForce paper (arXiv 2404.11912v3), with the figures it gives for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hspec_cli.bench.records import Case, Outcome, Published, Row

NAME = "triforce-paper"
MODEL = "llama2-7b-128k"
NEW = 256
PROMPT, OFFLOADED = 122 * 1024, 127 * 1024
PAPER_OFFLOADED = "triforce, 2/12"
PAPER, NAIVE, RETRIEVAL, STREAMING, OWN = (
    "triforce, 2/6",
    "naive (68M, 1K streaming)",
    "retrieval, no hierarchy",
    "streaming for retrieval",
    "triforce",
)
ON_CHIP = {  # T: TriForce's speed-up and acceptance, the naive policy's
    0.0: (2.31, 0.9234, 1.56, 0.4649),
    0.2: (2.25, 0.9203, 1.54, 0.4452),
    0.4: (2.20, 0.9142, 1.47, 0.4256),
    0.6: (2.19, 0.9137, 1.42, 0.4036),
    0.8: (2.08, 0.8986, 1.34, 0.3131),
    1.0: (2.08, 0.9004, 1.29, 0.2872),
    1.2: (2.02, 0.8902, 1.27, 0.2664),
}
ABLATION = {RETRIEVAL: (1.80, 0.9126), STREAMING: (1.90, 0.8745)}  # T 0.6
BATCHES = {  # prompts, tokens of each, budget: at T 0 TriForce and naive, at T 0.6
    (2, 56 * 1024, 1024): (1.89, 1.46, 1.75, 1.35),
    (6, 19 * 1024, 768): (1.90, 1.39, 1.76, 1.28),
    (10, 12 * 1024, 768): (1.72, 1.34, 1.61, 1.21),
}
OFFLOADS = (  # hardware, target, speed-up, its ms a token, over what
    ("2× RTX 4090", "Llama2-7B-128K", 7.78, 108, "the authors' own offloaded decoding"),
    ("2× RTX 4090", "LWM-Text-Chat-128K", 7.37, 114, "the authors' own offloaded decoding"),
    ("2× RTX 4090", "Llama2-13B-128K", 7.94, 226, "the authors' own offloaded decoding"),
    ("1× RTX 4090", "Llama2-7B-128K", 4.86, 312, "DeepSpeed ZeRO-Inference"),
    ("1× RTX 4090", "LWM-Text-Chat-128K", 4.83, 314, "DeepSpeed ZeRO-Inference"),
    ("1× L40", "LWM-Text-256K", 11.81, None, "plain offloaded decoding"),
    ("1× L40", "LWM-Text-512K", 12.10, None, "plain offloaded decoding"),
)
ON_CHIP_ONLY = "`--offload` was given: the suite without it runs this setting"
ABOUT = (
    "The paper's speed-ups are over eager transformers with FlashAttention on one A100 80GB (Llama2-7B-128K, PG-19), "
    "those measured here over the fastest plain decoding of hspec itself, on the text named above; `triforce` is "
    "hspec's own, with widths and levels that follow measurements."
)


@dataclass(frozen=True)
class Contest:
    """A case with its methods: names, and level stacks or names of hspec's methods."""

    case: Case
    methods: Mapping[str, str]


def stack(budget: int, first: str = "draft(streaming:256, width=2) > ", view: str = "retrieval", gamma: int = 6) -> str:
    """TriForce with the paper's widths."""
    return f"{first}target({view}:{budget}, width={gamma}) > target(full)"


def contests(offload: bool) -> list[Contest]:
    """Everything that a GPU with enough memory can run, small cases first; or the setting with offloading."""
    made: list[Contest] = []
    if offload:
        return [Contest(Case(OFFLOADED, NEW, 0.6), {PAPER_OFFLOADED: stack(8192, gamma=12), OWN: "auto"})]
    for (batch, tokens, budget), _ in sorted(BATCHES.items(), key=lambda item: item[0][0] * item[0][1]):
        methods = {PAPER: stack(budget), NAIVE: naive(), OWN: "auto"}
        made += [Contest(Case(tokens, NEW, heat, batch), methods) for heat in (0.0, 0.6)]
    for heat in ON_CHIP:
        methods = {PAPER: stack(4096), NAIVE: naive(), OWN: "auto"}
        if heat == 0.6:
            methods |= {RETRIEVAL: stack(4096, ""), STREAMING: stack(4096, view="streaming")}
        made.append(Contest(Case(PROMPT, NEW, heat), methods))
    return made


def naive() -> str:
    """The small draft model alone."""
    return "draft(streaming:1024) > target(full)"


def published(outcomes: Sequence[Outcome], offload: bool) -> list[Published]:
    """The paper's rows with what was measured; `offload`: whether that was the setting with offloading."""
    found = {(row.method, outcome.case): row for outcome in outcomes for row in outcome.rows}
    rows = []
    for heat, (gain, kept, naive_gain, naive_kept) in ON_CHIP.items():
        case = Case(PROMPT, NEW, heat)
        told = [(PAPER, gain, kept), (NAIVE, naive_gain, naive_kept)]
        told += [(name, *pair) for name, pair in ABLATION.items()] if heat == 0.6 else []
        rows += [_beside(Published("2", setting(case), *row), found.get((row[0], case))) for row in told]
    for (batch, tokens, _budget), gains in BATCHES.items():
        for n, heat in enumerate((0.0, 0.6)):
            case = Case(tokens, NEW, heat, batch)
            for name, gain in ((PAPER, gains[2 * n]), (NAIVE, gains[2 * n + 1])):
                rows.append(_beside(Published("4", setting(case), name, gain), found.get((name, case))))
    for hardware, target, gain, ms, over in OFFLOADS:
        speed = f", {ms} ms a token" if ms else ""
        where = f"{hardware}, offloaded{speed}, over {over}"
        rows.append(_offloaded(Published("3", where, target, gain), hardware, target, found if offload else None))
    return [replace(row, reason=ON_CHIP_ONLY) if offload and row.table != "3" else row for row in rows]


def setting(case: Case) -> str:
    """A case on the paper's A100, in its own words."""
    several = f"{case.batch} × " if case.batch > 1 else ""
    return f"A100, {several}{case.context // 1024}K, T {case.temperature:g}"


def _offloaded(row: Published, hardware: str, target: str, found: Mapping[tuple[str, Case], Row] | None) -> Published:
    """A row with offloading. What is measured here is one GPU and one model: it stands beside the row that is too."""
    if found is None:
        return replace(row, reason="`--offload` runs this setting, with `--vram 24GiB` as on the paper's cards")
    if (hardware, target) != ("1× RTX 4090", "Llama2-7B-128K"):
        return replace(row, reason="another number of GPUs, or another model")
    case = Case(OFFLOADED, NEW, 0.6)
    paper, own = (found.get((name, case)) for name in (PAPER_OFFLOADED, OWN))
    return _beside(row, paper if paper is not None and paper.speed_up else own)


def _beside(row: Published, measured: Row | None) -> Published:
    if measured is None or measured.speed_up is None:
        reason = "not reached" if measured is None else measured.reason
        if measured is not None and measured.withheld:
            reason = "the text is not plain decoding's"
        return replace(row, reason=reason or "no plain decoding to compare with")
    levels = measured.typical.levels[:-1] if measured.typical else ()
    kept = levels[-1].acceptance if levels else None
    return replace(row, measured=measured.speed_up, measured_acceptance=kept)
