"""Draft models on disk: `heads.safetensors` and `config.json` in a directory, found by the target's shape."""

from __future__ import annotations

import json
import os
from importlib.resources import files
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as loads
from safetensors.torch import save as saved
from torch import Tensor

from hspec_decoding.calibration import fingerprint
from hspec_decoding.chimera.config import ChimeraConfig
from hspec_decoding.chimera.heads import Heads
from hspec_decoding.config import ModelConfig
from hspec_decoding.model import Decoder
from hspec_profiles.errors import HspecError

WEIGHTS, CONFIG = "heads.safetensors", "config.json"


def made(config: ChimeraConfig, vocabulary: Tensor, target: Decoder) -> Heads:
    """New heads over a target, on its device, as they are before training: float32."""
    ids = vocabulary.to(target.device)
    head = target.head
    rows = head[ids] if isinstance(head, Tensor) else head.dequantized(target.dtype)[ids]
    scale = float(target.norm.float().square().mean().sqrt())
    return Heads(config, ids, target.embedding, rows, scale).to(target.device)


def save(directory: Path, heads: Heads) -> None:
    """Write heads, in 16 bits; an earlier file is replaced as a whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    state = heads.state_dict()
    vocabulary = state.pop("vocabulary").to(torch.int32)
    tensors = {name: tensor.to(torch.bfloat16).cpu().contiguous() for name, tensor in state.items()}
    replace(directory / WEIGHTS, saved(tensors | {"vocabulary": vocabulary.cpu()}))
    replace(directory / CONFIG, (json.dumps(heads.config.to_dict(), indent=2) + "\n").encode())


def replace(path: Path, data: bytes) -> None:
    """Write a file beside its place, then put it there, so that no part of it is ever taken for the whole."""
    beside = path.with_name(path.name + ".part")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def load(directory: Path | None, target: Decoder, model: str = "MODEL") -> Heads:
    """Heads of a target in its type and on its device, ready for decoding; None looks where they are kept.

    `model`: what the user calls it. Raises HspecError where there are none, and for files of another target, short
    ones and such as hold no numbers.
    """
    found = place(directory, target.config, model)
    again = f"`hspec train chimera -m {model} --out {found}` makes it anew"
    try:
        config = ChimeraConfig.from_dict(json.loads((found / CONFIG).read_text("utf-8")))
        tensors = loads((found / WEIGHTS).read_bytes())
        vocabulary = tensors.pop("vocabulary").long()
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as why:
        raise HspecError(f"`{found}` holds no draft model that can be read: {why!r}", again) from None
    if config.fingerprint != fingerprint(target.config):
        raise HspecError(f"the draft model in `{found}` was trained for another model than `{model}`", again)
    if int(vocabulary.min()) < 0 or int(vocabulary.max()) >= target.head.shape[0]:
        raise HspecError(f"the draft model in `{found}` drafts tokens that `{model}` does not have", again)
    heads = made(config, vocabulary, target)
    try:
        heads.load_state_dict(tensors | {"vocabulary": vocabulary})
    except RuntimeError:
        raise HspecError(f"the weights in `{found}` are not of the shape that its {CONFIG} says", again) from None
    broken = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise HspecError(f"the draft model in `{found}` holds NaN or infinity: {', '.join(broken[:3])}", again)
    heads.to(target.dtype).requires_grad_(False).eval()
    heads.fold()
    return heads


def place(directory: Path | None, target: ModelConfig, model: str) -> Path:
    """The directory that holds heads: the one given, or where they are kept. Raises HspecError where there are none."""
    found = directory or find(target)
    if found is None or not (found / CONFIG).is_file():
        where = f"no draft model in `{directory}`" if directory else f"no draft model is here for `{model}`"
        raise HspecError(where, f"`hspec train chimera -m {model}` makes one")
    return found


def find(target: ModelConfig) -> Path | None:
    """The directory of the user's heads for a model, else of shipped ones, else None."""
    name = fingerprint(target)
    shipped = Path(str(files("hspec_decoding"))) / "heads" / name
    return next((path for path in (directory() / name, shipped) if (path / CONFIG).is_file()), None)


def directory() -> Path:
    """`$XDG_DATA_HOME/hspec/heads`."""
    base = Path(os.environ.get("XDG_DATA_HOME", "")).expanduser()
    return (base if base.is_absolute() else Path.home() / ".local" / "share") / "hspec" / "heads"
