"""Appending to pages, in plain torch: the oracle of the kernel, and what runs on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from gemkv_compile.kernels.layout import PageLayout
from gemkv_compile.kernels.memory import pack_groups, write_groups


def append_kv_reference(
    k: Tensor, v: Tensor, page_table: Tensor, seq_lens: Tensor, tail: Tensor, layout: PageLayout
) -> None:
    """Store new tokens; arguments as in `gemkv_compile.kernels.ops.append_kv`, mutates seq_lens, tail and the pages."""
    if not k.numel():
        return
    lengths = seq_lens.tolist()
    guard = layout.group_size if layout.is_guarded else 0
    places = [(length % layout.group_size, layout.tail_row(length)) for length in lengths]
    for fill, at in sorted(set(places)):
        rows = [row for row, place in enumerate(places) if place == (fill, at)]
        # Sequences whose tails hold the same number of tokens complete the same number of groups.
        picked = slice(None) if len(rows) == len(lengths) else rows
        old, new = tail[picked][:, :, :, at : at + fill], torch.stack((k[picked], v[picked]), dim=1)
        rest, data = _fill_tail(old, new, page_table.shape[1], layout)
        if data is None:
            tail[picked, :, :, at + fill : at + fill + k.shape[2]] = rest
            continue
        if guard and not at:
            tail[picked, :, :, fill:guard] = new[:, :, :, : guard - fill]
        tail[picked, :, :, guard : guard + rest.shape[3]] = rest
        for row, groups in zip(rows, data, strict=True):
            first = (lengths[row] + k.shape[2]) // layout.group_size - groups.shape[1]
            _write_pages(groups, first, page_table[row].tolist(), layout)
    seq_lens += k.shape[2]


def _fill_tail(old: Tensor, new: Tensor, max_pages: int, layout: PageLayout) -> tuple[Tensor, Tensor | None]:
    """Put new tokens behind those of the tail, both [batch, 2, Hkv, tokens, D].

    Returns:
        The tokens for the tail, [batch, 2, Hkv, n, D], and the packed groups [batch, Hkv, n, group_bytes] or None if
        none is complete, without those that are too old for a table of max_pages columns.
    """
    complete = (old.shape[3] + new.shape[3]) // layout.group_size
    if not complete:
        return new, None
    tokens = torch.cat((old, new), dim=3)
    end = complete * layout.group_size
    skipped = max(0, complete - max_pages * layout.groups_per_page) * layout.group_size
    grouped = tokens[:, :, :, skipped:end].unflatten(3, (-1, layout.group_size))
    return tokens[:, :, :, end:], pack_groups(grouped[:, 0], grouped[:, 1], layout)


def _write_pages(groups: Tensor, first: int, table: list[int], layout: PageLayout) -> None:
    """Write the groups first, first + 1, .. of one sequence, [Hkv, n, group_bytes], to the pages of its table."""
    per_page, end = layout.groups_per_page, first + groups.shape[1]
    newest = (end - 1) // per_page
    for page in range(max(first // per_page, newest - len(table) + 1), newest + 1):
        address = table[page % len(table)]
        begin, stop = max(first, page * per_page), min(end, (page + 1) * per_page)
        if address:
            write_groups(address, begin - page * per_page, groups[:, begin - first : stop - first], layout)
