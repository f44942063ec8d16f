"""RMSNorm and rotary embedding of the heads of one token a sequence, in Triton.

A program makes one head of one sequence: queries first, then keys, then values. The two halves that are rotated into
each other, and what is not rotated, are loaded apart, so that every load is of neighbouring channels. Products and sums
are never fused: from Hopper on LLVM makes bfloat16 instructions of rounded float32 ones, and of two of these an fma,
which leaves the rounding of a product out.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 1


@triton.jit
def _rounded(x, y):
    """float32 numbers rounded to the dtype that y points to."""
    return x.to(y.dtype.element_ty).to(tl.float32)


@triton.jit
def _load(x, channel, stride, END: tl.constexpr):
    """Channels up to END as float32."""
    return tl.load(x + channel * stride, mask=channel < END, other=0.0).to(tl.float32)


@triton.jit
def _scaled(x, rms, w, y, channel, END: tl.constexpr, NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    """Channels times the reciprocal `rms` and the weight; rounded as the norm says, and then to y's dtype."""
    if NORM == "none":
        return x
    x *= rms
    if HAS_WEIGHT:
        weight = _load(w, channel, 1, END)
        if NORM == "rounded_weight":
            x = _rounded(x, y)
        if NORM == "one_plus_weight":
            weight += 1.0
        x *= weight
    return _rounded(x, y)


@triton.jit
def _head(
    x, stride, w, cos, cos_stride, sin, sin_stride, y, eps,
    D: tl.constexpr, ROTARY: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """One head: x of D channels, of which the first ROTARY are rotated, into y."""
    half: tl.constexpr = ROTARY // 2
    low = tl.arange(0, HALF)
    high = half + low
    rest = ROTARY + tl.arange(0, REST)
    total = 0.0
    if ROTARY > 0:
        first, second = _load(x, low, stride, half), _load(x, high, stride, ROTARY)
        total += tl.sum(first * first + second * second)
    if ROTARY < D:
        unrotated = _load(x, rest, stride, D)
        total += tl.sum(unrotated * unrotated)
    rms = tl.rsqrt(total / D + eps)
    if ROTARY > 0:
        first = _scaled(first, rms, w, y, low, half, NORM, HAS_WEIGHT)
        second = _scaled(second, rms, w, y, high, ROTARY, NORM, HAS_WEIGHT)
        left = _rounded(first * _load(cos, low, cos_stride, half), y)
        left -= _rounded(second * _load(sin, low, sin_stride, half), y)
        right = _rounded(second * _load(cos, high, cos_stride, ROTARY), y)
        right += _rounded(first * _load(sin, high, sin_stride, ROTARY), y)
        tl.store(y + low, left.to(y.dtype.element_ty), mask=low < half)
        tl.store(y + high, right.to(y.dtype.element_ty), mask=low < half)
    if ROTARY < D:
        unrotated = _scaled(unrotated, rms, w, y, rest, D, NORM, HAS_WEIGHT)
        tl.store(y + rest, unrotated.to(y.dtype.element_ty), mask=rest < D)


@triton.jit
def norm_and_rotate(
    q, q_row, q_head, q_stride, k, k_row, k_head, k_stride, v, v_row, v_head, v_stride, q_weight, k_weight,
    cos, cos_row, cos_stride, sin, sin_row, sin_stride, q_out, k_out, v_out, q_heads, k_heads, v_heads, eps,
    D: tl.constexpr, ROTARY: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, ALL: tl.constexpr,
    NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_V: tl.constexpr,
):  # fmt: skip
    """Programs are (sequences, heads); HALF, REST and ALL are powers of two from ROTARY / 2, D - ROTARY and D on."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    cos += row * cos_row
    sin += row * sin_row
    if head < q_heads:
        x = q + row * q_row + head * q_head
        y = q_out + (row * q_heads + head) * D
        _head(x, q_stride, q_weight, cos, cos_stride, sin, sin_stride, y, eps, D, ROTARY, HALF, REST, NORM, HAS_WEIGHT)
    elif head < q_heads + k_heads:
        x = k + row * k_row + (head - q_heads) * k_head
        y = k_out + (row * k_heads + head - q_heads) * D
        _head(x, k_stride, k_weight, cos, cos_stride, sin, sin_stride, y, eps, D, ROTARY, HALF, REST, NORM, HAS_WEIGHT)
    elif HAS_V:
        head -= q_heads + k_heads
        y = v_out + (row * v_heads + head) * D
        x = v + row * v_row + head * v_head
        _head(x, v_stride, q_weight, cos, cos_stride, sin, sin_stride, y, eps, D, 0, 1, ALL, NORM, False)


def qk_norm_rope_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    norm: str,
    eps: float,
) -> list[Tensor]:
    """Arguments and results as in `gemkv_compile.kernels.ops_rope.qk_norm_rope`."""
    given = [q, k] if v is None else [q, k, v]
    outs = [_result(x) for x in given]
    heads = [x.shape[1] for x in given]
    dim, rotary = q.shape[-1], cos.shape[-1]
    has_v, filled = v is not None, [*given, q][:3]  # what is not there has no programs
    arguments: list[Any] = [each for x in filled for each in (x, x.stride(0), x.stride(1), x.stride(3))]
    tables = [each for x in (cos, sin) for each in (x, 0 if x.shape[0] == 1 else x.stride(0), x.stride(3))]
    with torch.cuda.device_of(q):
        norm_and_rotate[(q.shape[0], sum(heads))](
            *arguments, q if q_weight is None else q_weight, k if k_weight is None else k_weight, *tables,
            *[*outs, outs[0]][:3], *[*heads, 0][:3], eps,
            D=dim, ROTARY=rotary, HALF=triton.next_power_of_2(rotary // 2),
            REST=triton.next_power_of_2(max(1, dim - rotary)), ALL=triton.next_power_of_2(dim), NORM=norm,
            HAS_WEIGHT=q_weight is not None, HAS_V=has_v, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return outs


def _result(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
