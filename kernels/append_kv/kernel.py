"""Appending to pages in Triton: one launch for a decode step, with the commit of a full group inside."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemkv_compile.errors import InvalidOption
from gemkv_compile.kernels.formats import HALF_MAX, MAX_CODE
from gemkv_compile.kernels.layout import PageLayout

BLOCK_D = 64  # channels that a program quantises at once: a [64, 64] tile takes 32 registers a thread
_HALF_MAX = tl.constexpr(HALF_MAX)
_MAX_CODE = tl.constexpr(float(MAX_CODE))
_TO_NEAREST = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds a small float32 to an integer, half to even


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
        "GROUPS_PER_PAGE": layout.groups_per_page,
        "PLANE_BYTES": layout.plane_bytes,
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
    with torch.cuda.device_of(k):
        append_chunk[grid](k, v, *k.stride(), *v.stride(), *state, q_len, **sizes, BLOCK_D=BLOCK_D)
    seq_lens.add_(q_len)


@triton.jit
def append_token(
    k, v, k_batch, k_head, k_dim, v_batch, v_head, v_dim,
    page_table, table_batch, table_page, max_pages, seq_lens, lens_batch, tail, tail_batch,
    HEADS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, GROUPS_PER_PAGE: tl.constexpr,
    PLANE_BYTES: tl.constexpr, GROUP_BYTES: tl.constexpr, QUANTISED: tl.constexpr,
    HEADS_PADDED: tl.constexpr, D_PADDED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One token of one sequence: a program does all heads, so that it alone reads and advances the length."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(seq_lens + row * lens_batch)
    fill = length % GROUP
    k += row * k_batch
    v += row * v_batch
    tail += row * tail_batch
    if fill < GROUP - 1:
        head = tl.arange(0, HEADS_PADDED)[:, None].to(tl.int64)
        dim = tl.arange(0, D_PADDED)[None, :]
        inside = (head < HEADS) & (dim < D)
        place = tail + (head * GROUP + fill) * D + dim
        tl.store(place, tl.load(k + head * k_head + dim * k_dim, mask=inside), mask=inside)
        tl.store(place + HEADS * GROUP * D, tl.load(v + head * v_head + dim * v_dim, mask=inside), mask=inside)
    else:
        group = length // GROUP
        address = tl.load(page_table + row * table_batch + (group // GROUPS_PER_PAGE) % max_pages * table_page)
        if address != 0:
            for head in range(HEADS):
                block = address + (head * GROUPS_PER_PAGE + group % GROUPS_PER_PAGE).to(tl.int64) * GROUP_BYTES
                for first in tl.static_range(0, D, BLOCK_D):
                    x = _tokens(tail + head * GROUP * D, k + head * k_head, 0, k_dim, 0, fill, fill + 1, first,
                                D, GROUP, BLOCK_D)  # fmt: skip
                    _store(x, block, False, first, D, GROUP, PLANE_BYTES, QUANTISED, BLOCK_D)
                    x = _tokens(tail + (HEADS + head) * GROUP * D, v + head * v_head, 0, v_dim, 0, fill, fill + 1,
                                first, D, GROUP, BLOCK_D)  # fmt: skip
                    _store(x, block, True, first, D, GROUP, PLANE_BYTES, QUANTISED, BLOCK_D)
    tl.debug_barrier()  # every thread has read the length
    tl.store(seq_lens + row * lens_batch, length + 1)


@triton.jit
def append_chunk(
    k, v, k_batch, k_head, k_token, k_dim, v_batch, v_head, v_token, v_dim,
    page_table, table_batch, table_page, max_pages, seq_lens, lens_batch, tail, tail_batch, q_len,
    HEADS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, GROUPS_PER_PAGE: tl.constexpr,
    PLANE_BYTES: tl.constexpr, GROUP_BYTES: tl.constexpr, QUANTISED: tl.constexpr, BLOCK_D: tl.constexpr,
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
    rows = tail + row * tail_batch + (is_value.to(tl.int64) * HEADS + head) * GROUP * D
    if step < complete:
        group = length // GROUP + step
        page = group // GROUPS_PER_PAGE
        newest = (length // GROUP + complete - 1) // GROUPS_PER_PAGE
        address = tl.load(page_table + row * table_batch + page % max_pages * table_page)
        if (page > newest - max_pages) & (address != 0):
            x = _tokens(rows, new, token_stride, dim_stride, step, fill, total, first, D, GROUP, BLOCK_D)
            block = address + (head * GROUPS_PER_PAGE + group % GROUPS_PER_PAGE).to(tl.int64) * GROUP_BYTES
            if is_value:
                _store(x, block, True, first, D, GROUP, PLANE_BYTES, QUANTISED, BLOCK_D)
            else:
                _store(x, block, False, first, D, GROUP, PLANE_BYTES, QUANTISED, BLOCK_D)
    if step == 0:
        tl.debug_barrier()  # the first group has been read before the tail is written
        token = complete * GROUP + tl.arange(0, GROUP)[:, None]
        dim = first + tl.arange(0, BLOCK_D)[None, :]
        inside = (token >= fill) & (token < total) & (dim < D)
        x = tl.load(new + (token - fill).to(tl.int64) * token_stride + dim * dim_stride, mask=inside)
        tl.store(rows + (token - complete * GROUP) * D + dim, x, mask=inside)


@triton.jit
def _tokens(
    tail, new, token_stride, dim_stride, step, fill, total, first,
    D: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Group `step` of the `fill` tokens of the tail and the new ones behind them, [GROUP, BLOCK_D]."""
    token = step * GROUP + tl.arange(0, GROUP)[:, None]
    dim = first + tl.arange(0, BLOCK_D)[None, :]
    old = tl.load(tail + token * D + dim, mask=(token < fill) & (dim < D), other=0.0)
    place = new + (token - fill).to(tl.int64) * token_stride + dim * dim_stride
    return tl.where(token < fill, old, tl.load(place, mask=(token >= fill) & (token < total) & (dim < D), other=0.0))


@triton.jit
def _store(
    x, block, is_value: tl.constexpr, first,
    D: tl.constexpr, GROUP: tl.constexpr, PLANE_BYTES: tl.constexpr, QUANTISED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write a group's keys as rows or its values as columns to the tile at address `block`, see `kernels.layout`."""
    token = tl.arange(0, GROUP)[:, None]
    dim = first + tl.arange(0, BLOCK_D)
    place = dim[None, :] * GROUP + token if is_value else token * D + dim[None, :]
    plane = block + PLANE_BYTES if is_value else block
    if QUANTISED:
        codes, scale, zero = _quantise(x.to(tl.float32))
        tl.store(plane.to(tl.pointer_type(tl.int8)) + place, codes, mask=dim[None, :] < D)
        scales = (block + 2 * PLANE_BYTES).to(tl.pointer_type(tl.float16)) + (2 * D if is_value else 0) + dim
        tl.store(scales, scale, mask=dim < D)
        tl.store(scales + D, zero, mask=dim < D)
    else:
        tl.store(plane.to(tl.pointer_type(x.dtype)) + place, x, mask=dim[None, :] < D)


@triton.jit
def _quantise(x):
    """Codes int8 [GROUP, BLOCK_D], scale and zero float16 [BLOCK_D]; the arithmetic of `formats.quantise_groups`."""
    low, high = tl.min(x, 0), tl.max(x, 0)
    # min and max pass over NaN here, and only a marked channel keeps it from becoming a plausible number.
    broken = tl.max(((x != x) | (tl.abs(x) == float("inf"))).to(tl.int32), 0) != 0
    zero = tl.minimum(tl.maximum(low * 0.5 + high * 0.5, -_HALF_MAX), _HALF_MAX).to(tl.float16)
    middle = zero.to(tl.float32)
    reach = tl.maximum(high - middle, middle - low)
    scale = tl.div_rn(reach, tl.full(reach.shape, _MAX_CODE, tl.float32)).to(tl.float16)
    # 127 * scale is exact in float32; the next float16 above a non-negative one has the next bit pattern.
    short = (scale.to(tl.float32) * _MAX_CODE < reach).to(tl.int16)
    scale = (scale.to(tl.int16, bitcast=True) + short).to(tl.float16, bitcast=True)
    scale = tl.where(scale == 0.0, 1.0, scale).to(tl.float16)
    scale = tl.where(broken, float("nan"), scale).to(tl.float16)
    spread = tl.broadcast_to(scale.to(tl.float32)[None, :], x.shape)
    codes = tl.div_rn(x - middle[None, :], spread)
    codes = tl.where(codes == codes, tl.minimum(tl.maximum(codes, -_MAX_CODE), _MAX_CODE), 0.0)
    codes = (codes + _TO_NEAREST) - _TO_NEAREST
    return codes.to(tl.int8), scale, zero
