"""Quantization of groups of keys and values in torch, and its inverse."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 128  # tokens whose keys share the scales of their channels


def quantize_reference(
    keys: Tensor, values: Tensor, bits: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """keys and values [HK, n, D], n a multiple of 128 -> the four tensors of that part of a `QuantizedKV`."""
    heads, dim = len(keys), keys.shape[-1]
    key_codes, key_scales = _coded(keys.float().reshape(heads, -1, GROUP, dim), 2, bits, dtype)
    halves = values.float().reshape(heads, -1, GROUP, 2, dim // 2)
    value_codes, value_scales = _coded(halves, 4, bits, dtype)  # scales [HK, groups, 128, 2, 2]
    return (
        _packed(key_codes, bits).flatten(1, 2),
        _packed(value_codes.flatten(-2), bits).transpose(2, 3),
        key_scales,
        value_scales.movedim(3, 1).flatten(2, 3),
    )


def dequantize(keys: Tensor, values: Tensor, key_scales: Tensor, value_scales: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values that the four tensors stand for, float32 [HK, n, D]."""
    heads, dim = len(keys), key_scales.shape[-2]
    key_codes = _unpacked(keys, dim).reshape(heads, -1, GROUP, dim)
    value_codes = _unpacked(values.transpose(2, 3).flatten(1, 2), dim).reshape(heads, -1, 2, dim // 2)
    scale, minimum = key_scales.float()[:, :, None].unbind(-1)  # [HK, groups, 1, D]
    value_scale, value_minimum = value_scales.float().transpose(1, 2)[:, :, :, None].unbind(-1)  # [HK, n, 2, 1]
    return (key_codes * scale + minimum).flatten(1, 2), (value_codes * value_scale + value_minimum).flatten(2)


def _coded(x: Tensor, over: int, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of x float32; in place of dimension `over`, last, scale and minimum [..., 2] of what shares it."""
    levels = 2**bits - 1
    low, high = x.amin(over, keepdim=True), x.amax(over, keepdim=True)
    scale, minimum = ((high - low) / levels).to(dtype), low.to(dtype)
    steps = (x - minimum.float()) / scale.float().masked_fill(scale == 0, 1.0)
    codes = (steps + 0.5).floor().clamp(0, levels).to(torch.int32)
    return codes, torch.stack((scale, minimum), dim=-1).squeeze(over)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., D] in words [..., W]."""
    words = torch.zeros_like(codes[..., : codes.shape[-1] * bits // 16])
    for i, piece in enumerate(codes.chunk(16 // bits, dim=-1)):
        words |= piece << (i * bits)
    return words.to(torch.int16)


def _unpacked(words: Tensor, dim: int) -> Tensor:
    """Codes [..., D] of words [..., W], float32."""
    bits = 16 * words.shape[-1] // dim
    pieces = [words.int() >> shift & (2**bits - 1) for shift in range(0, 16, bits)]
    return torch.cat(pieces, dim=-1).float()
