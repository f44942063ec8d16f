"""How well the groups of a cache are held by its format: counted when somebody asks, never in a decode step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gemkv_compile.errors import ReleasedHandle
from gemkv_compile.kernels.formats import spread_norms
from gemkv_compile.kernels.layout import PageLayout
from gemkv_compile.kernels.memory import gather_pages, read_groups, split_groups
from gemkv_compile.runtime.ledger import tables_of
from gemkv_compile.runtime.page_table import PageTable

BOUND = 0.05


@dataclass(frozen=True)
class GroupErrors:
    """Complete groups of one layer's cache that pages hold; one is 64 tokens of one K/V head of one sequence.

    Args:
        groups: All of them.
        guarded: Those that are read in the model's precision all the same: the first ones, in guarded formats.
        beyond_keys, beyond_values: Others whose expected squared error is more than the bound, in parts of the
            squared mean distance of a channel's numbers from their mean, channels added up. A few tokens that are far
            from the others make steps large and this distance not.
        worst_keys, worst_values: The largest of these parts; 0.0 if there are none.
    """

    groups: int = 0
    guarded: int = 0
    beyond_keys: int = 0
    beyond_values: int = 0
    worst_keys: float = 0.0
    worst_values: float = 0.0


def group_errors(cache: Any, bound: float = BOUND) -> tuple[GroupErrors, ...]:
    """What the codes in pages say about rounding, layer by layer.

    Args:
        cache: As `kv_memory` takes it.
        bound: What a group may have; 4-bit codes of normally distributed numbers have about 0.02, 6-bit ones 0.001.
    Raises:
        TypeError: as `kv_memory`.
        ReleasedHandle: a table was released.
    Rounding to steps of s has a mean squared error of s * s / 12. It reads every page once, a page at a time, and waits
    for the device: not for the inside of a decode loop. A group of equal tokens has no error.
    """
    return tuple(_measure(table, bound) for table in tables_of(cache))


def _measure(table: PageTable, bound: float) -> GroupErrors:
    layout, groups, guarded = table.pool.layout, 0, 0
    found: list[Tensor] = [torch.zeros(2, 0)]
    with table.claimed(), torch.no_grad():
        if table.released:
            raise ReleasedHandle("A paged key/value cache")
        for index, addresses in table.pages.items():
            first = index * layout.groups_per_page
            complete = max(0, min(layout.groups_per_page, table.length // layout.group_size - first))
            skipped = int(layout.is_guarded and not first and complete > 0)
            groups += complete * table.batch * layout.num_kv_heads
            guarded += skipped * table.batch * layout.num_kv_heads
            if layout.is_quantised:
                data = gather_pages([[address] for address in addresses], layout, table.pool.device)
                found.append(_relative_errors(data[:, :, skipped:complete], layout).flatten(1).cpu())
    errors = torch.cat(found, 1)
    beyond = [int(count) for count in (errors > bound).sum(1)]
    worst = [float(part.max()) if part.numel() else 0.0 for part in errors]
    return GroupErrors(groups, guarded, *beyond, *worst)


def _relative_errors(data: Tensor, layout: PageLayout) -> Tensor:
    """Errors of keys and values as in `GroupErrors`, [2, batch, Hkv, n], of groups [batch, Hkv, n, group_bytes]."""
    scales, last = (part for part in split_groups(data, layout)[2:] if part is not None)
    k_step, _, v_step = (part.float().unsqueeze(-2) for part in scales.unbind(-2))  # [batch, Hkv, n, 1, D]
    if layout.has_norms:
        v_step = v_step * spread_norms(last, layout.head_dim)
    errors = []
    for step, rows in zip((k_step, v_step), read_groups(data, layout), strict=True):
        x = rows.unflatten(-2, (-1, layout.group_size))
        spread = (x - x.mean(-2, keepdim=True)).abs().mean(-2).square().sum(-1)
        error = (step.square() / 12).expand_as(x).mean(-2).sum(-1)
        errors.append(torch.where(spread > 0, error / spread, 0.0))
    return torch.stack(errors)
