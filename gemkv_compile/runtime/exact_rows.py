"""Rows of paged caches as they were before a format rounded them: what the shadow remembers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gemkv_compile.runtime.handle import PagedKVTensor
from gemkv_compile.runtime.page_table import PageTable


class ExactRows:
    """Dense keys and values by table, while the table lives and only shadowed calls continue it.

    Pages of the model's own dtype are exact themselves, so nothing is kept for them. Rows that a table has are never
    changed, so what is kept stays right; what is not known (an older cache, a reordered or edited one) is None.
    """

    def __init__(self) -> None:
        self._rows: weakref.WeakKeyDictionary[PageTable, dict[int, tuple[int, int, Tensor]]]
        self._rows = weakref.WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, handle: PagedKVTensor, dense: Tensor) -> Tensor | None:
        """The exact rows of a handle, shaped as it is, or None if they are not known; `dense` is what it shows."""
        if not handle.table.pool.layout.is_quantised:
            return dense
        known = self._rows.get(handle.table, {}).get(handle.role)
        if known is None:
            return None
        first, dim, rows = known
        if dim != handle.seq_dim or handle.start < first or handle.length > first + rows.shape[dim]:
            return None
        return rows.narrow(dim, handle.start - first, handle.length - handle.start)

    def keep(self, handle: PagedKVTensor, past: Tensor | None, computed: Tensor, num_tokens: int) -> None:
        """Remember the rows of a handle that a call has returned.

        Args:
            past: The exact past, or None if there was none.
            computed: What the original graph returns for the handle; its last `num_tokens` rows are new.
        Rows that the table still has in its tail are taken from there: they are the rewritten graph's own, so that an
        error of it is not taken for one of the format.
        """
        table, dim = handle.table, handle.seq_dim
        if not table.pool.layout.is_quantised or computed.shape != handle.shape:
            return
        new = min(num_tokens, computed.shape[dim])
        rows = computed.narrow(dim, computed.shape[dim] - new, new)
        rows = rows if past is None or not past.numel() else torch.cat([past, rows], dim)
        if rows.shape[dim] < handle.shape[dim]:
            return
        rows = rows.narrow(dim, rows.shape[dim] - handle.shape[dim], handle.shape[dim]).clone()
        begin = max(handle.start, table.tail_begin)
        newest = table.read(begin, handle.length)[handle.role].transpose(2, dim)
        rows.narrow(dim, begin - handle.start, handle.length - begin).copy_(newest)
        if table.length == handle.length:  # else another thread has gone on, and may have rounded the tail
            self._rows.setdefault(table, {})[handle.role] = (handle.start, dim, rows)

    def forget(self, args: Sequence[Any]) -> None:
        """Drop the rows of the tables that a call is given, and of released ones."""
        given = {id(arg.table) for arg in args if isinstance(arg, PagedKVTensor)}
        for table in list(self._rows):
            if id(table) in given or table.released:
                self._rows.pop(table, None)


exact_rows = ExactRows()
