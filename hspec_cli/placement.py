"""Options that say what may be used, and what goes where, as `hspec run` and `hspec plan` take them."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Annotated

from typer import Option

from hspec_cli.words import choice, whole
from hspec_profiles.errors import UsageError

if TYPE_CHECKING:
    from hspec_cli.run import Run
    from hspec_cli.voice import Voice
    from hspec_offload.ask import Limits
    from hspec_profiles.profile import HostProfile

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
KINDS = ("auto", "weights", "kv", "both")

place_option = partial(Option, rich_help_panel="Placement")


def size(flag: str) -> partial[int]:
    """A parser of sizes with a unit: 24GiB, 24GB, 24G (= GB), 512MiB."""
    return partial(_size, flag)


def _size(flag: str, word: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)b?", word.strip().lower())
    if not match:
        raise UsageError(f"`{flag}` must be a size with its unit, got '{word}'", f"for example `{flag} 24GiB`")
    return round(float(match[1]) * UNITS[match[2]])


Vram = Annotated[
    int | None,
    place_option("--vram", parser=size("--vram"), metavar="SIZE", help="Use at most this much of each GPU: 24GiB."),
]
Ram = Annotated[
    int | None, place_option("--ram", parser=size("--ram"), metavar="SIZE", help="Use at most this much RAM.")
]
Reserve = Annotated[
    int | None,
    place_option(
        "--reserve",
        parser=size("--reserve"),
        metavar="SIZE",
        help="Leave this much of each GPU (of RAM where there is none) alone.  [default: 500 MB and 1 %]",
    ),
]
GpuLayers = Annotated[
    int | None,
    place_option(
        "--gpu-layers",
        "-ngl",
        parser=whole("--gpu-layers", 0),
        metavar="N",
        help="Layers whose 16-bit weights are on the GPU.  [default: what is fastest]",
    ),
]
KvDevice = Annotated[
    str | None,
    place_option(
        "--kv-device",
        parser=choice("--kv-device", ("cpu", "gpu")),
        metavar="DEVICE",
        help="Where keys and values live: cpu or gpu.  [default: what is fastest]",
    ),
]
OffloadKind = Annotated[
    str | None,
    place_option(
        "--offload-kind",
        parser=choice("--offload-kind", KINDS),
        metavar="KIND",
        help="What may live outside the GPU: auto, weights, kv or both.  [default: auto]",
    ),
]


def roughly(voice: Voice) -> HostProfile:
    """This host, measured at once in a few seconds, and a note that says so."""
    from hspec_profiles.measure import quick_probe

    measured = quick_probe()
    voice.note("this host was measured roughly; `hspec profile` measures it well, and keeps it")
    return measured


def check_run(run: Run) -> None:
    """Raise UsageError for options of placement that contradict each other, or that nothing would come of."""
    given = {flag: value for flag, value in _flags(run).items() if value is not None}
    if run.plan is not None and given:
        flags = ", ".join(f"`{flag}`" for flag in given)
        raise UsageError(f"`--plan` says where everything goes, and so does {flags}", "give `hspec plan` these flags")
    idle = [flag for flag in ("--offload-kind", "--gpu-layers", "--kv-device") if flag in given]
    if idle and not run.offload:
        raise UsageError(f"`{idle[0]}` says what is kept outside the GPU, which needs `--offload`", "add `--offload`")
    if run.offload_kind == "weights" and run.kv_device == "cpu":
        raise UsageError("`--offload-kind weights` keeps KV on the GPU, `--kv-device cpu` does not", "drop one of them")
    if about_gpus(run) and run.device == "cpu":
        raise UsageError(f"`{about_gpus(run)[0]}` is about a GPU, and `--device cpu` uses none", "drop one of them")


def about_gpus(run: Run) -> list[str]:
    """Flags that mean nothing without a GPU."""
    given = _flags(run)
    return [flag for flag in ("--vram", "--gpu-layers", "--kv-device") if given[flag] not in (None, "cpu")]


def _flags(run: Run) -> dict[str, int | str | None]:
    return {
        "--offload-kind": run.offload_kind,
        "--vram": run.vram,
        "--ram": run.ram,
        "--gpu-layers": run.gpu_layers,
        "--kv-device": run.kv_device,
        "--reserve": run.reserve,
    }


def limits(run: Run) -> Limits:
    """What the run may use."""
    from hspec_offload.ask import Limits

    return Limits(run.vram, run.ram, run.reserve, run.gpu_layers, run.kv_device, run.offload_kind or "auto")
