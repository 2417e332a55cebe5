"""GGUF files: the header, read without numpy, and what it says in the words of a `config.json`.

The layout is a magic, counts, typed key-value pairs, one record per tensor, then the aligned data. Tensor bytes are
left where they are; `convert.py` dequantizes them.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hspec_decoding.checkpoints.files import looks_like
from hspec_decoding.config import FAMILIES, ModelConfig
from hspec_profiles.errors import HspecError

MAGIC = b"GGUF"
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9

# GGUF name -> Hugging Face name, without `.weight` or `.bias`
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FREQS = "rope_freqs.weight"  # Llama 3's frequency divisors, one per rotary pair
END_TEXTS = frozenset({"</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>"})


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor's place: rows-first `shape`, ggml type number, absolute `offset` in bytes."""

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GGUFFile:
    """The header of a GGUF file; `size` is the file's in bytes."""

    path: Path
    size: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    @classmethod
    def read(cls, path: Path) -> GGUFFile:
        """Parse the header. Raises HspecError when the file is not GGUF, ends within it, or is one of several."""
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise HspecError(f"`{path}` {looks_like(path) or 'does not begin with GGUF'}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                try:
                    metadata, tensors = _Cursor(data).header(path)
                except (struct.error, IndexError, MemoryError, OverflowError):
                    raise HspecError(
                        f"`{path}` ends inside its GGUF header, at {size:,} bytes", "download or copy it again"
                    ) from None
        parts = int(metadata.get("split.count", 1))
        if parts > 1:
            part = int(metadata.get("split.no", 0)) + 1
            raise HspecError(
                f"`{path}` is part {part} of {parts} of a split GGUF file",
                "join the parts with `llama-gguf-split --merge` and give the result",
            )
        return cls(path, size, metadata, tensors)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `<architecture>.<key>`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def names(self) -> dict[str, str]:
        """Hugging Face name of every weight -> its name in the file. Raises HspecError for tensors of unknown use."""
        known, unknown = {}, []
        for name in self.tensors:
            at = re.fullmatch(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)", name)
            translated = at and (LAYER if at[1] else OUTER).get(at[2])
            if at and translated:
                prefix = f"model.layers.{at[1]}." if at[1] else ""
                known[f"{prefix}{translated}.{at[3]}"] = name
            elif name != ROPE_FREQS:
                unknown.append(name)
        if unknown:
            shown = ", ".join(unknown[:5])
            raise HspecError(
                f"`{self.path}` holds {len(unknown)} tensors that a {self.architecture} model of hspec has not: {shown}"
            )
        return known

    def config(self) -> dict[str, Any]:
        """The model's shape as a `config.json` dictionary. Raises HspecError for an unsupported architecture."""
        family = self.architecture
        if family not in FAMILIES or self.get("expert_count", 0):
            kind = f"{family} with {self.get('expert_count')} experts" if family in FAMILIES else family
            raise HspecError(
                f"unsupported model: the GGUF file's architecture is {kind!r}",
                "hspec runs " + "; ".join(f"{name} ({what})" for name, what in FAMILIES.items()),
            )
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None:
            raise HspecError(f"`{self.path}` holds no token_embd.weight, so it is no whole model")
        heads, hidden = self._need("attention.head_count"), self._need("embedding_length")
        raw = {
            "architectures": [f"{family.capitalize()}ForCausalLM"],
            "model_type": family,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": self._need("feed_forward_length"),
            "num_hidden_layers": self._need("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._need("attention.head_count_kv", heads),
            "head_dim": self._head_dim(hidden // heads),
            "rms_norm_eps": self._need("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self._need("context_length"),
            "vocab_size": embedding.shape[0],
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "rope_theta": self.get("rope.freq_base", 10_000.0),
            "rope_scaling": self._rope_scaling(),
            "torch_dtype": "float32",
            "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.metadata.get("tokenizer.ggml.eos_token_id"),
        }
        if family == "llama":
            raw["attention_bias"] = "blk.0.attn_q.bias" in self.tensors
            raw["mlp_bias"] = "blk.0.ffn_up.bias" in self.tensors
        return raw

    def generation(self) -> dict[str, Any]:
        """A `generation_config.json`: every token that ends a turn or the text, and sampling where the file says."""
        ids = {self.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
        kinds = self.metadata.get("tokenizer.ggml.token_type", ())
        for number, token in enumerate(self.metadata.get("tokenizer.ggml.tokens", ())):
            if token in END_TEXTS and number < len(kinds) and kinds[number] == 3:
                ids.add(number)
        raw: dict[str, Any] = {"eos_token_id": sorted(i for i in ids if i is not None)}
        for ours, theirs in (("temperature", "temp"), ("top_p", "top_p"), ("top_k", "top_k"), ("min_p", "min_p")):
            value = self.metadata.get(f"general.sampling.{theirs}")
            if value is not None:
                raw |= {ours: value, "do_sample": True}
        return raw

    def _head_dim(self, usual: int) -> int:
        size = int(self.get("attention.key_length", usual))
        rotary = self.get("rope.dimension_count", size)
        if rotary != size:
            raise HspecError(
                f"unsupported model: `{self.path}` rotates {rotary} of {size} dimensions of a head, hspec all of them"
            )
        return size

    def _need(self, key: str, default: Any = None) -> Any:
        value = self.get(key, default)
        if value is None or isinstance(value, list):
            problem = "lacks" if value is None else "gives per layer"
            raise HspecError(f"`{self.path}` {problem} `{self.architecture}.{key}`")
        return value

    def _rope_scaling(self) -> dict[str, Any] | None:
        """RoPE scaling in the words of `rope_scaling`; None for plain RoPE."""
        kind = self.get("rope.scaling.type", "none")
        factor = self.get("rope.scaling.factor") or self.get("rope.scale_linear")
        if ROPE_FREQS in self.tensors:
            return self._llama3_scaling()
        if kind == "none" or not factor:
            return None
        if self.get("rope.scaling.yarn_attn_factor", 1.0) != 1.0:
            raise HspecError(f"unsupported model: `{self.path}` scales attention by a factor of its own")
        scaling = {"rope_type": kind, "factor": factor}
        for theirs, ours in {
            "original_context_length": "original_max_position_embeddings",
            "yarn_beta_fast": "beta_fast",
            "yarn_beta_slow": "beta_slow",
        }.items():
            if (value := self.get(f"rope.scaling.{theirs}")) is not None:
                scaling[ours] = value
        return scaling

    def _llama3_scaling(self) -> dict[str, Any]:
        """Llama 3's parameters, recovered from the divisors that the file holds in their place."""
        tensor = self.tensors[ROPE_FREQS]
        count = math.prod(tensor.shape)
        with self.path.open("rb") as file:
            file.seek(tensor.offset)
            data = file.read(4 * count)
        if tensor.kind != 0 or len(data) < 4 * count:
            raise HspecError(f"`{self.path}` holds {ROPE_FREQS} in a form that cannot be read")
        divisors = struct.unpack(f"<{count}f", data)
        theta = float(self.get("rope.freq_base", 10_000.0))
        scaling = {
            "rope_type": "llama3",
            "factor": max(divisors),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        wanted = llama3_divisors(theta, count, scaling)
        if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(divisors, wanted, strict=True)):
            raise HspecError(f"`{self.path}` scales RoPE by divisors ({ROPE_FREQS}) that are not Llama 3's")
        return scaling


def llama3_divisors(theta: float, pairs: int, scaling: Mapping[str, Any]) -> list[float]:
    """By how much Llama 3's rule lowers the frequency of each rotary pair."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    divisors = []
    for pair in range(pairs):
        turns = scaling["original_max_position_embeddings"] / (2 * math.pi * theta ** (pair / pairs))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def supported(file: GGUFFile, raw: Mapping[str, Any], names: Mapping[str, str]) -> ModelConfig:
    """The config that `raw` means. Raises HspecError when the file lacks a tensor or has it in another shape."""
    config = ModelConfig.from_dict(raw)
    wanted = config.tensors()
    missing = [name for name in wanted if name not in names]
    if missing:
        raise HspecError(f"`{file.path}` lacks {len(missing)} tensors: {', '.join(missing[:5])}")
    for name, shape in wanted.items():
        found = file.tensors[names[name]].shape
        if found != shape:
            raise HspecError(f"`{file.path}`: `{names[name]}` has shape {found}, its metadata says {shape}")
    return config


class _Cursor:
    """Reads the header's little-endian values one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 4

    def header(self, path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        version, tensor_count, pair_count = self.take("IQQ")
        if version not in (2, 3):
            raise HspecError(f"`{path}` is GGUF version {version}, hspec reads versions 2 and 3 (little-endian)")
        metadata = {}
        for _ in range(pair_count):
            key = self.string()
            metadata[key] = self.value(self.take("I")[0])
        records = []
        for _ in range(tensor_count):
            name = self.string()
            shape = self.take(f"{self.take('I')[0]}Q")
            records.append((name, tuple(reversed(shape)), *self.take("IQ")))
        align = int(metadata.get("general.alignment", 32))
        start = -(-self.at // align) * align
        return metadata, {name: GGUFTensor(shape, kind, start + at) for name, shape, kind, at in records}

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self.data, self.at)
        self.at += struct.calcsize(f"<{layout}")
        return values

    def string(self) -> str:
        (length,) = self.take("Q")
        if length > len(self.data) - self.at:
            raise IndexError
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.take(SCALARS[kind])[0] if kind in SCALARS else self._corrupt()
        inner, count = self.take("IQ")
        if count > len(self.data):
            raise IndexError
        if inner in SCALARS:
            return list(self.take(f"{count}{SCALARS[inner]}"))
        return [self.value(inner) for _ in range(count)]

    def _corrupt(self) -> Any:
        raise IndexError
