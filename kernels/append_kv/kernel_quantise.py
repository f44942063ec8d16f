"""Pieces of the append kernels: reading a group of tokens, and quantising it as `kernels.formats` does."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from gemkv_compile.kernels.formats import HALF_MAX, MAX_CODE, NORM_STEPS

_HALF_MAX = tl.constexpr(HALF_MAX)
LARGEST_OF_8 = tl.constexpr(float(MAX_CODE[8]))
LARGEST_OF_6 = tl.constexpr(float(MAX_CODE[6]))
LARGEST_OF_4 = tl.constexpr(float(MAX_CODE[4]))
_NORM_STEPS = tl.constexpr(float(NORM_STEPS))
_TO_NEAREST = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds a small float32 to an integer, half to even


@triton.jit
def load_tokens(
    tail, new, token_stride, dim_stride, step, fill, total, dim,
    END: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Group `step` of the `fill` tokens of the tail and the new ones behind them, [GROUP, channels below END]."""
    token = step * GROUP + tl.arange(0, GROUP)[:, None]
    inside = (dim < END)[None, :]
    old = tl.load(tail + token * D + dim[None, :], mask=(token < fill) & inside, other=0.0)
    place = new + (token - fill).to(tl.int64) * token_stride + dim[None, :] * dim_stride
    return tl.where(token < fill, old, tl.load(place, mask=(token >= fill) & (token < total) & inside, other=0.0))


@triton.jit
def token_norms(
    tail, new, token_stride, dim_stride, step, fill, total,
    BITS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Norms of both halves of a group's tokens, as in `formats.quantise_values`; each [GROUP] float16."""
    if BITS == 4:
        low, high = tl.zeros([GROUP], tl.int32), tl.zeros([GROUP], tl.int32)
        for first in range(0, D // 2, BLOCK_D // 2):
            dim = first + tl.arange(0, BLOCK_D // 2)
            x = load_tokens(tail, new, token_stride, dim_stride, step, fill, total, dim, D // 2, D, GROUP)
            low += _squares(x)
            x = load_tokens(tail, new, token_stride, dim_stride, step, fill, total, dim + D // 2, D, D, GROUP)
            high += _squares(x)
        norms = (_root(low), _root(high))
    else:
        norms = (0, 0)
    return norms


@triton.jit
def _squares(x):
    x = tl.abs(x.to(tl.float32))
    step = tl.max(x, 0)
    step = tl.div_rn(step, tl.full(step.shape, _NORM_STEPS, tl.float32))
    steps = tl.div_rn(x, tl.broadcast_to(step[None, :], x.shape))
    steps = (steps + _TO_NEAREST) - _TO_NEAREST
    steps = tl.where(_is_broken(x)[None, :] | (steps != steps), 0.0, steps).to(tl.int32)
    return tl.sum(steps * steps, 1)


@triton.jit
def _root(squares):
    root = tl.sqrt_rn(tl.maximum(squares, 1).to(tl.float32))
    return tl.div_rn(root, tl.full(root.shape, _NORM_STEPS, tl.float32)).to(tl.float16)


@triton.jit
def _is_broken(x):
    """Whether a channel of x [GROUP, channels] holds NaN or inf: min and max pass over NaN here."""
    return tl.max(((x != x) | (tl.abs(x) == float("inf"))).to(tl.int32), 0) != 0


@triton.jit
def _smallest_scale(reach, broken, LARGEST: tl.constexpr):
    """As the function of that name in `formats`; NaN marks a broken channel, whose numbers must not look plausible."""
    scale = tl.div_rn(reach, tl.full(reach.shape, LARGEST, tl.float32)).to(tl.float16)
    # LARGEST * scale is exact in float32; the next float16 above a non-negative one has the next bit pattern.
    short = (scale.to(tl.float32) * LARGEST < reach).to(tl.int16)
    scale = (scale.to(tl.int16, bitcast=True) + short).to(tl.float16, bitcast=True)
    scale = tl.where(scale == 0.0, 1.0, scale).to(tl.float16)
    return tl.where(broken, float("nan"), scale).to(tl.float16)


@triton.jit
def _codes(x, spread, LARGEST: tl.constexpr):
    codes = tl.div_rn(x, tl.broadcast_to(spread, x.shape))
    codes = tl.where(codes == codes, tl.minimum(tl.maximum(codes, -LARGEST), LARGEST), 0.0)
    return ((codes + _TO_NEAREST) - _TO_NEAREST).to(tl.int8)


@triton.jit
def quantise_values(x, norms, scales, dim, END: tl.constexpr):
    """Codes int8 of x [GROUP, channels], after storing their scales; the arithmetic of `formats.quantise_values`."""
    x, norms = x.to(tl.float32), norms.to(tl.float32)[:, None]
    reach = tl.max(tl.div_rn(tl.abs(x), tl.broadcast_to(norms, x.shape)), 0)
    scale = _smallest_scale(reach, _is_broken(x), LARGEST_OF_4)
    tl.store(scales + dim, scale, mask=dim < END)
    return _codes(x, norms * scale.to(tl.float32)[None, :], LARGEST_OF_4)


@triton.jit
def quantise_channels(x, scales, dim, END: tl.constexpr, D: tl.constexpr, LARGEST: tl.constexpr):
    """Codes int8 of x [GROUP, channels], after storing their scales and, D numbers on, their zero-points.

    The arithmetic of `formats.quantise_groups`.
    """
    x = x.to(tl.float32)
    low, high = tl.min(x, 0), tl.max(x, 0)
    zero = tl.minimum(tl.maximum(low * 0.5 + high * 0.5, -_HALF_MAX), _HALF_MAX).to(tl.float16)
    middle = zero.to(tl.float32)
    scale = _smallest_scale(tl.maximum(high - middle, middle - low), _is_broken(x), LARGEST)
    tl.store(scales + dim, scale, mask=dim < END)
    tl.store(scales + D + dim, zero, mask=dim < END)
    return _codes(x - middle[None, :], scale.to(tl.float32)[None, :], LARGEST)
