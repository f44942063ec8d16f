"""From a static cache that a call receives, and writes into, to a page table that the call may append to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gemkv_compile.compat import forget_tensors, swap_with
from gemkv_compile.plan import BufferPlan, Size, TablePlan
from gemkv_compile.runtime.handle import KEYS, VALUES, PagedKVTensor, make_handle
from gemkv_compile.runtime.importing import import_dense, used_rows
from gemkv_compile.runtime.page_table import PageTable
from gemkv_compile.runtime.pool import PagePool


def read_positions(plans: Sequence[TablePlan], args: Sequence[Any]) -> list[int | None]:
    """Where each table's new rows go; None for a table that has no fixed places, or whose rows are not consecutive.

    Tensors are read once each, with one wait for their device.
    """
    buffers = [plan.buffer for plan in plans if plan.buffer is not None]
    sources = {i for buffer in buffers for i in (buffer.scalar, buffer.vector) if i is not None}
    tensors = {i: args[i].detach().flatten().to(torch.int64) for i in sorted(sources)}
    numbers = torch.cat(list(tensors.values())).tolist() if tensors else []
    places: dict[int, list[int]] = {}
    for index, tensor in tensors.items():
        places[index], numbers = numbers[: len(tensor)], numbers[len(tensor) :]
    return [None if plan.buffer is None else _position(plan.buffer, args, places) for plan in plans]


def _position(plan: BufferPlan, args: Sequence[Any], places: dict[int, list[int]]) -> int | None:
    if plan.scalar is not None:
        return places[plan.scalar][0]
    if plan.vector is not None:
        own = places[plan.vector]
        return own[0] if own and own == list(range(own[0], own[0] + len(own))) else None
    return None if plan.start is None else _value(plan.start, args)


def continue_static(
    pool: PagePool, plan: TablePlan, args: Sequence[Any], position: int | None, size: tuple[int, int]
) -> tuple[PageTable, int] | None:
    """A table whose rows are a static cache's before `position`, free to be appended to and claimed, and its first row.

    A plain tensor becomes a handle here: the caller's own object, whose storage is given up.

    Returns:
        None if the rewritten graph does not cover the call: rows that do not follow those that are there, rows after
        the new ones that a mask may show, tensors that cannot become handles.
    """
    buffer, (batch, num_tokens) = plan.buffer, size
    assert buffer is not None
    places = _value(buffer.places, args)
    if not buffer.rolls and (position is None or position < 0 or (buffer.only_new and position != 0)):
        return None
    if plan.past_keys is None or plan.past_values is None:
        fits = plan.keep is not None or num_tokens <= places
        return (_claimed(PageTable(pool, batch), 0, 0, 0), 0) if position == 0 and fits else None
    pair = _as_handles(pool, plan, args, places)
    if pair is None:
        return None
    start, length, table = pair[0].start, pair[0].length, pair[0].table
    if buffer.rolls:
        return (_claimed(table, start, length, length), start) if length - start == places else None
    assert position is not None
    if length < position or position + num_tokens > places:
        return None
    if length > position and not _hides(buffer, args, position + num_tokens, length):
        return None
    return _claimed(table, 0, position, length), 0


def _claimed(table: PageTable, start: int, position: int, length: int) -> PageTable:
    table.claim()
    if position == length == table.length and not table.is_appending and not table.released:
        return table
    try:
        fork = table.fork(start, position)
    finally:
        table.unclaim()
    fork.claim()
    return fork


def _as_handles(
    pool: PagePool, plan: TablePlan, args: Sequence[Any], places: int
) -> tuple[PagedKVTensor, PagedKVTensor] | None:
    """Keys and values as handles of one table of the pool; plain tensors become them."""
    assert plan.past_keys is not None and plan.past_values is not None and plan.buffer is not None
    keys, values = args[plan.past_keys], args[plan.past_values]
    are_handles = [isinstance(part, PagedKVTensor) for part in (keys, values)]
    if all(are_handles) and _fit(keys, values, pool, plan, places):
        return keys, values
    if all(are_handles) and any(part.places != places or part.seq_dim != plan.seq_dim for part in (keys, values)):
        return None
    if any(are_handles) != all(are_handles):
        return None
    if plan.buffer.in_place and not any(are_handles) and any(_shares_memory(part, args) for part in (keys, values)):
        return None
    dense = [part.materialise() if isinstance(part, PagedKVTensor) else part for part in (keys, values)]
    lengths = {part.length - part.start for part in (keys, values) if isinstance(part, PagedKVTensor)}
    rows = places if plan.buffer.rolls else lengths.pop() if len(lengths) == 1 else used_rows(dense, plan.seq_dim)
    # Views of a tensor that stay alive would keep it from being swapped.
    table = import_dense(pool, *_first(dense, rows, plan.seq_dim), seq_dim=plan.seq_dim)
    if not plan.buffer.in_place:
        return make_handle(table, KEYS, 0, rows, plan.seq_dim, places), make_handle(
            table, VALUES, 0, rows, plan.seq_dim, places
        )
    if all(are_handles):  # of another pool, or of two tables: each stands for its rows in one new table
        for role, part in enumerate((keys, values)):
            part.role = role
            part.stand_for(table, 0, rows)
        return keys, values
    return _swapped(table, keys, values, rows, plan.seq_dim, places)


def _first(pair: Sequence[torch.Tensor], rows: int, seq_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = (part.narrow(seq_dim, 0, rows) for part in pair)
    return keys, values


def _fit(keys: PagedKVTensor, values: PagedKVTensor, pool: PagePool, plan: TablePlan, places: int) -> bool:
    """Whether two handles are keys and values of one table as the graph takes them."""
    same_rows = keys.table is values.table and (keys.start, keys.length) == (values.start, values.length)
    roles = (keys.role, values.role) == (KEYS, VALUES) and keys.seq_dim == values.seq_dim == plan.seq_dim
    starts = keys.start == 0 or (plan.buffer is not None and plan.buffer.rolls)
    return same_rows and roles and starts and keys.table.pool is pool and keys.places == values.places == places


def _swapped(
    table: PageTable, keys: torch.Tensor, values: torch.Tensor, rows: int, seq_dim: int, places: int
) -> tuple[PagedKVTensor, PagedKVTensor] | None:
    """Put handles of a table where two plain tensors stand; None, and nothing has changed, if that cannot be."""
    handles = [make_handle(table, role, 0, rows, seq_dim, places) for role in (KEYS, VALUES)]
    for handle in handles:
        table.unregister(handle)  # a registered one has a weak reference
    if not swap_with(keys, handles[KEYS]):
        return None
    if not swap_with(values, handles[VALUES]):
        swap_with(keys, handles[KEYS])
        return None
    for part in (keys, values):
        table.register(part)
    return keys, values  # type: ignore[return-value]


def give_up_storage(plans: Sequence[TablePlan], args: Sequence[Any]) -> None:
    """Prepare plain tensors of static caches to become handles."""
    indices = [
        i
        for plan in plans
        if plan.buffer is not None and plan.buffer.in_place
        for i in (plan.past_keys, plan.past_values)
    ]
    plain = [args[i] for i in indices if i is not None and not isinstance(args[i], PagedKVTensor)]
    if plain:
        forget_tensors(plain)


def _shares_memory(tensor: torch.Tensor, args: Sequence[Any]) -> bool:
    """Whether a tensor is a view, or another argument has its memory, so that it cannot be given up."""
    storage = tensor.untyped_storage()
    others = [a for a in args if isinstance(a, torch.Tensor) and a is not tensor and not isinstance(a, PagedKVTensor)]
    whole = storage.nbytes() == tensor.numel() * tensor.element_size()
    return (
        not whole
        or tensor._base is not None
        or any(o.untyped_storage().data_ptr() == storage.data_ptr() for o in others)
    )


def _hides(plan: BufferPlan, args: Sequence[Any], end: int, length: int) -> bool:
    """Whether nothing sees the rows [end, length) that stay from before: they are dropped."""
    if plan.only_new or end >= length:
        return True
    if None in plan.masks or not plan.masks:
        return False
    given = [arg._marker if isinstance(arg, PagedKVTensor) else arg for arg in args]  # no mask is made of keys
    with torch.no_grad():
        masks = [mask(*given) for mask in plan.masks if mask is not None]
    return not any(mask.shape[-1] == 1 or _shows(mask[..., end:length]) for mask in masks)


def _shows(mask: torch.Tensor) -> bool:
    shown = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    return bool(shown.any())


def _value(size: Size, args: Sequence[Any]) -> int:
    return size if isinstance(size, int) else size(args)
