"""Codes of a page as numbers that tensor cores multiply.

The bits of the float16 number 1024 + n, for n below 1024, are those of 1024 with n in the low end: a code that is made
positive needs no conversion, only a byte beside it. bfloat16 has too few bits for that. All conversions are exact.
The idea is that of "magic number" conversions, as in arXiv:2211.10017.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

BIAS = tl.constexpr(1152.0)  # what OF_BYTES adds: 1024, and 128 to make a code positive
NIBBLE_BIAS = tl.constexpr(1032.0)  # likewise, with 8
SIX_BIAS = tl.constexpr(1056.0)  # and with 32


def _four_halves(*steps: str) -> tl.constexpr:
    """PTX that makes four float16 numbers, $0 and $1, of the four codes that the steps leave in `positive`."""
    last = ("prmt.b32 $0, positive, 0x64646464, 0x4140", "prmt.b32 $1, positive, 0x64646464, 0x4342")
    return tl.constexpr("{ .reg .b32 positive, rest; " + "; ".join((*steps, *last)) + "; }")


_NIBBLE = ("and.b32 positive, positive, 0x0f0f0f0f", "xor.b32 positive, positive, 0x08080808")
_LOW = ("mov.b32 positive, $2", *_NIBBLE)
_HIGH = ("shr.u32 positive, $2, 4", *_NIBBLE)
_REST = (  # $3 is the number of bits that the lower 2 of each code are up in the bytes of $4
    "and.b32 rest, $3, 255",
    "shr.u32 rest, $4, rest",
    "and.b32 rest, rest, 0x03030303",
    "shl.b32 positive, positive, 2",
    "or.b32 positive, positive, rest",
)
OF_BYTES = _four_halves("xor.b32 positive, $2, 0x80808080")
OF_LOW, OF_HIGH = _four_halves(*_LOW), _four_halves(*_HIGH)
OF_LOW_AND_REST, OF_HIGH_AND_REST = _four_halves(*_LOW, *_REST), _four_halves(*_HIGH, *_REST)


# A `return` under a compile-time `if` does not end a function for Triton: each branch needs its `else`.


@triton.jit
def exact_codes(codes, dtype: tl.constexpr, BITS: tl.constexpr):
    """Codes of 8 bits. BITS: float16 numbers may be made of bits."""
    if dtype == tl.float16 and BITS:
        numbers = tl.inline_asm_elementwise(OF_BYTES, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
        numbers -= BIAS
    else:
        numbers = codes.to(dtype)
    return numbers


@triton.jit
def exact_nibbles(pairs, HIGH: tl.constexpr, dtype: tl.constexpr, BITS: tl.constexpr):
    """The codes in the low or the high nibbles of bytes."""
    if dtype == tl.float16 and BITS:
        asm: tl.constexpr = OF_HIGH if HIGH else OF_LOW
        numbers = tl.inline_asm_elementwise(asm, "=r,=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=4)
        numbers -= NIBBLE_BIAS
    else:
        numbers = ((pairs if HIGH else pairs << 4) >> 4).to(dtype)
    return numbers


@triton.jit
def exact_six(pairs, rests, HIGH: tl.constexpr, SHIFT: tl.constexpr, dtype: tl.constexpr, BITS: tl.constexpr):
    """Codes of 6 bits: the upper 4 are nibbles of `pairs`, the lower 2 are SHIFT bits up in the bytes of `rests`."""
    if dtype == tl.float16 and BITS:
        asm: tl.constexpr = OF_HIGH_AND_REST if HIGH else OF_LOW_AND_REST
        words = [pairs, tl.full([1, 1], SHIFT, tl.int8), rests]
        numbers = tl.inline_asm_elementwise(asm, "=r,=r,r,r,r", words, dtype=tl.float16, is_pure=True, pack=4)
        numbers -= SIX_BIAS
    else:
        numbers = (((pairs if HIGH else pairs << 4) >> 4 << 2) | ((rests >> SHIFT) & 3)).to(dtype)
    return numbers
