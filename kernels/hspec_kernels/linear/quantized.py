"""Weight matrices in four bits: NF4 as bitsandbytes packs it, and affine INT4 packed for `quantized_kernel`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 64  # elements of a row that share a scale
BLOCK = 128  # elements of a row whose INT4 codes are packed together
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CHUNK = 1 << 24  # elements held in float32 at a time while a matrix is converted

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip  # quantiles of a normal distribution (Dettmers et al., arXiv 2305.14314)


@dataclass(frozen=True, eq=False)
class Quantized:
    """A weight matrix [N, K] in four bits, with a scale for every 64 elements of a row.

    "nf4": codes uint8 [N, K / 2], element 2i of a row in the high nibble of byte i and 2i + 1 in the low one; scales
    float32 [K / 64, N], the largest magnitudes. An element is NF4[code] * scale.

    "int4": codes uint8 [ceil(K / 128), N, 64]; of a block's 16-bit words w = 0 to 31, nibble i (from the lowest) is
    element 32 i + w. Scales bfloat16 [2 ceil(K / 128), N, 2], step and minimum. An element is code * step + minimum.
    """

    kind: str
    codes: Tensor
    scales: Tensor
    shape: tuple[int, int]
    dtype: torch.dtype  # of the matrix that was quantized

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def rows(self, start: int, stop: int) -> Quantized:
        """Rows `start` to `stop` of the matrix, sharing memory."""
        start, stop, _ = slice(start, stop).indices(self.shape[0])
        codes = self.codes[start:stop] if self.kind == "nf4" else self.codes[:, start:stop]
        return Quantized(self.kind, codes, self.scales[:, start:stop], (stop - start, self.shape[1]), self.dtype)

    def dequantized(self, dtype: torch.dtype | None = None) -> Tensor:
        """The matrix [N, K] that the codes stand for, rounded to `dtype` or else to that of the original."""
        out = torch.empty(self.shape, dtype=dtype or self.dtype, device=self.codes.device)
        for start, stop in _chunks(self.shape):
            out[start:stop] = FORMATS[self.kind].dequantize(self.rows(start, stop))
        return out

    def linear(self, x: Tensor, bias: Tensor | None, dequantize: Callable[[Quantized, torch.dtype], Tensor]) -> Tensor:
        """x [..., K] times the matrix, transposed, plus bias [N]; a slice of rows is dequantized at a time."""
        out = torch.empty(*x.shape[:-1], self.shape[0], dtype=x.dtype, device=x.device)
        for start, stop in _chunks(self.shape):
            part = dequantize(self.rows(start, stop), x.dtype)
            out[..., start:stop] = F.linear(x, part, None if bias is None else bias[start:stop])
        return out


def quantizable(weight: Tensor) -> bool:
    """Whether `quantize` takes the tensor: a matrix of floats whose rows are whole groups of 64."""
    return weight.ndim == 2 and weight.dtype in DTYPES and weight.numel() > 0 and weight.shape[1] % GROUP == 0


def quantize(weight: Tensor, kind: str) -> Quantized:
    """Weights [N, K] as "nf4" or "int4", on their own device.

    Raises ValueError for another kind, and for weights that are not `quantizable`.
    """
    if kind not in FORMATS:
        raise ValueError(f"a 4-bit format must be one of {', '.join(FORMATS)}, but got {kind!r}")
    if not quantizable(weight):
        raise ValueError(
            f"4-bit weights must be a float matrix [N, K] with K divisible by {GROUP}, "
            f"but got {list(weight.shape)} of {weight.dtype}"
        )
    return FORMATS[kind].quantize(weight)


@dataclass(frozen=True)
class _Format:
    quantize: Callable[[Tensor], Quantized]
    dequantize: Callable[[Quantized], Tensor]


def _chunks(shape: tuple[int, int]) -> list[tuple[int, int]]:
    """Ranges of rows of a matrix [N, K] that are converted at a time."""
    step = max(1, CHUNK // shape[1])
    return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def _quantize_nf4(weight: Tensor) -> Quantized:
    from bitsandbytes.functional import quantize_4bit

    outputs, inner = weight.shape
    packed, state = quantize_4bit(weight.contiguous(), blocksize=GROUP, quant_type="nf4", compress_statistics=False)
    scales = state.absmax.view(outputs, inner // GROUP).T.contiguous()
    return Quantized("nf4", packed.view(outputs, inner // 2), scales, (outputs, inner), weight.dtype)


def _dequantize_nf4(weight: Quantized) -> Tensor:
    table = torch.tensor(NF4, device=weight.codes.device)
    codes = torch.stack([weight.codes >> 4, weight.codes & 15], dim=-1)
    values = table[codes.view(-1, weight.shape[1] // GROUP, GROUP).int()]
    return (values * weight.scales.T[:, :, None]).view(weight.shape)


def _quantize_int4(weight: Tensor) -> Quantized:
    outputs, inner = weight.shape
    blocks = -(-inner // BLOCK)
    codes = torch.empty(blocks, outputs, BLOCK // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(2 * blocks, outputs, 2, dtype=torch.bfloat16, device=weight.device)
    for start, stop in _chunks((outputs, inner)):
        codes[:, start:stop], scales[:, start:stop] = _affine(weight[start:stop].float(), blocks)
    return Quantized("int4", codes, scales, (outputs, inner), weight.dtype)


def _affine(weight: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows [n, K] in float32. Codes are chosen for the scales as they are rounded."""
    groups = F.pad(weight, (0, blocks * BLOCK - weight.shape[1])).view(len(weight), -1, GROUP)
    low, high = groups.aminmax(dim=-1)
    step, low = ((high - low) / 15).bfloat16(), low.bfloat16()
    codes = ((groups - low.float()[..., None]) / step.float()[..., None]).round().nan_to_num(0.0).clamp(0, 15)
    nibbles = codes.to(torch.int32).view(len(weight), blocks, 4, BLOCK // 4)
    words = (nibbles << torch.arange(0, 16, 4, device=weight.device)[:, None]).sum(dim=2).to(torch.int16)
    return words.view(torch.uint8).transpose(0, 1), torch.stack([step, low], dim=-1).transpose(0, 1)


def _dequantize_int4(weight: Quantized) -> Tensor:
    words = weight.codes.view(torch.int16).transpose(0, 1).int()  # [n, blocks, 32]
    codes = torch.stack([words >> 4 * i & 15 for i in range(4)], dim=2).view(len(words), -1, GROUP)
    step, low = weight.scales.float().transpose(0, 1).unbind(dim=-1)
    values = codes * step[..., None] + low[..., None]
    return values.view(len(words), -1)[:, : weight.shape[1]]


FORMATS = {"nf4": _Format(_quantize_nf4, _dequantize_nf4), "int4": _Format(_quantize_int4, _dequantize_int4)}
