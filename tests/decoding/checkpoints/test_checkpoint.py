"""Checkpoints in place: what is refused before a weight is read, and that reading copies nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

from hspec_decoding.checkpoints.checkpoint import Checkpoint, read_header
from hspec_profiles.errors import HspecError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_models.model(tmp_path / "model", tokenizer=False)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tiny_models.model(tmp_path / "model", tokenizer=False, shards=True)


def refusal(call: Callable[[], object]) -> HspecError:
    """The error that `call` raises, whose message is one sentence."""
    with pytest.raises(HspecError) as caught:
        call()
    message = caught.value.message
    assert "\n" not in message
    assert not message.endswith(".")
    assert caught.value.exit_code == 1
    return caught.value


def opened(directory: Path) -> Checkpoint:
    checkpoint = Checkpoint.open(directory)
    checkpoint.preflight()
    return checkpoint


def edit(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


# --- what is there -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_tensors_are_the_stored_ones(tmp_path: Path, family: str, shards: bool) -> None:
    directory = tiny_models.model(tmp_path, family, tokenizer=False, shards=shards, seed=3)
    checkpoint = opened(directory)
    expected = tiny_models.build(family, 3, torch.float32, {}).state_dict()
    assert set(checkpoint.config.tensors()) == set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.tensor(name), tensor), name
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in expected.values())
    assert checkpoint.raw["model_type"] == checkpoint.config.family == family
    assert checkpoint.generation == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_stored_dtype_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoint = opened(tiny_models.model(tmp_path, tokenizer=False, dtype=dtype))
    assert checkpoint.tensor("model.norm.weight").dtype == dtype
    assert checkpoint.nbytes == 188_992 * dtype.itemsize


@pytest.mark.parametrize(
    "overrides",
    [
        {"head_dim": 32},
        {"num_key_value_heads": 1},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    ],
    ids=["head_dim", "mqa", "tied", "biases", "yarn"],
)
def test_kinds_of_llama(tmp_path: Path, overrides: dict[str, Any]) -> None:
    checkpoint = opened(tiny_models.model(tmp_path, tokenizer=False, **overrides))
    assert checkpoint.config.tied == ("lm_head.weight" not in checkpoint.tensors)
    assert checkpoint.config.context == 512


def test_generation_config_is_read(model: Path) -> None:
    (model / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    assert Checkpoint.open(model).generation == {"eos_token_id": [1, 3]}


def test_nothing_is_copied(model: Path) -> None:
    checkpoint = opened(model)
    first, again = (checkpoint.tensor("model.embed_tokens.weight") for _ in range(2))
    assert first.data_ptr() == again.data_ptr()
    before = first.clone()
    checkpoint.release(checkpoint.tensors)
    assert torch.equal(first, before)


def test_writing_to_a_view_leaves_the_file_alone(model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    Checkpoint.open(model).tensor("model.norm.weight").zero_()
    assert (model / "model.safetensors").read_bytes() == content


SIZE_PROBE = """
import sys
from pathlib import Path
from hspec_decoding.checkpoints.checkpoint import Checkpoint

def anonymous():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon")) * 1024

checkpoint = Checkpoint.open(Path(sys.argv[1]))
small = checkpoint.tensor("model.norm.weight").sum()
before = anonymous()
large = checkpoint.tensor("model.embed_tokens.weight")
assert large.nbytes > 200e6 and large.sum() == 0
print(anonymous() - before)
"""


def test_large_tensor_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    """200 MB are summed where they lie: what the process allocates stays under 8 MB."""
    tiny_models.model(tmp_path, tokenizer=False, num_hidden_layers=1)
    edit(tmp_path, vocab_size=1_600_000)
    shapes = Checkpoint.open(tmp_path).config.tensors()
    header, end = {}, 0
    for name, (rows, *columns) in shapes.items():
        start, end = end, end + 2 * rows * (columns[0] if columns else 1)
        header[name] = {"dtype": "BF16", "shape": (rows, *columns), "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)  # a sparse file of zeros; the header's length is odd on purpose
    opened(tmp_path)
    out = subprocess.run(
        [sys.executable, "-c", SIZE_PROBE, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert int(out) < 8_000_000


def test_opening_is_fast(tmp_path: Path) -> None:
    directory = tiny_models.model(tmp_path, tokenizer=False, num_hidden_layers=30)

    def once() -> float:
        start = time.perf_counter()
        opened(directory)
        return time.perf_counter() - start

    assert min(once() for _ in range(5)) < 0.05


# --- damaged files -----------------------------------------------------------------------------------------------


def test_truncated_file(model: Path) -> None:
    path = model / "model.safetensors"
    whole = path.stat().st_size
    os.truncate(path, whole - 500)
    error = refusal(lambda: Checkpoint.open(model))
    assert error.message == f"`{path}` is truncated: it has {whole - 500:,} bytes, its header says {whole:,}"
    assert error.hint == "download or copy it again"


def test_truncated_header(model: Path) -> None:
    path = model / "model.safetensors"
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    os.truncate(path, 100)
    assert f"has 100 bytes, its header alone needs {header:,}" in refusal(lambda: Checkpoint.open(model)).message


def test_trailing_bytes(model: Path) -> None:
    path = model / "model.safetensors"
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"x" * 7)
    message = refusal(lambda: Checkpoint.open(model)).message
    assert f"has bytes after its end: it has {whole + 7:,} bytes, its header says {whole:,}" in message


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 2590000000\n"


@pytest.mark.parametrize(
    ("content", "looks"),
    [
        (LFS, "is a Git LFS pointer of 135 bytes"),
        (b"\n<!DOCTYPE html><html></html>", "is an HTML page of 29 bytes"),
        (b"", "is empty"),
        (b"\0\1\2", "is no safetensors file: 3 bytes"),
        (b"\xff" * 4096, "is no safetensors file: 4,096 bytes"),
        (b"\x04" + bytes(7) + b"[{}]", "is no safetensors file: its header of 4 bytes is damaged"),
        (b"\x0a" + bytes(7) + b'{"a":null}', "is no safetensors file: its header of 10 bytes is damaged"),
    ],
    ids=["lfs", "html", "empty", "tiny", "noise", "list", "null"],
)
def test_file_that_holds_no_weights(model: Path, content: bytes, looks: str) -> None:
    (model / "model.safetensors").write_bytes(content)
    assert f"`{model / 'model.safetensors'}` {looks}" in refusal(lambda: Checkpoint.open(model)).message


def test_header_range_that_is_not_the_shape(model: Path) -> None:
    header = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 20]}}
    text = json.dumps(header).encode()
    path = model / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(20))
    assert "damaged" in refusal(lambda: read_header(path)).message


def test_dtype_that_nobody_reads(model: Path) -> None:
    text = b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
    path = model / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(1))
    assert "`a` is stored as F4" in refusal(lambda: read_header(path)).message


def test_all_missing_shards_are_named(sharded: Path) -> None:
    shards = sorted(sharded.glob("model-*.safetensors"))
    for gone in shards[1:3]:
        gone.unlink()
    error = refusal(lambda: Checkpoint.open(sharded))
    assert f"lacks 2 of the {len(shards)} weight files" in error.message
    assert error.message.endswith(f"{shards[1].name}, {shards[2].name}")
    assert error.hint


def test_stale_index(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, *_, last = sorted(set(index["weight_map"].values()))
    index["weight_map"] |= {"model.norm.weight": first, "model.layers.9.mlp.up_proj.weight": last}
    path.write_text(json.dumps(index))
    message = refusal(lambda: Checkpoint.open(sharded)).message
    assert f"2 tensors are not where it says, `model.norm.weight` in {first}" in message


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {"a": "../b"}}', "nonsense"])
def test_broken_index(sharded: Path, index: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in refusal(lambda: Checkpoint.open(sharded)).message


# --- config and tensors ------------------------------------------------------------------------------------------


def test_missing_tensor_is_named(model: Path) -> None:
    edit_tensors(model, lambda tensors: tensors.pop("model.layers.2.mlp.down_proj.weight"))
    message = refusal(lambda: opened(model)).message
    assert message == (
        f"`{model}` lacks 1 of the 39 tensors that its config.json asks for: model.layers.2.mlp.down_proj.weight"
    )


def test_more_layers_in_the_config(model: Path) -> None:
    edit(model, num_hidden_layers=6)
    error = refusal(lambda: opened(model))
    assert "lacks 18 of the 57 tensors" in error.message
    assert "model.layers.4.self_attn.q_proj.weight" in error.message
    assert error.message.endswith("and 13 more")
    assert error.hint == "config.json says 6 layers, the files hold 4"


def test_untied_config_without_head(model: Path) -> None:
    edit_tensors(model, lambda tensors: tensors.pop("lm_head.weight"))
    error = refusal(lambda: opened(model))
    assert "asks for: lm_head.weight" in error.message
    assert "tie_word_embeddings" in (error.hint or "")
    edit(model, tie_word_embeddings=True)
    opened(model)


def test_shape_of_another_model(model: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    edit_tensors(model, lambda tensors: tensors.update({name: torch.zeros(48, 64)}))
    message = refusal(lambda: opened(model)).message
    assert message == f"`{model / 'model.safetensors'}`: `{name}` has shape 48 × 64, config.json says 32 × 64"


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_dtype_that_is_no_float(model: Path, dtype: torch.dtype) -> None:
    edit_tensors(model, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(dtype)}))
    message = refusal(lambda: opened(model)).message
    assert f"`model.norm.weight` is stored as {str(dtype).removeprefix('torch.')}" in message


def test_bias_that_the_config_denies(model: Path) -> None:
    edit_tensors(model, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    message = refusal(lambda: opened(model)).message
    assert "does not account for: model.layers.0.self_attn.q_proj.bias" in message


def test_old_rotary_buffers_do_not_matter(model: Path) -> None:
    edit_tensors(model, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    opened(model)


def test_tensor_that_is_not_there(model: Path) -> None:
    assert "has no tensor `nothing`" in refusal(lambda: Checkpoint.open(model).tensor("nothing")).message
