"""The kernels of attention shares: log-sum-exps of the observed queries, then the weights, summed over the queries.

Both take tiles of keys times queries: keys become numbers of the model's dtype once and stay in registers for the
queries of all heads that share them. A program's columns are queries of one K/V head: F.packed query heads with F.rows
queries each. Scores are to the base of 2.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of its functions: only constants may have one.

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from gemkv_compile.kernels.attend_chunk.kernel_loops import own_nibble
from gemkv_compile.kernels.attend_pages.kernel_parts import (
    LOWEST,
    exact_dot,
    finish_scores,
    is_seen,
    load_plane,
    load_rows,
    scaled,
)


@dataclass(frozen=True)
class Form:
    """What a pair of compiled kernels is for.

    `dim` is head_dim padded to a power of two; `scales` is how far scales of keys are from the start of their group, in
    bytes; `newest` is the row of the tail where the incomplete group begins. A program has packed * rows columns;
    `observed` is the number of queries, and `splits` that of shares of the keys, padded to powers of two.
    """

    heads: int
    groups: int
    head_dim: int
    dim: int
    group_size: int
    groups_per_page: int
    group_bytes: int
    k_bits: int
    scales: int
    newest: int
    windowed: bool
    capped: bool
    packed: int
    rows: int
    observed: int
    splits: int
    tile: int


@triton.jit
def own_queries(q, q_s, positions, observed, row, F: tl.constexpr):
    """What a program's columns are.

    Returns:
        The K/V head; the first query head, counted in it; which block of queries; of each column [columns] its query
        head, counted in the K/V head, its query, whether it is one, the query's token; the queries [dim, columns].
    """
    blocks, column, d = tl.cdiv(observed, F.rows), tl.arange(0, F.packed * F.rows), tl.arange(0, F.dim)
    place, head_blocks = tl.program_id(0), (F.groups + F.packed - 1) // F.packed
    head, first, block = place // blocks // head_blocks, place // blocks % head_blocks * F.packed, place % blocks
    member, query = first + column // F.rows, block * F.rows + column % F.rows
    inside = (member < F.groups) & (query < observed)
    token = tl.load(positions + query, mask=inside, other=0).to(tl.int32)
    rows = ((head * F.groups + member).to(tl.int64) * q_s[1] + query * q_s[2])[None, :] + d[:, None] * q_s[3]
    queries = tl.load(q + row * q_s[0] + rows, mask=inside[None, :] & (d < F.head_dim)[:, None], other=0)
    return head, first, block, member, query, inside, token, queries


@triton.jit
def page_address(table, table_page, max_pages, at, floor, end, F: tl.constexpr):
    """The page of the tile from token `at` on; 0 if it is not there, nobody sees it, or it is none before `end`."""
    column = at // (F.group_size * F.groups_per_page) % tl.maximum(max_pages, 1)
    return tl.load(table + column * table_page, mask=(at + F.tile > floor) & (at < end), other=0)


@triton.jit
def page_keys(address, elsewhere, head, at, dtype: tl.constexpr, F: tl.constexpr):
    """Keys [tile, dim] from token `at` on as numbers of a dtype. Absent ones are what is elsewhere, not to be used.

    A load with a mask would not be copied ahead. Bytes of packed codes are read once for every channel in them.
    """
    HALF: tl.constexpr = F.head_dim // 2
    QUARTER: tl.constexpr = F.head_dim // 4
    ROW: tl.constexpr = F.head_dim * F.k_bits // 8
    group, token, d = at // F.group_size, at % F.group_size + tl.arange(0, F.tile), tl.arange(0, F.dim)
    block = address + (head * F.groups_per_page + group % F.groups_per_page).to(tl.int64) * F.group_bytes
    block = tl.where(address != 0, block, elsewhere)
    if F.k_bits > 8:
        return load_rows(block, 0, dtype, token, d, F.head_dim, F.head_dim, F.dim)
    else:  # a `return` under a compile-time `if` does not end a function for Triton
        if F.k_bits == 8:
            codes = load_rows(block, 0, tl.int8, token, d, F.head_dim, ROW, F.dim)
        else:
            pairs = load_rows(block, 0, tl.int8, token, d % HALF, F.head_dim, ROW, F.dim)
            codes = own_nibble(pairs, (d >= HALF)[None, :])
            if F.k_bits == 6:
                rests = load_rows(block, HALF, tl.int8, token, d % QUARTER, F.head_dim, ROW, F.dim)
                codes = (codes << 2) | ((rests >> (d // QUARTER % 4 * 2).to(tl.int8)[None, :]) & 3)
        scale = load_plane(block, F.scales, d, F.head_dim, F.dim)
        zero = load_plane(block, F.scales + 2 * F.head_dim, d, F.head_dim, F.dim)
        return scaled(codes.to(tl.float32), scale[None, :], zero[None, :]).to(dtype)


@triton.jit
def tail_keys(tail, head, at, F: tl.constexpr):
    """Keys [tile, dim] of the tail's rows from `at` on; those of no token are not to be used."""
    row, d = at + tl.arange(0, F.tile), tl.arange(0, F.dim)
    place = tail + (head * (F.newest + F.group_size) + row)[:, None] * F.head_dim + d[None, :]
    return tl.load(place, mask=(d < F.head_dim)[None, :], other=0)


@triton.jit
def pair_scores(keys, queries, token, exists, position, view, F: tl.constexpr):
    """Scores [tile, columns] of keys of the tokens [tile], -inf where a query does not see one, if exists at all.

    view: The first token that may be seen, the end of them, scale, softcap, window, padding, its stride and columns.
    """
    seen = is_seen(token, view[0], view[1], view[5], view[6], view[7]) & exists
    product = exact_dot(keys, queries)
    scores = finish_scores(product, seen, token, 0, position, None, 0, 0, view[2], view[3], F.groups, F.capped)
    pairs = token[:, None] <= position[None, :]
    if F.windowed:
        pairs &= token[:, None] > position[None, :] - view[4]
    return tl.where(pairs, scores, float("-inf"))


@triton.jit
def add_scores(peak, total, scores):
    """Peaks and sums of weights with one score more each: of every place of a tile its own, without an exchange."""
    new = tl.maximum(peak, scores)
    return new, total * tl.exp2(peak - new) + tl.exp2(scores - new)


@triton.jit(
    do_not_specialize=["window", "tokens", "observed", "max_pages", "padding_len"],
    do_not_specialize_on_alignment=["positions", "padding"],
)
def sum_weights(
    q, positions, page_table, starts, tail, padding, lses, q_s, table_s, starts_s, tail_s, padding_s,
    scale, softcap, window, tokens, observed, max_pages, padding_len, F: tl.constexpr,
):  # fmt: skip
    """Log-sum-exps of one share of the keys, to lses [splits, B, Hq, n]; tensors as in the reference, their strides.

    Grid: blocks of columns of all K/V heads, shares of the keys, sequences.
    """
    split, splits, row = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    head, _, _, member, query, inside, position, queries = own_queries(q, q_s, positions, observed, row, F)
    PAGE: tl.constexpr = F.group_size * F.groups_per_page
    n, stored = tl.arange(0, F.tile), tokens - tokens % F.group_size
    low = tl.maximum(tl.load(starts + row * starts_s[0]), 0)
    if F.windowed:
        low = tl.maximum(low, tl.min(tl.where(inside, position, tokens), 0) - window + 1)
    floor = tl.maximum(low, ((stored - 1) // PAGE - max_pages + 1) * PAGE)  # a later page has taken an old one's column
    table, tail = page_table + row * table_s[0], tail + row * tail_s[0]
    if padding is not None:
        padding += row * padding_s[0]
    view = (low, tokens, scale, softcap, window, padding, padding_s[1], padding_len)
    first, last = tl.maximum(floor, F.newest) // F.tile, stored // F.tile
    share = tl.cdiv(tl.maximum(last - first, 0), splits)
    begin = first + split * share
    end = tl.minimum(begin + share, last)

    peak = tl.full((F.tile, F.packed * F.rows), LOWEST, tl.float32)
    total = tl.zeros_like(peak)
    address = page_address(table, table_s[1], max_pages, begin * F.tile, floor, end * F.tile, F)
    for tile in tl.range(begin, end):
        at = tile * F.tile
        following = page_address(table, table_s[1], max_pages, at + F.tile, floor, end * F.tile, F)
        keys = page_keys(address, tail.to(tl.int64), head, at, q.dtype.element_ty, F)
        scores = pair_scores(keys, queries, at + n, address != 0, position, view, F)
        peak, total = add_scores(peak, total, scores)
        address = following
    # The first share has the rows of a guarded format's first group, the last one those of the newest.
    begin, end = tl.where(split == 0, 0, F.newest), tl.where(split == splits - 1, F.newest + tokens - stored, F.newest)
    for at in tl.range(begin, end, F.tile, num_stages=1):
        exists = (at >= F.newest) | (page_address(table, table_s[1], max_pages, at, floor, F.newest, F) != 0)
        token = at + n + tl.where(at < F.newest, 0, stored - F.newest)
        keys = tail_keys(tail, head, at, F)
        peak, total = add_scores(peak, total, pair_scores(keys, queries, token, exists, position, view, F))

    top = tl.max(peak, 0)
    lse = top + tl.log2(tl.sum(total * tl.exp2(peak - top[None, :]), 0))
    place = ((split * tl.num_programs(2) + row) * F.heads + head) * F.groups + member
    tl.store(lses + place * observed + query, lse, mask=inside)


@triton.jit
def query_weights(position, padding, padding_s, padding_len, positions, observed, inside, F: tl.constexpr):
    """Which columns count, and one over the number of queries that do; padding is the sequence's own."""
    if padding is None:
        return inside, 1.0 / observed
    else:
        query = tl.arange(0, F.observed)
        token = tl.load(positions + query, mask=query < observed, other=padding_len)
        real = tl.load(padding + token * padding_s[1], mask=token < padding_len, other=0) != 0
        own = tl.load(padding + position.to(tl.int64) * padding_s[1], mask=inside & (position < padding_len), other=0)
        return inside & (own != 0), 1.0 / tl.maximum(tl.sum(real.to(tl.int32), 0), 1)


@triton.jit
def store_shares(out, scores, lse, counts, factor, token, tokens, member, F: tl.constexpr):
    """Store the weights [tile, columns] of scores, summed over the queries of each head [packed], where they count."""
    weights = tl.where(counts[None, :], tl.exp2(scores - lse[None, :]), 0.0)
    sums = tl.sum(tl.reshape(weights, (F.tile, F.packed, F.rows)), 2) * factor
    tl.store(out + member[None, :].to(tl.int64) * tokens + token[:, None], sums, mask=member[None, :] < F.groups)


@triton.jit(
    do_not_specialize=["window", "tokens", "observed", "max_pages", "padding_len"],
    do_not_specialize_on_alignment=["positions", "padding"],
)
def share_out(
    q, positions, page_table, starts, tail, padding, lses, q_s, table_s, starts_s, tail_s, padding_s,
    scale, softcap, window, tokens, observed, max_pages, padding_len, F: tl.constexpr, out, splits,
):  # fmt: skip
    """Shares of one run of the tokens of complete pages, to out [blocks of queries, B, Hq, these tokens].

    Arguments and grid as of `sum_weights`, which has left `splits` shares of the log-sum-exps.
    """
    row = tl.program_id(2).to(tl.int64)
    head, first, block, member, query, inside, position, queries = own_queries(q, q_s, positions, observed, row, F)
    PAGE: tl.constexpr = F.group_size * F.groups_per_page
    n, stored, complete = tl.arange(0, F.tile), tokens - tokens % F.group_size, tokens - tokens % PAGE
    low = tl.maximum(tl.load(starts + row * starts_s[0]), 0)
    if F.windowed:
        low = tl.maximum(low, tl.min(tl.where(inside, position, tokens), 0) - window + 1)
    floor = tl.maximum(low, ((stored - 1) // PAGE - max_pages + 1) * PAGE)
    table, tail = page_table + row * table_s[0], tail + row * tail_s[0]
    if padding is not None:
        padding += row * padding_s[0]
    view = (low, tokens, scale, softcap, window, padding, padding_s[1], padding_len)

    split = tl.arange(0, F.splits)
    place = ((split[:, None] * tl.num_programs(2) + row) * F.heads + head) * F.groups + member[None, :]
    shares = (split < splits)[:, None] & inside[None, :]
    parts = tl.load(lses + place * observed + query[None, :], mask=shares, other=float("-inf"))
    top = tl.maximum(tl.max(parts, 0), LOWEST)
    lse = top + tl.log2(tl.sum(tl.exp2(parts - top[None, :]), 0))
    counts, factor = query_weights(position, padding, padding_s, padding_len, positions, observed, inside, F)
    counts &= (lse > float("-inf")) & (lse < float("inf"))
    member = first + tl.arange(0, F.packed)
    out += ((block * tl.num_programs(2) + row) * F.heads + head) * F.groups * complete

    share = tl.cdiv(complete // F.tile, tl.num_programs(1))
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, complete // F.tile)
    for at in tl.range(begin * F.tile, tl.minimum(end * F.tile, F.newest), F.tile, num_stages=1):
        exists = page_address(table, table_s[1], max_pages, at, floor, F.newest, F) != 0
        scores = pair_scores(tail_keys(tail, head, at, F), queries, at + n, exists, position, view, F)
        store_shares(out, scores, lse, counts, factor, at + n, complete, member, F)
    begin = tl.maximum(begin, F.newest // F.tile)
    address = page_address(table, table_s[1], max_pages, begin * F.tile, floor, end * F.tile, F)
    for tile in tl.range(begin, end):
        at = tile * F.tile
        following = page_address(table, table_s[1], max_pages, at + F.tile, floor, end * F.tile, F)
        keys = page_keys(address, tail.to(tl.int64), head, at, q.dtype.element_ty, F)
        scores = pair_scores(keys, queries, at + n, address != 0, position, view, F)
        store_shares(out, scores, lse, counts, factor, at + n, complete, member, F)
        address = following
