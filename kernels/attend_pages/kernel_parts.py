"""Pieces of the decode kernel: reading a group of 64 tokens, scoring it, and adding up what the programs leave."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e38)  # finite, so that the difference of two peaks is never NaN
HEADROOM = tl.constexpr(8.0)  # weights reach 2 ** 8: float16 then holds those of 2e-10 of the largest as well


@triton.jit
def load_rows(
    block, offset: tl.constexpr, dtype: tl.constexpr, token, dim,
    D: tl.constexpr, STRIDE: tl.constexpr, D_PADDED: tl.constexpr,
):  # fmt: skip
    """Keys of a group from the element `offset` of each row on, D of each row of STRIDE elements, [GROUP, D_PADDED]."""
    place = tl.multiple_of(block.to(tl.pointer_type(dtype)), 16) + token[:, None] * STRIDE + (offset + dim[None, :])
    if D == D_PADDED:
        return tl.load(place)
    return tl.load(place, mask=dim[None, :] < D, other=0)


@triton.jit
def load_columns(
    block, offset: tl.constexpr, dtype: tl.constexpr, token, dim,
    D: tl.constexpr, D_PADDED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Values of a group, which are stored transposed, D columns, [D_PADDED, GROUP]."""
    place = tl.multiple_of((block + offset).to(tl.pointer_type(dtype)), 16) + dim[:, None] * GROUP + token[None, :]
    if D == D_PADDED:
        return tl.load(place)
    return tl.load(place, mask=dim[:, None] < D, other=0)


@triton.jit
def load_plane(block, offset: tl.constexpr, dim, D: tl.constexpr, D_PADDED: tl.constexpr):
    """Scales or zero-points of D channels, float16 [D_PADDED]."""
    place = tl.multiple_of((block + offset).to(tl.pointer_type(tl.float16)), 16) + dim
    return tl.load(place) if D == D_PADDED else tl.load(place, mask=dim < D, other=0.0)


@triton.jit
def largest_number(query):
    """The largest absolute number of each head's query, float32 [query heads]."""
    return tl.max(tl.abs(query.to(tl.float32)), 0)


@triton.jit
def power_above(number):
    """A power of two above a number, or about one of its size."""
    return tl.exp2(tl.floor(tl.log2(tl.maximum(number, 1e-30))) + 1.0)


@triton.jit
def normalise(query, unit):
    """Queries [channels, query heads] in units of their head as float16 numbers below 1.

    A product with a scale, a float16 number itself, stays in float16's range then. What float16 cannot hold is below
    6e-8 of the head's largest number.
    """
    return (query.to(tl.float32) / unit[None, :]).to(tl.float16)


@triton.jit
def scaled(codes, scale, zero):
    """Numbers of codes, of one dtype; on a GPU a multiply-add, which rounds once."""
    return codes * scale.to(codes.dtype) + zero.to(codes.dtype)


@triton.jit
def exact_dot(left, right):
    """A product in float32, exact for float32 operands."""
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def is_seen(position, low, length, padding, padding_token, padding_len):
    """Whether tokens [GROUP] exist and are not padding."""
    seen = (position >= low) & (position < length)
    if padding is not None:
        place = padding + position.to(tl.int64) * padding_token
        seen = seen & (tl.load(place, mask=seen & (position < padding_len), other=0) != 0)
    return seen


@triton.jit
def finish_scores(product, seen, position, length, member, mask, mask_token, mask_len, scale, softcap,
            GROUPS: tl.constexpr, HAS_CAP: tl.constexpr):  # fmt: skip
    """Scores [GROUP, query heads] to the base of 2: scaled, capped, masked, -inf where nothing is seen."""
    scores = product * scale
    if HAS_CAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), which is right at both ends
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores / softcap * (2.0 * LOG2_E)) + 1.0))
    scores = scores * LOG2_E
    seen = seen[:, None]
    if mask is not None:
        column = (position - length + mask_len)[:, None]
        bias = tl.load(mask + column * mask_token, mask=seen & (member[None, :] < GROUPS), other=0)
        if mask.dtype.element_ty.is_floating():
            scores += bias.to(tl.float32) * LOG2_E
        else:
            seen = seen & (bias != 0)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def combine_splits(
    sums, peaks, sinks, sink_head, out, out_batch, out_head, lse, splits,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS_PADDED: tl.constexpr,
):  # fmt: skip
    """Add the shares of BLOCK_D channels of one query head, each on the scale of its own peak."""
    head, row, block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    heads = tl.num_programs(0)
    split, dim = tl.arange(0, SPLITS_PADDED), block * BLOCK_D + tl.arange(0, BLOCK_D)
    place = (row * heads + head) * splits + split
    peak = tl.load(peaks + place, mask=split < splits, other=LOWEST)
    total = tl.load(peaks + tl.num_programs(1).to(tl.int64) * heads * splits + place, mask=split < splits, other=0.0)
    peak = tl.where(total > 0.0, peak, LOWEST)
    highest = tl.max(peak, 0)
    if sinks is not None:
        sink = tl.load(sinks + head * sink_head).to(tl.float32) * LOG2_E
        highest = tl.maximum(highest, sink)
    factor = tl.where(total > 0.0, tl.exp2(peak - highest), 0.0)
    whole = tl.sum(total * factor, 0)
    if sinks is not None:
        whole += tl.where(sink > LOWEST, tl.exp2(sink - highest), 0.0)
    inside = (split[:, None] < splits) & (dim[None, :] < D)
    shares = tl.load(sums + place[:, None] * D + dim[None, :], mask=inside, other=0.0)
    result = tl.sum(shares * factor[:, None], 0) / tl.where(whole > 0.0, whole, 1.0)
    tl.store(out + row * out_batch + head * out_head + dim, result.to(out.dtype.element_ty), mask=dim < D)
    whole = tl.where(whole > 0.0, (highest + tl.log2(whole)) * LN_2, float("-inf"))
    tl.store(lse + row * heads + head, whole, mask=block == 0)
