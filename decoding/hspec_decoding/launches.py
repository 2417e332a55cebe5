"""Launch shapes of matrix products, tuned once per GPU and kept for the next start. They change times, never a bit."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hspec_decoding.checkpoints.files import own_cache
from hspec_decoding.config import ModelConfig
from hspec_kernels.linear import quantizable

if TYPE_CHECKING:
    from hspec_kernels.linear.tuning import Matrix, Shape

SECONDS = 3.0  # for each model with something to tune; what they do not suffice for is left to the next start


def tune_launches(
    target: ModelConfig,
    draft: ModelConfig | None,
    forms: Sequence[str],
    vocabulary: int,
    dtype: torch.dtype,
    device: torch.device,
    notes: list[str],
) -> None:
    """Launch products as is known to be fastest on a GPU, and measure those that nothing is known of; a note says so.

    `forms`: the 4-bit formats that the target's weights are used in, beside their own. Nothing happens without a GPU,
    in Triton's interpreter, in float32, whose products are cuBLAS's, and with HSPEC_TUNE=0.
    """
    if device.type != "cuda" or dtype.itemsize > 2 or os.environ.get("HSPEC_TUNE") == "0":
        return
    from hspec_kernels.linear import tuning

    if tuning.interpreted():
        return
    store = Store(own_cache() / "launches.json", gpu_name(device))
    models = [(target, (None, *forms)), *([(draft, (None,))] if draft else [])]
    wanted = [matrices(config, used, vocabulary, dtype, device) for config, used in models]
    known = store.known(matrix for model in wanted for matrix in model)
    missing = [[matrix for matrix in model if matrix not in known] for model in wanted]
    if any(missing):
        started = time.perf_counter()
        products = list(dict.fromkeys(matrix for model in missing for matrix in model))
        found = tuning.tune(products, SECONDS * sum(map(bool, missing)))
        torch.cuda.empty_cache()
        failure = store.keep(found)
        notes.append(_note(len(found), len(products), time.perf_counter() - started, failure))
        known |= found
    tuning.use(known)


def _note(found: int, missing: int, seconds: float, failure: str | None) -> str:
    done = f"{found}" if found == missing else f"{found} of {missing}"
    kept = f"could not be kept: {failure}" if failure else "are kept"
    return f"launch shapes of {done} products were tuned in {seconds:.1f} s and {kept}; HSPEC_TUNE=0 turns that off"


def matrices(
    config: ModelConfig, forms: Sequence[str | None], vocabulary: int, dtype: torch.dtype, device: torch.device
) -> list[Matrix]:
    """What a model's rows are multiplied with, what takes the most time first."""
    from hspec_kernels.linear.tuning import TILE, Matrix

    hidden, ffn, queries = config.hidden_size, config.ffn_size, config.heads * config.head_dim
    stacked, head = queries + 2 * config.kv_heads * config.head_dim, min(vocabulary, config.vocab_size)
    sizes = ((2 * ffn, hidden), (hidden, ffn), (stacked, hidden), (hidden, queries), (head, hidden))
    every = dict.fromkeys(Matrix(device, dtype, form, *size, TILE) for form in forms for size in sizes)
    return [of for of in every if not of.form or quantizable(torch.empty(of[3:5], dtype=dtype, device="meta"))]


def gpu_name(device: torch.device) -> str:
    """What launch shapes hold for: a GPU, and what compiles and launches kernels."""
    import triton

    capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
    name = torch.cuda.get_device_name(device)
    return f"{name}, {capability}, triton {triton.__version__}, torch {torch.__version__}"


@dataclass(frozen=True)
class Store:
    """A JSON file of launch shapes: by GPU, and there by matrix, the fields of a shape."""

    path: Path
    gpu: str

    def known(self, matrices: Iterable[Matrix]) -> dict[Matrix, Shape]:
        """The kept shapes of matrices, as far as they are among those that give the same bits today."""
        from hspec_kernels.linear.tuning import candidates

        kept = self._read().get(self.gpu)
        kept = kept if isinstance(kept, dict) else {}
        named = ((of, kept.get(_key(of))) for of in matrices)
        found = ((of, next((s for s in candidates(of) if s._asdict() == fields), None)) for of, fields in named)
        return {of: shape for of, shape in found if shape is not None}

    def keep(self, found: Mapping[Matrix, Shape]) -> str | None:
        """Write shapes beside those of the file, whole or not at all; why not, if it cannot be written."""
        kept = self._read()
        own = kept.get(self.gpu)
        shapes = {_key(of): shape._asdict() for of, shape in found.items()}
        kept[self.gpu] = {**(own if isinstance(own, dict) else {}), **shapes}
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
            partial.replace(self.path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            return error.strerror or "an error of the disk"
        return None

    def _read(self) -> dict[str, Any]:
        """What the file holds; nothing if there is none or it is broken."""
        try:
            kept = json.loads(self.path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return kept if isinstance(kept, dict) else {}


def _key(of: Matrix) -> str:
    dtype = str(of.dtype).removeprefix("torch.")
    return f"{of.form or 'whole'} {of.outputs} x {of.inner}, {dtype}, tile {of.tile}"
