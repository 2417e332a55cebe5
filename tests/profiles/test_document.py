"""Records as TOML: what is written is read, what nobody wrote is refused in words."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hspec_profiles.document import Malformed, dumps, loads
from hspec_profiles.profile import Gpu, Host, HostProfile

text = st.text(st.characters(exclude_categories=["Cs"]))
rate = st.none() | st.floats(min_value=1e-300, allow_infinity=False)
size = st.integers(0, 1 << 62)
gpus = st.builds(
    Gpu,
    text,
    size,
    size,
    copy=rate,
    matrix=rate,
    pcie_width=st.none() | st.integers(0, 16),
    capability=st.none() | st.tuples(st.integers(0, 20), st.integers(0, 9)),
    identity=text,
)
hosts = st.builds(Host, text, size, size, pinnable=st.none() | size, dram=rate, disk=rate)
profiles = st.builds(
    HostProfile,
    text,
    hosts,
    gpus=st.lists(gpus, max_size=3).map(tuple),
    peer=rate,
    sources=st.dictionaries(text, text, max_size=4),
    measured_at=text,
)


@given(profiles)
def test_what_is_written_is_read(profile: HostProfile) -> None:
    assert loads(HostProfile, dumps(profile, 3), 3) == profile


SMALL = HostProfile("a", Host("cpu", 2, 1000), (Gpu("g", 100, 90),))


def test_it_reads_well() -> None:
    profile = replace(SMALL, gpus=(Gpu("RTX", 25_757_220_864, 0, copy=9.07e11, to_device=25e9, capability=(8, 9)),))
    assert dumps(profile, 1) == (
        'version = 1\nname = "a"\n\n[host]\nname = "cpu"\ncores = 2\nram = 1_000\n\n'
        '[[gpus]]\nname = "RTX"\nmemory = 25_757_220_864\nfree = 0\ncopy = 9.07e11\nto_device = 2.5e10\n'
        "capability = [8, 9]\n"
    )


def test_records_can_be_keys() -> None:
    assert len({SMALL, replace(SMALL), replace(SMALL, name="b")}) == 2


HOST = "[host]\nname = 'c'\ncores = 1\nram = 1\n"
FAULTS = {
    "": "no `version`",
    "name = 'a'": "no `version`",
    "version = ": "not TOML",
    "\x00": "not TOML",
    "version = 2\nfoo = 1": "format version 2 where 1 is read",
    "version = '1'": "format version '1'",
    "version = 1": "`name`, `host` missing",
    "version = 1\nname = 'a'\nhost = 3": "`host` must be a table",
    f"version = 1\nname = 5\n{HOST}": "`name` must be a string",
    f"version = 1\nname = 'a'\n{HOST}".replace("cores = 1", "cores = 1.5"): "`host.cores` must be a whole number",
    f"version = 1\nname = 'a'\n{HOST}".replace("cores = 1", "cores = true"): "`host.cores` must be a whole number",
    f"version = 1\nname = 'a'\n{HOST}".replace("ram = 1", "ram = -1"): "`host.ram` must be a whole number, 0 or more",
    f"version = 1\nname = 'a'\n{HOST}dram = -1": "`host.dram` must be a number, 0 or more",
    f"version = 1\nname = 'a'\n{HOST}dram = nan": "`host.dram` must be a number, 0 or more",
    f"version = 1\nname = 'a'\n{HOST}dram = inf": "`host.dram` must be a number, 0 or more",
    f"version = 1\nname = 'a'\n{HOST}dram = '9'": "`host.dram` must be a number, 0 or more",
    f"version = 1\nname = 'a'\n{HOST}dramm = 1": "`host.dramm` not known",
    f"version = 1\nname = 'a'\ngpus = 3\n{HOST}": "`gpus` must be a list",
    f"version = 1\nname = 'a'\ngpus = [3]\n{HOST}": "`gpus.0` must be a table",
    f"version = 1\nname = 'a'\n{HOST}[[gpus]]\nname = 'g'": "`gpus.0.memory`, `gpus.0.free` missing",
    f"version = 1\nname = 'a'\n{HOST}[[gpus]]\nname = 'g'\nmemory = 1\nfree = 1\ncapability = [8]": "2 items",
    f"version = 1\nname = 'a'\nsources = []\n{HOST}": "`sources` must be a table",
    f"version = 1\nname = 'a'\nsources = {{x = 1}}\n{HOST}": "`sources.x` must be a string",
}


@pytest.mark.parametrize(("document", "said"), FAULTS.items(), ids=range(len(FAULTS)))
def test_what_is_no_record(document: str, said: str) -> None:
    with pytest.raises(Malformed) as refused:
        loads(HostProfile, document, 1)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@dataclass(frozen=True)
class Other:
    """A record with what profiles do not have."""

    sure: bool
    share: float = 1.0
    parts: tuple[Host, ...] = ()


@pytest.mark.parametrize("record", [Other(True), Other(False, 0.0, (Host("a", 1, 2), Host("b", 0, 0, dram=0.0)))])
def test_records_of_others(record: Other) -> None:
    assert loads(Other, dumps(record, 1), 1) == record


def test_truth_is_no_number() -> None:
    for wrong in ("sure = 1", "sure = true\nshare = true"):
        with pytest.raises(Malformed):
            loads(Other, f"version = 1\n{wrong}", 1)


def test_every_cut_is_noticed_or_harmless() -> None:
    """A file that lost its end is refused, or says nothing false."""
    whole = dumps(SMALL, 1)
    for end in range(len(whole)):
        try:
            found = loads(HostProfile, whole[:end], 1)
        except Malformed:
            continue
        assert found.name == "a"
        assert found.host.cores == 2


def test_whole_numbers_may_stand_for_rates() -> None:
    assert tomllib.loads("x = 9e9")["x"] == 9e9
    found = loads(HostProfile, dumps(SMALL, 1).replace("ram = 1_000", "ram = 1\ndram = 9_000"), 1)
    assert found.host.dram == 9000.0
    assert isinstance(found.host.dram, float)
    assert math.isfinite(found.host.dram)
