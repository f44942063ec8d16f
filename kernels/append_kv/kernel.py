"""Appending to pages in Triton: one launch for a decode step, with the commit of a full group inside.

A block of 4-bit codes is two half blocks of channels, d and d + D / 2, that share bytes; one of 6-bit codes is four
quarter blocks, D / 4 apart.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemkv_compile.errors import InvalidOption
from gemkv_compile.kernels.append_kv.kernel_quantise import (
    LARGEST_OF_4,
    LARGEST_OF_6,
    LARGEST_OF_8,
    load_tokens,
    quantise_channels,
    quantise_values,
    token_norms,
)
from gemkv_compile.kernels.layout import PageLayout

BLOCK_D = 64  # channels that a program quantises at once: a [64, 64] tile takes 32 registers a thread; even


def append_kv_triton(
    k: Tensor, v: Tensor, page_table: Tensor, seq_lens: Tensor, tail: Tensor, layout: PageLayout
) -> None:
    """Store new tokens; arguments as in `gemkv_compile.kernels.ops.append_kv`, mutates seq_lens, tail and the pages.

    No length is read on the host. A chunk of several tokens takes a second launch that advances seq_lens.

    Raises:
        InvalidOption: the group size is no power of two.
    """
    if layout.group_size & (layout.group_size - 1):
        raise InvalidOption(
            f"group_size must be a power of two on a GPU, got {layout.group_size}. Use the default, 64."
        )
    batch, heads, q_len, dim = k.shape
    if not k.numel():
        return
    sizes = {
        "HEADS": heads,
        "D": dim,
        "GROUP": layout.group_size,
        "TAIL_ROWS": layout.tail_rows,
        "GROUPS_PER_PAGE": layout.groups_per_page,
        "K_BITS": layout.k_bits,
        "V_BITS": layout.v_bits,
        "K_BYTES": layout.k_bytes,
        "V_BYTES": layout.v_bytes,
        "GROUP_BYTES": layout.group_bytes,
        "QUANTISED": layout.is_quantised,
    }
    state = page_table, *page_table.stride(), page_table.shape[1], seq_lens, seq_lens.stride(0), tail, tail.stride(0)
    if q_len == 1:
        k_strides, v_strides = (k.stride(0), k.stride(1), k.stride(3)), (v.stride(0), v.stride(1), v.stride(3))
        padded = {"HEADS_PADDED": triton.next_power_of_2(heads), "D_PADDED": triton.next_power_of_2(dim)}
        with torch.cuda.device_of(k):
            append_token[(batch,)](k, v, *k_strides, *v_strides, *state, **sizes, **padded, BLOCK_D=BLOCK_D)
        return
    # Tokens in the tail may complete one group more than the chunk alone.
    grid = triton.cdiv(q_len, layout.group_size) + 1, batch * heads, 2 * triton.cdiv(dim, BLOCK_D)
    num_warps = 2 if min(layout.k_bits, layout.v_bits) >= 8 else 4  # the fewest that spill nothing
    with torch.cuda.device_of(k):
        append_chunk[grid](k, v, *k.stride(), *v.stride(), *state, q_len, **sizes, BLOCK_D=BLOCK_D, num_warps=num_warps)
    seq_lens.add_(q_len)


@triton.jit
def append_token(
    k, v, k_batch, k_head, k_dim, v_batch, v_head, v_dim,
    page_table, table_batch, table_page, max_pages, seq_lens, lens_batch, tail, tail_batch,
    HEADS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, GROUPS_PER_PAGE: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_BYTES: tl.constexpr, V_BYTES: tl.constexpr, GROUP_BYTES: tl.constexpr,
    QUANTISED: tl.constexpr, TAIL_ROWS: tl.constexpr, HEADS_PADDED: tl.constexpr, D_PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One token of one sequence: a program does all heads, so that it alone reads and advances the length."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(seq_lens + row * lens_batch)
    fill = length % GROUP
    k += row * k_batch
    v += row * v_batch
    tail += row * tail_batch
    is_first = (length < GROUP) & (TAIL_ROWS > GROUP)  # of a guarded format, whose first group stays in the tail
    tail += tl.where(is_first, 0, TAIL_ROWS - GROUP) * D
    if (fill < GROUP - 1) | is_first:
        head = tl.arange(0, HEADS_PADDED)[:, None].to(tl.int64)
        dim = tl.arange(0, D_PADDED)[None, :]
        inside = (head < HEADS) & (dim < D)
        place = tail + (head * TAIL_ROWS + fill) * D + dim
        tl.store(place, tl.load(k + head * k_head + dim * k_dim, mask=inside), mask=inside)
        tl.store(place + HEADS * TAIL_ROWS * D, tl.load(v + head * v_head + dim * v_dim, mask=inside), mask=inside)
    if fill == GROUP - 1:
        group = length // GROUP
        address = tl.load(page_table + row * table_batch + (group // GROUPS_PER_PAGE) % max_pages * table_page)
        if address != 0:
            for head in range(HEADS):
                block = address + (head * GROUPS_PER_PAGE + group % GROUPS_PER_PAGE).to(tl.int64) * GROUP_BYTES
                k_rows, v_rows = tail + head * TAIL_ROWS * D, tail + (HEADS + head) * TAIL_ROWS * D
                norms = token_norms(v_rows, v + head * v_head, 0, v_dim, 0, fill, fill + 1,
                               V_BITS, D, GROUP, BLOCK_D)  # fmt: skip
                if K_BITS == 6:  # unrolled, it spills
                    for first in range(0, D, BLOCK_D):
                        _commit_both(k_rows, v_rows, k + head * k_head, v + head * v_head, k_dim, v_dim, fill, norms,
                             first, block, K_BITS, V_BITS, D, GROUP, K_BYTES, V_BYTES, QUANTISED, BLOCK_D)  # fmt: skip
                else:
                    for first in tl.static_range(0, D, BLOCK_D):
                        _commit_both(k_rows, v_rows, k + head * k_head, v + head * v_head, k_dim, v_dim, fill, norms,
                             first, block, K_BITS, V_BITS, D, GROUP, K_BYTES, V_BYTES, QUANTISED, BLOCK_D)  # fmt: skip
    tl.debug_barrier()  # every thread has read the length
    tl.store(seq_lens + row * lens_batch, length + 1)


@triton.jit
def _commit_both(
    k_rows, v_rows, k, v, k_dim, v_dim, fill, norms, first, block, K_BITS: tl.constexpr, V_BITS: tl.constexpr,
    D: tl.constexpr, GROUP: tl.constexpr, K_BYTES: tl.constexpr, V_BYTES: tl.constexpr, QUANTISED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`_commit` for keys and for values, of a group that one new token completes."""
    _commit(k_rows, k, 0, k_dim, 0, fill, fill + 1, norms, first,
            block, False, K_BITS, D, GROUP, K_BYTES, V_BYTES, QUANTISED, BLOCK_D)  # fmt: skip
    _commit(v_rows, v, 0, v_dim, 0, fill, fill + 1, norms, first,
            block, True, V_BITS, D, GROUP, K_BYTES, V_BYTES, QUANTISED, BLOCK_D)  # fmt: skip


@triton.jit
def append_chunk(
    k, v, k_batch, k_head, k_token, k_dim, v_batch, v_head, v_token, v_dim,
    page_table, table_batch, table_page, max_pages, seq_lens, lens_batch, tail, tail_batch, q_len,
    HEADS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, GROUPS_PER_PAGE: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_BYTES: tl.constexpr, V_BYTES: tl.constexpr, GROUP_BYTES: tl.constexpr,
    QUANTISED: tl.constexpr, TAIL_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One group of one head's keys or values, some channels; the program of the first group also fills the tail."""
    step = tl.program_id(0)
    row = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    is_value = tl.program_id(2) % 2 == 1
    first = tl.program_id(2) // 2 * BLOCK_D
    length = tl.load(seq_lens + row * lens_batch)
    fill = length % GROUP
    total = fill + q_len
    complete = total // GROUP
    if is_value:
        new = v + row * v_batch + head * v_head
        token_stride, dim_stride = v_token, v_dim
    else:
        new = k + row * k_batch + head * k_head
        token_stride, dim_stride = k_token, k_dim
    rows = tail + row * tail_batch + (is_value.to(tl.int64) * HEADS + head) * TAIL_ROWS * D
    rest = rows + tl.where(length + q_len < GROUP, 0, TAIL_ROWS - GROUP) * D  # where the incomplete group goes
    rows += tl.where(length < GROUP, 0, TAIL_ROWS - GROUP) * D
    guarded = (TAIL_ROWS > GROUP) & (length < GROUP) & (total >= GROUP)  # the first group stays where it is
    block = length.to(tl.int64) * 0  # the address of the group's tile; 0: there is none
    if step < complete:
        group = length // GROUP + step
        page = group // GROUPS_PER_PAGE
        newest = (length // GROUP + complete - 1) // GROUPS_PER_PAGE
        address = tl.load(page_table + row * table_batch + page % max_pages * table_page)
        if (page > newest - max_pages) & (address != 0):
            block = address + (head * GROUPS_PER_PAGE + group % GROUPS_PER_PAGE).to(tl.int64) * GROUP_BYTES
    if is_value:
        _part(rows, rest, guarded, new, token_stride, dim_stride, step, fill, total, first, block,
              True, V_BITS, D, GROUP, K_BYTES, V_BYTES, QUANTISED, BLOCK_D)  # fmt: skip
    else:
        _part(rows, rest, guarded, new, token_stride, dim_stride, step, fill, total, first, block,
              False, K_BITS, D, GROUP, K_BYTES, V_BYTES, QUANTISED, BLOCK_D)  # fmt: skip


@triton.jit
def _part(
    rows, rest, guarded, new, token_stride, dim_stride, step, fill, total, first, block, IS_VALUE: tl.constexpr,
    BITS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, K_BYTES: tl.constexpr, V_BYTES: tl.constexpr,
    QUANTISED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What one program of `append_chunk` writes. A barrier: the first group is read before the tail is written."""
    if IS_VALUE and BITS == 4:  # norms are of all channels, so one program has them all
        if first == 0:
            if block != 0:
                norms = token_norms(rows, new, token_stride, dim_stride, step, fill, total, BITS, D, GROUP, BLOCK_D)
                for at in range(0, D, BLOCK_D):
                    _commit(rows, new, token_stride, dim_stride, step, fill, total, norms, at, block,
                            IS_VALUE, BITS, D, GROUP, K_BYTES, V_BYTES, QUANTISED, BLOCK_D)  # fmt: skip
            if step == 0:
                tl.debug_barrier()
                for at in range(0, D, BLOCK_D):
                    _fill_tail(rest, new, token_stride, dim_stride, total // GROUP * GROUP, fill, total, at,
                               BITS, D, GROUP, BLOCK_D)  # fmt: skip
                    if guarded:
                        _fill_tail(rows, new, token_stride, dim_stride, 0, fill, total, at, BITS, D, GROUP, BLOCK_D)
    else:
        if block != 0:
            _commit(rows, new, token_stride, dim_stride, step, fill, total, (0, 0), first, block,
                    IS_VALUE, BITS, D, GROUP, K_BYTES, V_BYTES, QUANTISED, BLOCK_D)  # fmt: skip
        if step == 0:
            tl.debug_barrier()
            _fill_tail(rest, new, token_stride, dim_stride, total // GROUP * GROUP, fill, total, first,
                       BITS, D, GROUP, BLOCK_D)  # fmt: skip
            if guarded:
                _fill_tail(rows, new, token_stride, dim_stride, 0, fill, total, first, BITS, D, GROUP, BLOCK_D)


@triton.jit
def _fill_tail(
    rows, new, token_stride, dim_stride, begin, fill, total, first,
    BITS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the new tokens of the group from token `begin` on to the tail, in the channels that `_commit` reads."""
    dim = _channels(first, BITS, D, BLOCK_D)[None, :]
    token = begin + tl.arange(0, GROUP)[:, None]
    inside = (token >= fill) & (token < total) & (dim < D)
    x = tl.load(new + (token - fill).to(tl.int64) * token_stride + dim * dim_stride, mask=inside)
    tl.store(rows + (token - begin) * D + dim, x, mask=inside)


@triton.jit
def _channels(first, BITS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
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
def _commit(
    tail, new, token_stride, dim_stride, step, fill, total, norms, first, block, IS_VALUE: tl.constexpr,
    BITS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, K_BYTES: tl.constexpr, V_BYTES: tl.constexpr,
    QUANTISED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write a group's keys as rows or its values as columns to the tile at address `block`, see `kernels.layout`.

    The channels are those of `_channels`, the group that of `load_tokens`; norms: its `token_norms`, if it has some.
    """
    if BITS == 6:
        _commit_quarters(tail, new, token_stride, dim_stride, step, fill, total, first, block,
                         D, GROUP, K_BYTES, V_BYTES, BLOCK_D)  # fmt: skip
    else:
        _commit_halves(tail, new, token_stride, dim_stride, step, fill, total, norms, first, block, IS_VALUE,
                       BITS, D, GROUP, K_BYTES, V_BYTES, QUANTISED, BLOCK_D)  # fmt: skip


@triton.jit
def _commit_halves(
    tail, new, token_stride, dim_stride, step, fill, total, norms, first, block, IS_VALUE: tl.constexpr,
    BITS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, K_BYTES: tl.constexpr, V_BYTES: tl.constexpr,
    QUANTISED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`_commit` for numbers of 4 or 8 bits and of the model."""
    scales = (block + K_BYTES + V_BYTES).to(tl.pointer_type(tl.float16)) + (2 * D if IS_VALUE else 0)
    WIDTH: tl.constexpr = D // 2 if BITS == 4 else D
    token = tl.arange(0, GROUP)
    if BITS == 4:
        dim = first // BLOCK_D * (BLOCK_D // 2) + tl.arange(0, BLOCK_D // 2)  # a multiple that the compiler sees
        x = load_tokens(tail, new, token_stride, dim_stride, step, fill, total, dim, WIDTH, D, GROUP)
        y = load_tokens(tail, new, token_stride, dim_stride, step, fill, total, dim + WIDTH, D, D, GROUP)
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
        x = load_tokens(tail, new, token_stride, dim_stride, step, fill, total, dim, D, D, GROUP)
        if QUANTISED:
            x = quantise_channels(x, scales, dim, D, D, LARGEST_OF_8)
    place = dim[None, :] * GROUP + token[:, None] if IS_VALUE else token[:, None] * WIDTH + dim[None, :]
    plane = (block + K_BYTES if IS_VALUE else block).to(tl.pointer_type(x.dtype))
    # Wider rows of keys would make threads load, and reduce, more channels of fewer tokens.
    tl.store(tl.multiple_of(plane, 16 if IS_VALUE else 8) + place, x, mask=(dim < WIDTH)[None, :])


@triton.jit
def _commit_quarters(
    tail, new, token_stride, dim_stride, step, fill, total, first, block, D: tl.constexpr, GROUP: tl.constexpr,
    K_BYTES: tl.constexpr, V_BYTES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`_commit` for keys of 6 bits."""
    scales = (block + K_BYTES + V_BYTES).to(tl.pointer_type(tl.float16))
    PART: tl.constexpr = D // 4
    dim = first // BLOCK_D * (BLOCK_D // 4) + tl.arange(0, BLOCK_D // 4)
    inside = (dim < PART)[None, :]
    row = block.to(tl.pointer_type(tl.int8)) + tl.arange(0, GROUP)[:, None] * (3 * PART) + dim[None, :]
    rests = tl.zeros([GROUP, BLOCK_D // 4], tl.int8)
    for half in tl.static_range(2):  # the quarters whose upper bits share a byte
        at, after = half * PART, (half + 2) * PART
        x = load_tokens(tail, new, token_stride, dim_stride, step, fill, total, dim + at, at + PART, D, GROUP)
        low = quantise_channels(x, scales, dim + at, at + PART, D, LARGEST_OF_6)
        x = load_tokens(tail, new, token_stride, dim_stride, step, fill, total, dim + after, after + PART, D, GROUP)
        high = quantise_channels(x, scales, dim + after, after + PART, D, LARGEST_OF_6)
        tl.store(row + at, ((low >> 2) & 15) | ((high >> 2) << 4), mask=inside)
        rests = rests | ((low & 3) << (2 * half)) | ((high & 3) << (2 * half + 4))
    tl.store(row + 2 * PART, rests, mask=inside)
