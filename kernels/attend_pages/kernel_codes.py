"""Codes of a page as numbers that tensor cores multiply.

The bits of the float16 number 1024 + n, for n below 1024, are those of 1024 with n in the low end: a code that is made
positive needs no conversion, only a byte beside it. bfloat16 has too few bits for that. All conversions are exact.
The idea is that of "magic number" conversions, as in arXiv:2211.10017.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

BIAS = tl.constexpr(1152.0)  # what `shifted_codes` adds: 1024, and 128 to make a code positive
NIBBLE_BIAS = tl.constexpr(1032.0)  # likewise, with 8
SIX_BIAS = tl.constexpr(1056.0)  # and with 32


@triton.jit
def shifted_codes(codes, dtype: tl.constexpr, BITS: tl.constexpr):
    """Codes of 8 bits; in float16 with BIAS added."""
    if dtype != tl.float16:
        return codes.to(dtype)
    if not BITS:
        return codes.to(tl.float16) + BIAS
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 positive;
        xor.b32 positive, $2, 0x80808080;
        prmt.b32 $0, positive, 0x64646464, 0x4140;
        prmt.b32 $1, positive, 0x64646464, 0x4342;
        }
        """,
        "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def exact_codes(codes, dtype: tl.constexpr, BITS: tl.constexpr):
    """Codes of 8 bits."""
    if dtype != tl.float16 or not BITS:
        return codes.to(dtype)
    return shifted_codes(codes, dtype, BITS) - BIAS


@triton.jit
def exact_low(pairs, dtype: tl.constexpr, BITS: tl.constexpr):
    """The codes in the low nibbles of bytes."""
    if dtype != tl.float16 or not BITS:
        return ((pairs << 4) >> 4).to(dtype)
    shifted = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 positive;
        and.b32 positive, $2, 0x0f0f0f0f;
        xor.b32 positive, positive, 0x08080808;
        prmt.b32 $0, positive, 0x64646464, 0x4140;
        prmt.b32 $1, positive, 0x64646464, 0x4342;
        }
        """,
        "=r,=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=4,
    )  # fmt: skip
    return shifted - NIBBLE_BIAS


@triton.jit
def exact_high(pairs, dtype: tl.constexpr, BITS: tl.constexpr):
    """The codes in the high nibbles of bytes."""
    if dtype != tl.float16 or not BITS:
        return (pairs >> 4).to(dtype)
    shifted = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 positive;
        shr.u32 positive, $2, 4;
        and.b32 positive, positive, 0x0f0f0f0f;
        xor.b32 positive, positive, 0x08080808;
        prmt.b32 $0, positive, 0x64646464, 0x4140;
        prmt.b32 $1, positive, 0x64646464, 0x4342;
        }
        """,
        "=r,=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=4,
    )  # fmt: skip
    return shifted - NIBBLE_BIAS


@triton.jit
def exact_low_of_6(pairs, rests, SHIFT: tl.constexpr, dtype: tl.constexpr, BITS: tl.constexpr):
    """Codes of 6 bits: the upper 4 are low nibbles of bytes, the lower 2 are SHIFT bits up in other bytes."""
    if dtype != tl.float16 or not BITS:
        return (((pairs << 4) >> 2) | ((rests >> SHIFT) & 3)).to(dtype)
    shifted = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 rest, positive;
        and.b32 positive, $3, 255;
        shr.u32 rest, $4, positive;
        and.b32 positive, $2, 0x0f0f0f0f;
        xor.b32 positive, positive, 0x08080808;
        shl.b32 positive, positive, 2;
        and.b32 rest, rest, 0x03030303;
        or.b32 positive, positive, rest;
        prmt.b32 $0, positive, 0x64646464, 0x4140;
        prmt.b32 $1, positive, 0x64646464, 0x4342;
        }
        """,
        "=r,=r,r,r,r", [pairs, tl.full([1, 1], SHIFT, tl.int8), rests], dtype=tl.float16, is_pure=True, pack=4,
    )  # fmt: skip
    return shifted - SIX_BIAS


@triton.jit
def exact_high_of_6(pairs, rests, SHIFT: tl.constexpr, dtype: tl.constexpr, BITS: tl.constexpr):
    """As `exact_low_of_6`, for high nibbles."""
    if dtype != tl.float16 or not BITS:
        return (((pairs >> 4) << 2) | ((rests >> SHIFT) & 3)).to(dtype)
    shifted = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 rest, positive;
        and.b32 positive, $3, 255;
        shr.u32 rest, $4, positive;
        shr.u32 positive, $2, 4;
        and.b32 positive, positive, 0x0f0f0f0f;
        xor.b32 positive, positive, 0x08080808;
        shl.b32 positive, positive, 2;
        and.b32 rest, rest, 0x03030303;
        or.b32 positive, positive, rest;
        prmt.b32 $0, positive, 0x64646464, 0x4140;
        prmt.b32 $1, positive, 0x64646464, 0x4342;
        }
        """,
        "=r,=r,r,r,r", [pairs, tl.full([1, 1], SHIFT, tl.int8), rests], dtype=tl.float16, is_pure=True, pack=4,
    )  # fmt: skip
    return shifted - SIX_BIAS
