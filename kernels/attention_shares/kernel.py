"""Attention shares on a GPU: two launches, each of which reads the keys once for a block of queries."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from gemkv_compile.kernels.attend_pages.sizes import USUAL_PROGRAMS, device_limits, num_splits, padded, tile_tokens
from gemkv_compile.kernels.attention_shares.kernel_shares import Form, share_out, sum_weights
from gemkv_compile.kernels.layout import PageLayout

MAX_SPLITS = 64
MIN_ROWS = 16  # of queries, as many as a tensor core multiplies with


def attention_shares_triton(
    q: Tensor,
    positions: Tensor,
    page_table: Tensor,
    starts: Tensor,
    tail: Tensor,
    padding: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    tokens: int,
    layout: PageLayout,
) -> Tensor:
    """Arguments and result as in the reference; nothing is read on the host, and the bits are always the same.

    A token without a column in padding is not an error here: it is not seen.
    Raises:
        InvalidOption: the layout's group_size is no multiple of 16.
    Source: log-sum-exps of split keys, Flash-Decoding (2023-10), as in `attend_pages`.
    """
    (batch, q_heads, observed, _), complete = q.shape, tokens // layout.page_size * layout.page_size
    form = _form(layout, q_heads // layout.num_kv_heads, observed, softcap is not None, window is not None)
    blocks = -(-observed // form.rows)
    out = torch.empty((blocks, batch, q_heads, complete), dtype=torch.float32, device=q.device)
    if not out.numel():
        return out.new_zeros(batch, q_heads, complete)
    columns = form.heads * -(-form.groups // form.packed) * blocks
    multiprocessors, shared_bytes = device_limits(q.device)
    at_once = USUAL_PROGRAMS * multiprocessors
    splits = min(num_splits(batch * columns, tokens // form.tile, at_once), MAX_SPLITS)
    lses = torch.empty((splits, batch, q_heads, observed), dtype=torch.float32, device=q.device)
    padding = None if padding is None else padding.view(torch.uint8)
    arguments: tuple[Any, ...] = (
        q, positions, page_table, starts, tail, padding, lses,
        *(x.stride() for x in (q, page_table, starts, tail)), (0, 0) if padding is None else padding.stride(),
        scale, softcap or 0.0, window or 0, tokens, observed, page_table.shape[1],
        0 if padding is None else padding.shape[1], form,
    )  # fmt: skip
    options = launch_options(layout.head_dim, q.element_size(), shared_bytes)
    with torch.cuda.device_of(q):
        sum_weights[(columns, splits, batch)](*arguments, **options)
        share_out[(columns, splits, batch)](*arguments, out, splits, **options)
    return out[0] if blocks == 1 else out.sum(0)


def tile_sizes(head_dim: int, element_bytes: int, group_size: int) -> tuple[int, int]:
    """Keys and queries of a tile: what fits the registers.

    Raises:
        InvalidOption: group_size is no multiple of 16.
    """
    tile = tile_tokens(head_dim, element_bytes, group_size)
    if element_bytes == 4:  # float32 is multiplied on the plain cores, out of registers
        return min(tile, 32 if head_dim <= 128 else 16), 16
    return (tile, 64) if head_dim <= 256 else (min(tile, 32), 32)


def launch_options(head_dim: int, element_bytes: int, shared_bytes: int) -> dict[str, int]:
    """Warps and stages of both kernels, for the shared memory that a program may have."""
    row = padded(head_dim) * element_bytes
    stages = 3 if row <= 256 or (row <= 512 and shared_bytes >= 160 << 10) else 2 if shared_bytes >= 160 << 10 else 1
    return {"num_warps": 4, "num_stages": stages}


def _form(layout: PageLayout, groups: int, observed: int, capped: bool, windowed: bool) -> Form:
    """Which kernels a call needs."""
    dim, element = layout.head_dim, layout.model_dtype.itemsize
    tile, columns = tile_sizes(dim, element, layout.group_size)
    rows = min(max(MIN_ROWS, padded(observed)), columns)
    return Form(
        heads=layout.num_kv_heads,
        groups=groups,
        head_dim=dim,
        dim=triton.next_power_of_2(dim),
        group_size=layout.group_size,
        groups_per_page=layout.groups_per_page,
        group_bytes=layout.group_bytes,
        k_bits=layout.k_bits,
        scales=layout.k_bytes + layout.v_bytes,
        newest=layout.tail_rows - layout.group_size,
        windowed=windowed,
        capped=capped,
        packed=min(padded(groups), columns // rows),
        rows=rows,
        observed=padded(observed),
        splits=MAX_SPLITS,
        tile=tile,
    )
