"""`hspec run --offload`: flags to limits to plans, what is said of them, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import plan_tools
import pytest
import tiny_models
from case_tools import Hspec, answered, refused

from hspec_cli import offload, show
from hspec_cli.contradictions import check
from hspec_cli.parser import parse
from hspec_cli.placement import limits
from hspec_cli.run import Run
from hspec_cli.voice import Voice
from hspec_decoding.beside import Beside
from hspec_decoding.options import Settings
from hspec_offload.ask import Limits
from hspec_offload.plan import Plan
from hspec_offload.plan_file import as_toml, document
from hspec_profiles import measure
from hspec_profiles.errors import HspecError, UsageError
from hspec_profiles.profile import HostProfile


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.model(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host that is quickly measured, without saved profiles."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(measure, "quick_probe", lambda: plan_tools.NONE)


def words(*argv: str) -> Run:
    """The record of a command line, checked."""
    run = parse(["run", *argv])
    assert isinstance(run, Run)
    check(run)
    return run


# --- flags -------------------------------------------------------------------------------------------------------


def test_a_plain_flag() -> None:
    run = words("--method", "triforce", "--offload")
    assert (run.offload, run.prompt, run.method) == (True, None, "triforce")
    run = words("--method", "triforce", "--offload", "Why is the sky blue?")
    assert (run.offload, run.prompt) == (True, "Why is the sky blue?")
    assert limits(run) == Limits()


def test_flags_are_limits() -> None:
    run = words("--offload", "--offload-kind", "kv", "--vram", "24GiB", "--ram", "64GB", "-ngl", "7", "-n", "5")
    assert limits(run) == Limits(24 << 30, 64 * 10**9, None, 7, None, "kv")
    assert run.max_tokens == 5
    run = words("--offload", "--kv-device", "cpu", "--gpu-layers", "0", "--reserve", "1GB")
    assert limits(run) == Limits(None, None, 10**9, 0, "cpu", "auto")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("-ngl", "3"), "needs `--offload`"),
        (("--kv-device", "gpu"), "needs `--offload`"),
        (("--offload-kind", "both"), "needs `--offload`"),
        (("--offload", "--offload-kind", "disk"), "auto, weights, kv, both"),
        (("--offload", "--offload-kind", "weights", "--kv-device", "cpu"), "keeps KV on the GPU"),
        (("--plan", "p.json", "--vram", "8GB", "--ram", "9GB"), "`--vram`, `--ram`"),
        (("--vram", "8GB", "--device", "cpu"), "`--vram` is about a GPU"),
        (("--offload", "-ngl", "2", "--device", "cpu"), "`--gpu-layers` is about a GPU"),
        (("--offload", "--kv-device", "gpu", "--device", "cpu"), "`--kv-device` is about a GPU"),
        (("--offload", "--vram", "24"), "size with its unit"),
    ],
)
def test_contradictions(argv: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        words(*argv)


# --- runs --------------------------------------------------------------------------------------------------------


def test_what_fits_is_resident_and_that_is_said(hspec: Hspec, model: Path) -> None:
    alone = answered(hspec("run", "-m", model, "-n", 6, "hello"))
    for argv in (("--offload", "hello"), ("--offload", "--method", "triforce", "hello")):
        result = answered(hspec("run", "-m", model, "-n", 6, *argv))
        assert result.out == alone.out
        assert sum("nothing is offloaded" in line for line in result.err.splitlines()) == 1
        assert sum("measured roughly" in line for line in result.err.splitlines()) == 1
    assert answered(hspec("run", "-m", model, "-n", 6, "--offload", stdin=b"hello")).out == alone.out


def test_predicted_stands_beside_measured(hspec: Hspec, model: Path) -> None:
    run = ("run", "-m", model, "-n", 6, "--offload", "--method", "autoregressive")
    err = answered(hspec(*run, "--stats", "hello")).err
    assert "measured / predicted" in err
    assert [line.split()[0] for line in err.splitlines()[-3:]] == ["token", "verify", "prefill"]
    placement = answered(hspec(*run, "--json", "hello")).document["placement"]
    assert placement["resident"]
    assert placement["elsewhere"] == ""
    assert set(placement["figures"]) == {"token", "verify pass", "prefill"}
    assert all(figure["predicted"] > 0 for figure in placement["figures"].values())
    assert answered(hspec("run", "-m", model, "-n", 6, "--json", "hello")).document["placement"] is None


def test_corrections_are_told_and_never_used(
    hspec: Hspec, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs leave what they measured beside the profile; a plan tells of it, and predicts what it did before."""
    plan = ("plan", "-m", model, "-c", 200, "--json")
    before = answered(hspec(*plan)).document
    for _ in range(2):
        answered(hspec("run", "-m", model, "-n", 6, "--offload", "--method", "autoregressive", "hello"))
    after = answered(hspec(*plan)).document
    told = [note for note in after.pop("notes") if note not in before["notes"]]
    assert any(note.startswith("token: measured") and note.endswith("in 2 runs here") for note in told)
    before.pop("notes")
    assert after == before
    assert "notes" in answered(hspec(*plan, "--profile", "cpu-only")).document
    (tmp_path / "state" / "hspec" / "corrections.json").write_text('{"none": {"token": [1, 0, "x"]}, "other": 3}')
    answered(hspec(*plan))
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    answered(hspec("run", "-m", model, "-n", 2, "--offload", "hello"))


def test_a_host_without_a_gpu_has_no_vram(hspec: Hspec, model: Path) -> None:
    for flags in (("--vram", "8GB"), ("--offload", "--vram", "8GB"), ("--offload", "-ngl", 2)):
        refused(hspec("run", "-m", model, *flags, "hello"), 2, flags[-2].replace("-ngl", "--gpu-layers"), "GPU")


def test_less_ram_than_there_is(hspec: Hspec, model: Path) -> None:
    refused(hspec("run", "-m", model, "--ram", "300kB", "hello"), 3, "this host has 285 kB", "a larger `--ram`")
    answered(hspec("run", "-m", model, "--ram", "3MB", "-n", 2, "hello"))
    refused(hspec("run", "-m", model, "--ram", "3MB", "--reserve", "2.9MB", "hello"), 3, "has 100 kB")


# --- plans from files --------------------------------------------------------------------------------------------


@pytest.fixture
def plan_file(hspec: Hspec, model: Path, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_bytes(answered(hspec("plan", "-m", model, "-c", 200, "--json")).out)
    return path


def test_a_plan_is_carried_out(hspec: Hspec, model: Path, plan_file: Path) -> None:
    run = ("run", "-m", model, "-n", 6, "--dtype", "bf16")
    result = answered(hspec(*run, "--plan", plan_file, "--json", "hello"))
    assert result.document["context"] == 200
    assert result.document["placement"]["resident"]
    assert result.document["text"] == answered(hspec(*run, "--json", "hello")).document["text"]


@pytest.mark.parametrize(
    ("argv", "change", "code", "says"),
    [
        (("-c", 100), {}, 2, ("200 tokens, not 100",)),
        (("--dtype", "fp32"), {}, 2, ("16 bits, not 32",)),
        ((), {"model": "llama2-7b"}, 2, ("the model `llama2-7b`, not",)),
        ((), {"gpus": (0,)}, 2, ("card", "on the CPU")),
        ((), {"context": 4}, 3, ("the prompt is", "the plan holds 4")),
    ],
)
def test_a_plan_for_something_else(
    hspec: Hspec, model: Path, plan_file: Path, argv: Any, change: dict[str, Any], code: int, says: tuple[str, ...]
) -> None:
    from hspec_offload.plan_file import read_plan

    made = replace(read_plan(plan_file), **change)
    if made.gpus:
        card = replace(made.devices[0], name="GPU 0 (card)")
        made = replace(made, devices=(card, *made.devices), ring_pieces=4, piece_bytes=1 << 26)
    plan_file.write_text(as_toml(made))
    base = ("--dtype", "bf16") if "--dtype" not in argv else ()
    refused(hspec("run", "-m", model, "--plan", plan_file, *base, *argv, "hello there"), code, *says)


def test_files_that_are_no_plans(hspec: Hspec, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    refused(hspec("run", "-m", model, "--plan", path, "hello"), 1, "no plan can be read", "plan.json")
    path.write_text("{}")
    refused(hspec("run", "-m", model, "--plan", path, "hello"), 1, "is no plan", "hspec plan --json")


# --- a GPU that this host does not have --------------------------------------------------------------------------


def gpu_plan(
    monkeypatch: pytest.MonkeyPatch, run: Run, profile: HostProfile = plan_tools.ONE, context: int = 8192
) -> tuple[Plan | None, Voice]:
    """What a run of a 7B model comes to on a host with a GPU."""
    import torch

    from hspec_decoding.checkpoints import hub
    from hspec_decoding.config import ModelConfig

    config = ModelConfig.from_dict(hub.read_config("llama2-7b-128k", offline=True, say=print))
    job = SimpleNamespace(
        target=SimpleNamespace(config=config), draft=None, draft_name=None, context=context, prompt=(0,) * (context - 9)
    )
    monkeypatch.setattr(offload, "pick_device", lambda _name, _notes: torch.device("cuda", 0))
    monkeypatch.setattr(offload, "pick_dtype", lambda _name, _device: torch.bfloat16)
    monkeypatch.setattr(measure, "quick_probe", lambda: profile)
    voice = Voice(quiet=True)
    settings = Settings(method=run.method, levels=run.levels)
    return offload.planned(run, cast(Any, job), settings, None, voice), voice


def test_on_a_gpu_it_says_where_everything_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    made, voice = gpu_plan(monkeypatch, words("--offload", "--vram", "8GiB", "-m", "llama2-7b-128k"), context=2048)
    assert made
    assert not made.resident
    assert any(
        "in host memory" in note and "; predicted" in note and "by plain decoding" in note for note in voice.notes
    )
    assert made.devices[0].available == 8 << 30
    made, voice = gpu_plan(monkeypatch, words("--offload", "-m", "llama2-7b-128k"))
    assert made
    assert made.resident
    assert "everything fits the GPU: nothing is offloaded" in voice.notes
    assert gpu_plan(monkeypatch, words("-m", "llama2-7b-128k"))[0] is None


def test_triforce_says_that_it_reads_four_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    run = words("--offload", "--method", "triforce", "--vram", "12GiB", "-m", "llama2-7b-128k")
    made, voice = gpu_plan(monkeypatch, run, context=32_768)
    assert made
    assert "retrieval" in made.levels
    assert "w=int4" in made.levels
    assert any("in 4 bits" in note for note in voice.notes)


def test_one_gpu_of_several_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the others could do."""
    made, _ = gpu_plan(monkeypatch, words("--offload", "-m", "llama2-7b-128k"), plan_tools.gpus(24, 24), 60_000)
    assert made
    assert made.gpus == (0,)


def test_weights_on_the_disk_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    run = words("--offload", "--vram", "4GiB", "--ram", "8GB", "-m", "llama2-7b-128k")
    made, voice = gpu_plan(monkeypatch, run, context=2048)
    assert made
    assert any("read from the disk in every pass, which is slow" in note for note in voice.notes)
    assert any("on the disk" in note and "predicted" in note for note in voice.notes)


@pytest.mark.parametrize("argv", [("-ngl", "4", "--offload-kind", "kv"), ("--vram", "1GB"), ("--ram", "9GB")])
def test_what_cannot_be_is_refused_before_loading(monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]) -> None:
    with pytest.raises(HspecError) as caught:
        gpu_plan(monkeypatch, words("--offload", *argv, "-m", "llama2-7b-128k"), plan_tools.gpus(24), 122_880)
    assert caught.value.exit_code == (2 if "-ngl" in argv else 3)
    assert argv[0].replace("-ngl", "--gpu-layers") in caught.value.message + (caught.value.hint or "")


def test_plan_files_survive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A plan of a run is one of `hspec plan`, in JSON and in TOML."""
    from hspec_offload.plan_file import read_plan

    made, _ = gpu_plan(monkeypatch, words("--offload", "--vram", "8GiB", "-m", "llama2-7b-128k"), context=2048)
    assert made
    for name, text in (("plan.json", json.dumps(document(made))), ("plan.toml", as_toml(made))):
        (tmp_path / name).write_text(text)
        assert read_plan(tmp_path / name) == made


def test_table_of_predictions() -> None:
    figures = [Beside("token", 0.05, 0.055), Beside("prefill", None, 12.0)]
    assert show.predictions(figures).splitlines() == [
        "seconds  predicted  measured  measured / predicted",
        "token         0.05     0.055                  1.10",
        "prefill          -        12                     -",
    ]
