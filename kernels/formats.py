"""The integer formats of pages: signed codes of 8, 6 or 4 bits of groups of tokens.

Keys, and values of 8 bits, have a float16 scale and zero-point per group and channel. Values of 4 bits have a scale per
group and channel, times one per token and half of the channels, and no zero-point.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_CODE = {8: 127, 6: 31, 4: 7}  # by bits; codes are symmetric: -128, -32 and -8 are never stored
NORM_STEPS = 1023  # a token's norm is a sum of squares of integers up to this: no order of summation changes it
HALF_MAX = torch.finfo(torch.float16).max


def quantise_groups(x: Tensor, bits: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise groups of tokens, each channel of a group on its own range.

    Args:
        x: Keys or values, [..., group_size, head_dim], any float dtype; the arithmetic is float32.
        bits: 8, 6 or 4; codes are -127 .. 127, -31 .. 31 or -7 .. 7.
    Returns:
        codes [..., group_size, head_dim] int8, scale [..., head_dim] float16 and zero [..., head_dim] float16 with
        |codes * scale + zero - x| <= scale / 2. A channel whose range needs a scale beyond float16 (values above 8e6,
        2e6 with 6 bits, 4e5 with 4) or that holds inf or NaN gets a scale of inf or NaN, so that reading it never
        gives a finite number.
    Source: asymmetric per-channel quantisation of K/V groups, KIVI, arXiv:2402.02750.
    """
    x = x.to(torch.float32)
    low, high = x.amin(-2), x.amax(-2)
    zero = (low * 0.5 + high * 0.5).clamp(-HALF_MAX, HALF_MAX).to(torch.float16)
    middle = zero.to(torch.float32)
    scale = _smallest_scale(torch.maximum(high - middle, middle - low), MAX_CODE[bits])
    codes = (x - middle.unsqueeze(-2)).div_(scale.to(torch.float32).unsqueeze(-2)).round_()
    # A NaN has no defined integer value; its channel's scale already marks it.
    codes = codes.clamp_(-MAX_CODE[bits], MAX_CODE[bits]).nan_to_num_(0.0).to(torch.int8)
    return codes, scale, zero


def dequantise_groups(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Invert `quantise_groups`.

    Args:
        codes: [..., group_size, head_dim] int8.
        scale, zero: [..., head_dim] float16.
    Returns:
        [..., group_size, head_dim] float32.
    """
    scaled = codes.to(torch.float32) * scale.to(torch.float32).unsqueeze(-2)
    return scaled.add_(zero.to(torch.float32).unsqueeze(-2))


def quantise_values(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise groups of values to 4 bits: each token's halves by their norms, then each channel by what remains.

    Args:
        x: Values, [..., group_size, head_dim], any float dtype; the arithmetic is float32.
    Returns:
        codes [..., group_size, head_dim] int8, scale [..., head_dim] float16 and norms [..., 2, group_size] float16
        with |codes * scale * norm - x| <= scale * norm / 2, where the norm is that of the token and of the channel's
        half. A channel that holds inf or NaN, or needs a scale beyond float16, gets a scale of inf or NaN.
    Source: values by token, KIVI, arXiv:2402.02750; a scale for each row times one for each column, SINQ,
        arXiv:2509.22944.
    """
    x = x.to(torch.float32)
    largest = x.abs().amax(-2, keepdim=True)
    steps = (x.abs() / (largest / NORM_STEPS)).round_().nan_to_num_(0.0, 0.0, 0.0)
    squares = steps.to(torch.int32).square_().unflatten(-1, (2, -1)).sum(-1, dtype=torch.int32)  # [..., G, 2]
    # torch's float32 root on CPUs is not the nearest one everywhere, and a norm must be the same bits everywhere.
    roots = squares.clamp(min=1).to(torch.float64).sqrt().to(torch.float32)
    norms = (roots / NORM_STEPS).to(torch.float16).mT.contiguous()
    spread = spread_norms(norms, x.shape[-1])
    scale = _smallest_scale((x.abs() / spread).amax(-2), MAX_CODE[4])
    codes = (x / (spread * scale.to(torch.float32).unsqueeze(-2))).round_()
    return codes.clamp_(-MAX_CODE[4], MAX_CODE[4]).nan_to_num_(0.0).to(torch.int8), scale, norms


def dequantise_values(codes: Tensor, scale: Tensor, norms: Tensor) -> Tensor:
    """Invert `quantise_values`, whose results are the arguments; [..., group_size, head_dim] float32."""
    return codes.to(torch.float32) * (spread_norms(norms, codes.shape[-1]) * scale.to(torch.float32).unsqueeze(-2))


def spread_norms(norms: Tensor, head_dim: int) -> Tensor:
    """Norms [..., 2, group_size] for every number of their group, [..., group_size, head_dim] float32."""
    return norms.mT.to(torch.float32).repeat_interleave(head_dim // 2, dim=-1)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes as they are stored.

    Args:
        codes: [..., head_dim] int8; with 6 bits head_dim is a multiple of 4, with 4 bits of 2.
        bits: 8, 6 or 4.
    Returns:
        int8: the codes; or [..., head_dim / 2] with channel d in the low nibble and d + head_dim / 2 in the high one;
        or, with 6 bits, that for the upper 4 bits of each code, and behind it [..., head_dim / 4] for the lower 2:
        channel d + i * head_dim / 4 in the bits 2 i and 2 i + 1.
    """
    if bits == 8:
        return codes
    if bits == 6:
        rests = [(part & 3) << 2 * i for i, part in enumerate(codes.chunk(4, dim=-1))]
        return torch.cat((pack_codes(codes >> 2, 4), rests[0] | rests[1] | rests[2] | rests[3]), dim=-1)
    low, high = codes.chunk(2, dim=-1)
    return (low & 15) | (high << 4)


def unpack_codes(stored: Tensor, bits: int) -> Tensor:
    """Invert `pack_codes`: stored int8 [..., head_dim * bits / 8] to codes [..., head_dim] int8."""
    if bits == 8:
        return stored
    if bits == 6:
        nibbles, rests = stored.split([stored.shape[-1] // 3 * 2, stored.shape[-1] // 3], dim=-1)
        return (unpack_codes(nibbles, 4) << 2) | torch.cat([(rests >> 2 * i) & 3 for i in range(4)], dim=-1)
    return torch.cat(((stored << 4) >> 4, stored >> 4), dim=-1)


def clamp_finite(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (float32, any shape) with finite numbers beyond the range of `dtype` at its ends; inf and NaN stay.

    Half a scale more than the largest float16 would become inf there. The other dtypes hold every dequantised number.
    """
    if dtype != torch.float16:
        return x
    return torch.where(x.isfinite(), x.clamp(-HALF_MAX, HALF_MAX), x)


def _smallest_scale(reach: Tensor, max_code: int) -> Tensor:
    """The smallest float16 scale with max_code * scale >= reach (float32, >= 0), and 1 where reach is 0."""
    scale = (reach / max_code).to(torch.float16)
    # max_code * scale is exact in float32; the next float16 above a non-negative one has the next bit pattern.
    short = scale.to(torch.float32) * max_code < reach
    scale = (scale.view(torch.int16) + short).view(torch.float16)
    return scale.masked_fill(scale == 0, 1.0)
