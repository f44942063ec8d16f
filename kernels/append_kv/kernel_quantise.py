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
    tail, new, token_stride, dim_stride, step, fill, dim,
    END: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Group `step` of the `fill` tokens of the tail and the new ones behind them, [GROUP, channels below END].

    All of its tokens are there; those of a group after the first are all new.
    """
    row = tl.arange(0, GROUP)[:, None]
    inside = (dim < END)[None, :]
    if step > 0:
        new += (step * GROUP - fill).to(tl.int64) * token_stride
        x = tl.load(new + row * token_stride + dim[None, :] * dim_stride, mask=inside, other=0.0)
    else:
        old = tl.load(tail + row * D + dim[None, :], mask=(row < fill) & inside, other=0.0)
        place = new + (row - fill).to(tl.int64) * token_stride + dim[None, :] * dim_stride
        x = tl.where(row < fill, old, tl.load(place, mask=(row >= fill) & inside, other=0.0))
    return x


@triton.jit
def token_norms(
    tail, new, token_stride, dim_stride, step, fill,
    BITS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Norms of both halves of a group's tokens, as in `formats.quantise_values`; each [GROUP] float16."""
    if BITS == 4:
        low, high = tl.zeros([GROUP], tl.int32), tl.zeros([GROUP], tl.int32)
        for first in range(0, D // 2, BLOCK_D // 2):
            dim = first + tl.arange(0, BLOCK_D // 2)
            x = load_tokens(tail, new, token_stride, dim_stride, step, fill, dim, D // 2, D, GROUP)
            low += _squares(x)
            x = load_tokens(tail, new, token_stride, dim_stride, step, fill, dim + D // 2, D, D, GROUP)
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
    """Whether a channel of x [GROUP, channels] holds NaN or inf, of which 0 times is NaN: min and max pass over NaN."""
    return tl.sum(x * 0.0, 0) != 0.0


@triton.jit
def _quotient(x, divisor, inverse):
    """x / divisor to the nearest float32, of a divisor with few bits and 1 / divisor to the nearest; 0 if both are 0.

    The residue of x * inverse is exact, and with it the quotient is off by less than 2**-23 of a last bit. That a
    quotient by a number of 12 bits or fewer is nearer than 2**-13 to the middle of two float32 numbers cannot be.
    Three instructions where a division takes twelve. Source: P. Markstein, IBM J. Res. Dev. 34(1), 1990.
    """
    inverse, divisor = tl.broadcast_to(inverse, x.shape), tl.broadcast_to(divisor, x.shape)
    near = x * inverse
    return tl.fma(tl.fma(-near, divisor, x), inverse, near)


@triton.jit
def _smallest_scale(reach, LARGEST: tl.constexpr):
    """As the function of that name in `formats`."""
    largest = tl.full(reach.shape, LARGEST, tl.float32)
    scale = _quotient(reach, largest, tl.full(reach.shape, 1 / LARGEST, tl.float32)).to(tl.float16)
    # LARGEST * scale is exact in float32; the next float16 above a non-negative one has the next bit pattern.
    short = (scale.to(tl.float32) * LARGEST < reach).to(tl.int16)
    scale = (scale.to(tl.int16, bitcast=True) + short).to(tl.float16, bitcast=True)
    return tl.where(scale == 0.0, 1.0, scale).to(tl.float16)


@triton.jit
def _nearest(x):
    """x, which is small, as the nearest int8, half to even; an arbitrary one for NaN."""
    return (x + _TO_NEAREST).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def quantise_values(x, norms, scales, dim, END: tl.constexpr):
    """Codes int8 of x [GROUP, channels], after storing their scales; the arithmetic of `formats.quantise_values`."""
    x, norms = x.to(tl.float32), norms.to(tl.float32)[:, None]
    reach = tl.max(tl.div_rn(tl.abs(x), tl.broadcast_to(norms, x.shape)), 0)
    scale = tl.where(_is_broken(x), float("nan"), _smallest_scale(reach, LARGEST_OF_4)).to(tl.float16)
    tl.store(scales + dim, scale, mask=dim < END)
    codes = tl.div_rn(x, tl.broadcast_to(norms * scale.to(tl.float32)[None, :], x.shape))
    return _nearest(tl.where(codes == codes, tl.minimum(tl.maximum(codes, -LARGEST_OF_4), LARGEST_OF_4), 0.0))


@triton.jit
def quantise_channels(x, scales, dim, END: tl.constexpr, D: tl.constexpr, LARGEST: tl.constexpr):
    """Codes int8 of x [GROUP, channels], after storing their scales and, D numbers on, their zero-points.

    The arithmetic of `formats.quantise_groups`; a channel that holds NaN or inf gets codes that say nothing.
    """
    x = x.to(tl.float32)
    low, high = tl.min(x, 0), tl.max(x, 0)
    zero = tl.minimum(tl.maximum(low * 0.5 + high * 0.5, -_HALF_MAX), _HALF_MAX).to(tl.float16)
    middle = zero.to(tl.float32)
    scale = _smallest_scale(tl.maximum(high - middle, middle - low), LARGEST)
    scale = tl.where(_is_broken(x), float("nan"), scale).to(tl.float16)
    tl.store(scales + dim, scale, mask=dim < END)
    tl.store(scales + D + dim, zero, mask=dim < END)
    spread = tl.where(tl.abs(scale) < float("inf"), scale, 0.0).to(tl.float32)
    inverse = tl.where(spread == 0.0, 0.0, tl.div_rn(tl.full(spread.shape, 1.0, tl.float32), spread))
    # No quotient is beyond LARGEST: LARGEST * scale is no less than any difference, and rounding keeps the order.
    return _nearest(_quotient(x - middle[None, :], spread[None, :], inverse[None, :]))
