"""Calibrations of TidalDecode (arXiv 2410.05076): which layers of a model attend to all keys, and whose lists of tokens
the others read. They are found by `hspec calibrate` and kept by the shape of the model; some are shipped.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from hspec_decoding.config import ModelConfig
from hspec_profiles.errors import HspecError

WAYS = ("heads", "pooled")  # how a selector's list is made: for each KV head, or one for all


@dataclass(frozen=True)
class Calibration:
    """`full`: layers that attend to all keys, ascending; the last one of a run of them selects for those behind it.

    `heads[layer][head]`: the KV head of its selector whose list a head reads, under the way "heads"; None for the same.
    """

    full: tuple[int, ...]
    way: str = "pooled"
    heads: tuple[tuple[int, ...], ...] | None = None
    source: str = "not calibrated: layers by rule of thumb, `hspec calibrate` finds better ones"

    def selectors(self, config: ModelConfig) -> frozenset[int]:
        """The layers of `full` behind which there are others before the next one."""
        reads = whole_layers(config)
        behind = dict(pairwise(reads))
        return frozenset(layer for layer in self.full if layer in behind and behind[layer] not in self.full)

    @property
    def words(self) -> str:
        """What it says, in a line."""
        return f"layers {', '.join(map(str, self.full))} read all keys ({self.source})"


def whole_layers(config: ModelConfig) -> list[int]:
    """Layers without a sliding window: the others read few keys as it is."""
    return [layer for layer, window in enumerate(config.windows) if window is None]


def by_rule(config: ModelConfig) -> Calibration:
    """The first three and one of the middle, where nothing is known of the model."""
    layers = whole_layers(config)
    return Calibration(tuple(sorted({*layers[:3], *layers[round(0.4 * len(layers)) :][:1]})))


def fingerprint(config: ModelConfig) -> str:
    """A hash of the shape of a model: a family's versions and fine-tunes share it, and their RoPE is left out."""
    shape = {
        name: getattr(config, name)
        for name in ("family", "vocab_size", "hidden_size", "ffn_size", "layers", "heads", "kv_heads", "head_dim")
    }
    words = json.dumps({**shape, "windows": config.windows}, sort_keys=True)
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def find(config: ModelConfig) -> Calibration:
    """The user's calibration, else the shipped one, else layers by rule of thumb.

    Raises HspecError for a file of the user's that cannot be read.
    """
    name = f"{fingerprint(config)}.json"
    ours = directory() / name
    if ours.exists():
        return _read(ours.read_text("utf-8"), config, str(ours))
    shipped = files("hspec_decoding") / "calibrations" / name
    if shipped.is_file():
        return _read(shipped.read_text("utf-8"), config, "shipped")
    return by_rule(config)


def save(config: ModelConfig, found: Calibration, figures: Mapping[str, Any]) -> Path:
    """Write a calibration to where `find` looks first; its path."""
    path = directory() / f"{fingerprint(config)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(document(found, figures), "utf-8")
    beside.replace(path)
    return path


def document(found: Calibration, figures: Mapping[str, Any]) -> str:
    """A calibration with the figures that it was chosen by, as JSON of a line per key."""
    made = {"full": found.full, "way": found.way, "heads": found.heads, "source": found.source, **figures}
    return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in made.items()) + "\n}\n"


def directory() -> Path:
    """`$XDG_CONFIG_HOME/hspec/calibrations`."""
    base = Path(os.environ.get("XDG_CONFIG_HOME", "")).expanduser()
    return (base if base.is_absolute() else Path.home() / ".config") / "hspec" / "calibrations"


def _read(text: str, config: ModelConfig, where: str) -> Calibration:
    try:
        raw = json.loads(text)
        full, heads = tuple(map(int, raw["full"])), raw.get("heads")
        read = None if heads is None else tuple(tuple(map(int, layer)) for layer in heads)
        found = Calibration(full, str(raw["way"]), read, f"{raw['source']}; {where}")
    except (ValueError, KeyError, TypeError, AttributeError) as why:
        raise HspecError(f"`{where}` is no calibration: {why!r}", "delete it, or run `hspec calibrate` again") from None
    if not _fits(found, config):
        raise HspecError(f"`{where}` is no calibration of this model", "delete it, or run `hspec calibrate` again")
    return found


def _fits(found: Calibration, config: ModelConfig) -> bool:
    layers = whole_layers(config)
    sound = found.way in WAYS and found.full[:1] == tuple(layers[:1]) and set(found.full) <= set(layers)
    sound = sound and list(found.full) == sorted(set(found.full))
    if found.heads is None:
        return sound
    heads = range(config.kv_heads)
    right = all(len(layer) == config.kv_heads and all(h in heads for h in layer) for layer in found.heads)
    return sound and right and len(found.heads) == config.layers
