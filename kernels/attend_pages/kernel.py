"""Attention of one new token to its paged past in Triton: tokens on the long side of the product, split over programs.

A program takes a run of 64-token groups of one K/V head and leaves an unnormalised sum; a second launch combines them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gemkv_compile.kernels.attend_pages.kernel_parts import combine_splits
from gemkv_compile.kernels.attend_pages.kernel_split import attend_split
from gemkv_compile.kernels.attend_pages.sizes import (
    USUAL_PROGRAMS,
    combined_channels,
    device_limits,
    num_splits,
    num_warps,
    padded,
    part_padded,
    programs_at_once,
    stages,
    step_bytes,
    tile_tokens,
)
from gemkv_compile.kernels.layout import PageLayout
from gemkv_compile.kernels.results import empty_results


def attend_pages_triton(
    q: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    starts: Tensor,
    tail: Tensor,
    padding: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    layout: PageLayout,
) -> tuple[Tensor, Tensor]:
    """Arguments and result as in `gemkv_compile.kernels.ops.attend_pages`; no length is read on the host.

    Source: split keys with a second reduction, Flash-Decoding (2023-10), https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
    """
    out, lse = empty_results(q)
    batch, num_q_heads, _, dim = q.shape
    heads = layout.num_kv_heads
    if not q.numel():
        return out, lse
    groups = num_q_heads // heads
    multiprocessors, shared_bytes = device_limits(q.device)
    tile, warps = tile_tokens(dim, q.element_size(), layout.group_size), num_warps(dim, layout.k_bits, layout.v_bits)
    view = None if mask is None else mask.expand(batch, num_q_heads, 1, mask.shape[3])
    arguments = (
        q, q.stride(0), q.stride(1), q.stride(3),
        page_table, *page_table.stride(), page_table.shape[1],
        seq_lens, seq_lens.stride(0), starts, starts.stride(0), tail, tail.stride(0),
        padding, *((0, 0, 0) if padding is None else (*padding.stride(), padding.shape[1])),
        view, *((0, 0, 0, 0) if view is None else (view.stride(0), view.stride(1), view.stride(3), view.shape[3])),
    )  # fmt: skip
    options = dict(
        scale=scale, softcap=softcap or 0.0, window=window or 0,
        HEADS=heads, GROUPS=groups, D=dim, GROUP=layout.group_size, TILE=tile, TAIL_ROWS=layout.tail_rows,
        GROUPS_PER_PAGE=layout.groups_per_page, K_BITS=layout.k_bits, V_BITS=layout.v_bits, K_BYTES=layout.k_bytes,
        V_BYTES=layout.v_bytes, GROUP_BYTES=layout.group_bytes, QUANTISED=layout.is_quantised,
        HAS_CAP=softcap is not None, HAS_WINDOW=window is not None, D_PADDED=padded(dim),
        HALF_PADDED=part_padded(dim, 2), QUARTER_PADDED=part_padded(dim, 4), GROUPS_PADDED=max(8, padded(groups)),
        HALVES=q.element_size() == 2, BITS=q.is_cuda, num_warps=warps,
        num_stages=stages(step_bytes(tile, dim, layout.k_bits + layout.v_bits), shared_bytes),
    )  # fmt: skip
    with torch.cuda.device_of(q):
        kind = layout, groups, padding is None, None if mask is None else mask.dtype, softcap is None, window is None
        at_once = _at_once((q.device, *kind), arguments, options) if q.is_cuda else USUAL_PROGRAMS * multiprocessors
        splits = num_splits(batch * heads, page_table.shape[1] * layout.groups_per_page, at_once)
        sums = torch.empty((batch, num_q_heads, splits, dim), dtype=torch.float32, device=q.device)
        peaks = torch.empty((2, batch, num_q_heads, splits), dtype=torch.float32, device=q.device)
        attend_split[(splits, heads, batch)](*arguments, sums, peaks, **options)
        block = combined_channels(batch * num_q_heads, dim, multiprocessors)
        combine_splits[(num_q_heads, batch, -(-dim // block))](
            sums, peaks, sinks, 0 if sinks is None else sinks.stride(0), out, out.stride(0), out.stride(1), lse, splits,
            D=dim, BLOCK_D=block, SPLITS_PADDED=padded(splits), num_warps=4,
        )  # fmt: skip
    return out, lse


_PROGRAMS: dict[tuple[Any, ...], int] = {}  # that a device runs at once, by what decides what is compiled


def _at_once(kind: tuple[Any, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> int:
    """Programs of a launch that the current CUDA device runs at once, by what the compiled kernel takes."""
    found = _PROGRAMS.get(kind)
    if found is None:
        compiled: Any = attend_split.warmup(*arguments, torch.float32, torch.float32, grid=(1, 1, 1), **options)
        compiled = compiled.result() if hasattr(compiled, "result") else compiled
        compiled.run  # noqa: B018 - loads the kernel, and so finds its registers
        taken = compiled.n_regs, compiled.metadata.shared, options["num_warps"]
        found = _PROGRAMS[kind] = programs_at_once(*taken, arguments[0].device)
    return found
