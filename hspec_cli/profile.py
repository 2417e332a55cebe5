"""`hspec profile`: what this host can do, measured, shown and kept."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from hspec_cli.show import written
from hspec_cli.words import Command
from hspec_offload.sizes import human
from hspec_profiles.errors import HspecError, UsageError

if TYPE_CHECKING:
    from hspec_cli.voice import Voice
    from hspec_profiles.profile import HostProfile

WIDEST = 110  # columns of a table
Row = tuple[str, str, str]  # what, how much, how it is known or why it is not

EXAMPLES = """\
Examples:
  hspec profile
  hspec profile --show
  hspec profile --show --name 2x-rtx-4090 --json
  hspec profile --name laptop"""


@dataclass(frozen=True)
class Profile(Command):
    """Measure what this host can do, in less than a minute, and keep it for plans and offloading."""

    show: Annotated[
        bool, Option("--show", help="Show the profile that was kept, or the one called NAME; measure nothing.")
    ] = False
    name: Annotated[
        str | None,
        Option("--name", metavar="NAME", help="Keep it under this name too; with --show, a name or a file."),
    ] = None
    quick: Annotated[bool, Option("--quick", help="Measure roughly, for 5 seconds.")] = False
    json: Annotated[bool, Option("--json", help="Print one JSON document.")] = False
    quiet: Annotated[bool, Option("--quiet", "-q", help="Say nothing on stderr but errors.")] = False
    debug: Annotated[bool, Option("--debug", help="Show tracebacks.")] = False

    def execute(self) -> int:
        """Print the profile; 0, also without a GPU. Raises HspecError for what cannot be shown or kept."""
        if self.show and self.quick:
            raise UsageError("`--show` measures nothing and `--quick` does", "drop one of them")
        if self.show:
            self._print(_kept(self.name))
            return 0
        from hspec_cli.voice import Voice
        from hspec_profiles.profile import check_name

        voice = Voice(self.quiet)
        profile = self._measured(None if self.name is None else check_name(self.name), voice)
        try:
            path = _keep(profile, self.name)
        finally:
            self._print(profile)
        voice.line(f"kept in {_short(path)}")
        return 0

    def _measured(self, name: str | None, voice: "Voice") -> "HostProfile":
        """Measure, with a bar or lines on stderr."""
        from hspec_cli.interrupt import check
        from hspec_cli.progress import progress
        from hspec_profiles.measure import measure, quick_probe

        with progress(voice) as shown:

            def tell(done: int, total: int) -> None:
                check()
                shown.update("measurements", done, total)

            return quick_probe(name=name, tell=tell) if self.quick else measure(name, tell=tell)

    def _print(self, profile: "HostProfile") -> None:
        print(document(profile) if self.json else listing(profile), flush=True)


def _keep(profile: "HostProfile", name: str | None) -> Path:
    """Save the profile as this host's, and under its name if it has one."""
    from hspec_profiles.profile import host_key, save_profile

    path = save_profile(profile, host_key())
    return path if name is None else save_profile(profile, name)


def _kept(name: str | None) -> "HostProfile":
    """A profile by its name, or this host's."""
    from hspec_profiles.profile import load_profile, saved_profile

    if name is not None:
        return load_profile(name)
    profile = saved_profile()
    if profile is None:
        raise HspecError(
            "no profile of this host is kept, or its GPUs or driver have changed",
            "`hspec profile` measures it; `hspec profile --show --name 1x-rtx-4090` shows one that comes with hspec",
        )
    return profile


def _short(path: Path) -> str:
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def document(profile: "HostProfile") -> str:
    """The profile as JSON; figures that are unknown are null, `sources` says why."""
    from dataclasses import asdict

    made: dict[str, Any] = asdict(profile)
    return written(made)


def listing(profile: "HostProfile") -> str:
    """The profile for people, as wide as the terminal; without escape codes where stdout is none."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    console.width = min(console.width, WIDEST)
    when = f", measured {profile.measured_at.replace('T', ' ').replace('+00:00', ' UTC')}" * bool(profile.measured_at)
    with console.capture() as captured:
        console.print(Text(f"{profile.name}{when}"))
        for heading, rows in _tables(profile):
            console.print(Text(f"\n{heading}", "bold"))
            console.print(_table(rows))
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def _table(rows: list[Row]) -> Any:
    """Three columns without lines; only the last one wraps."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, min_width=26)
    table.add_column(no_wrap=True, min_width=13, justify="right")
    table.add_column(overflow="fold")
    for what, value, how in rows:
        table.add_row(Text(f"  {what}"), Text(value), Text(how, "dim"))
    return table


def _tables(profile: "HostProfile") -> Iterator[tuple[str, list[Row]]]:
    """Headings and rows: the host, every GPU, the GPUs together."""
    yield profile.host.name, _rows(profile, "host.", profile.host, HOST)
    for index, gpu in enumerate(profile.gpus):
        yield f"GPU {index}: {gpu.name}", _rows(profile, f"gpus.{index}.", gpu, GPU)
    if not profile.gpus:
        yield "GPUs", [("none", "", profile.sources.get("gpus", ""))]
    if len(profile.gpus) > 1:
        yield "GPUs together", _rows(profile, "", profile, TOGETHER)


def _rows(profile: "HostProfile", path: str, record: object, figures: "Sequence[Figure]") -> list[Row]:
    """A row for every figure of the record at `path`."""

    def row(what: str, name: str, worded: Callable[[Any], str]) -> Row:
        value = getattr(record, name)
        return what, "unknown" if value is None else worded(value), profile.sources.get(f"{path}{name}", "")

    return [row(*figure) for figure in figures]


def _rate(value: float) -> str:
    return f"{human(value)}/s"


Figure = tuple[str, str, Callable[[Any], str]]  # what, its field, a value in words
HOST: tuple[Figure, ...] = (
    ("cores to use", "cores", str),
    ("RAM to use", "ram", human),
    ("RAM that can be pinned", "pinnable", human),
    ("pinning", "pin", _rate),
    ("reading RAM, all cores", "dram", _rate),
    ("attention over RAM, 1 row", "attention", _rate),
    ("attention over RAM, 16 rows", "attention_rows", _rate),
    ("weights in RAM times 1 row", "product", _rate),
    ("reading the disk", "disk", _rate),
)
GPU: tuple[Figure, ...] = (
    ("memory", "memory", human),
    ("memory to use", "free", human),
    ("copy within its memory", "copy", _rate),
    ("bfloat16 matrix product", "matrix", lambda value: f"{value / 1e12:,.0f} TFLOP/s"),
    ("from pinned RAM", "to_device", _rate),
    ("into pinned RAM", "to_host", _rate),
    ("from pageable RAM", "to_device_pageable", _rate),
    ("into pageable RAM", "to_host_pageable", _rate),
    ("PCIe generation", "pcie_generation", str),
    ("PCIe lanes", "pcie_width", str),
    ("compute capability", "capability", lambda pair: ".".join(map(str, pair))),
)
TOGETHER: tuple[Figure, ...] = (
    ("from the first to the second", "peer", _rate),
    ("from pinned RAM into all", "both_links", _rate),
)
