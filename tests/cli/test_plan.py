"""`hspec plan`: from the config alone, for any host, in 80 columns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import plan_tools
import pytest
from case_tools import ESCAPES, Hspec, answered, environment, program, refused

from hspec_decoding.stack import parse
from hspec_offload.plan_file import read_plan

CASES = {
    "kv": ("-m", "llama2-7b-128k", "-c", 122880, "--profile", "1x-h200", "--vram", "24GiB"),
    "weights": ("-m", "llama2-7b", "--profile", "1x-rtx-4060-8gb", "-c", 2048, "--text", "code"),
    "pair": ("-m", "llama2-13b-128k", "--profile", "2x-rtx-4090-x8"),
    "disk": ("-m", "llama3.1-70b", "--profile", "1x-rtx-4090", "-c", 4096, "--ram", "60GB"),
    "cpu": ("-m", "llama3.2-1b", "--profile", "cpu-only", "-c", 8192, "--batch", 4),
    "resident": ("-m", "qwen3-8b", "--profile", "1x-l40", "-c", 8192, "--draft-model", "qwen3-0.6b"),
}


@pytest.fixture(autouse=True)
def own_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No profile of the user's."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.mark.parametrize("case", CASES)
def test_fits_a_terminal(hspec: Hspec, no_network: list[object], case: str) -> None:
    result = answered(hspec("plan", *CASES[case]))
    text = result.out.decode()
    assert max(map(len, text.splitlines())) <= 80
    assert not ESCAPES.search(text)
    for words in ("memory", "RAM", "layers", "levels", "predicted ms", "plain decoding", "prefill"):
        assert words in text
    assert result.err == ""
    assert not no_network


def test_levels_can_be_given_to_run(hspec: Hspec) -> None:
    for case in CASES.values():
        document = answered(hspec("plan", *case, "--json")).document
        assert parse(document["levels"])[-1].decides


def test_document_is_the_plan(hspec: Hspec, tmp_path: Path) -> None:
    result = answered(hspec("plan", *CASES["kv"], "--json"))
    path = tmp_path / "plan.json"
    path.write_bytes(result.out)
    plan = read_plan(path)
    assert plan.context == 122_880
    assert plan.key_copy == "int4"
    assert all(device.used <= device.available for device in plan.devices)
    assert result.document["hints"]


@pytest.mark.parametrize(
    "option",
    [
        ("-c", 4096),
        ("--batch", 2),
        ("--vram", "12GiB"),
        ("--ram", "12GB"),
        ("--reserve", "3GiB"),
        ("--gpu-layers", 2),
        ("-ngl", 20),
        ("--kv-device", "cpu"),
        ("--draft-model", "none"),
        ("--text", "code"),
        ("--profile", "1x-rtx-3090"),
    ],
    ids=str,
)
def test_options_show(hspec: Hspec, option: tuple[str, object]) -> None:
    base = ("plan", "-m", "llama2-7b-128k", "-c", 20_000, "--profile", "1x-rtx-4090", "--vram", "16GiB")
    assert answered(hspec(*base, *option)).out != answered(hspec(*base)).out


def test_a_draft_that_was_asked_for(hspec: Hspec) -> None:
    text = answered(hspec("plan", *CASES["resident"])).out.decode()
    assert "draft model" in text


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("-m", "llama2-7b", "-c", 9000, "--profile", "cpu-only"), 3, ("9,000", "4,096", "--ctx 4096")),
        (("-m", "llama2-7b-128k", "--profile", "1x-rtx-4060-8gb"), 3, ("RAM needs", "28.0 GB", "longest context")),
        (("-m", "llama2-7b", "--profile", "1x-rtx-4090", "--vram", "1GB"), 3, ("GPU 0", "needs", "1.0 GB", "--vram")),
        (("-m", "llama2-7b", "--profile", "cpu-only", "--vram", "8GB"), 2, ("--vram", "cpu-only")),
        (("-m", "llama2-7b", "--profile", "nope"), 2, ("nope", "1x-rtx-4090")),
        (("-m", "lama2-7b", "--profile", "cpu-only"), 1, ("did you mean", "llama2-7b")),
        (("--profile", "cpu-only", "--vram", "24"), 2, ("--vram", "unit", "24GiB")),
        (("--profile", "cpu-only", "--ram", "many"), 2, ("--ram", "many")),
        (("--profile", "cpu-only", "--kv-device", "disk"), 2, ("--kv-device", "cpu, gpu")),
        (("--profile", "cpu-only", "-c", 0), 2, ("--ctx", "1 or more")),
        (("--profile", "cpu-only", "--text", "verse"), 2, ("--text", "prose, code")),
        (("--profile", "cpu-only", "--offline", "-md", "some/thing"), 1, ("some/thing",)),
    ],
)
def test_refusals(
    hspec: Hspec, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...], code: int, says: tuple[str, ...]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused(hspec("plan", *words), code, *says)


@pytest.mark.parametrize(
    ("word", "size"),
    [("24GiB", 24 << 30), ("24GB", 24 * 10**9), ("24g", 24 * 10**9), ("1.5 gib", 3 << 29), ("512MiB", 1 << 29)],
)
def test_sizes(word: str, size: int) -> None:
    from hspec_cli.placement import size as parser

    assert parser("--vram")(word) == size


def test_host_without_a_profile(hspec: Hspec, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is measured roughly at once, and that is said; a profile that was kept is used without a word."""
    from hspec_profiles import measure, profile

    monkeypatch.setattr(measure, "quick_probe", lambda: plan_tools.NONE)
    result = answered(hspec("plan", "-m", "llama3.2-1b", "-c", 4096))
    assert "hspec profile" in result.err
    assert "on none" in result.out.decode()
    assert answered(hspec("plan", "-m", "llama3.2-1b", "-c", 4096, "-q")).err == ""
    profile.save_profile(plan_tools.ONE, profile.host_key())
    result = answered(hspec("plan", "-m", "llama3.2-1b", "-c", 4096))
    assert result.err == ""
    assert "on one" in result.out.decode()


def test_files_of_profiles(hspec: Hspec, tmp_path: Path) -> None:
    from hspec_profiles.profile import save_profile

    path = save_profile(plan_tools.gpus(8), "mine")
    by_name, by_file = (answered(hspec("plan", "-m", "llama2-7b", "--profile", p)) for p in ("mine", path))
    assert by_name.out == by_file.out
    refused(hspec("plan", "--profile", tmp_path / "none.toml"), 1, "none.toml")


def test_needs_no_torch(tmp_path: Path) -> None:
    """A plan for another host, from a config that is shipped, is there at once."""
    code = "import sys; from hspec_cli.main import main; main(); sys.exit('torch' in sys.modules)"
    words = [sys.executable, "-c", code, "plan", "-m", "llama2-7b", "--profile", "1x-rtx-4090"]
    done = subprocess.run(words, env=environment(tmp_path), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    words = program("plan", "-m", "llama2-7b", "--profile", "1x-rtx-4090")
    with subprocess.Popen(words, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout
        assert running.stderr
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 141
