"""`hspec profile`: measured, shown, kept; and every way in which that fails."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from case_tools import ESCAPES, Hspec, answered, environment, program, refused

from hspec_cli.parser import parse
from hspec_cli.profile import Profile
from hspec_profiles import measure as measuring
from hspec_profiles.measure import Tell
from hspec_profiles.probes.timing import Effort
from hspec_profiles.profile import (
    Gpu,
    Host,
    HostProfile,
    host_key,
    load_profile,
    save_profile,
    saved_names,
    saved_profile,
    shipped_profiles,
)

STYLES = re.compile(r"\x1b\[[012]m")  # plain, bold, dim
LAB = HostProfile(
    "lab",
    Host("A [bold]CPU[/INST] :smile:", 16, 120 * 10**9, dram=9e10, attention=6.8e10),
    (
        Gpu("NVIDIA H200", 150 * 10**9, 149 * 10**9, copy=4.23e12, matrix=7.9e14, pcie_width=16, capability=(9, 0)),
        Gpu("[red]", 8 * 10**9, 0),
    ),
    both_links=1.1e11,
    sources={
        "host.dram": "measured",
        "host.pin": "pinning was refused: [/INST] " + "a long story " * 20,
        "gpus.0.pcie_generation": "NVML: Not Supported",
        "gpus.1.free": "memory ran out",
        "peer": "needs two GPUs",
    },
    measured_at="2026-11-30T20:08:49+00:00",
)


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where profiles are kept."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path / "config" / "hspec" / "profiles"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Measuring gives LAB under the name that was asked for; the names of the functions that were called."""
    called: list[str] = []

    def fake(function: str) -> Callable[..., HostProfile]:
        def measure(name: str | None = None, *, tell: Tell = measuring.silent) -> HostProfile:
            called.append(function)
            tell(0, 2)
            tell(2, 2)
            return replace(LAB, name=name or "here")

        return measure

    monkeypatch.setattr(measuring, "measure", fake("measure"))
    monkeypatch.setattr(measuring, "quick_probe", fake("quick_probe"))
    return called


def rows(text: str) -> dict[str, list[str]]:
    """Lines of a table by their first words."""
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]
    return {line[0]: line[1:] for line in reversed(cells) if line}


# --- measuring ---------------------------------------------------------------------------------------------------


def test_words() -> None:
    assert parse(["profile"]) == Profile()
    argv = "profile --show --name x --quick --json -q --debug"
    assert parse(argv.split()) == Profile(show=True, name="x", quick=True, json=True, quiet=True, debug=True)


def test_this_machine_for_real(hspec: Hspec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever there is: exit 0, figures of the CPU, a reason where there is no figure."""
    monkeypatch.setattr(measuring, "ROUGH", Effort(0.01, 64 << 20))
    monkeypatch.setattr(measuring, "usable_cores", lambda: 1)
    result = answered(hspec("profile", "--quick"))
    assert not ESCAPES.search(result.out.decode() + result.err)
    table = rows(result.text)
    assert table["reading RAM, all cores"][0].endswith("B/s")
    assert table["reading RAM, all cores"][1] == "measured"
    assert table["reading the disk"] == ["unknown", "left out of a quick measurement"]
    assert table["pinning"] == ["unknown", "no GPU to pin memory for"]
    assert table["none"][0]
    kept = saved_profile()
    assert kept is not None
    assert kept.gpus == ()
    assert kept.host.attention
    assert f"kept in {os.environ['XDG_CONFIG_HOME']}/hspec/profiles/{host_key()}.toml" in result.err


def test_measured_kept_and_shown(hspec: Hspec, measured: list[str]) -> None:
    first = answered(hspec("profile"))
    assert measured == ["measure"]
    assert saved_names() == (host_key(),)
    again = answered(hspec("profile", "--show"))
    assert measured == ["measure"]
    assert again.out == first.out
    assert again.err == ""
    assert first.text.splitlines()[0] == "here, measured 2026-11-30 20:08:49 UTC"
    answered(hspec("profile", "--quick"))
    assert measured == ["measure", "quick_probe"]


def test_kept_under_a_name_too(hspec: Hspec, measured: list[str]) -> None:
    result = answered(hspec("profile", "--name", "lab"))
    assert "kept in" in result.err
    assert "lab.toml" in result.err
    assert set(saved_names()) == {"lab", host_key()}
    assert load_profile("lab") == saved_profile() == LAB
    assert answered(hspec("profile", "--show", "--name", "lab")).out == result.out
    assert measured == ["measure"]


def test_the_table(hspec: Hspec, measured: list[str]) -> None:
    result = answered(hspec("profile", "-q"))
    assert measured
    assert result.err == ""
    text = result.text
    assert [line for line in text.splitlines()[2:] if line and not line.startswith(" ")] == [
        "A [bold]CPU[/INST] :smile:",
        "GPU 0: NVIDIA H200",
        "GPU 1: [red]",
        "GPUs together",
    ]
    table = rows(text)
    assert table["RAM to use"] == ["120 GB"]
    assert table["reading RAM, all cores"] == ["90.0 GB/s", "measured"]
    assert table["copy within its memory"] == ["4.2 TB/s"]
    assert table["bfloat16 matrix product"] == ["790 TFLOP/s"]
    assert table["PCIe generation"] == ["unknown", "NVML: Not Supported"]
    assert table["PCIe lanes"] == ["16"]
    assert table["compute capability"] == ["9.0"]
    assert table["from the first to the second"] == ["unknown", "needs two GPUs"]
    assert table["from pinned RAM into all"] == ["110 GB/s"]
    assert "pinning was refused: [/INST]" in " ".join(text.split())
    assert " ".join(text.split()).count("a long story") == 20
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_table_fits(columns: int, hspec: Hspec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for name in shipped_profiles():
        lines = answered(hspec("profile", "--show", "--name", name)).text.splitlines()
        assert max(map(len, lines)) <= min(columns, 110)
        assert not [line for line in lines if line != line.rstrip()]


def test_json(hspec: Hspec, measured: list[str]) -> None:
    result = answered(hspec("profile", "--json", "--name", "lab"))
    document = result.document
    assert document["name"] == "lab"
    assert document["host"]["dram"] == 9e10
    assert document["host"]["disk"] is None
    assert document["gpus"][0]["capability"] == [9, 0]
    assert document["peer"] is None
    assert document["sources"] == dict(LAB.sources)
    assert answered(hspec("profile", "--json", "--show")).document == document
    assert measured


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profiles_are_shown(name: str, hspec: Hspec, tmp_path: Path) -> None:
    result = answered(hspec("profile", "--show", "--name", name))
    assert result.text.splitlines()[0] == name
    assert answered(hspec("profile", "--show", "--name", name, "--json")).document["name"] == name
    elsewhere = save_profile(load_profile(name), "mine")
    assert answered(hspec("profile", "--show", "--name", elsewhere)).out == result.out
    assert tmp_path in elsewhere.parents


# --- what cannot be ----------------------------------------------------------------------------------------------


def test_nothing_kept_yet(hspec: Hspec) -> None:
    refused(hspec("profile", "--show"), 1, "no profile of this host", "`hspec profile` measures it")


def test_words_that_contradict(hspec: Hspec, measured: list[str]) -> None:
    refused(hspec("profile", "--show", "--quick"), 2, "--show", "--quick")
    refused(hspec("profile", "--name", "cpu-only"), 2, "comes with hspec", "--show --name cpu-only")
    refused(hspec("profile", "--name", "a/b"), 2, "letters, digits", "'a/b'")
    refused(hspec("profile", "--show", "--name", "2x-rtx-9090"), 2, "`2x-rtx-9090`", "2x-rtx-4090-x8", "cpu-only")
    refused(hspec("profile", "--show", "--name", "./x.toml"), 1, "x.toml", "no such file")
    refused(hspec("profile", "extra"), 2, "unexpected")
    assert measured == []


@pytest.mark.parametrize(
    "content", [b"", b"version = 0\n", b"version = 1\n", b"\xff", b"<html>", b"version = 1\n[host"]
)
def test_files_that_hold_no_profile(content: bytes, hspec: Hspec, measured: list[str]) -> None:
    path = save_profile(LAB, host_key())
    path.write_bytes(content)
    refused(hspec("profile", "--show"), 1, f"`{path}` is no host profile", "`hspec profile` writes it anew")
    answered(hspec("profile"))
    answered(hspec("profile", "--show"))
    assert measured == ["measure"]


def test_what_cannot_be_kept_is_printed_all_the_same(hspec: Hspec, config: Path, measured: list[str]) -> None:
    config.parent.parent.mkdir(parents=True)
    config.parent.write_text("in the way")
    result = hspec("profile")
    assert result.code == 1
    assert rows(result.text)["RAM to use"] == ["120 GB"]
    assert [line for line in result.err.splitlines() if line.startswith("error: the profile cannot be saved in")]
    assert "XDG_CONFIG_HOME" in result.err
    assert "Traceback" not in result.err
    assert measured


def test_interrupted(hspec: Hspec, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> HostProfile:
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "measure", interrupted)
    result = hspec("profile")
    assert (result.code, result.out, result.err) == (130, b"", "hspec: interrupted\n")
    assert saved_names() == ()


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    """`hspec profile | head -1`."""
    read, write = os.pipe()
    os.close(read)
    argv = program("profile", "--show", "--name", "cpu-only")
    done = subprocess.run(argv, stdout=write, stderr=subprocess.PIPE, env=environment(tmp_path), check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_help_and_names_need_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys; from hspec_cli.main import main\n"
        "for argv in (['profile', '--help'], ['profile', '--show', '--name', 'cpu-only', '--json']): main(argv)\n"
        "print({'torch', 'numpy', 'pynvml', 'rich'} & set(sys.modules), file=sys.stderr)"
    )
    argv = [program()[0], "-c", script]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment(tmp_path), check=True)
    assert done.stderr == "set()\n"


# --- a terminal --------------------------------------------------------------------------------------------------


def on_a_terminal(tmp_path: Path, *argv: str, **more: str) -> str:
    """What a terminal of 80 columns receives from a command that ends well."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = environment(tmp_path, TERM="xterm", **more)
    for name in ("COLUMNS", "NO_COLOR") if "NO_COLOR" not in more else ("COLUMNS",):
        env.pop(name, None)
    with subprocess.Popen(program(*argv), stdout=theirs, stderr=theirs, stdin=theirs, env=env) as command:
        os.close(theirs)
        said = b"".join(iter(lambda: _read(ours), b""))
    os.close(ours)
    assert command.returncode == 0, said
    return said.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the command is gone
        return b""


def test_on_a_terminal(tmp_path: Path, hspec: Hspec) -> None:
    argv = ("profile", "--show", "--name", "2x-rtx-4090")
    plain = on_a_terminal(tmp_path, *argv, NO_COLOR="1")
    coloured = on_a_terminal(tmp_path, *argv)
    assert "\x1b[1mGPU 0: NVIDIA GeForce RTX 4090" in coloured
    words = hspec(*argv).text.split()
    assert STYLES.sub("", coloured).split() == words
    plain = STYLES.sub("", plain)
    assert max(map(len, plain.splitlines())) <= 80
    assert plain.split() == words
