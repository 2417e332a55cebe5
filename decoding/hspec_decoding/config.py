"""What a model is, read from its `config.json`; no weights, no torch.

Supported are the Llama-shaped families: pre-norm RMSNorm, rotary attention with grouped KV heads, SwiGLU. Anything
else is refused here, by name, before a weight is read or downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hspec_profiles.errors import HspecError

FAMILIES = {
    "llama": "Llama 2 and 3, SmolLM2, Yi, Vicuna, R1 distils",
    "mistral": "Mistral",
    "qwen2": "Qwen2 and Qwen2.5, R1 distils",
    "qwen3": "Qwen3 dense",
}
DEFAULTS: Mapping[str, Mapping[str, int]] = {  # what transformers takes where a config.json is silent
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
}
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that fix a decoder's shape. Sizes in elements, lengths in tokens."""

    family: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: Mapping[str, Any]  # `rope_type`, `rope_theta` and the type's own keys, spelled as transformers 5 does
    windows: tuple[int | None, ...]  # per layer: tokens of sliding attention, None for full attention

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read a `config.json`. Raises HspecError for a family, activation or RoPE type that is not supported."""
        family = raw.get("model_type")
        if family not in FAMILIES:
            kind = ", ".join(raw.get("architectures") or []) or "no architecture named"
            raise HspecError(
                f"unsupported model: `model_type` is {family!r} ({kind})",
                "hspec runs " + "; ".join(f"{name} ({what})" for name, what in FAMILIES.items()),
            )
        _refuse(raw)
        raw = {**DEFAULTS[family], **raw}
        try:
            hidden, heads, layers = (int(raw[k]) for k in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
            ffn, vocab = int(raw["intermediate_size"]), int(raw["vocab_size"])
        except KeyError as missing:
            raise HspecError(f"config.json lacks {missing}") from None
        qwen2 = family == "qwen2"
        bias = bool(raw.get("attention_bias", False)) and family != "mistral"
        config = cls(
            family=family,
            vocab_size=vocab,
            hidden_size=hidden,
            ffn_size=ffn,
            layers=layers,
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_positions=int(raw["max_position_embeddings"]),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=qwen2 or bias,
            o_bias=bias,
            mlp_bias=bool(raw.get("mlp_bias", False)) and family == "llama",
            qk_norm=family == "qwen3",
            rope=_rope(raw),
            windows=_windows(raw, layers),
        )
        if config.heads % config.kv_heads:
            raise HspecError(
                f"config.json: attention heads must be a multiple of KV heads, got {heads} and {config.kv_heads}"
            )
        return config

    @property
    def context(self) -> int:
        """Usable tokens: `max(max_position_embeddings, RoPE factor × original length)`."""
        original = self.rope.get("original_max_position_embeddings", self.max_positions)
        return max(self.max_positions, int(float(self.rope.get("factor") or 1.0) * original))

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that a checkpoint must hold, with its shape, by the Hugging Face names."""
        d, q, kv = self.hidden_size, self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, d)}
        for i in range(self.layers):
            at = f"model.layers.{i}."
            linears = {
                "self_attn.q_proj": (q, d, self.qkv_bias),
                "self_attn.k_proj": (kv, d, self.qkv_bias),
                "self_attn.v_proj": (kv, d, self.qkv_bias),
                "self_attn.o_proj": (d, q, self.o_bias),
                "mlp.gate_proj": (self.ffn_size, d, self.mlp_bias),
                "mlp.up_proj": (self.ffn_size, d, self.mlp_bias),
                "mlp.down_proj": (d, self.ffn_size, self.mlp_bias),
            }
            for name, (rows, columns, biased) in linears.items():
                shapes[f"{at}{name}.weight"] = (rows, columns)
                if biased:
                    shapes[f"{at}{name}.bias"] = (rows,)
            if self.qk_norm:
                shapes[f"{at}self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[f"{at}self_attn.k_norm.weight"] = (self.head_dim,)
            shapes[f"{at}input_layernorm.weight"] = (d,)
            shapes[f"{at}post_attention_layernorm.weight"] = (d,)
        shapes["model.norm.weight"] = (d,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, d)
        return shapes


def _refuse(raw: Mapping[str, Any]) -> None:
    """Raise for what a supported `model_type` can still carry and this decoder does not compute."""
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise HspecError(f"unsupported model: `hidden_act` is {activation!r}, only silu is")
    quantization = raw.get("quantization_config")
    if quantization:
        method = str(quantization.get("quant_method", "unknown"))
        package = {"gptq": "gptqmodel", "awq": "autoawq", "bitsandbytes": "bitsandbytes"}.get(method)
        needs = f", which other tools read with {package}" if package else ""
        raise HspecError(
            f"unsupported checkpoint: quantized with {method}{needs}",
            "give the 16-bit checkpoint or a GGUF file of the same model",
        )


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """One spelling for `rope_scaling` (`type`, `rope_type`) and `rope_parameters`."""
    merged = dict(raw.get("rope_scaling") or {})
    merged.update(raw.get("rope_parameters") or {})
    kind = merged.pop("rope_type", None) or merged.get("type", "default")
    merged.pop("type", None)
    kind = {"su": "longrope"}.get(kind, kind)
    if kind not in ROPE_TYPES:
        raise HspecError(f"unsupported model: RoPE type is {kind!r}", "hspec knows " + ", ".join(ROPE_TYPES))
    rope = {"rope_type": kind, **merged}
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = float(raw.get("rope_theta") or 10_000.0)
    if kind in ("yarn", "llama3", "longrope"):
        original = raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = original or raw["max_position_embeddings"]
    return rope


def _windows(raw: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer. Qwen slides only when `use_sliding_window` says so; Llama never does."""
    window = raw.get("sliding_window")
    if raw.get("model_type") == "llama" or not window:
        return (None,) * layers
    kinds = raw.get("layer_types")
    if raw["model_type"] == "mistral":
        kinds = kinds or ["sliding_attention"] * layers
    elif not raw.get("use_sliding_window", False):
        return (None,) * layers
    elif not kinds:
        full = int(raw.get("max_window_layers", 28))
        kinds = ["full_attention" if i < full else "sliding_attention" for i in range(layers)]
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise HspecError(f"unsupported model: `layer_types` holds {', '.join(unknown)}")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds[:layers])
