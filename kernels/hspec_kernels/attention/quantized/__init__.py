"""A copy of keys and values in 4 or 8 bits: keys by channel over groups of tokens, values by token (Liu et al., KIVI,
arXiv 2402.02750).

Letters: S sequences, HK key/value heads, C slots, D head_dim, W = D * bits / 16 words of one token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hspec_kernels.attention.quantized.reference import GROUP, dequantize, quantize_reference
from hspec_kernels.shapes import on_triton, power_of_two

__all__ = ["GROUP", "QuantizedKV", "quantize_reference"]


class QuantizedKV:
    """Whole groups of 128 tokens, each code c standing for c * scale + minimum.

    keys    int16 [S, HK, C, W]             key_scales   [S, HK, C / 128, D, 2]  of a channel in a group
    values  int16 [S, HK, C / 128, W, 128]  value_scales [S, HK, 2, C, 2]        of half the channels of a token

    Word j holds channels j, j + W, j + 2 W ... from its low bits on, so that pieces of W channels are multiplied with
    nothing interleaved. Words of values lie token by token within a group, the order in which a product over tokens
    reads them. The last dimension of scales is (scale, minimum).
    """

    def __init__(
        self,
        sequences: int,
        kv_heads: int,
        capacity: int,
        dim: int,
        bits: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """For `capacity` tokens, of which only whole groups are kept; scales and minima are stored in `dtype`."""
        if bits not in (4, 8):
            raise ValueError(f"keys and values are quantized to 4 or 8 bits: {bits}")
        if dim % 4:
            raise ValueError(f"head_dim must be a multiple of 4: {dim}")
        self.bits, self.dim = bits, dim
        self.capacity = capacity // GROUP * GROUP
        groups, width = capacity // GROUP, dim * bits // 16
        lead = (sequences, kv_heads)
        self.keys = torch.empty(*lead, self.capacity, width, dtype=torch.int16, device=device)
        self.values = torch.empty(*lead, groups, width, GROUP, dtype=torch.int16, device=device)
        self.key_scales = torch.empty(*lead, groups, dim, 2, dtype=dtype, device=device)
        self.value_scales = torch.empty(*lead, 2, self.capacity, 2, dtype=dtype, device=device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Codes of keys and of values, scales of keys and of values."""
        return self.keys, self.values, self.key_scales, self.value_scales

    @property
    def nbytes(self) -> int:
        """Bytes of the whole copy."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def fill(self, keys: Tensor, values: Tensor, slot: int, start: int, stop: int) -> None:
        """Quantize groups `start` to `stop` - 1 of sequence `slot` of a store [S, HK, C, D] into the same places."""
        span = slice(start * GROUP, stop * GROUP)
        self.put(keys[slot, :, span], values[slot, :, span], slot, start)

    def put(self, keys: Tensor, values: Tensor, slot: int, start: int) -> None:
        """Quantize whole groups of tokens [HK, n * 128, D] into sequence `slot` from group `start` on."""
        stop = start + keys.shape[1] // GROUP
        if start >= stop:
            return
        if on_triton(keys):
            self._fill(keys, values, slot, start, stop)
            return
        found = quantize_reference(keys, values, self.bits, self.key_scales.dtype)
        for place, tensor in zip(self.part(slot, start, stop), found, strict=True):
            place.copy_(tensor)

    def tokens(self, slot: int, groups: int) -> tuple[Tensor, Tensor]:
        """The first `groups` groups of sequence `slot` as keys and values, float32 [HK, groups * 128, D]."""
        return dequantize(*self.part(slot, 0, groups))

    def part(self, slot: int, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What groups `start` to `stop` - 1 of a sequence take of each tensor."""
        span = slice(start * GROUP, stop * GROUP)
        return (
            self.keys[slot, :, span],
            self.values[slot, :, start:stop],
            self.key_scales[slot, :, start:stop],
            self.value_scales[slot, :, :, span],
        )

    def _fill(self, keys: Tensor, values: Tensor, slot: int, start: int, stop: int) -> None:
        from hspec_kernels.attention.quantized.kernel import fill_kernel

        fill_kernel[(stop - start, keys.shape[0])](
            keys,
            values,
            *(tensor[slot] for tensor in self.tensors),
            *keys.stride()[:2],
            *values.stride()[:2],
            start,
            self.capacity,
            D=self.dim,
            BP=max(16, power_of_two(self.keys.shape[-1])),
            BITS=self.bits,
            LEVELS=2**self.bits - 1,
            num_warps=8,
        )
