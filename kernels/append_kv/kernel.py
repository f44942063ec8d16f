"""Appending to pages in Triton: one launch for a decode step, two for a chunk of several tokens."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemkv_compile.errors import InvalidOption
from gemkv_compile.kernels.append_kv.kernel_commit import BLOCK_D, channels, commit
from gemkv_compile.kernels.append_kv.kernel_quantise import token_norms
from gemkv_compile.kernels.append_kv.kernel_token import NUM_WARPS, append_token, launch_sizes
from gemkv_compile.kernels.layout import PageLayout


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
        "BLOCK_D": BLOCK_D,
    }
    state = page_table, *page_table.stride(), page_table.shape[1], seq_lens, seq_lens.stride(0), tail, tail.stride(0)
    if q_len == 1:
        k_strides, v_strides = (k.stride(0), k.stride(1), k.stride(3)), (v.stride(0), v.stride(1), v.stride(3))
        parts, own = launch_sizes(batch, heads, dim)
        with torch.cuda.device_of(k):
            append_token[(batch, parts, 2)](k, v, *k_strides, *v_strides, *state, **sizes, **own, num_warps=NUM_WARPS)
        return
    # Tokens in the tail may complete one group more than the chunk alone.
    grid = triton.cdiv(q_len, layout.group_size) + 1, batch * heads, 2 * triton.cdiv(dim, BLOCK_D)
    num_warps = 2 if min(layout.k_bits, layout.v_bits) >= 8 else 4  # the fewest that spill nothing
    with torch.cuda.device_of(k):
        append_chunk[grid](k, v, *k.stride(), *v.stride(), *state, q_len, **sizes, num_warps=num_warps)
    seq_lens.add_(q_len)


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
    if (step < complete) & (max_pages > 0):
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
                norms = token_norms(rows, new, token_stride, dim_stride, step, fill, BITS, D, GROUP, BLOCK_D)
                for at in range(0, D, BLOCK_D):
                    commit(rows, new, token_stride, dim_stride, step, fill, norms, at, block,
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
            commit(rows, new, token_stride, dim_stride, step, fill, (0, 0), first, block,
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
    """Write the new tokens of the group from token `begin` on to the tail, in the channels that `commit` reads."""
    dim = channels(first, BITS, D, BLOCK_D)[None, :]
    token = begin + tl.arange(0, GROUP)[:, None]
    inside = (token >= fill) & (token < total) & (dim < D)
    x = tl.load(new + (token - fill).to(tl.int64) * token_stride + dim * dim_stride, mask=inside)
    tl.store(rows + (token - begin) * D + dim, x, mask=inside)
