"""Plans as JSON and TOML, and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from plan_tools import GB, GIB, NONE, ONE, gpus, model, shape

from hspec_offload.ask import Limits, Workload
from hspec_offload.hints import hints
from hspec_offload.plan import plan
from hspec_offload.plan_file import as_toml, document, parsed, read_plan
from hspec_profiles.document import Malformed
from hspec_profiles.errors import HspecError

LLAMA = shape("llama2-7b-128k")
PLANS = {
    "resident": plan(ONE, LLAMA, Workload(4096)),
    "kv": plan(ONE, LLAMA, Workload(122_880, draft=shape("llama-68m")), Limits(vram=24 * GIB)),
    "weights": plan(gpus(8), LLAMA, Workload(2048, text="code")),
    "disk": plan(gpus(8), LLAMA, Workload(2048), Limits(ram=8 * GB)),
    "pair": plan(gpus(24, 12), LLAMA, Workload(60_000)),
    "cpu": plan(NONE, model(), Workload(512, batch=2)),
}


@pytest.mark.parametrize("name", PLANS)
def test_there_and_back(name: str) -> None:
    made = PLANS[name]
    assert parsed(as_toml(made)) == made
    assert parsed(json.dumps(document(made, ["a hint"]), allow_nan=False)) == made


def test_files(tmp_path: Path) -> None:
    made = PLANS["kv"]
    for name, text in (("plan.json", json.dumps(document(made))), ("plan.toml", as_toml(made))):
        path = tmp_path / name
        path.write_text(text, "utf-8")
        assert read_plan(path) == made


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no `version`"),
        ("{", "not JSON"),
        ("[1", "not TOML"),
        ('{"version": 7}', "version 7"),
        ("{}", "no `version`"),
        ('{"version": 1, "model": null}', "missing"),
        ("null", "not TOML"),
        ('{"version": 1, "model": "m"}', "missing"),
        ('{"version": 1, "modle": "m"}', "not known"),
    ],
)
def test_other_files_are_no_plans(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(Malformed, match=says):
        parsed(text)
    path = tmp_path / "plan.json"
    path.write_text(text, "utf-8")
    with pytest.raises(HspecError, match="is no plan"):
        read_plan(path)


@pytest.mark.parametrize("name", ["kv", "weights", "cpu"])
@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("layers", 0, "weights"), "nowhere", "gpu, stream, disk, cpu"),
        (("layers", 0, "keys"), "disk", "gpu, stream, cpu, split"),
        (("layers", 0, "copy"), "int2", "int4"),
        (("layers", 0, "first"), 1, "follow one another"),
        (("layers", 0, "last"), None, "`layers.0.last` must be a whole number"),
        (("devices",), [], "and RAM"),
        (("gpus",), [0, 1, 2], "and RAM"),
        (("block",), 65, "from 1 to 64 rows"),
        (("block",), 0, "from 1 to 64 rows"),
        (("context",), None, "`context` must be a whole number"),
    ],
)
def test_what_a_hand_broke_is_told(name: str, path: tuple[str | int, ...], value: object, says: str) -> None:
    table = part = json.loads(json.dumps(document(PLANS[name])))
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = value
    with pytest.raises(Malformed, match=says):
        parsed(json.dumps(table))


def test_a_ring_without_room_is_told() -> None:
    for pieces, nbytes in ((0, 1 << 26), (4, 0), (4, 1 << 20)):
        broken = replace(PLANS["kv"], ring_pieces=pieces, piece_bytes=nbytes)
        with pytest.raises(Malformed, match="67,108,864 bytes at least"):
            parsed(as_toml(broken))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(HspecError, match="No such file"):
        read_plan(tmp_path / "plan.json")


class TestHints:
    """What is said to help does."""

    def test_more_memory_and_less_context(self) -> None:
        host, work = gpus(24), Workload(122_880)
        said = hints(host, LLAMA, work, Limits(), plan(host, LLAMA, work))
        memory = next(line for line in said if "GPU memory" in line)
        more = int(memory.split()[1])
        better = plan(gpus(24 + more), LLAMA, work).prediction.seconds_per_token
        said_ms = float(memory.split("memory: ")[1].split()[0].replace(",", ""))
        assert said_ms == pytest.approx(1e3 * better, rel=5e-3)
        assert any("`--ctx 61440`" in line for line in said)
        assert any("131,072 tokens would fit, all that the model holds" in line for line in said)

    def test_caps_are_raised_too(self) -> None:
        work, limits = Workload(2048), Limits(vram=8 * GIB, ram=8 * GB)
        said = hints(ONE, LLAMA, work, limits, plan(ONE, LLAMA, work, limits))
        assert any("more GPU memory" in line for line in said)
        assert any("more RAM" in line for line in said)

    def test_memory_helps_no_plan_that_is_resident(self) -> None:
        work = Workload(LLAMA.context)
        assert not any("more" in line for line in hints(ONE, LLAMA, work, Limits(), plan(ONE, LLAMA, work)))
