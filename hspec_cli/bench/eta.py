"""How long a bench still takes: a bar with what runs and the time that is left, or a line now and then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hspec_cli.bench.figures import clock

if TYPE_CHECKING:
    from hspec_cli.progress import Progress

MEASURING = "seconds of measuring (about)"


class Eta:
    """Drawn on stderr where that is a terminal that can redraw and nobody asked for silence; else told to `shown`."""

    def __init__(self, shown: Progress, quiet: bool) -> None:
        from hspec_cli.progress import can_redraw

        self._shown, self._rich, self._what = shown, None, ""
        if not quiet and can_redraw():
            self._rich = _bar()

    def __call__(self, what: str, gone: float, total: float) -> None:
        """`gone` of `total` seconds have gone by; `what` runs."""
        if self._rich is None:
            self._shown.update(MEASURING, round(gone), max(1, round(total)))
            return
        if not self._rich.live.is_started:
            self._shown.pause()
            self._task: Any = self._rich.add_task("", total=total, left="")
            self._rich.start()
        left = f"about {clock(max(0.0, total - gone))} left"
        self._rich.update(self._task, description=what, completed=gone, total=total, left=left)

    def close(self) -> None:
        """Erase the bar and show the cursor."""
        if self._rich is not None:
            self._rich.stop()


def _bar() -> Any:
    """A bar that vanishes when it stops; stdout is left alone."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[left]}", markup=False),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
