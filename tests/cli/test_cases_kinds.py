"""Kinds of checkpoints and room for their copies: section F of the cases that users of other tools hit."""

from __future__ import annotations

import collections
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import case_models as models
import case_tools as cases
import numpy as np
import pytest
import tiny_gguf
import tiny_models
import torch
from case_models import speaker
from case_tools import Hspec, answered, refused, short_run


@pytest.mark.parametrize(
    ("quantization", "package"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptqmodel"),
        ({"quant_method": "awq", "bits": 4}, "autoawq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "fp8"}, "fp8"),
    ],
)
def test_F14_quantized_checkpoint(hspec: Hspec, model: Path, quantization: dict[str, Any], package: str) -> None:
    """A quantized checkpoint is refused with its method, the package others read it with, and what hspec reads."""
    models.edit(model / "config.json", quantization_config=quantization)
    refused(short_run(hspec, model), 1, quantization["quant_method"], package, "GGUF")


YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {**YARN, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {
    "factor": 4.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        ("linear", {"factor": 2.0}),
        ("dynamic", {"factor": 2.0}),
        ("yarn", YARN),
        ("llama3", LLAMA3),
        ("longrope", LONG),
    ],
)
def test_F15_spellings_of_rope(hspec: Hspec, model: Path, kind: str, rope: dict[str, Any]) -> None:
    """`rope_scaling` with `type`, with `rope_type`, and `rope_parameters` mean the same; the text shows it."""
    texts = []
    for spelled in (
        {"rope_scaling": {"type": kind, **rope}, "rope_theta": 5000.0},
        {"rope_scaling": {"rope_type": kind, **rope}, "rope_theta": 5000.0},
        {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **rope}},
    ):
        models.edit(model / "config.json", **{"rope_scaling": None, "rope_parameters": None, "rope_theta": None})
        models.edit(model / "config.json", **spelled)
        result = answered(hspec("run", "-m", model, "--raw", "-n", 16, "--method", "triforce", "x" * 200))
        texts.append(result.out)
    assert texts[0] == texts[1] == texts[2]


def test_F15_unknown_rope(hspec: Hspec, model: Path) -> None:
    """A RoPE type that nobody knows is refused by name."""
    models.edit(model / "config.json", rope_scaling={"rope_type": "spiral", "factor": 2.0}, rope_parameters=None)
    refused(short_run(hspec, model), 1, "spiral")


def test_F18_bin_only(hspec: Hspec, tmp_path: Path) -> None:
    """A repository of `pytorch_model.bin` runs, is converted once, and gives the text of its safetensors twin."""
    same = short_run(hspec, tiny_models.model(tmp_path / "twin", seed=4)).out
    model = tiny_models.model(tmp_path / "model", seed=4, safetensors=False)
    assert [path.suffix for path in model.iterdir() if "model" in path.name and path.suffix in (".bin", ".safetensors")]
    assert not list(model.glob("*.safetensors"))
    first = answered(short_run(hspec, model))
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.safetensors")}
    second = answered(short_run(hspec, model))
    again = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.safetensors")}
    assert first.out == second.out == same
    assert made == again != {}


class Trap:
    """An object that runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def test_F18_bin_with_code(hspec: Hspec, tmp_path: Path) -> None:
    """A `.bin` that would run code is refused and runs none."""
    model = tiny_models.model(tmp_path / "model", safetensors=False)
    for path in model.glob("*.bin"):
        torch.save({"model.embed_tokens.weight": Trap(tmp_path / "ran")}, path)
    refused(short_run(hspec, model), 1, ".bin")
    assert not (tmp_path / "ran").exists()


def test_F18_safetensors_before_bin(hspec: Hspec, tmp_path: Path) -> None:
    """Where both kinds lie side by side, the safetensors are read."""
    model = speaker(tmp_path / "model", "o", "abc", then=1)
    (model / "pytorch_model.bin").write_bytes(b"never read")
    assert answered(short_run(hspec, model)).text == "abc"


def test_F18_adapters_only(hspec: Hspec, model: Path) -> None:
    """A directory of adapters is refused by that name, with the model they need."""
    (model / "model.safetensors").rename(model / "adapter_model.safetensors")
    (model / "config.json").unlink()
    models.edit(model / "adapter_config.json", peft_type="LORA", base_model_name_or_path="someone/base")
    refused(short_run(hspec, model), 1, "adapter", "someone/base")


def test_F18_no_weights(hspec: Hspec, model: Path) -> None:
    """A directory with a config and no weights is refused with the names that are looked for."""
    (model / "model.safetensors").unlink()
    refused(short_run(hspec, model), 1, "safetensors", str(model))


def write_gguf(path: Path) -> Path:
    """A two-layer Llama as a GGUF file that answers what ends in `o` with `abc`: one-hot embeddings, inert layers."""
    names = tiny_gguf.VOCABULARY["tokenizer.ggml.tokens"]
    size = len(names)
    head = np.zeros((size, size), np.float32)
    for one, after in (("o", "a"), ("a", "b"), ("b", "c"), ("c", "</s>")):
        head[names.index(after), names.index(one)] = 4.0
    ones = np.ones(size, np.float32)
    tensors = {"token_embd.weight": np.eye(size, dtype=np.float32), "output_norm.weight": ones, "output.weight": head}
    shapes = {"attn_q": (size, size), "attn_k": (size // 2, size), "attn_v": (size // 2, size)}
    shapes |= {"attn_output": (size, size), "ffn_gate": (32, size), "ffn_up": (32, size), "ffn_down": (size, 32)}
    for at in ("blk.0", "blk.1"):
        tensors |= {f"{at}.{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
        tensors |= {f"{at}.{name}.weight": ones for name in ("attn_norm", "ffn_norm")}
    metadata = {
        "context_length": 256,
        "embedding_length": size,
        "block_count": 2,
        "feed_forward_length": 32,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "rope.dimension_count": size // 4,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    return tiny_gguf.write(path, "llama", metadata, tensors)


@pytest.mark.parametrize("method", cases.METHODS)
def test_F18_gguf(hspec: Hspec, tmp_path: Path, method: str) -> None:
    """A GGUF file is a model like any other, and so is its copy in the cache at the second run."""
    path = write_gguf(tmp_path / "model.gguf")
    for _ in range(2):
        assert answered(short_run(hspec, path, "--method", method)).text == "abc"


def test_F18_damaged_gguf(hspec: Hspec, tmp_path: Path) -> None:
    """A truncated GGUF file, or one that is none, is refused by name."""
    path = write_gguf(tmp_path / "model.gguf")
    os.truncate(path, path.stat().st_size - 500)
    refused(short_run(hspec, path), 1, "model.gguf")
    path.write_bytes(cases.LFS_POINTER)
    refused(short_run(hspec, path), 1, "model.gguf", "LFS pointer")


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("bert", "BertModel"),
        ("mixtral", "MixtralForCausalLM"),
        ("qwen3_moe", "Qwen3MoeForCausalLM"),
        ("mamba", "MambaForCausalLM"),
        ("llava", "LlavaForConditionalGeneration"),
        ("t5", "T5ForConditionalGeneration"),
    ],
)
def test_F19_unsupported_architecture(
    hspec: Hspec, model: Path, no_network: list[object], kind: str, architecture: str
) -> None:
    """Encoders, mixtures, state-space and multimodal models are refused by name before a weight is sought."""
    (model / "model.safetensors").unlink()
    models.edit(model / "config.json", model_type=kind, architectures=[architecture])
    refused(hspec("run", "-m", model, "--raw", "hello"), 1, kind, architecture, "qwen2")
    assert not no_network


def test_F13_no_room_for_the_converted_copy(hspec: Hspec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that the disk has no room for is refused beforehand with both sizes, and leaves no file."""
    model = tiny_models.model(tmp_path / "model", safetensors=False)
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 4096, 4096))
    refused(short_run(hspec, model), 3, "free")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.stat().st_size > 4096]


def test_F13_disk_that_fills_while_writing(hspec: Hspec, tmp_path: Path) -> None:
    """A write that fails half-way is one sentence, and no half file is taken for whole afterwards."""
    model = tiny_models.model(tmp_path / "model", safetensors=False)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        result = short_run(hspec, model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    refused(result, (1, 3), "too large")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    answered(short_run(hspec, model))
