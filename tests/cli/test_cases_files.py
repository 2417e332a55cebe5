"""Damaged weight files and configs: section F of the cases that users of other tools hit."""

from __future__ import annotations

import os
from pathlib import Path

import case_models as models
import case_tools as cases
import pytest
import tiny_models
import torch
from case_models import speaker
from case_tools import Hspec, answered, refused, short_run


def test_F1_truncated_file(hspec: Hspec, model: Path) -> None:
    """A file 500 bytes short is refused with its name, the size it has and the size it should have."""
    weights = model / "model.safetensors"
    whole = weights.stat().st_size
    os.truncate(weights, whole - 500)
    refused(short_run(hspec, model), 1, weights.name, f"{whole - 500:,}", f"{whole:,}")


def test_F1_truncated_shard(hspec: Hspec, sharded: Path) -> None:
    """A truncated shard among whole ones is refused with its own name."""
    shard = cases.shards(sharded)[1]
    os.truncate(shard, shard.stat().st_size - 500)
    refused(short_run(hspec, sharded), 1, shard.name)


HTML = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head><body></body></html>\n"


@pytest.mark.parametrize(
    ("content", "looks"),
    [
        (cases.LFS_POINTER, "LFS pointer"),
        (HTML, "HTML"),
        (b"", "empty"),
        (b"\0\1\2", "3 bytes"),
        (b"\xff" * 4096, ""),
    ],
)
@pytest.mark.parametrize("form", ["single", "shard"])
def test_F2_file_that_holds_no_weights(hspec: Hspec, tmp_path: Path, form: str, content: bytes, looks: str) -> None:
    """A Git LFS pointer, a web page, an empty or tiny file or noise in place of weights is named for what it is."""
    model = tiny_models.model(tmp_path / "model", shards=form == "shard")
    weights = cases.shards(model)[1] if form == "shard" else model / "model.safetensors"
    weights.write_bytes(content)
    refused(short_run(hspec, model), 1, weights.name, looks)


def test_F4_missing_shards(hspec: Hspec, sharded: Path) -> None:
    """Every shard that the index names and the directory lacks is listed, with a hint."""
    gone = cases.shards(sharded)[1:3]
    for shard in gone:
        shard.unlink()
    result = short_run(hspec, sharded)
    refused(result, 1, *(shard.name for shard in gone), "hint:")


def test_F6_tensor_missing(hspec: Hspec, model: Path) -> None:
    """A tensor that no file holds is named; nothing runs on random weights."""
    name = "model.layers.2.mlp.down_proj.weight"
    models.edit_tensors(model, lambda tensors: tensors.pop(name))
    refused(short_run(hspec, model), 1, name)


def test_F6_more_layers_in_the_config(hspec: Hspec, model: Path) -> None:
    """Six layers in config.json and four in the file are refused with the number of missing tensors and a name."""
    models.edit(model / "config.json", num_hidden_layers=6)
    refused(short_run(hspec, model), 1, "18", "model.layers.4.")


def test_F6_tensor_of_another_shape(hspec: Hspec, model: Path) -> None:
    """A tensor of another shape than config.json says is named with both shapes."""
    name = "model.layers.1.self_attn.k_proj.weight"
    models.edit_tensors(model, lambda tensors: tensors.update({name: torch.zeros(48, 64)}))
    refused(short_run(hspec, model), 1, name, "48", "32")


@pytest.mark.parametrize("method", cases.METHODS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_F7_weights_that_are_no_numbers(hspec: Hspec, model: Path, value: float, method: str) -> None:
    """NaN or infinite weights stop the run before a token is printed."""
    name = "model.layers.1.mlp.down_proj.weight"
    models.edit_tensors(model, lambda tensors: tensors[name].fill_(value))
    refused(short_run(hspec, model, "--method", method), 1, "finite")


def test_F7_head_that_is_no_number(hspec: Hspec, tmp_path: Path) -> None:
    """One NaN row of the head is found too, though all hidden states are finite."""
    model = speaker(tmp_path / "model", "o", "abc")
    models.edit_tensors(model, lambda tensors: tensors["lm_head.weight"][7].fill_(float("nan")))
    refused(short_run(hspec, model), 1, "finite")


def test_F6_untied_model_without_head(hspec: Hspec, model: Path) -> None:
    """An untied config without `lm_head.weight` is refused, and a tied one needs none."""
    models.edit(model / "config.json", tie_word_embeddings=True)
    models.edit_tensors(model, lambda tensors: tensors.pop("lm_head.weight", None))
    answered(short_run(hspec, model))
    models.edit(model / "config.json", tie_word_embeddings=False)
    refused(short_run(hspec, model), 1, "lm_head.weight")


def test_F6_tokenizer_larger_than_the_embedding(hspec: Hspec, tmp_path: Path) -> None:
    """A prompt whose ids lie beyond the embedding is refused with both sizes."""
    model = tiny_models.model(tmp_path / "model", vocab_size=200)
    size = len(models.vocabulary_of(model))
    refused(hspec("run", "-m", model, "--raw", "hello the world"), 1, str(size), "200")
