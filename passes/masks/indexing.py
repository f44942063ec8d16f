"""How indexing of a mask is read: slices, single indices, new dimensions, and gathers by index tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import sympy
import torch

from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.masks.call import Call
from gemkv_compile.passes.masks.indexed import Indexed, Unreadable, replace


def _selected(call: Call, input: object, dim: int, index: object) -> Indexed:
    rank = len(call.tensor(input).dims)
    return _indexed(call, input, (*[slice(None)] * (dim % rank), index))


def _narrowed(call: Call, input: object, dim: int, start: object, length: object) -> Indexed:
    rank = len(call.tensor(input).dims)
    return _indexed(call, input, (*[slice(None)] * (dim % rank), slice(start, None)))


def _indexed(call: Call, input: object, index: object) -> Indexed:
    tensor = call.tensor(input)
    items = list(index) if isinstance(index, tuple | list) else [index]
    consumed = sum(item is not None and item is not Ellipsis for item in items)
    full = [slice(None)] * (len(tensor.dims) - consumed)
    at = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    items[at : at + 1] = full
    if any(call.is_tensor(item) for item in items):
        return _gathered(call, tensor, items)
    return _sliced(call, tensor, items)


def _sliced(call: Call, tensor: Indexed, items: Sequence[object]) -> Indexed:
    moves: dict[sympy.Symbol, sympy.Expr] = {}
    result, source, target = Indexed(call.dims, tensor.value), 0, 0
    for item in items:
        if item is None:
            target += 1
            continue
        axis, size = tensor.axis(source), tensor.dims[source]
        if isinstance(item, slice):
            moves[axis] = _start(call, item, size) + _step(call, item) * result.axis(target)
            target += 1
        else:
            moves[axis] = _wrapped(call, call.size(item), size)
        source += 1
    return call.moved(replace(tensor.value, moves))


def _start(call: Call, item: slice, size: sympy.Expr) -> sympy.Expr:
    start = sympy.S.Zero if item.start is None else call.size(item.start)
    if not call.facts.nonnegative(start) and call.facts.nonnegative(-size - start):
        return sympy.S.Zero  # a start before the first element is clamped to it
    return _wrapped(call, start, size)


def _step(call: Call, item: slice) -> sympy.Expr:
    return sympy.S.One if item.step is None else call.size(item.step)


def _wrapped(call: Call, index: sympy.Expr, size: sympy.Expr) -> sympy.Expr:
    """An index into a dimension, counted from its start."""
    if call.facts.nonnegative(index):
        return index
    if call.facts.nonnegative(-index - 1) and call.facts.nonnegative(size + index):
        return size + index
    raise Unreadable(f"indexes with {index}, whose sign is not known")


def _gathered(call: Call, tensor: Indexed, items: Sequence[object]) -> Indexed:
    if len(items) != len(tensor.dims) or any(item is None or isinstance(item, slice) for item in items):
        raise Unreadable("is indexed by tensors and by slices at once")
    moves = {}
    for position, item in enumerate(items):
        index = call.operand(item)
        if call.is_tensor(item) and value_of(item).dtype not in (torch.int32, torch.int64):
            raise Unreadable(f"is indexed by a {value_of(item).dtype} tensor")
        if not call.never_negative(index):
            raise Unreadable(f"is indexed by {index}, which may be negative")
        moves[tensor.axis(position)] = index
    return call.moved(replace(tensor.value, moves))


READERS: dict[str, Callable[..., Indexed]] = {"select": _selected, "narrow": _narrowed, "getitem": _indexed}
