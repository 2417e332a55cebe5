"""Where profiles lie, which one is meant, and what is said about files that hold none."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from hspec_profiles import profile as profiles
from hspec_profiles.document import dumps
from hspec_profiles.errors import HspecError, UsageError
from hspec_profiles.profile import (
    Gpu,
    Host,
    HostProfile,
    check_name,
    host_key,
    load_profile,
    save_profile,
    saved_names,
    saved_profile,
    shipped_profiles,
)

SMALL = HostProfile("a", Host("cpu", 2, 1000), (Gpu("g", 100, 90, copy=1.5e9),), sources={"gpus.0.copy": "measured"})
SHIPPED = [
    "1x-a100-80gb",
    "1x-h200",
    "1x-l40",
    "1x-rtx-3090",
    "1x-rtx-4060-8gb",
    "1x-rtx-4090",
    "1x-rtx-5090",
    "2x-rtx-4090",
    "2x-rtx-4090-x8",
    "cpu-only",
]
MEASURABLE = {
    "host": {field.name for field in fields(Host)} - {"name"},
    "gpu": {field.name for field in fields(Gpu)} - {"name", "identity"},
}


# --- shipped profiles --------------------------------------------------------------------------------------------


def test_what_is_shipped() -> None:
    assert list(shipped_profiles()) == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_figures_say_where_they_come_from(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.measured_at == ""
    for record, path, names in [
        (profile.host, "host.", MEASURABLE["host"]),
        *((gpu, f"gpus.{i}.", MEASURABLE["gpu"]) for i, gpu in enumerate(profile.gpus)),
    ]:
        for field in names:
            assert profile.sources[f"{path}{field}"], field
            if getattr(record, field) is not None:
                first = profile.sources[f"{path}{field}"].split(",")[0].split(":")[0].split(" on ")[0]
                assert first in ("measured", "data sheet", "derived", "an example", "all usable RAM"), (field, first)
    if len(profile.gpus) > 1:
        assert {"peer", "both_links"} <= set(profile.sources)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_figures_are_possible(name: str) -> None:
    profile = load_profile(name)
    assert len(profile.gpus) == (0 if name == "cpu-only" else int(name[0]))
    host = profile.host
    assert None not in (host.dram, host.attention, host.attention_rows, host.product)
    assert host.attention_rows < host.attention < host.dram
    assert host.product <= host.dram
    for gpu in profile.gpus:
        assert gpu.free < gpu.memory
        bus = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}[gpu.pcie_generation] * gpu.pcie_width
        assert 0.7 * bus < gpu.to_device < bus
        assert gpu.to_device_pageable < gpu.to_device < gpu.copy


def test_the_h200_is_as_measured() -> None:
    host, (gpu,) = load_profile("1x-h200").host, load_profile("1x-h200").gpus
    assert (gpu.copy, gpu.to_device, gpu.to_host, gpu.to_device_pageable) == (4240e9, 55e9, 55e9, 9.2e9)
    assert (host.cores, host.dram, host.attention, host.attention_rows, host.pin) == (16, 92e9, 77e9, 46e9, 2.8e9)


def test_lanes_shared_by_two_gpus_halve_the_links() -> None:
    wide, narrow = load_profile("2x-rtx-4090"), load_profile("2x-rtx-4090-x8")
    assert narrow.both_links == pytest.approx(wide.both_links / 2, rel=0.02)


# --- the user's profiles -----------------------------------------------------------------------------------------


def test_saved_and_loaded_by_name_and_by_path(config: Path) -> None:
    path = save_profile(SMALL, "lab.2")
    assert path == config / "hspec" / "profiles" / "lab.2.toml"
    assert load_profile("lab.2") == load_profile(path) == load_profile(str(path)) == SMALL
    assert saved_names() == ("lab.2",)
    assert [file.name for file in path.parent.iterdir()] == ["lab.2.toml"]
    save_profile(replace(SMALL, name="b"), "lab.2")
    assert load_profile("lab.2").name == "b"


def test_the_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CONFIG_HOME", value)
        assert save_profile(SMALL, "x") == tmp_path / ".config" / "hspec" / "profiles" / "x.toml"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert load_profile("x") == load_profile("~/.config/hspec/profiles/x.toml") == SMALL


def test_this_hosts_profile() -> None:
    assert saved_profile() is None
    save_profile(SMALL, host_key())
    assert saved_profile() == SMALL


def test_the_key_is_the_host_its_gpus_and_its_driver(
    gpus: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [host_key()]
    for how in ({"count": 1}, {"count": 2}, {"count": 2, "driver": "590"}):
        gpus(**how)
        keys += [host_key()]
        assert host_key() == keys[-1]
    monkeypatch.setattr("platform.node", lambda: "Über/../host.example")
    keys += [host_key()]
    assert len(set(keys)) == len(keys)
    assert keys[-1].startswith("ber-host-example-")
    assert check_name(keys[-1])
    monkeypatch.setattr("platform.node", lambda: "")
    assert host_key().startswith("host-")


@pytest.mark.parametrize("name", ["", "a/b", "..", ".x", "-x", "a b", "ä", "x.toml", "a\n"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(UsageError, match="a profile's name"):
        check_name(name)


def test_shipped_names_are_taken() -> None:
    with pytest.raises(UsageError, match="comes with hspec"):
        check_name("cpu-only")


def test_no_room_or_no_permission(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text("a file where a directory should be")
    with pytest.raises(HspecError, match=r"cannot be saved in .*profiles`: ") as failure:
        save_profile(SMALL, "x")
    assert "XDG_CONFIG_HOME" in str(failure.value.hint)
    config.unlink()
    save_profile(SMALL, "x")

    def full(_self: Path, *_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(HspecError, match="No space left"):
            save_profile(replace(SMALL, name="other"), "x")
    assert load_profile("x") == SMALL
    assert os.listdir(config / "hspec" / "profiles") == ["x.toml"]


# --- what is no profile ------------------------------------------------------------------------------------------


def test_unknown_names_list_the_known_ones() -> None:
    save_profile(SMALL, "mine")
    with pytest.raises(UsageError, match="no host profile named `1x-rtx-4080`") as failure:
        load_profile("1x-rtx-4080")
    assert failure.value.hint is not None
    assert {"mine,", "1x-rtx-4090,", "`hspec", "profile`"} <= set(failure.value.hint.split())


@pytest.mark.parametrize("path", ["./nowhere.toml", "/nowhere/x", "nowhere.toml"])
def test_files_that_are_not_there(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HspecError, match=r"no host profile can be read at `.*`: No such file"):
        load_profile(path)
    with pytest.raises(HspecError, match="Is a directory"):
        load_profile(tmp_path)


DAMAGED = {
    "empty": (b"", "no `version`"),
    "old": (dumps(SMALL, 0).encode(), "format version 0 where 1 is read"),
    "newer": (dumps(SMALL, 2).encode() + b"[more]\n", "format version 2"),
    "cut": (dumps(SMALL, 1).encode().split(b"[host]")[0], "`host` missing"),
    "binary": (b"\xff\xfe\x00", "not UTF-8"),
    "a page": (b"<!DOCTYPE html>", "not TOML"),
    "no cores": (dumps(replace(SMALL, host=Host("c", 0, 1)), 1).encode(), "host.cores"),
    "no name": (dumps(replace(SMALL, name=""), 1).encode(), "name"),
    "a rate of nothing": (dumps(replace(SMALL, gpus=(Gpu("g", 1, 0, copy=0.0),)), 1).encode(), "gpus.0.copy"),
    "more free than there is": (dumps(replace(SMALL, gpus=(Gpu("g", 1, 2),)), 1).encode(), "gpus.0.free"),
}


@pytest.mark.parametrize(("content", "said"), DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_and_old_files(content: bytes, said: str) -> None:
    path = save_profile(SMALL, host_key())
    path.write_bytes(content)
    for read in (saved_profile, lambda: load_profile(path), lambda: load_profile(host_key())):
        with pytest.raises(HspecError) as failure:
            read()
        assert str(path) in failure.value.message
        assert said in failure.value.message
        assert "\n" not in failure.value.message
        assert "hspec profile" in str(failure.value.hint)
    assert profiles.VERSION == 1
