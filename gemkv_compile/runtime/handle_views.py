"""The operations on a handle whose result is a handle: they pick sequences or tokens and touch no value.

Only calls that are surely right are answered here. Whatever else is asked runs on a dense copy, so that a mistake
raises what it raises for a dense tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from gemkv_compile.runtime.handle import PagedKVTensor, make_handle

# Return the tensor itself where nothing changes.
CONVERSIONS = frozenset("to type type_as float double half bfloat16 cpu cuda contiguous".split())
COPIES = frozenset("clone detach __copy__ alias".split())
BATCH_DIMS = (0, -4)


def known_view(name: str, handle: PagedKVTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The handle that the method `name` of a handle gives, or None if the operation is to run on a dense copy."""
    if name in CONVERSIONS or name in COPIES:
        plain = _without_format(args, kwargs)
        return None if plain is None else _same_values(name, handle, *plain)
    if handle.places is not None:
        return None
    if name == "__getitem__":
        return _index(handle, args[0])
    if name == "narrow" and len(args) == 3 and not kwargs:
        return _narrow(handle, *args)
    if name == "index_select" and len(args) == 2 and not kwargs and _is_one_of(args[0], BATCH_DIMS):
        rows = _listed_rows(args[1], handle.table.batch)
        return None if rows is None else select_rows(handle, rows)
    if name == "repeat_interleave" and args:
        return _repeat(handle, args[0], *args[1:2], **kwargs) if len(args) <= 2 else None
    return None


def select_rows(handle: PagedKVTensor, rows: Sequence[int]) -> PagedKVTensor:
    """The handle of the sequences `rows` of a batch, sharing pages; keys and values of a table stay together."""
    table, key = handle.table, (handle.start, handle.length, tuple(rows))
    known = table.last_selection
    selected = known[1]() if known and known[0] == key else None
    if selected is not None:
        with selected.claimed():
            if selected.has_newest(handle.start, handle.length):
                return make_handle(selected, handle.role, handle.start, handle.length, handle.seq_dim)
    selected = table.fork(handle.start, handle.length, rows)
    table.last_selection = (key, weakref.ref(selected))
    return make_handle(selected, handle.role, handle.start, handle.length, handle.seq_dim)


def _without_format(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments without a memory format that a handle has anyway; None if another one is asked for."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.memory_format)]
    if any(value not in (torch.contiguous_format, torch.preserve_format) for value in given):
        return None
    kept = tuple(value for value in args if not isinstance(value, torch.memory_format))
    return kept, {key: value for key, value in kwargs.items() if not isinstance(value, torch.memory_format)}


def _same_values(name: str, handle: PagedKVTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name in COPIES:
        return None if args or kwargs else handle.copy()
    converted = getattr(torch.Tensor, name)(handle._marker, *args, **kwargs)
    return handle if converted is handle._marker else None


def _narrow(handle: PagedKVTensor, dim: Any, start: Any, length: Any) -> PagedKVTensor | None:
    rows = handle.length - handle.start
    if not _is_one_of(dim, (handle.seq_dim, handle.seq_dim - 4)) or not _is_int(start) or not _is_int(length):
        return None
    first = start + rows if start < 0 else start
    if not 0 <= first <= first + length <= rows:
        return None
    return handle.with_rows(handle.start + first, handle.start + first + length)


def _repeat(handle: PagedKVTensor, repeats: Any, dim: Any = None, output_size: Any = None) -> PagedKVTensor | None:
    batch = handle.table.batch
    if not _is_int(repeats) or repeats < 0 or not _is_one_of(dim, BATCH_DIMS):
        return None
    if output_size not in (None, batch * repeats):
        return None
    return select_rows(handle, [row for row in range(batch) for _ in range(repeats)])


def _index(handle: PagedKVTensor, key: Any) -> PagedKVTensor | None:
    """handle[key] as a handle, where key keeps whole rows and picks sequences or tokens; else None."""
    parts = list(key) if isinstance(key, tuple) else [key]
    if any(part is Ellipsis for part in parts):
        at = next(i for i, part in enumerate(parts) if part is Ellipsis)
        parts[at : at + 1] = [slice(None)] * (5 - len(parts))
    parts += [slice(None)] * (4 - len(parts))
    other_dims = [part for dim, part in enumerate(parts) if dim not in (0, handle.seq_dim)]
    if len(parts) != 4 or any(not _is_full(part) for part in other_dims):
        return None
    tokens = parts[handle.seq_dim]
    if not isinstance(tokens, slice) or tokens.step not in (None, 1):
        return None
    batch = handle.table.batch
    rows = _row_indices(parts[0], batch)
    if rows is None:
        return None
    first, last, _ = tokens.indices(handle.length - handle.start)
    view = handle.with_rows(handle.start + first, handle.start + max(first, last))
    return view if rows == list(range(batch)) else select_rows(view, rows)


def _is_full(part: Any) -> bool:
    return isinstance(part, slice) and part.start in (None, 0) and part.stop is None and part.step in (None, 1)


def _row_indices(part: Any, batch: int) -> list[int] | None:
    """The sequences that an index along the batch dimension picks, or None if it does more than that."""
    if isinstance(part, slice):
        return list(range(batch))[part] if part.step is None or part.step > 0 else None
    if isinstance(part, list):
        if {type(row) for row in part} not in ({int}, {bool}, set()):
            return None
        part = torch.tensor(part, device="cpu", dtype=None if part else torch.int64)
    if not isinstance(part, torch.Tensor) or part.dim() != 1:
        return None
    if part.dtype in (torch.bool, torch.uint8):  # a mask of bytes, as torch still takes it
        return part.nonzero().flatten().tolist() if len(part) == batch else None
    rows = _listed_rows(part, batch, lowest=-batch)
    return None if rows is None else [row % batch for row in rows]


def _listed_rows(index: Any, batch: int, lowest: int = 0) -> list[int] | None:
    """The numbers in an index tensor of at most one dimension, if all of them are in [lowest, batch)."""
    if not isinstance(index, torch.Tensor) or index.dim() > 1 or index.dtype not in (torch.int32, torch.int64):
        return None
    rows = index.flatten().tolist()
    return rows if all(lowest <= row < batch for row in rows) else None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_one_of(value: Any, dims: tuple[int, ...]) -> bool:
    return _is_int(value) and value in dims
