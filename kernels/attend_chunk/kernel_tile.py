"""What the Triton kernel of `attend_chunk` does with one tile of keys and values.

Source: FlashAttention-2, arXiv:2307.08691; online softmax, arXiv:1805.02867.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of its functions: only constants may have one.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(float("-inf"))
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@dataclass(frozen=True)
class Form:
    """What one compiled kernel is for.

    `dim` is head_dim padded to a power of two; mask is "", "bool" or "float"; packed is how many query heads of a K/V
    head share a tile of scores, one query after the other.
    If not own, the chunk's own keys are left out: out and lse hold what they give, and are added to.
    """

    head_dim: int
    dim: int
    page_size: int
    group_size: int
    group_bytes: int
    k_bits: int
    v_bits: int
    k_bytes: int
    v_bytes: int
    quantised: bool
    guarded: bool
    causal: bool
    windowed: bool
    capped: bool
    padded: bool
    mask: str
    packed: int
    block_m: int
    block_n: int
    precision: str
    own: bool = True


@triton.jit
def tanh(x, ACCURATE: tl.constexpr):
    """Hyperbolic tangent. The quotient loses the low bits of a small x, which only float32 models would notice."""
    t = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = (1 - t) / (1 + t)
    far = tl.where(x < 0, -far, far)
    if not ACCURATE:
        return far
    # tanh(x) / x - 1 is a polynomial in x * x: least squares of the relative error over |x| < 0.55, which is 1.1e-9.
    u = x * x
    near = ((-0.0062824637 * u + 0.02107775) * u - 0.053853855) * u + 0.13332602
    near = x + x * u * (near * u - 0.3333332)
    return tl.where(tl.abs(x) < 0.55, near, far)


@triton.jit
def weight(x, F: tl.constexpr):
    """The weight of a difference of scores. They are in units of ln 2, but with a float mask in natural ones.

    A mask may hold the lowest float32, which has no multiple.
    """
    if F.mask == "float":
        x *= LOG2E
    return tl.exp2(x)


@triton.jit
def seen_tokens(token, low, high, view, F: tl.constexpr):
    """Which tokens [block_n] some query of the tile sees, as far as a mask does not hide them.

    Args:
        low, high: Only tokens low .. high - 1 are there.
        view: What the tile's queries see, as `attend_chunk_kernel` makes it: (their positions [block_m], the first, the
            last, rules, scales).
    """
    first, last, rules = view[1], view[2], view[3]
    seen = (token >= low) & (token < high)
    if F.causal:
        seen &= token <= last
    if F.windowed:
        seen &= token > first - rules[0]
    if F.padded:
        seen &= tl.load(rules[1] + token.to(tl.int64) * rules[2], mask=seen & (token < rules[3]), other=0) != 0
    return seen


@triton.jit
def hide_pairs(scores, begin, seen, view, F: tl.constexpr):
    """Scores [block_m, block_n] of the tokens from begin on, with a float mask added, and which of them count.

    seen is what `seen_tokens` gives for them.
    """
    query, rules, n = view[0], view[3], tl.arange(0, F.block_n)
    token = begin + n
    pairs = tl.broadcast_to(seen[None, :], scores.shape)
    if F.causal:
        pairs &= token[None, :] <= query[:, None]
    if F.windowed:
        pairs &= token[None, :] > query[:, None] - rules[0]
    if F.mask != "":
        pairs &= (query < rules[7])[:, None] & (token >= rules[6])[None, :]
        # Offsets inside a tile fit 32 bits; pointers for every pair would fill the registers.
        corner = rules[4] + tl.cast(begin - rules[6], tl.int64) * rules[5][1]
        offset = tl.arange(0, F.block_m)[:, None] * rules[5][0] + n[None, :] * rules[5][1]
        found = tl.load(corner + offset, mask=pairs, other=0)
        if F.mask == "float":
            found = found.to(tl.float32)
            scores += found
            pairs &= found != NEVER
        else:
            pairs &= found != 0
    return scores, pairs


@triton.jit
def weigh_keys(state, q, keys, begin, seen, exists, whole, view, F: tl.constexpr):
    """What a tile of keys [block_n, dim] from position begin on makes of the state, before its values.

    The state is the weighted sum [block_m, dim], the total [block_m] and the peak [block_m] of the weights, float32.
    If whole, every query sees every token; if not exists, none.
    Returns:
        The state, its sum on the new scale; weights [block_m, block_n] for `add_values`; the tokens that anybody sees.
    """
    weighted, total, peak = state
    scores = tl.dot(q, tl.trans(keys), input_precision=F.precision) * view[4][0]
    if F.capped:
        scores = view[4][1] * tanh(scores, F.precision == "ieee")
    if F.padded or F.mask != "":
        scores, pairs = hide_pairs(scores, begin, seen, view, F)
        scores = tl.where(pairs, scores, NEVER)
        if F.mask != "":
            seen = tl.max(pairs.to(tl.int32), 0) != 0
    else:
        scores += tl.where(exists, 0.0, NEVER)
        if not whole:
            scores, pairs = hide_pairs(scores, begin, seen, view, F)
            scores = tl.where(pairs, scores, NEVER)
    new = tl.maximum(peak, tl.max(scores, 1))
    weights = weight(scores - new[:, None], F)
    decay = weight(peak - new, F)
    total = total * decay + tl.sum(weights, 1)
    return (weighted * decay[:, None], total, new), weights.to(q.dtype), seen


@triton.jit
def add_values(state, weights, values, seen, F: tl.constexpr, CLEAN: tl.constexpr):
    """The state of `weigh_keys` with the values [block_n, dim]; if CLEAN, those that seen excludes are 0 already."""
    if not CLEAN or F.mask != "":
        # A weight of 0 does not silence a NaN, and memory that nobody has written may hold one.
        values = tl.where(seen[:, None], values, 0)
    return tl.dot(weights, values, state[0], input_precision=F.precision), state[1], state[2]
