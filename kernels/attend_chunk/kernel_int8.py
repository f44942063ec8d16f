"""Attention of a whole prompt with its scores on int8 tensor cores: an approximation, for `prefill="int8"`.

Queries are quantised by token, keys by blocks of 64 tokens after their mean is taken off; products are int32. Weights
and values are multiplied in the model's dtype, as in the plain kernel. What the mean adds to a query's scores is the
same for every key, so that only softcap and lse need it.
Source: SageAttention, arXiv:2410.02367; FlashAttention-2, arXiv:2307.08691; online softmax, arXiv:1805.02867.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of its functions: only constants may have one.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemkv_compile.kernels.attend_chunk.kernel_int8_keys import GROUP, codes_of, quantise_keys
from gemkv_compile.kernels.attend_chunk.kernel_tile import LOG2E, LOWEST, NEVER, tanh
from gemkv_compile.kernels.attend_chunk.variants import capability
from gemkv_compile.kernels.results import empty_results

LN2 = tl.constexpr(0.6931471805599453)


class Tiles(NamedTuple):
    """Queries and keys in a tile of scores, warps of a program, and tiles of keys in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def tiles(head_dim: int, is_hopper: bool) -> Tiles:
    """The largest tiles for a head size that spill nothing, on GPUs before Hopper and later ones."""
    if head_dim <= 128:
        return Tiles(128, 64 if is_hopper else 32, 8, 3)
    return Tiles(128, 32, 8, 2) if is_hopper else Tiles(64, 64, 8, 2)


@triton.jit(do_not_specialize=["window", "tokens", "padding_len"])
def attend_int8_kernel(
    q, codes, steps, means, v, padding, out, lse, q_s, v_s, padding_s, out_s, scales, window, tokens, groups,
    padding_len, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PADDED: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Tensors as in `attend_int8_triton` and `quantise_keys`, with strides where these vary; lse is contiguous.

    scales: of scores, in units of ln 2, and (with softcap) the softcap in such units, of scores as shares of it.
    Grid: tiles of queries, query heads, sequences.
    """
    block, head, row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads, blocks = tl.num_programs(1), tl.cdiv(tokens, GROUP)
    if CAUSAL:
        block = tl.num_programs(0) - 1 - block  # the last queries have most to do: they start first
    kv_row = row * (heads // groups) + head // groups
    first = block * BLOCK_M
    last = tl.minimum(first + BLOCK_M, tokens) - 1
    m, d, n = first + tl.arange(0, BLOCK_M), tl.arange(0, D), tl.arange(0, BLOCK_N)
    rows, inside = m.to(tl.int64), (m < tokens)[:, None]
    q += row * q_s[0] + head * q_s[1]
    queries = tl.load(q + rows[:, None] * q_s[2] + d[None, :] * q_s[3], mask=inside, other=0).to(tl.float32)
    shift = tl.sum(queries * tl.load(means + kv_row * D + d)[None, :], 1) * scales[0]
    queries, unit = codes_of(queries, tl.max(tl.abs(queries), 1)[:, None])
    unit = tl.max(unit, 1) * scales[0]

    # No query of the tile sees a token before low; every query sees the tokens full .. full_end - 1.
    low, full = 0, 0
    if WINDOWED:
        low, full = tl.maximum(first - window + 1, 0), tl.maximum(last - window + 1, 0)
    begin, stop = low // BLOCK_N * BLOCK_N, last + 1 if CAUSAL else tokens
    full_end = first + 1 if CAUSAL else tokens
    codes += kv_row * blocks * (GROUP * D) + n[:, None] * D + d[None, :]
    steps += kv_row * blocks
    v += row * v_s[0] + head // groups * v_s[1] + d[None, :] * v_s[3]
    if PADDED:
        padding += row * padding_s[0]
    weighted = tl.zeros((BLOCK_M, D), tl.float32)
    total, peak = tl.zeros((BLOCK_M,), tl.float32), tl.full((BLOCK_M,), LOWEST, tl.float32)
    for at in tl.range(begin, stop, BLOCK_N):
        token = at + n
        seen = token < tokens
        if PADDED:
            seen &= tl.load(padding + token * padding_s[1], mask=seen & (token < padding_len), other=0) != 0
        keys = tl.load(codes + tl.cast(at, tl.int64) * D)
        values = tl.load(v + token.to(tl.int64)[:, None] * v_s[2], mask=seen[:, None], other=0)
        products = tl.dot(queries, tl.trans(keys), out_dtype=tl.int32)
        scores = products.to(tl.float32) * (unit * tl.load(steps + at // GROUP))[:, None]
        if CAPPED:
            scores = scales[1] * tanh(scores + shift[:, None], False)
        if PADDED or (at < full) or (at + BLOCK_N > full_end):
            pairs = tl.broadcast_to(seen[None, :], scores.shape)
            if CAUSAL:
                pairs &= token[None, :] <= m[:, None]
            if WINDOWED:
                pairs &= token[None, :] > m[:, None] - window
            scores = tl.where(pairs, scores, NEVER)
        new = tl.maximum(peak, tl.max(scores, 1))
        weights, decay = tl.exp2(scores - new[:, None]), tl.exp2(peak - new)
        total = total * decay + tl.sum(weights, 1)
        weighted = tl.dot(weights.to(values.dtype), values, weighted * decay[:, None])
        peak = new
    result = peak + tl.log2(total)
    if not CAPPED:
        result += shift
    out += row * out_s[0] + head * out_s[1] + rows[:, None] * out_s[2] + d[None, :] * out_s[3]
    weighted /= tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out, weighted.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + (row * heads + head) * tokens + rows, result * LN2, mask=m < tokens)


def attend_int8_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Tensor | None,
    scale: float,
    softcap: float | None,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Attend the queries of a prompt to its own keys, with scores of int8 codes.

    Args:
        q: [B, Hq, N, D] float16 or bfloat16, any strides; D is 64, 128 or 256.
        k, v: [B, Hkv, N, D], of the same dtype.
        padding: Bool [B, columns] or None: tokens that are False, or have no column, are not attended to.
        scale, softcap, causal, window: As in `gemkv_compile.kernels.ops.attend_chunk`.
    Returns:
        out [B, Hq, N, D] and lse [B, Hq, N] as of `attend_chunk`; a row that sees nothing is 0, its lse -inf.
    """
    out, lse = empty_results(q)
    if not out.numel():
        return out, lse
    batch, heads, tokens, dim = q.shape
    padding = None if padding is None else padding.view(torch.uint8)
    strides = (0, 0) if padding is None else padding.stride()
    scales = (scale * LOG2E.value, 0.0) if softcap is None else (scale / softcap, softcap * LOG2E.value)
    sizes = tiles(dim, capability(q.device) >= (9, 0))
    grid = triton.cdiv(tokens, sizes.block_m), heads, batch
    with torch.cuda.device_of(q):
        keys = quantise_keys(k, padding)
        attend_int8_kernel[grid](
            q, *keys, v, padding, out, lse, q.stride(), v.stride(), strides, out.stride(), scales, window or 0, tokens,
            heads // k.shape[1], 0 if padding is None else padding.shape[1], causal, window is not None,
            softcap is not None, padding is not None, dim, sizes.block_m, sizes.block_n, GROUP,
            num_warps=sizes.num_warps, num_stages=sizes.num_stages,
        )  # fmt: skip
    return out, lse
