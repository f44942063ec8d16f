"""A call's 2-D padding mask, brought to the numbering of a cache's own rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gemkv_compile.plan import PaddingPlan, Size


class Paddings:
    """The padding masks of a call. Tables that number their rows alike have one between them, however many layers.

    Args:
        plans: Of each mask; what is said of masks below is in their order.
    """

    def __init__(self, plans: Sequence[PaddingPlan]) -> None:
        self._tables = [plan.table for plan in plans]
        columns: dict[tuple[int, Size], int] = {}
        self._columns = [columns.setdefault((plan.source, plan.column), len(columns)) for plan in plans]
        self._sources = list(columns)

    def keys(self, args: Sequence[Any], starts: Sequence[int]) -> list[tuple[int, int]]:
        """For each mask its argument's position, and by how much the table's numbers are above its columns.

        Args:
            starts: First row of each table that this call attends to.
        """
        found = [(source, column if isinstance(column, int) else column(args)) for source, column in self._sources]
        at = zip(map(found.__getitem__, self._columns), self._tables, strict=True)
        return [(source, starts[table] - column) for (source, column), table in at]

    def aligned(self, args: Sequence[Any], starts: Sequence[int], batches: Sequence[int]) -> list[torch.Tensor]:
        """The masks as `aligned` gives them; equal ones are one tensor.

        Args:
            batches: Sequences of each table.
        """
        made: dict[tuple[int, int, int], torch.Tensor] = {}
        keys = [(*key, batches[table]) for key, table in zip(self.keys(args, starts), self._tables, strict=True)]
        for source, shift, batch in dict.fromkeys(keys):
            made[source, shift, batch] = aligned(args[source], shift, batch)
        return [made[key] for key in keys]


def aligned_padding(plan: PaddingPlan, args: Sequence[Any], start: int, batch: int) -> torch.Tensor:
    """The padding mask of one table, see `aligned`.

    Args:
        start: First row of the table that this call attends to.
    """
    column = plan.column
    return aligned(args[plan.source], start - (column if isinstance(column, int) else column(args)), batch)


def aligned(source: torch.Tensor, shift: int, batch: int) -> torch.Tensor:
    """A padding mask as bool [batch, >= tokens], indexed by a table's own token numbers; contiguous.

    Inductor compiles for the strides of the example, and asserts them.

    Args:
        source: [1 or batch, tokens], what is not 0 is attended to.
        shift: By how much the table's numbers are above the mask's columns.
    """
    mask = source.to(torch.bool)
    if shift > 0:
        mask = torch.nn.functional.pad(mask, (shift, 0), value=True)
    return mask[:, max(0, -shift) :].expand(batch, -1).contiguous()


def columns_of(source: torch.Tensor, shift: int) -> int:
    """How many columns `aligned` has."""
    return int(source.shape[1]) + shift


def copy_aligned(source: torch.Tensor, shift: int, buffer: torch.Tensor) -> None:
    """Write what `aligned` gives to the first columns of `buffer`, bool [batch, at least as many]."""
    if shift > 0:
        buffer[:, :shift] = True
    source = source[:, max(0, -shift) :]
    begin = max(0, shift)
    buffer[:, begin : begin + source.shape[1]] = source  # what is not 0 is True
