"""Writing a group of tokens to its page, some channels at a time: what the launches of an append share.

A block of 4-bit codes is two half blocks of channels, d and d + D / 2, that share bytes; one of 6-bit codes is four
quarter blocks, D / 4 apart.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from gemkv_compile.kernels.append_kv.kernel_quantise import (
    LARGEST_OF_4,
    LARGEST_OF_6,
    LARGEST_OF_8,
    load_tokens,
    quantise_channels,
    quantise_values,
)

BLOCK_D = 64  # channels that a program quantises at once: a [64, 64] tile takes 32 registers a thread; even


@triton.jit
def channels(first, BITS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The channels of the block at `first`, [BLOCK_D]; D where there is none. See the head of this file."""
    place = tl.arange(0, BLOCK_D)
    if BITS == 4 or BITS == 6:
        PARTS: tl.constexpr = 2 if BITS == 4 else 4
        one = first // PARTS + place % (BLOCK_D // PARTS)
        dim = tl.where(one < D // PARTS, one + place // (BLOCK_D // PARTS) * (D // PARTS), D)
    else:
        dim = first + place
    return dim


@triton.jit
def commit(
    tail, new, token_stride, dim_stride, step, fill, norms, first, block, IS_VALUE: tl.constexpr,
    BITS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, K_BYTES: tl.constexpr, V_BYTES: tl.constexpr,
    QUANTISED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write a group's keys as rows or its values as columns to the tile at address `block`, see `kernels.layout`.

    The channels are those of `channels`, the group that of `load_tokens`; norms: its `token_norms`, if it has some.
    """
    if BITS == 6:
        _commit_quarters(tail, new, token_stride, dim_stride, step, fill, first, block,
                         D, GROUP, K_BYTES, V_BYTES, BLOCK_D)  # fmt: skip
    else:
        _commit_halves(tail, new, token_stride, dim_stride, step, fill, norms, first, block, IS_VALUE,
                       BITS, D, GROUP, K_BYTES, V_BYTES, QUANTISED, BLOCK_D)  # fmt: skip


@triton.jit
def _commit_halves(
    tail, new, token_stride, dim_stride, step, fill, norms, first, block, IS_VALUE: tl.constexpr,
    BITS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, K_BYTES: tl.constexpr, V_BYTES: tl.constexpr,
    QUANTISED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`commit` for numbers of 4 or 8 bits and of the model."""
    scales = (block + K_BYTES + V_BYTES).to(tl.pointer_type(tl.float16)) + (2 * D if IS_VALUE else 0)
    WIDTH: tl.constexpr = D // 2 if BITS == 4 else D
    token = tl.arange(0, GROUP)
    if BITS == 4:
        dim = first // BLOCK_D * (BLOCK_D // 2) + tl.arange(0, BLOCK_D // 2)  # a multiple that the compiler sees
        x = load_tokens(tail, new, token_stride, dim_stride, step, fill, dim, WIDTH, D, GROUP)
        y = load_tokens(tail, new, token_stride, dim_stride, step, fill, dim + WIDTH, D, D, GROUP)
        if IS_VALUE:
            low = quantise_values(x, norms[0], scales, dim, WIDTH)
            high = quantise_values(y, norms[1], scales, dim + WIDTH, D)
            tl.store(scales + D + token, norms[0])  # every block of channels writes the same numbers
            tl.store(scales + D + GROUP + token, norms[1])
        else:
            low = quantise_channels(x, scales, dim, WIDTH, D, LARGEST_OF_4)
            high = quantise_channels(y, scales, dim + WIDTH, D, D, LARGEST_OF_4)
        x = (low & 15) | (high << 4)
    else:
        dim = first + tl.arange(0, BLOCK_D)
        x = load_tokens(tail, new, token_stride, dim_stride, step, fill, dim, D, D, GROUP)
        if QUANTISED:
            x = quantise_channels(x, scales, dim, D, D, LARGEST_OF_8)
    place = dim[None, :] * GROUP + token[:, None] if IS_VALUE else token[:, None] * WIDTH + dim[None, :]
    plane = (block + K_BYTES if IS_VALUE else block).to(tl.pointer_type(x.dtype))
    # Wider rows of keys would make threads load, and reduce, more channels of fewer tokens.
    tl.store(tl.multiple_of(plane, 16 if IS_VALUE else 8) + place, x, mask=(dim < WIDTH)[None, :])


@triton.jit
def _commit_quarters(
    tail, new, token_stride, dim_stride, step, fill, first, block, D: tl.constexpr, GROUP: tl.constexpr,
    K_BYTES: tl.constexpr, V_BYTES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`commit` for keys of 6 bits."""
    scales = (block + K_BYTES + V_BYTES).to(tl.pointer_type(tl.float16))
    PART: tl.constexpr = D // 4
    dim = first // BLOCK_D * (BLOCK_D // 4) + tl.arange(0, BLOCK_D // 4)
    inside = (dim < PART)[None, :]
    row = block.to(tl.pointer_type(tl.int8)) + tl.arange(0, GROUP)[:, None] * (3 * PART) + dim[None, :]
    rests = tl.zeros([GROUP, BLOCK_D // 4], tl.int8)
    for half in tl.static_range(2):  # the quarters whose upper bits share a byte
        at, after = half * PART, (half + 2) * PART
        x = load_tokens(tail, new, token_stride, dim_stride, step, fill, dim + at, at + PART, D, GROUP)
        low = quantise_channels(x, scales, dim + at, at + PART, D, LARGEST_OF_6)
        x = load_tokens(tail, new, token_stride, dim_stride, step, fill, dim + after, after + PART, D, GROUP)
        high = quantise_channels(x, scales, dim + after, after + PART, D, LARGEST_OF_6)
        tl.store(row + at, ((low >> 2) & 15) | ((high >> 2) << 4), mask=inside)
        rests = rests | ((low & 3) << (2 * half)) | ((high & 3) << (2 * half + 4))
    tl.store(row + 2 * PART, rests, mask=inside)
