"""The loops of the Triton kernel of `attend_chunk`, over pages and over rows in model precision.

Source: pages, arXiv:2309.06180; the layout is in `gemkv_compile.kernels.layout`.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of its functions: only constants may have one.

from __future__ import annotations

import triton
import triton.language as tl

from gemkv_compile.kernels.attend_chunk.kernel_tile import LOG2E, NEVER, add_values, seen_tokens, weigh_keys


@triton.jit
def own_nibble(pairs, high):
    """Of bytes with two 4-bit codes each, the code in the high nibble where high, else that in the low one, int8."""
    return tl.where(high, pairs >> 4, (pairs << 4) >> 4)


@triton.jit
def codes_of_6(rows, d, has, F: tl.constexpr):
    """Keys of 6 bits, [block_n, dim] int8, from pointers [block_n, 1] to their rows: see `kernels.layout`."""
    HALF: tl.constexpr = F.head_dim // 2
    QUARTER: tl.constexpr = F.head_dim // 4
    pairs = tl.load(rows + (d % HALF)[None, :], mask=has[None, :], other=0)
    rests = tl.load(rows + (HALF + d % QUARTER)[None, :], mask=has[None, :], other=0)
    shift = (d // QUARTER % 4 * 2).to(tl.int8)
    return (own_nibble(pairs, (d >= HALF)[None, :]) << 2) | ((rests >> shift[None, :]) & 3)


@triton.jit
def decode_codes(codes, planes, has, PLANE: tl.constexpr, F: tl.constexpr):
    """Codes [block_n, dim] as float32; the scale is PLANE planes of head_dim numbers on, the zero-point follows it."""
    scale = tl.load(planes + PLANE * F.head_dim, mask=has, other=0).to(tl.float32)
    zero = tl.load(planes + (PLANE + 1) * F.head_dim, mask=has, other=0).to(tl.float32)
    return codes.to(tl.float32) * scale[None, :] + zero[None, :]


@triton.jit
def decode_values(codes, planes, norms, has, there, F: tl.constexpr):
    """Codes [block_n, dim] of 4-bit values as float32; norms are pointers [block_n] to those of the lower half."""
    d = tl.arange(0, F.dim)
    scale = tl.load(planes + 2 * F.head_dim, mask=has, other=0).to(tl.float32)
    low = tl.load(norms, mask=there, other=0).to(tl.float32)
    high = tl.load(norms + F.group_size, mask=there, other=0).to(tl.float32)
    spread = tl.where((d >= F.head_dim // 2)[None, :], high[:, None], low[:, None])
    return codes.to(tl.float32) * (spread * scale[None, :])


@triton.jit
def attend_pages(state, q, table, table_p, max_pages, head_group, low, full, high, view, F: tl.constexpr):
    """The state after the pages of the tokens low .. high - 1; every query sees those from full on.

    head_group is the head's first group in a page. The next address is on its way while a tile is attended to: no load
    of keys has to wait for one.
    """
    BLOCK_N: tl.constexpr = F.block_n
    ELEMENT: tl.constexpr = tl.int8 if F.quantised else q.dtype
    # Bytes of packed codes are read once for every channel in them: the tile is then as an 8-bit one.
    K_DIM: tl.constexpr = F.head_dim // 2 if F.k_bits == 4 else F.head_dim
    V_DIM: tl.constexpr = F.head_dim // 2 if F.v_bits == 4 else F.head_dim
    max_pages = tl.maximum(max_pages, 1)
    begin = low // BLOCK_N * BLOCK_N
    address = tl.load(table + begin // F.page_size % max_pages * table_p, mask=begin < high, other=0)
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, F.dim)
    k_d = d % K_DIM if F.k_bits == 4 else d
    v_d = d % V_DIM if F.v_bits == 4 else d
    for at in tl.range(begin, high, BLOCK_N):
        after = at + BLOCK_N
        following = tl.load(table + after // F.page_size % max_pages * table_p, mask=after < high, other=0)
        base = address + (head_group + at % F.page_size // F.group_size).to(tl.int64) * F.group_bytes
        data = tl.multiple_of(base.to(tl.pointer_type(ELEMENT)), 16)  # a fact of the layout
        scales = tl.multiple_of((base + F.k_bytes + F.v_bytes).to(tl.pointer_type(tl.float16)), 16)
        planes = scales + d
        has, row = (d < F.head_dim) & (address != 0), n
        if F.group_size != BLOCK_N:
            row = n + tl.multiple_of(at % F.group_size, BLOCK_N)
        if F.k_bits == 6:
            keys = codes_of_6(data + row[:, None] * (F.head_dim // 4 * 3), d, has, F)
        else:
            keys = tl.load(data + row[:, None] * K_DIM + k_d[None, :], mask=has[None, :], other=0)
        data = tl.multiple_of((base + F.k_bytes).to(tl.pointer_type(ELEMENT)), 16)
        values = tl.load(data + v_d[:, None] * F.group_size + row[None, :], mask=has[:, None], other=0)
        if F.k_bits == 4:
            keys = own_nibble(keys, (d >= K_DIM)[None, :])
        if F.v_bits == 4:
            values = own_nibble(values, (d >= V_DIM)[:, None])
        if F.quantised:
            keys = decode_codes(keys, planes, has, 0, F).to(q.dtype)
        seen = seen_tokens(at + n, low, high, view, F) & (address != 0)
        state, weights, seen = weigh_keys(state, q, keys, at, seen, address != 0, at >= full, view, F)
        values = tl.trans(values)
        if F.v_bits == 4:
            norms = scales + 3 * F.head_dim + row
            values = decode_values(values, planes, norms, has, address != 0, F).to(q.dtype)
        elif F.quantised:
            values = decode_codes(values, planes, has, 2, F).to(q.dtype)
        state = add_values(state, weights, values, seen, F, False)
        address = following
    return state


@triton.jit
def add_results(state, out, lse, inside, F: tl.constexpr):
    """The state of `weigh_keys` with a finished attention added, out [block_m, dim] and lse [block_m]; pointers.

    Source: shares of a softmax add up, arXiv:1805.02867, section 3.1.
    """
    weighted, total, peak = state
    there = tl.load(lse, mask=tl.max(inside.to(tl.int32), 1) != 0, other=NEVER) * LOG2E
    new = tl.maximum(peak, there)
    decay, share = tl.exp2(peak - new), tl.exp2(there - new)
    rows = tl.load(out, mask=inside, other=0).to(tl.float32)
    return weighted * decay[:, None] + rows * share[:, None], total * decay + share, new


@triton.jit
def attend_rows(state, q, k, v, strides, begin, first, low, high, whole, view, F: tl.constexpr):
    """The state after the rows begin .. of k and v, strides (k_n, k_d, v_n, v_d); row 0 is the token first.

    Tokens below low or from high on are not there. If whole, every query sees every token.
    """
    n, d = begin + tl.arange(0, F.block_n), tl.arange(0, F.dim)
    token, rows, has = first + n, n.to(tl.int64)[:, None], (d < F.head_dim)[None, :]
    seen = seen_tokens(token, low, high, view, F)
    k += rows * strides[0] + d[None, :] * strides[1]
    v += rows * strides[2] + d[None, :] * strides[3]
    keys = tl.load(k, mask=(token < high)[:, None] & has, other=0)
    values = tl.load(v, mask=seen[:, None] & has, other=0)
    state, weights, seen = weigh_keys(state, q, keys, first + begin, seen, True, whole, view, F)
    return add_values(state, weights, values, seen, F, True)
