"""`.bin` checkpoints as safetensors: the same tensors, once, whole or not at all."""

from __future__ import annotations

import collections
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors.torch import load_file

from hspec_decoding.checkpoints import convert, hub
from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.checkpoints.safetensors_file import Stored, write_safetensors
from hspec_profiles.errors import DoesNotFit, HspecError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own; the directory that copies are made in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hspec" / "converted"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_models.model(tmp_path / "model", tokenizer=False, safetensors=False)


def fetch(directory: Path, said: list[str] | None = None) -> Path:
    return hub.fetch(str(directory), offline=True, say=(said if said is not None else []).append)


def refused(directory: Path) -> str:
    with pytest.raises(HspecError) as caught:
        fetch(directory)
    return caught.value.message


def copies(cache: Path) -> list[str]:
    """Everything under the cache but lock files."""
    return sorted(path.name for path in cache.glob("*") if not path.name.endswith(".lock"))


def edit_bin(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = directory / "pytorch_model.bin"
    tensors = torch.load(path, weights_only=True)
    change(tensors)
    torch.save(tensors, path)


# --- the writer --------------------------------------------------------------------------------------------------


def test_written_file_is_what_the_library_reads(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).to(torch.bfloat16), "c": torch.randn(2, 2, 2).half()}
    kinds = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

    def halves(tensor: torch.Tensor) -> list[memoryview]:
        data = memoryview(tensor.view(torch.uint8).numpy().tobytes())
        return [data[:3], data[3:]]

    stored = [
        Stored(name, kinds[t.dtype], tuple(t.shape), lambda t=t: halves(t))  # type: ignore[misc]
        for name, t in tensors.items()
    ]
    wrote: list[int] = []
    write_safetensors(tmp_path / "x.safetensors", stored, wrote.append)
    read = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert sum(wrote) == sum(tensor.nbytes for tensor in tensors.values())


def test_tensor_that_gives_too_few_bytes(tmp_path: Path) -> None:
    with pytest.raises(HspecError, match="`a` gave 3 bytes, not 8"):
        write_safetensors(tmp_path / "x", [Stored("a", "F32", (2,), lambda: [memoryview(b"abc")])], lambda _: None)


# --- the same tensors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", [False, True])
def test_same_as_its_safetensors_twin(tmp_path: Path, shards: bool, dtype: torch.dtype) -> None:
    twin = tiny_models.model(tmp_path / "twin", seed=5, tokenizer=False, dtype=dtype)
    model = tiny_models.model(
        tmp_path / "model", seed=5, tokenizer=False, safetensors=False, shards=shards, dtype=dtype
    )
    checkpoint = Checkpoint.open(fetch(model))
    checkpoint.preflight()
    expected = load_file(twin / "model.safetensors")
    assert {info.dtype for info in checkpoint.tensors.values()} == {dtype}
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in expected.items())


def test_large_tensors_go_in_pieces(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "PIECE", 1000)
    steps: list[tuple[int, int]] = []
    directory = hub.fetch(str(model), offline=True, say=lambda _: None, progress=lambda *step: steps.append(step))
    expected = torch.load(model / "pytorch_model.bin", weights_only=True)
    checkpoint = Checkpoint.open(directory)
    assert all(torch.equal(checkpoint.tensor(name), expected[name]) for name in checkpoint.tensors)
    assert len(steps) > 700
    assert steps == sorted(steps)


def test_older_format_is_read(model: Path) -> None:
    path = model / "pytorch_model.bin"
    tensors = torch.load(path, weights_only=True)
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    assert torch.equal(Checkpoint.open(fetch(model)).tensor("lm_head.weight"), tensors["lm_head.weight"])


def test_buffers_and_a_tied_head_are_left_out(tmp_path: Path) -> None:
    model = tiny_models.model(tmp_path / "m", tokenizer=False, safetensors=False, tie_word_embeddings=True)
    more = {"lm_head.weight": torch.zeros(320, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    edit_bin(model, lambda tensors: tensors.update(more))
    checkpoint = Checkpoint.open(fetch(model))
    checkpoint.preflight()
    assert not set(more) & set(checkpoint.tensors)


def test_repository_of_llama2_7b_128k(tmp_path: Path) -> None:
    """The card's own model: two `.bin` shards, tokenizer.model, yarn, and code that stays untouched."""
    model = tiny_models.yarn_llama(tmp_path / "model")
    said: list[str] = []
    directory = fetch(model, said)
    checkpoint = Checkpoint.open(directory)
    checkpoint.preflight()
    assert checkpoint.config.rope["rope_type"] == "yarn"
    assert checkpoint.config.context == 4096
    assert (directory / "tokenizer.model").read_bytes() == (model / "tokenizer.model").read_bytes()
    assert not list(directory.glob("*.py"))
    assert not (model / tiny_models.MARKER).exists()
    assert [line for line in said if "auto_map" in line] == [
        f"`{model}` brings its own code (auto_map), ignored: hspec's llama decoder runs it"
    ]
    assert "converting" in said[1]
    assert " free" in said[1]


# --- once, and again when the source changes ---------------------------------------------------------------------


def test_converted_once(model: Path, cache: Path) -> None:
    said: list[str] = []
    first = fetch(model, said)
    times = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    assert fetch(model, said) == first
    assert {path: path.stat().st_mtime_ns for path in first.iterdir()} == times
    assert len(said) == 1
    assert copies(cache) == [first.name]


@pytest.mark.parametrize("file", ["pytorch_model.bin", "config.json"])
def test_changed_source_is_converted_again(model: Path, cache: Path, file: str) -> None:
    first = fetch(model)
    if file == "config.json":
        (model / file).write_text(json.dumps(json.loads((model / file).read_text()) | {"rope_theta": 5e5}))
    else:
        edit_bin(model, lambda tensors: tensors["model.norm.weight"].zero_())
    os.utime(model / file, ns=(time.time_ns(), time.time_ns() + 5))
    second = fetch(model)
    assert second != first
    assert copies(cache) == [second.name], "the copy of the older source is removed"
    if file == "pytorch_model.bin":
        assert not Checkpoint.open(second).tensor("model.norm.weight").any()


def test_same_names_elsewhere_are_other_models(tmp_path: Path, cache: Path) -> None:
    made = []
    for seed in (1, 2):
        model = tiny_models.model(tmp_path / str(seed) / "m", tokenizer=False, safetensors=False, seed=seed)
        made.append(Checkpoint.open(fetch(model)).tensor("lm_head.weight"))
    assert not torch.equal(*made)
    assert len(copies(cache)) == 2


def test_left_over_of_a_killed_process_is_replaced(model: Path, cache: Path) -> None:
    final = convert.place(model, [model / "pytorch_model.bin", model / "config.json"])
    partial = final.with_name(f"{final.name}.partial")
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"half")
    assert fetch(model) == final
    assert copies(cache) == [final.name]


def test_two_processes_convert_once(model: Path, cache: Path) -> None:
    code = (
        "import sys\nfrom hspec_decoding.checkpoints import hub\n"
        "print(hub.fetch(sys.argv[1], offline=True, say=lambda line: print(line, file=sys.stderr)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", code, str(model)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    running = [subprocess.Popen(command, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    results = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0], results
    assert len({out for out, _ in results}) == 1
    assert sum(err.count("converting `") for _, err in results) == 1
    assert len(copies(cache)) == 1


# --- refused, and nothing left -----------------------------------------------------------------------------------


class Trap:
    """An object that runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def test_code_in_a_pickle_is_refused(model: Path, tmp_path: Path, cache: Path) -> None:
    torch.save({"model.embed_tokens.weight": Trap(tmp_path / "ran")}, model / "pytorch_model.bin")
    assert "would run code" in refused(model)
    assert not (tmp_path / "ran").exists()
    assert copies(cache) == []


def test_truncated_file(model: Path, cache: Path) -> None:
    path = model / "pytorch_model.bin"
    size = path.stat().st_size - 500
    os.truncate(path, size)
    assert refused(model) == (f"`{path}` is truncated: its {size:,} bytes end without the directory of a PyTorch file")
    assert copies(cache) == []


@pytest.mark.parametrize(
    ("content", "looks"),
    [(b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"), (b"<html>", "HTML page"), (b"", "empty")],
)
def test_file_that_holds_no_weights(model: Path, content: bytes, looks: str) -> None:
    (model / "pytorch_model.bin").write_bytes(content)
    assert looks in refused(model)


def test_noise(model: Path) -> None:
    (model / "pytorch_model.bin").write_bytes(bytes(range(256)) * 9)
    assert f"`{model / 'pytorch_model.bin'}`" in refused(model)


def test_file_that_is_no_dictionary(model: Path) -> None:
    torch.save([torch.zeros(3)], model / "pytorch_model.bin")
    assert "is not a dictionary of tensors" in refused(model)


def test_missing_tensor_names_the_source(model: Path, cache: Path) -> None:
    edit_bin(model, lambda tensors: tensors.pop("model.layers.3.mlp.up_proj.weight"))
    assert refused(model) == f"`{model}` lacks 1 of 39 tensors: model.layers.3.mlp.up_proj.weight"
    assert copies(cache) == []


def test_missing_shards(tmp_path: Path) -> None:
    model = tiny_models.model(tmp_path / "m", tokenizer=False, safetensors=False, shards=True)
    for number in (1, 3):
        (model / f"pytorch_model-0000{number}-of-00003.bin").unlink()
    assert refused(model) == (
        f"`{model}` lacks 2 of the 3 weight files that pytorch_model.bin.index.json names: "
        "pytorch_model-00001-of-00003.bin, pytorch_model-00003-of-00003.bin"
    )


def test_no_room_on_the_disk(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 4096, 4096))
    size = (model / "pytorch_model.bin").stat().st_size
    with pytest.raises(DoesNotFit) as caught:
        fetch(model)
    assert f"({size:,} bytes)" in caught.value.message
    assert caught.value.message.endswith("has 4.1 kB free")
    assert caught.value.exit_code == 3
    assert "XDG_CACHE_HOME" in (caught.value.hint or "")
    assert copies(cache) == []


def test_disk_that_fills_while_writing(model: Path, cache: Path) -> None:
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        message = refused(model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert f"converting `{model}` failed: File too large" in message
    assert copies(cache) == []
    Checkpoint.open(fetch(model)).preflight()


def test_interrupted_conversion_leaves_nothing(model: Path, cache: Path) -> None:
    def interrupt(done: int, _total: int) -> None:
        if done > 100_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.fetch(str(model), offline=True, say=lambda _: None, progress=interrupt)
    assert copies(cache) == []


def test_cache_that_cannot_be_written(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert f"converting `{model}` failed: Not a directory" in refused(model)
