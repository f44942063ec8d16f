"""From the past that a call receives to a page table that the call may append to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gemkv_compile.errors import CacheMismatch
from gemkv_compile.kernels import ops
from gemkv_compile.kernels.layout import FORMAT_VERSION
from gemkv_compile.runtime.handle import KEYS, VALUES, PagedKVTensor
from gemkv_compile.runtime.page_table import PageTable
from gemkv_compile.runtime.pool import PagePool

FORMAT_NAME = f"format {FORMAT_VERSION}"


def import_dense(pool: PagePool, keys: torch.Tensor, values: torch.Tensor, seq_dim: int = 2) -> PageTable:
    """Store dense keys and values in pages.

    Args:
        keys, values: [batch, num_kv_heads, tokens, head_dim], or with dimensions 1 and 2 exchanged if seq_dim is 1.
    Raises:
        CacheMismatch: the shapes, dtypes or devices are not those of the pool.
        PoolExhausted: too few pages; nothing has changed.
    """
    if seq_dim == 1:
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    layout = pool.layout
    batch, tokens = keys.shape[0], keys.shape[2]
    expected = ((batch, layout.num_kv_heads, tokens, layout.head_dim), layout.model_dtype, pool.device)
    for name, tensor in (("keys", keys), ("values", values)):
        given = (tuple(tensor.shape), tensor.dtype, tensor.device)
        if given != expected:
            raise CacheMismatch(
                f"The past {name} must be {expected[0]} {expected[1]} on {expected[2]}, got {given[0]} {given[1]} on "
                f"{given[2]}. Pass keys and values of one cache, in the model's dtype and on the model's device."
            )
    table = PageTable(pool, batch)
    if tokens:
        with torch.no_grad():
            table.begin(tokens, keep=None)
            state = (table.page_table, table.seq_lens, table.tail)
            ops.append_kv(keys.detach(), values.detach(), *state, layout.page_size, layout.kv_format, FORMAT_NAME)
            table.commit(tokens)
    return table


def used_rows(pair: Sequence[torch.Tensor], seq_dim: int) -> int:
    """How many rows of a static cache's keys and values are not the zeros that it was made with."""
    dims = [dim for dim in range(4) if dim != seq_dim]
    used = torch.stack([(part != 0).any(dim=dims[2]).any(dim=dims[1]).any(dim=dims[0]) for part in pair]).any(0)
    places = used.nonzero()
    return int(places[-1]) + 1 if len(places) else 0


def continue_past(
    pool: PagePool, batch: int, past_keys: torch.Tensor | None, past_values: torch.Tensor | None, seq_dim: int
) -> tuple[PageTable, int]:
    """A table whose rows [start, table.length) are the given past, free to be appended to, and that start.

    A pair of handles of one table that nothing has continued is that table; an older pair is a fork of it; dense
    tensors, and handles that do not belong together, are imported. The table is claimed, which lasts until `end`.

    Raises:
        CacheMismatch: the past is not one of `batch` sequences that fit the pool.
        ReleasedHandle: the past was released.
    """
    table, start = _find_table(pool, batch, past_keys, past_values, seq_dim)
    length = past_keys.length if isinstance(past_keys, PagedKVTensor) and past_keys.table is table else table.length
    table.claim()
    if length == table.length and not table.is_appending and not table.released:
        return table, start
    try:
        fork = table.fork(start, length)
        table.release_unreachable(newer=True)  # what another continuation has appended, if it is dead by now
    finally:
        table.unclaim()
    fork.claim()
    return fork, start


def _find_table(
    pool: PagePool, batch: int, past_keys: torch.Tensor | None, past_values: torch.Tensor | None, seq_dim: int
) -> tuple[PageTable, int]:
    """The table that the given past is in, or a new one with its rows, and the past's first row there."""
    if past_keys is None or past_values is None or (_is_empty(past_keys, seq_dim) and _is_empty(past_values, seq_dim)):
        return PageTable(pool, batch), 0
    past_batch = past_keys.table.batch if isinstance(past_keys, PagedKVTensor) else past_keys.shape[0]
    if past_batch != batch:
        raise CacheMismatch(
            f"The past has batch size {past_batch}, the new keys {batch}. Select the cache's sequences first."
        )
    table = _common_table(past_keys, past_values, seq_dim)
    if table is None or table.pool is not pool:
        dense = [past.materialise() if isinstance(past, PagedKVTensor) else past for past in (past_keys, past_values)]
        return import_dense(pool, dense[0], dense[1], seq_dim), 0
    assert isinstance(past_keys, PagedKVTensor)
    return table, past_keys.start


def _is_empty(past: torch.Tensor, seq_dim: int) -> bool:
    """Whether a past has no tokens: a cache before its first call may hold an empty tensor of any shape."""
    if isinstance(past, PagedKVTensor):
        return past.length == past.start
    return past.numel() == 0 and (past.dim() != 4 or past.shape[seq_dim] == 0)


def _common_table(keys: torch.Tensor, values: torch.Tensor, seq_dim: int) -> PageTable | None:
    """The table of which `keys` and `values` are the same rows, or None."""
    if not isinstance(keys, PagedKVTensor) or not isinstance(values, PagedKVTensor):
        return None
    same_rows = keys.table is values.table and (keys.start, keys.length) == (values.start, values.length)
    fits = (keys.role, values.role, keys.seq_dim, values.seq_dim) == (KEYS, VALUES, seq_dim, seq_dim)
    return keys.table if same_rows and fits else None
