"""The decode kernel: one program's share of a sequence's keys and values.

Codes become numbers in registers, code * scale + zero, and go to the tensor cores from there; scales per token go into
the weights. Scales that a product needs as its operand are copied ahead with the codes; what is added to a product
later would be waited for in each step, which costs more than the multiplication saves. 4-bit codes come two in a byte:
low and high nibbles are two tiles, the two halves of the channels (`kernels.layout`), with a product each; keys of 6
bits are four tiles, the quarters of the channels.
Models of 16 bits multiply in float16 whatever their dtype is (`kernel_codes`): it holds keys and values with 3 more
bits than bfloat16, queries are brought to numbers below 1 for it, and weights lie below 256.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from gemkv_compile.kernels.attend_pages.kernel_codes import (
    exact_codes,
    exact_nibbles,
    exact_six,
)
from gemkv_compile.kernels.attend_pages.kernel_parts import (
    HEADROOM,
    LOWEST,
    exact_dot,
    finish_scores,
    is_seen,
    largest_number,
    load_columns,
    load_plane,
    load_rows,
    normalise,
    power_above,
    scaled,
)


@triton.jit
def attend_split(
    q, q_batch, q_head, q_dim, page_table, table_batch, table_page, max_pages,
    seq_lens, lens_batch, starts, starts_batch, tail, tail_batch,
    padding, padding_batch, padding_token, padding_len, mask, mask_batch, mask_head, mask_token, mask_len,
    sums, peaks, scale, softcap, window,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
    TAIL_ROWS: tl.constexpr, GROUPS_PER_PAGE: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr,
    K_BYTES: tl.constexpr, V_BYTES: tl.constexpr, GROUP_BYTES: tl.constexpr, QUANTISED: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, D_PADDED: tl.constexpr, HALF_PADDED: tl.constexpr,
    QUARTER_PADDED: tl.constexpr, GROUPS_PADDED: tl.constexpr, HALVES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One share of one K/V head's keys: sums [D, query heads], the largest score and the sum of weights of each.

    HALVES: the model's numbers have 16 bits; BITS: float16 numbers may be made of bits.
    """
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    splits = tl.num_programs(0)
    # Keys and values of 4 bits are tiles of half the channels; the other half is HALF further on. Keys of 6: quarters.
    HALF: tl.constexpr = D // 2
    QUARTER: tl.constexpr = D // 4
    K_DIM: tl.constexpr = HALF if K_BITS == 4 else QUARTER if K_BITS == 6 else D
    V_DIM: tl.constexpr = HALF if V_BITS == 4 else D
    K_PADDED: tl.constexpr = HALF_PADDED if K_BITS == 4 else QUARTER_PADDED if K_BITS == 6 else D_PADDED
    V_PADDED: tl.constexpr = HALF_PADDED if V_BITS == 4 else D_PADDED
    SCALES: tl.constexpr = K_BYTES + V_BYTES
    k_dim, v_dim = tl.arange(0, K_PADDED), tl.arange(0, V_PADDED)
    member = tl.arange(0, GROUPS_PADDED)
    q_heads = head * GROUPS + member
    length = tl.load(seq_lens + row * lens_batch)
    low = tl.maximum(tl.load(starts + row * starts_batch), 0)
    if HAS_WINDOW:
        low = tl.maximum(low, length - window)
    if mask is not None:
        low = tl.maximum(low, length - mask_len)
        mask += row * mask_batch + q_heads[None, :] * mask_head
    if padding is not None:
        padding += row * padding_batch
    inside = (member[None, :] < GROUPS) & (k_dim[:, None] < K_DIM)
    q += row * q_batch + q_heads[None, :] * q_head + k_dim[:, None] * q_dim
    query = tl.load(q, mask=inside, other=0.0)
    if K_BITS == 4 or K_BITS == 6:
        query_high = tl.load(q + HALF * q_dim, mask=inside, other=0.0)
    if K_BITS == 6:
        query_second = tl.load(q + QUARTER * q_dim, mask=inside, other=0.0)
        query_fourth = tl.load(q + (HALF + QUARTER) * q_dim, mask=inside, other=0.0)
    code_scale = scale
    if QUANTISED and HALVES:
        largest = largest_number(query)
        if K_BITS == 4 or K_BITS == 6:
            largest = tl.maximum(largest, largest_number(query_high))
        if K_BITS == 6:
            largest = tl.maximum(largest, tl.maximum(largest_number(query_second), largest_number(query_fourth)))
        unit = power_above(largest)
        query = normalise(query, unit)
        if K_BITS == 4 or K_BITS == 6:
            query_high = normalise(query_high, unit)
        if K_BITS == 6:
            query_second, query_fourth = normalise(query_second, unit), normalise(query_fourth, unit)
        code_scale = (scale * unit)[None, :]
    NUMBER: tl.constexpr = query.dtype

    # The groups of this program. A page that a later one has taken the column of is gone.
    last = length // GROUP
    newest = (last - 1) // GROUPS_PER_PAGE
    first = tl.maximum(low // GROUP, (newest - max_pages + 1) * GROUPS_PER_PAGE)
    if TAIL_ROWS > GROUP:
        first = tl.maximum(first, 1)  # a guarded format has the first group in the tail
    share = tl.cdiv(tl.maximum(last - first, 0), splits)
    begin = first + split * share
    end = tl.minimum(begin + share, last)

    peak = tl.full([GROUPS_PADDED], LOWEST, tl.float32)
    totals = tl.zeros([TILE, GROUPS_PADDED], tl.float32)
    weighted = tl.zeros([V_PADDED, GROUPS_PADDED], tl.float32)
    if V_BITS == 4:
        weighted_high = tl.zeros([V_PADDED, GROUPS_PADDED], tl.float32)
    table = page_table + row * table_batch
    tail += row * tail_batch
    elsewhere = tail.to(tl.int64)
    # The address is carried: a load of it in the same step would keep the loads of keys and values from overlapping.
    column = (begin // GROUPS_PER_PAGE) % tl.maximum(max_pages, 1)
    address = tl.load(table + column * table_page, mask=begin < end, other=0)
    for step in tl.range(begin * (GROUP // TILE), end * (GROUP // TILE)):
        group = step // (GROUP // TILE)
        token = step % (GROUP // TILE) * TILE + tl.arange(0, TILE)
        exists = address != 0
        position = group * GROUP + token
        seen = is_seen(position, low, length, padding, padding_token, padding_len) & exists
        # Masked loads would not be copied ahead, so what is absent is read from the tail, and then not used.
        block = address + (head * GROUPS_PER_PAGE + group % GROUPS_PER_PAGE).to(tl.int64) * GROUP_BYTES
        block = tl.where(exists, block, elsewhere)
        if QUANTISED:
            keys = load_rows(block, 0, tl.int8, token, k_dim, K_DIM, K_BITS * D // 8, K_PADDED)
            values = load_columns(block, K_BYTES, tl.int8, token, v_dim, V_DIM, V_PADDED, GROUP)
            k_scale = load_plane(block, SCALES, k_dim, K_DIM, K_PADDED)
            k_zero = load_plane(block, SCALES + 2 * D, k_dim, K_DIM, K_PADDED)
            if K_BITS == 4 or K_BITS == 6:
                scale_high = load_plane(block, SCALES + D, k_dim, K_DIM, K_PADDED)
                zero_high = load_plane(block, SCALES + 3 * D, k_dim, K_DIM, K_PADDED)
            if K_BITS == 6:
                others = load_rows(block, QUARTER, tl.int8, token, k_dim, K_DIM, K_BITS * D // 8, K_PADDED)
                rests = load_rows(block, HALF, tl.int8, token, k_dim, K_DIM, K_BITS * D // 8, K_PADDED)
                codes = exact_six(keys, rests, False, 0, NUMBER, BITS)
                product = exact_dot(scaled(codes, k_scale[None, :], k_zero[None, :]), query)
                codes = exact_six(keys, rests, True, 4, NUMBER, BITS)
                product += exact_dot(scaled(codes, scale_high[None, :], zero_high[None, :]), query_high)
                k_scale = load_plane(block, SCALES + 2 * QUARTER, k_dim, K_DIM, K_PADDED)
                k_zero = load_plane(block, SCALES + 2 * (D + QUARTER), k_dim, K_DIM, K_PADDED)
                codes = exact_six(others, rests, False, 2, NUMBER, BITS)
                product += exact_dot(scaled(codes, k_scale[None, :], k_zero[None, :]), query_second)
                k_scale = load_plane(block, SCALES + 6 * QUARTER, k_dim, K_DIM, K_PADDED)
                k_zero = load_plane(block, SCALES + 2 * (D + 3 * QUARTER), k_dim, K_DIM, K_PADDED)
                codes = exact_six(others, rests, True, 6, NUMBER, BITS)
                product += exact_dot(scaled(codes, k_scale[None, :], k_zero[None, :]), query_fourth)
            elif K_BITS == 4:
                codes = exact_nibbles(keys, False, NUMBER, BITS)
                product = exact_dot(scaled(codes, k_scale[None, :], k_zero[None, :]), query)
                codes = exact_nibbles(keys, True, NUMBER, BITS)
                product += exact_dot(scaled(codes, scale_high[None, :], zero_high[None, :]), query_high)
            else:
                codes = exact_codes(keys, NUMBER, BITS)
                product = exact_dot(scaled(codes, k_scale[None, :], k_zero[None, :]), query)
            # Groups that nobody sees may hold NaN, and a weight of 0 does not silence one.
            if padding is None:
                alive = exists
            else:
                alive = tl.max(seen.to(tl.int32), 0) != 0
            v_scale = tl.where(alive, load_plane(block, SCALES + 4 * D, v_dim, V_DIM, V_PADDED), 0.0)
            if V_BITS == 4:
                v_scale_high = load_plane(block, SCALES + 5 * D, v_dim, V_DIM, V_PADDED)
                v_scale_high = tl.where(alive, v_scale_high, 0.0)
                norms = tl.where(alive, load_plane(block, SCALES + 6 * D, token, GROUP, GROUP).to(tl.float32), 0.0)
                norms_high = load_plane(block, SCALES + 6 * D + 2 * GROUP, token, GROUP, GROUP).to(tl.float32)
                norms_high = tl.where(alive, norms_high, 0.0)
            else:
                v_zero = tl.where(alive, load_plane(block, SCALES + 6 * D, v_dim, V_DIM, V_PADDED), 0.0)
        else:
            keys = load_rows(block, 0, NUMBER, token, k_dim, D, D, D_PADDED)
            values = load_columns(block, K_BYTES, NUMBER, token, v_dim, D, D_PADDED, GROUP)
            values = tl.where(seen[None, :], values, tl.zeros_like(values))
            product = exact_dot(keys, query)
        scores = finish_scores(product, seen, position, length, member, mask, mask_token, mask_len, code_scale, softcap,
                         GROUPS, HAS_CAP)  # fmt: skip
        new_peak = tl.maximum(peak, tl.max(scores, 0) - HEADROOM)
        decay = tl.exp2(peak - new_peak)
        exact_weights = tl.exp2(scores - new_peak[None, :])
        totals = totals * decay[None, :] + exact_weights
        weighted = weighted * decay[None, :]
        if V_BITS == 4:
            codes = exact_nibbles(values, False, NUMBER, BITS) * v_scale.to(NUMBER)[:, None]
            weighted += exact_dot(codes, (exact_weights * norms[:, None]).to(NUMBER))
            codes = exact_nibbles(values, True, NUMBER, BITS) * v_scale_high.to(NUMBER)[:, None]
            weighted_high = weighted_high * decay[None, :]
            weighted_high += exact_dot(codes, (exact_weights * norms_high[:, None]).to(NUMBER))
        else:
            if QUANTISED:
                values = scaled(exact_codes(values, NUMBER, BITS), v_scale[:, None], v_zero[:, None])
            weighted += exact_dot(values, exact_weights.to(NUMBER))
        peak = new_peak
        # A column further with each page. One step past the last group, its own column is as good as any.
        is_next = ((step + 1) % (GROUPS_PER_PAGE * (GROUP // TILE)) == 0) & (step + 1 < end * (GROUP // TILE))
        column += is_next.to(tl.int32)
        column = tl.where(column == max_pages, 0, column)
        address = tl.load(table + column * table_page)

    filled = tl.where(split == splits - 1, length - last * GROUP, 0)
    begin_of_tail, before_tail = 0, last * GROUP  # rows, and the tokens before them that have none
    if TAIL_ROWS > GROUP:  # the first program takes the first group's rows, the last one those of the newest group
        kept = tl.where((split == 0) & (low < GROUP), tl.minimum(length, GROUP), 0)
        begin_of_tail = tl.where(kept > 0, 0, GROUP)
        filled = tl.where((filled > 0) & (last > 0), GROUP + filled, kept)
        before_tail = tl.maximum(before_tail - GROUP, 0)
    for begin_of_tile in tl.range(begin_of_tail, filled, TILE, num_stages=1):
        token = begin_of_tile + tl.arange(0, TILE)
        position = token + before_tail
        if TAIL_ROWS > GROUP:
            position = tl.where(begin_of_tile < GROUP, token, position)
        seen = is_seen(position, low, length, padding, padding_token, padding_len)
        rows = tail + (head * TAIL_ROWS + token[:, None]) * D
        shown = (k_dim[None, :] < K_DIM) & seen[:, None]
        exact = tl.load(q, mask=inside, other=0.0)
        product = exact_dot(tl.load(rows + k_dim[None, :], mask=shown, other=0.0), exact)
        if K_BITS == 4 or K_BITS == 6:
            exact = tl.load(q + HALF * q_dim, mask=inside, other=0.0)
            product += exact_dot(tl.load(rows + HALF + k_dim[None, :], mask=shown, other=0.0), exact)
        if K_BITS == 6:
            exact = tl.load(q + QUARTER * q_dim, mask=inside, other=0.0)
            product += exact_dot(tl.load(rows + QUARTER + k_dim[None, :], mask=shown, other=0.0), exact)
            exact = tl.load(q + (HALF + QUARTER) * q_dim, mask=inside, other=0.0)
            product += exact_dot(tl.load(rows + HALF + QUARTER + k_dim[None, :], mask=shown, other=0.0), exact)
        scores = finish_scores(product, seen, position, length, member, mask, mask_token, mask_len, scale, softcap,
                         GROUPS, HAS_CAP)  # fmt: skip
        new_peak = tl.maximum(peak, tl.max(scores, 0) - HEADROOM)
        decay = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores - new_peak[None, :])
        totals = totals * decay[None, :] + weights
        rows += HEADS * TAIL_ROWS * D + v_dim[None, :]
        shown, weights = (v_dim[None, :] < V_DIM) & seen[:, None], weights.to(exact.dtype)
        values = tl.load(rows, mask=shown, other=0.0)
        weighted = weighted * decay[None, :] + exact_dot(tl.trans(values), weights)
        if V_BITS == 4:
            values = tl.load(rows + HALF, mask=shown, other=0.0)
            weighted_high = weighted_high * decay[None, :] + exact_dot(tl.trans(values), weights)
        peak = new_peak

    place = (row * HEADS * GROUPS + q_heads) * splits + split
    inside = (member[None, :] < GROUPS) & (v_dim[:, None] < V_DIM)
    sums += place[None, :] * D + v_dim[:, None]
    tl.store(sums, weighted, mask=inside)
    if V_BITS == 4:
        tl.store(sums + HALF, weighted_high, mask=inside)
    tl.store(peaks + place, peak, mask=member < GROUPS)
    tl.store(
        peaks + tl.num_programs(2).to(tl.int64) * HEADS * GROUPS * splits + place,
        tl.sum(totals, 0),
        mask=member < GROUPS,
    )
