"""Keys of a prompt as int8 codes for `kernel_int8`: their mean over tokens taken off, one step for 64 of them.

Source: smoothed keys, SageAttention, arXiv:2410.02367.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of its functions: only constants may have one.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 64  # tokens that share a step
BLOCKS_SUMMED = 8  # by one program
_TO_NEAREST = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds a small float32 to an integer, half to even
_LARGEST = tl.constexpr(127.0)


@triton.jit
def codes_of(x, largest):
    """Codes int8 of x (float32), and the step between two of them, of what has `largest` as its largest absolute."""
    step = largest / _LARGEST
    step = tl.where(step > 0, step, 1.0)
    return (x / step + _TO_NEAREST).to(tl.int32, bitcast=True).to(tl.int8), step


@triton.jit
def load_keys(k, k_s, padding, padding_s, padding_len, begin, tokens, PADDED: tl.constexpr, D: tl.constexpr,
              GROUP: tl.constexpr):  # fmt: skip
    """A block of keys [GROUP, D], float32, and which of them count; the others are 0. Pointers are those of a head."""
    token, d = begin + tl.arange(0, GROUP), tl.arange(0, D)
    counts = token < tokens
    if PADDED:
        counts &= tl.load(padding + token * padding_s, mask=counts & (token < padding_len), other=0) != 0
    places = token.to(tl.int64)[:, None] * k_s[2] + d[None, :] * k_s[3]
    return tl.load(k + places, mask=counts[:, None], other=0).to(tl.float32), counts


@triton.jit(do_not_specialize=["tokens", "padding_len"])
def sum_keys_kernel(
    k, padding, sums, k_s, padding_s, tokens, padding_len, PADDED: tl.constexpr, D: tl.constexpr,
    GROUP: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Sums of the keys of some blocks: sums [batch, Hkv, parts, D] float32, contiguous. Grid: parts, Hkv, batch."""
    part, head, row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    k += row * k_s[0] + head * k_s[1]
    if PADDED:
        padding += row * padding_s[0]
    total = tl.zeros((D,), tl.float32)
    for block in range(BLOCKS):
        begin = (part * BLOCKS + block) * GROUP
        keys, _ = load_keys(k, k_s, padding, padding_s[1], padding_len, begin, tokens, PADDED, D, GROUP)
        total += tl.sum(keys, 0)
    place = (row * tl.num_programs(1) + head) * tl.num_programs(0) + part
    tl.store(sums + place * D + tl.arange(0, D), total)


@triton.jit(do_not_specialize=["tokens", "padding_len"])
def quantise_keys_kernel(
    k, padding, means, codes, steps, k_s, padding_s, tokens, padding_len, PADDED: tl.constexpr, D: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Codes of a block of keys and their step; outputs as in `quantise_keys`. Grid: blocks, Hkv, batch."""
    block, head, row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    k += row * k_s[0] + head * k_s[1]
    if PADDED:
        padding += row * padding_s[0]
    keys, counts = load_keys(
        k, k_s, padding, padding_s[1], padding_len, block * GROUP, tokens, PADDED, D, GROUP
    )  # fmt: skip
    place, d = row * tl.num_programs(1) + head, tl.arange(0, D)
    keys = tl.where(counts[:, None], keys - tl.load(means + place * D + d)[None, :], 0.0)
    place = place * tl.num_programs(0) + block
    numbers, step = codes_of(keys, tl.max(tl.max(tl.abs(keys), 1), 0))
    tl.store(codes + place * (GROUP * D) + tl.arange(0, GROUP)[:, None] * D + d[None, :], numbers)
    tl.store(steps + place, step)


def quantise_keys(k: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise keys [B, Hkv, N, D], of any strides; D is a power of two.

    Args:
        padding: uint8 [B, columns], 0 for tokens that nobody sees, as those without a column; or None.
    Returns:
        codes int8 [B, Hkv, blocks, 64, D], 0 for tokens that are not there; steps float32 [B, Hkv, blocks], what a code
        stands for; means float32 [B, Hkv, D] of the tokens that are seen: key = code * step + mean.
    """
    batch, heads, tokens, dim = k.shape
    blocks = triton.cdiv(tokens, GROUP)
    parts = triton.cdiv(blocks, BLOCKS_SUMMED)
    sums = torch.empty(batch, heads, parts, dim, dtype=torch.float32, device=k.device)
    codes = torch.empty(batch, heads, blocks, GROUP, dim, dtype=torch.int8, device=k.device)
    steps = torch.empty(batch, heads, blocks, dtype=torch.float32, device=k.device)
    strides = (0, 0) if padding is None else padding.stride()
    columns = 0 if padding is None else padding.shape[1]
    rules = k.stride(), strides, tokens, columns, padding is not None, dim, GROUP
    sum_keys_kernel[(parts, heads, batch)](k, padding, sums, *rules, BLOCKS_SUMMED)
    count: Tensor | int = tokens
    if padding is not None:
        count = padding[:, :tokens].count_nonzero(1).clamp(min=1)[:, None, None]
    means = sums.sum(2) / count
    quantise_keys_kernel[(blocks, heads, batch)](k, padding, means, codes, steps, *rules)
    return codes, steps, means
