"""The usual step: each past is all newest rows of a page table, and the call returns handles of those after it.

A decode step does what is here once a layer. So each function is one loop over the layers, without calls that it could
do without; what is known before the step stands in tuples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch

from gemkv_compile.errors import ReleasedHandle
from gemkv_compile.plan import TablePlan
from gemkv_compile.runtime.handle import PagedKVTensor
from gemkv_compile.runtime.page_table import PageTable
from gemkv_compile.runtime.pool import PagePool

NO_LIMIT = 1 << 62  # tokens
_make_wrapper: Any = torch.Tensor._make_wrapper_subclass
_WITHOUT_STORAGE = (False, False, None, False, False, None, 0)  # its last arguments; the last is the storage's size


class NewestPasts:
    """Begins the appends of calls whose pasts are pairs of handles that nothing has continued.

    Args:
        plans, pools: The caches of a graph, none of them static, and where their pages are.
    """

    def __init__(self, plans: Sequence[TablePlan], pools: Sequence[PagePool]) -> None:
        self._caches: list[tuple[Any, ...]] = []
        for plan, pool in zip(plans, pools, strict=True):
            if plan.past_keys is None or plan.past_values is None:
                break  # the caches of one call are new, or none is
            window, exact = (NO_LIMIT if limit is None else limit for limit in (plan.window, plan.exact_rows))
            self._caches.append((plan.past_keys, plan.past_values, plan.seq_dim, pool, window, exact, plan.keep))

    def begin(
        self, args: Sequence[Any], sizes: Sequence[tuple[int, int]], tables: list[PageTable], starts: list[int]
    ) -> None:
        """Put tables that are claimed and have begun, and the first row of each past, at the end of two empty lists.

        It stops before the first past that is something else, or that the rewritten graph does not cover.
        """
        for (k, v, seq_dim, pool, window, exact, keep), (batch, num_tokens) in zip(self._caches, sizes, strict=False):
            keys, values = args[k], args[v]
            if type(keys) is not PagedKVTensor or type(values) is not PagedKVTensor:
                return
            rows = keys.rows
            if values.rows is not rows or keys.role or not values.role:
                return
            table, start, length, dim, _ = rows
            if table.pool is not pool or table.batch != batch or dim != seq_dim:
                return
            if start >= length or start < length + 1 - exact:
                return
            if not table.claim_newest(length):
                return
            tables.append(table)
            starts.append(start)
            if start != table.base and (start > length + 1 - window or table.base > length + 1 - window):
                table.expose_from(start)
            table.begin(num_tokens, keep, start)


class NewestRows:
    """Makes the handles of a call's newest rows.

    Args:
        plans, pools: The caches of a graph, none of them static, and where their pages are.
    """

    def __init__(self, plans: Sequence[TablePlan], pools: Sequence[PagePool]) -> None:
        self._caches: list[tuple[Any, ...]] = []
        for plan, pool in zip(plans, pools, strict=True):
            outputs = [(each.index, each.role, NO_LIMIT if each.keep is None else each.keep) for each in plan.outputs]
            sizes, marker = (plan.layout.num_kv_heads, plan.layout.head_dim), pool.marker
            like = (None, None, None, marker.dtype, torch.strided, marker.device, *_WITHOUT_STORAGE)
            self._caches.append((outputs, plan.seq_dim, *sizes, marker, like))

    def show(self, results: list[Any], tables: Sequence[PageTable], starts: Sequence[int]) -> None:
        """Put handles where the call returns them, each as `make_handle` makes it; not in inference mode.

        The arguments of a new tensor go by position: by name they take a quarter longer.
        """
        for cache, table, start in zip(self._caches, tables, starts, strict=True):
            outputs, seq_dim, heads, dim, marker, like = cache
            if table.released:
                raise ReleasedHandle("A paged key/value cache")
            length, handles, former = table.length, table.handles, -1
            shape: Any = None
            rows: Any = None
            for index, role, keep in outputs:
                first = start if start > length - keep else length - keep
                if first != former:
                    former, shown, batch = first, length - first, table.batch
                    shape = (batch, heads, shown, dim) if seq_dim == 2 else (batch, shown, heads, dim)
                    rows = (table, first, length, seq_dim, None)
                handle = _make_wrapper(PagedKVTensor, shape, *like)
                handle._marker, handle.rows, handle.role = marker, rows, role
                handles.append(ref(handle))
                results[index] = handle
