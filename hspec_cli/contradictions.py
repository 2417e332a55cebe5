"""Words of `hspec run` that cannot be meant together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hspec_cli.placement import check_run
from hspec_decoding.stack import parse as parse_levels
from hspec_profiles.errors import UsageError

if TYPE_CHECKING:
    from hspec_cli.run import Run


def check(run: Run) -> None:
    """Raise UsageError for words of `hspec run` that contradict each other, before anything is read."""
    if run.levels is not None:
        parse_levels(run.levels)
    if run.levels is not None and run.method != "auto":
        raise UsageError("`--levels` and `--method` both name the level stack", "give one of them")
    _check_approximate(run)
    _check_chimera(run)
    if run.raw and run.system is not None:
        raise UsageError("`--system` needs the chat template that `--raw` turns off", "drop one of them")
    if run.quiet and run.dashboard:
        raise UsageError("`--quiet` and `--dashboard` contradict each other", "drop one of them")
    _check_lines(run)
    _check_ranks(run)
    check_run(run)
    if "" in (run.stop or ()):
        raise UsageError("`--stop` must not be empty")


def _check_ranks(run: Run) -> None:
    """The same of how many share the model."""
    if run.gpus is not None and run.ranks is not None:
        raise UsageError("`--gpus` and `--ranks` both say how many share the model", "give one of them")
    several = f"`--gpus {run.gpus}`" if run.gpus else f"`--ranks {run.ranks}`"
    if (run.gpus or run.ranks or 1) > 1 and run.device.startswith("cuda:"):
        raise UsageError(f"`--device {run.device}` names one GPU, {several} are more", "drop one of them")
    if run.gpus is not None and run.device == "cpu":
        raise UsageError("`--gpus` is about GPUs, and `--device cpu` uses none", f"`--ranks {run.gpus}`")
    if run.uses_chimera and (run.gpus or run.ranks or 1) > 1:
        raise UsageError("`chimera` levels need the whole model in one process", "run without `--gpus` and `--ranks`")


def _check_approximate(run: Run) -> None:
    """The same of what is verified, and what is not."""
    if run.levels is not None and run.lossless and run.approximate:
        raise UsageError("`--lossless` needs a last level that decides", f"`--levels '{run.levels} > target(full)'`")
    if run.correct is not None and not run.approximate:
        raise UsageError("`--correct` is for approximate levels, and these are verified", "drop it")
    if run.approximate and run.rule != "coupled":
        raise UsageError("`--rule` says how drafts are verified, and here nothing is", "drop it or add `--lossless`")


def _check_chimera(run: Run) -> None:
    """The same of Chimera's heads."""
    if run.uses_chimera and (run.offload or run.plan):
        raise UsageError("no plan is made for `chimera` levels", "run without `--offload` and `--plan`")
    if not run.uses_chimera and (run.heads is not None or run.tree is not None):
        flag = "--heads" if run.heads is not None else "--tree"
        raise UsageError(f"`{flag}` is for `chimera` levels and there are none", "add `--method chimera`")
    if run.tree and run.rule == "rejection":
        raise UsageError("trees need the coupled rule", "`--tree off` proposes chains under `--rule rejection`")


def _check_lines(run: Run) -> None:
    """The same of what is for many prompts, and what is for one."""
    given = {
        "a PROMPT": run.prompt is not None,
        "`--file`": bool(run.file),
        "`--dashboard`": run.dashboard,
        "`--record`": run.record is not None,
        "`--id`": run.id is not None,
        "`--gpus`": (run.gpus or 1) > 1,
        "`--ranks`": (run.ranks or 1) > 1,
    }
    wrong = next((flag for flag, there in given.items() if there), None)
    if run.jsonl and wrong:
        raise UsageError(f"`--jsonl` reads many prompts from standard input, {wrong} is for one", "drop one of them")
    idle = "`--unordered`" if run.unordered else "`--batch`" if run.batch is not None else None
    if idle and not run.jsonl:
        raise UsageError(f"{idle} is about many prompts, which need `--jsonl`", "add `--jsonl`")
