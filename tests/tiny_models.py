"""Tiny random models for tests, in the files that a model repository has. Weights by transformers, no download."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tiny
import torch

MARKER = "code-was-executed"  # the file that the code of `yarn_llama` leaves behind in its directory when it runs
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 320,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
}


def model(
    directory: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    tokenizer: bool = True,
    safetensors: bool = True,
    shards: bool = False,
    dtype: torch.dtype = torch.float32,
    **config_overrides: Any,
) -> Path:
    """Write a random model of `family` into `directory` and return it.

    Norms and biases are random too, so that a loader that loses one is seen. `shards` gives several files with an
    index; without `safetensors` they are `pytorch_model*.bin`. Overrides go to the config: `rope_scaling`,
    `rope_parameters`, `head_dim`, `num_key_value_heads`, `tie_word_embeddings`, ...
    """
    made = build(family, seed, dtype, config_overrides)
    directory.mkdir(parents=True, exist_ok=True)
    made.save_pretrained(directory, max_shard_size="100KB" if shards else "1GB")
    (directory / "generation_config.json").unlink(missing_ok=True)  # tests write their own
    if not safetensors:
        _as_bin(directory, made, count=3 if shards else 1)
    if tokenizer:
        tiny.tokenizer(directory)
    return directory


def build(family: str, seed: int, dtype: torch.dtype, overrides: Mapping[str, Any]) -> Any:
    """The transformers model itself, for tests that compare with it; weights as `model` saves them."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family], **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if parameter.dim() == 1:
                    parameter.copy_(0.2 * torch.randn_like(parameter) + (0.0 if name.endswith("bias") else 1.0))
    for parameter in made.parameters():  # not `.to(dtype)`, which would round the rotary frequencies too
        parameter.data = parameter.data.to(dtype)
    made.config.dtype = dtype
    return made.eval()


def yarn_llama(directory: Path, *, seed: int = 0, **config_overrides: Any) -> Path:
    """A repository with exactly the files of NousResearch/Yarn-Llama-2-7b-128k, small.

    Two bfloat16 `.bin` shards with their index, `tokenizer.model` and no `tokenizer.json`, a config with `auto_map`
    and yarn in its old spelling (factor 32), and the code that `auto_map` names: it leaves the file MARKER in
    `directory` when it is ever run.
    """
    yarn = {"factor": 32.0, "original_max_position_embeddings": 128, "type": "yarn"}
    shape = {"max_position_embeddings": 4096, "num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": 2}
    made = build("llama", seed, torch.bfloat16, {**shape, "rope_scaling": dict(yarn), **config_overrides})
    directory.mkdir(parents=True, exist_ok=True)
    made.config.save_pretrained(directory)
    _as_bin(directory, made, count=2)
    tiny.tokenizer(directory, sentencepiece=True, template=None)
    code = f"import pathlib\n\npathlib.Path({str(directory / MARKER)!r}).touch()\n\n\nclass Llama: ...\n"
    (directory / "configuration_llama.py").write_text(code)
    (directory / "modeling_llama_together_yarn.py").write_text(code)
    config = json.loads((directory / "config.json").read_text())
    config.pop("rope_parameters", None)
    config |= {
        "rope_scaling": {**yarn, "finetuned": True},
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "auto_map": {
            "AutoConfig": "configuration_llama.Llama",
            "AutoModelForCausalLM": "modeling_llama_together_yarn.Llama",
        },
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def hub_tree(cache: Path, source: Path, repo: str, commit: str = "c" * 40) -> Path:
    """Put a copy of `source` into a Hugging Face cache as the hub library lays it out; the snapshot's directory."""
    root = cache / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    for folder in (root / "refs", root / "blobs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(commit)
    for number, path in enumerate(sorted(source.iterdir())):
        blob = root / "blobs" / f"{number:040x}"
        shutil.copyfile(path, blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


def _as_bin(directory: Path, made: Any, count: int) -> None:
    """Replace the safetensors by `count` PyTorch files."""
    for path in directory.glob("model*.safetensors*"):
        path.unlink()
    tensors = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    if made.config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    if count == 1:
        torch.save(tensors, directory / "pytorch_model.bin")
        return
    names: list[str] = list(tensors)
    index: dict[str, str] = {}
    for part in range(count):
        file = f"pytorch_model-{part + 1:05d}-of-{count:05d}.bin"
        mine = names[part * len(names) // count : (part + 1) * len(names) // count]
        torch.save({name: tensors[name] for name in mine}, directory / file)
        index |= dict.fromkeys(mine, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    (directory / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
