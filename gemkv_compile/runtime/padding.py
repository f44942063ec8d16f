"""A call's 2-D padding mask, brought to the numbering of a cache's own rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gemkv_compile.plan import PaddingPlan


def aligned_padding(plan: PaddingPlan, args: Sequence[Any], start: int, batch: int) -> torch.Tensor:
    """The padding mask as bool [batch, >= tokens], indexed by the table's own token numbers; contiguous.

    Inductor compiles for the strides of the example, and asserts them.

    Args:
        start: First row of the table that this call attends to.
    """
    source = args[plan.source].to(torch.bool)
    shift = _shift(plan, args, start)
    if shift > 0:
        source = torch.nn.functional.pad(source, (shift, 0), value=True)
    return source[:, max(0, -shift) :].expand(batch, -1).contiguous()


def padding_columns(plan: PaddingPlan, args: Sequence[Any], start: int) -> int:
    """How many columns `aligned_padding` has."""
    return int(args[plan.source].shape[1]) + _shift(plan, args, start)


def copy_padding(plan: PaddingPlan, args: Sequence[Any], start: int, buffer: torch.Tensor) -> None:
    """Write what `aligned_padding` gives to the first columns of `buffer`, bool [batch, at least as many]."""
    source, shift = args[plan.source], _shift(plan, args, start)
    if shift > 0:
        buffer[:, :shift] = True
    source = source[:, max(0, -shift) :]
    begin = max(0, shift)
    buffer[:, begin : begin + source.shape[1]] = source  # what is not 0 is True


def _shift(plan: PaddingPlan, args: Sequence[Any], start: int) -> int:
    column = plan.column
    return start - (column if isinstance(column, int) else column(args))
