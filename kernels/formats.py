"""The integer format of pages: signed 8-bit codes with a float16 scale and zero-point per group and channel."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_CODE = 127  # codes are symmetric: -128 is never stored
HALF_MAX = torch.finfo(torch.float16).max


def quantise_groups(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise groups of tokens, each channel of a group on its own range.

    Args:
        x: Keys or values, [..., group_size, head_dim], any float dtype; the arithmetic is float32.
    Returns:
        codes [..., group_size, head_dim] int8, scale [..., head_dim] float16 and zero [..., head_dim] float16 with
        |codes * scale + zero - x| <= scale / 2. A channel whose range needs a scale beyond float16 (values above 8e6)
        or that holds inf or NaN gets a scale of inf or NaN, so that reading it never gives a finite number.
    Source: asymmetric per-channel quantisation of K/V groups, KIVI, arXiv:2402.02750.
    """
    x = x.to(torch.float32)
    low, high = x.amin(-2), x.amax(-2)
    zero = (low * 0.5 + high * 0.5).clamp(-HALF_MAX, HALF_MAX).to(torch.float16)
    middle = zero.to(torch.float32)
    scale = _smallest_scale(torch.maximum(high - middle, middle - low))
    codes = (x - middle.unsqueeze(-2)).div_(scale.to(torch.float32).unsqueeze(-2)).round_()
    # A NaN has no defined integer value; its channel's scale already marks it.
    codes = codes.clamp_(-MAX_CODE, MAX_CODE).nan_to_num_(0.0).to(torch.int8)
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


def clamp_finite(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (float32, any shape) with finite numbers beyond the range of `dtype` at its ends; inf and NaN stay.

    Half a scale more than the largest float16 would become inf there. The other dtypes hold every dequantised number.
    """
    if dtype != torch.float16:
        return x
    return torch.where(x.isfinite(), x.clamp(-HALF_MAX, HALF_MAX), x)


def _smallest_scale(reach: Tensor) -> Tensor:
    """The smallest float16 scale with 127 * scale >= reach (float32, >= 0), and 1 where reach is 0."""
    scale = (reach / MAX_CODE).to(torch.float16)
    # 127 * scale is exact in float32; the next float16 above a non-negative one has the next bit pattern.
    short = scale.to(torch.float32) * MAX_CODE < reach
    scale = (scale.view(torch.int16) + short).view(torch.float16)
    return scale.masked_fill(scale == 0, 1.0)
