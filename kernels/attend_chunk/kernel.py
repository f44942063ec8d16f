"""Attention of a chunk of new tokens to their paged past and to themselves, as one Triton kernel.

A program takes block_m queries of one head, or fewer of all heads that share keys, through the pages, the tail and the
chunk's own keys. Lengths and addresses are read by the kernel: a launch waits for nothing. Where the Hopper kernel does
the chunk's own keys (`variants`), this one runs after it and adds the past. Sums are float32; the weights, and keys and
values that pages hold
as codes, are rounded to the model's dtype for the tensor cores. Positions count the tokens of a sequence.
Source: FlashAttention-2, arXiv:2307.08691; online softmax, arXiv:1805.02867; pages, arXiv:2309.06180.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of its functions: only constants may have one.

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemkv_compile.errors import InvalidOption
from gemkv_compile.kernels.attend_chunk.kernel_loops import add_results, attend_pages, attend_rows
from gemkv_compile.kernels.attend_chunk.kernel_tile import LOG2E, LOWEST, NEVER, Form
from gemkv_compile.kernels.attend_chunk.variants import takes_hopper
from gemkv_compile.kernels.layout import PageLayout
from gemkv_compile.kernels.results import empty_results

LN2 = tl.constexpr(0.6931471805599453)

FEW_QUERIES = 16  # the fewest rows that a tensor core multiplies; a chunk of no more gets tiles of this height
PACKED_QUERIES = 64  # the height of the tiles of a chunk with fewer queries, whose heads share tiles
INTERPRETER_BYTES = 227 << 10  # any number would do: the interpreter has no shared memory


class Tiles(NamedTuple):
    """Queries and keys in a tile of scores, warps of a program, and tiles of keys in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def tiles(head_dim: int, shared_bytes: int, element_bytes: int) -> Tiles:
    """Tile sizes for a head size, the shared memory that a program may have, and the size of the model's dtype."""
    if element_bytes == 4:  # float32 is multiplied on the plain cores, out of registers
        return Tiles(32, 32, 4, 1) if head_dim <= 128 else Tiles(16, 16, 4, 1)
    large, medium = shared_bytes >= 200 << 10, shared_bytes >= 140 << 10
    if head_dim <= 128:
        return Tiles(128, 64, 8, 2)
    if head_dim <= 256:
        return Tiles(128, 64, 8, 2) if large else Tiles(64, 64, 8, 2) if medium else Tiles(64, 32, 8, 1)
    return Tiles(64, 32, 8, 2) if large else Tiles(32, 32, 8, 2) if medium else Tiles(32, 16, 8, 1)


@triton.jit(do_not_specialize=["window", "q_len", "new_len", "max_pages", "padding_len", "mask_len"])
def attend_chunk_kernel(
    q, k, v, page_table, seq_lens, starts, tail, padding, mask, sinks, out, lse,
    q_s, k_s, v_s, table_s, lens_s, starts_s, tail_s, padding_s, mask_s, sinks_s, out_s, lse_s,
    scales, window, q_len, new_len, groups, max_pages, padding_len, mask_len, F: tl.constexpr,
):  # fmt: skip
    """Tensors as in `gemkv_compile.kernels.ops.attend_chunk`, and their strides; the rest of `attend_chunk_triton`.

    Grid: tiles of queries, query heads or groups of them that share tiles, sequences.
    """
    BLOCK_M: tl.constexpr = F.block_m
    BLOCK_N: tl.constexpr = F.block_n
    DIM: tl.constexpr = F.dim
    PACKED: tl.constexpr = F.packed
    block, head, row = tl.program_id(0), tl.program_id(1).to(tl.int64) * PACKED, tl.program_id(2).to(tl.int64)
    if F.causal:
        block = tl.num_programs(0) - 1 - block  # the last queries have most to do: they start first
    kv_head = head // groups
    length = tl.load(seq_lens + row * lens_s[0])
    start = tl.maximum(tl.load(starts + row * starts_s[0]), 0)
    begin_m = block * BLOCK_M // PACKED
    end_m = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // PACKED + 1, q_len)
    m, d = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, DIM)
    heads = head  # of each row
    if PACKED > 1:
        heads = head + m % PACKED
        m = m // PACKED
    ahead = new_len - q_len  # the chunk's tokens before the first that has a query
    first, last = length + ahead + begin_m, length + ahead + end_m - 1
    inside = (m < q_len)[:, None] & (d < F.head_dim)[None, :]
    rows = m.to(tl.int64)
    q += row * q_s[0]
    if PACKED > 1:
        places = (heads * q_s[1] + rows * q_s[2])[:, None]
    else:
        q += head * q_s[1]
        places = rows[:, None] * q_s[2]
    queries = tl.load(q + places + d[None, :] * q_s[3], mask=inside, other=0)

    # No query of the tile sees a token before low; every query sees the tokens from full on, as far as rules go.
    low, full, mask_begin = start, start, length + new_len - mask_len
    if F.windowed:
        low, full = tl.maximum(low, first - window + 1), tl.maximum(full, last - window + 1)
    if not F.own and sinks is None:  # noqa: SIM102 (one is known when the kernel is compiled)
        if low >= length:
            return  # no query of the tile sees the past
    if F.padded:
        padding += row * padding_s[0]
    if F.mask != "":
        low = tl.maximum(low, mask_begin)
        mask += row * mask_s[0] + head * mask_s[1] + begin_m.to(tl.int64) * mask_s[2]
    mask_strides = (mask_s[2], mask_s[3])
    rules = (window, padding, padding_s[1], padding_len, mask, mask_strides, mask_begin, length + new_len)
    view = (length + ahead + m, first, last, rules, scales)

    state = (
        tl.zeros((BLOCK_M, DIM), tl.float32),
        tl.zeros((BLOCK_M,), tl.float32),
        tl.full((BLOCK_M,), LOWEST, tl.float32),
    )
    if sinks is not None:
        sink = tl.load(sinks + heads * sinks_s[0]).to(tl.float32)
        sink_peak = tl.maximum(sink * (1.0 if F.mask == "float" else LOG2E), LOWEST)
        state = (state[0], state[1] + tl.where(sink == NEVER, 0.0, 1.0), tl.zeros_like(state[2]) + sink_peak)

    # Pages. A later page may have taken the column of an old one.
    end = length - length % F.group_size
    oldest = ((end - 1) // F.page_size - max_pages + 1) * F.page_size
    table, head_group = page_table + row * table_s[0], kv_head * (F.page_size // F.group_size)
    if F.guarded:
        oldest = tl.maximum(oldest, F.group_size)
    there, full_there = tl.maximum(low, oldest), tl.maximum(full, oldest)
    state = attend_pages(state, queries, table, table_s[1], max_pages, head_group, there, full_there, end, view, F)

    tail += row * tail_s[0] + kv_head * tail_s[2]
    strides = (tail_s[3], tail_s[4], tail_s[3], tail_s[4])
    begin, stop = tl.maximum(low - end, 0) // BLOCK_N * BLOCK_N, length - end
    if F.guarded:  # rows of the first group, and then those of the newest one, if it is another
        begin = tl.where(low < F.group_size, low // BLOCK_N * BLOCK_N, begin + F.group_size)
        stop = tl.where(end > 0, stop + F.group_size, stop)
    for at in tl.range(begin, stop, BLOCK_N):
        first_row, high = end, length  # the token that row 0 would be, and the end of those that are there
        if F.guarded:
            first_row = tl.where(at < F.group_size, 0, end - F.group_size)
            high = tl.where(at < F.group_size, tl.minimum(length, F.group_size), length)
        state = attend_rows(state, queries, tail, tail + tail_s[1], strides, at, first_row, low, high, False, view, F)

    if F.own:  # the chunk itself, counted from its first token
        k += row * k_s[0] + kv_head * k_s[1]
        v += row * v_s[0] + kv_head * v_s[1]
        strides, new_end = (k_s[2], k_s[3], v_s[2], v_s[3]), length + new_len
        begin, stop = tl.maximum(low - length, 0) // BLOCK_N * BLOCK_N, ahead + end_m if F.causal else new_len
        full_begin, full_end = full - length, ahead + begin_m + 1 if F.causal else new_len
        for at in tl.range(begin, stop, BLOCK_N):
            whole = (at >= full_begin) & (at + BLOCK_N <= full_end)
            state = attend_rows(state, queries, k, v, strides, at, length, low, new_end, whole, view, F)

    out += row * out_s[0]
    if PACKED > 1:
        places = (heads * out_s[1] + rows * out_s[2])[:, None]
    else:
        out += head * out_s[1]
        places = rows[:, None] * out_s[2]
    out += places + d[None, :] * out_s[3]
    lse += row * lse_s[0] + heads * lse_s[1] + rows * lse_s[2]
    if not F.own:
        state = add_results(state, out, lse, inside, F)
    weighted, total, peak = state
    if F.mask == "float":
        result = peak + tl.log(total)
    else:
        result = (peak + tl.log2(total)) * LN2
    if sinks is not None:
        result = tl.where((total == 1) & (peak == sink_peak), sink, result)  # not rounded on the way to base 2 and back
    weighted /= tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out, weighted.to(out.dtype.element_ty), mask=inside)
    tl.store(lse, result, mask=m < q_len)


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETER_BYTES
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


def _form(
    q: Tensor,
    padding: Tensor | None,
    mask: Tensor | None,
    softcap: float | None,
    causal: bool,
    window: int | None,
    layout: PageLayout,
) -> tuple[Form, Tiles]:
    """Which kernel a call needs, and its tile sizes."""
    if layout.group_size % 16:
        raise InvalidOption(f"group_size must be a multiple of 16 on a GPU, got {layout.group_size}.")
    sizes = tiles(layout.head_dim, _shared_bytes(q.device), q.element_size())
    groups = q.shape[1] // layout.num_kv_heads
    packed = groups if mask is None and q.shape[2] < PACKED_QUERIES else 1
    if packed > 1 and layout.head_dim > 256:  # other tiles spill: the rows' heads need registers too
        sizes = sizes._replace(block_m=min(sizes.block_m, 32))
    elif q.shape[2] * packed <= FEW_QUERIES:
        sizes = sizes._replace(block_m=FEW_QUERIES, num_warps=4)
    elif packed > 1:
        sizes = sizes._replace(block_m=min(sizes.block_m, PACKED_QUERIES))
    if mask is not None:  # its numbers need registers too
        sizes = sizes._replace(block_n=min(sizes.block_n, 32))
    form = Form(
        head_dim=layout.head_dim,
        dim=triton.next_power_of_2(layout.head_dim),
        page_size=layout.page_size,
        group_size=layout.group_size,
        group_bytes=layout.group_bytes,
        k_bits=layout.k_bits,
        v_bits=layout.v_bits,
        k_bytes=layout.k_bytes,
        v_bytes=layout.v_bytes,
        quantised=layout.is_quantised,
        guarded=layout.is_guarded,
        causal=causal,
        windowed=window is not None,
        capped=softcap is not None,
        padded=padding is not None,
        packed=packed,
        mask="" if mask is None else "bool" if mask.dtype == torch.bool else "float",
        block_m=sizes.block_m,
        block_n=min(sizes.block_n, layout.group_size & -layout.group_size),  # a tile lies in one group
        precision="ieee" if q.dtype == torch.float32 else "tf32",
    )
    return form, sizes


def attend_chunk_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    starts: Tensor,
    tail: Tensor,
    padding: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    causal: bool,
    window: int | None,
    layout: PageLayout,
    variant: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Arguments and result as in `gemkv_compile.kernels.ops.attend_chunk`; tensors on CUDA, or in Triton's interpreter.

    Args:
        variant: As in `gemkv_compile.kernels.attend_chunk.variants.takes_hopper`.
    Nothing waits for the device, so a token without a column in padding is not an error here: it is not attended to.
    Raises:
        InvalidOption: group_size is no multiple of 16, or the variant cannot do this.
    """
    out, lse = empty_results(q)
    hopper = takes_hopper(variant, q, k, v, padding, mask, scale)
    if not out.numel():
        return out, lse
    if hopper:
        from gemkv_compile.kernels.attend_chunk.kernel_hopper import attend_chunk_hopper

        out, lse = attend_chunk_hopper(q, k, v, seq_lens, starts, scale, softcap, causal, window)
    batch, heads, q_len, _ = q.shape
    rows = q_len
    if hopper and window is not None and sinks is None:  # later queries see nothing of the past
        rows = min(rows, window - 1 - (k.shape[2] - q_len))
    if rows <= 0:
        return out, lse
    form, sizes = _form(q, padding, mask, softcap, causal, window, layout)
    form = dataclasses.replace(form, own=not hopper)
    unit = 1.0 if form.mask == "float" else LOG2E.value
    scales = (scale * unit, 0.0) if softcap is None else (scale / softcap, softcap * unit)
    if padding is not None:
        padding = padding.view(torch.uint8)
    if mask is not None:
        mask = mask.expand(batch, heads, -1, -1)
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    tensors = q, k, v, page_table, seq_lens, starts, tail, padding, mask, sinks, out, lse
    strides = ((0, 0, 0, 0) if x is None else x.stride() for x in tensors)
    columns = (0 if x is None else x.shape[-1] for x in (page_table, padding, mask))
    grid = (triton.cdiv(rows * form.packed, form.block_m), heads // form.packed, batch)
    with torch.cuda.device_of(q):
        attend_chunk_kernel[grid](
            *tensors, *strides, scales, window or 0, q_len, k.shape[2], heads // layout.num_kv_heads, *columns, form,
            num_warps=sizes.num_warps, num_stages=sizes.num_stages,
        )  # fmt: skip
    return out, lse
