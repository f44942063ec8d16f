"""How operations of a mask that move elements without computing are read: conversions, shapes and orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from gemkv_compile.passes.masks.call import Call, broadcast
from gemkv_compile.passes.masks.indexed import Indexed, Unreadable, replace


def _converted(call: Call, input: object, *target: object, **options: object) -> Indexed:
    return call.result(call.operand(input))  # dtype and device: the example value has them


def _expanded(call: Call, input: object, *sizes: object) -> Indexed:
    return call.moved(broadcast(call.tensor(input), call.dims, call.facts))


def _regrouped(call: Call, input: object, *sizes: object, **names: object) -> Indexed:
    """A change of shape that only adds or drops dimensions of size 1."""
    if any(isinstance(size, torch.dtype) for size in (*sizes, *names.values())):
        raise Unreadable("reinterprets the bytes of a tensor")
    tensor = call.tensor(input)
    old, new = _wide(tensor), _wide(Indexed(call.dims, tensor.value))
    if len(old) != len(new) or not all(call.facts.equal(a, b) for (_, a), (_, b) in zip(old, new, strict=True)):
        raise Unreadable(f"is reshaped from {tensor.dims} to {call.dims}")
    moves = dict.fromkeys(tensor.sizes(), sympy.S.Zero)
    moves.update({axis: target for (axis, _), (target, _) in zip(old, new, strict=True)})
    return call.moved(replace(tensor.value, moves))


def _wide(tensor: Indexed) -> list[tuple[sympy.Symbol, sympy.Expr]]:
    return [(axis, size) for axis, size in tensor.sizes().items() if size != 1]


def _reordered(call: Call, input: object, order: Sequence[int]) -> Indexed:
    """Dimension p of the result is dimension order[p] of the input."""
    tensor = call.tensor(input)
    result = Indexed(call.dims, tensor.value)
    moves = {tensor.axis(source): result.axis(position) for position, source in enumerate(order)}
    return call.moved(replace(tensor.value, moves))


def _transposed(call: Call, input: object, dim0: int, dim1: int) -> Indexed:
    order = list(range(len(call.dims)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _reordered(call, input, order)


def _matrix_transposed(call: Call, input: object) -> Indexed:
    return _transposed(call, input, -2, -1) if len(call.dims) > 1 else _converted(call, input)


def _permuted(call: Call, input: object, *dims: Any) -> Indexed:
    order = dims[0] if len(dims) == 1 and isinstance(dims[0], tuple | list) else dims
    return _reordered(call, input, [dim % len(call.dims) for dim in order])


def _attribute(call: Call, input: object, name: object) -> Indexed:
    if name not in ("T", "mT"):
        raise Unreadable(f"reads the attribute {name!r}")
    return _matrix_transposed(call, input)


_CONVERSIONS = "to type type_as bool int long float half bfloat16 double contiguous clone detach cpu cuda"
_REGROUPINGS = "view view_as reshape reshape_as flatten unflatten squeeze unsqueeze"

READERS: dict[str, Callable[..., Indexed]] = {
    **dict.fromkeys(_CONVERSIONS.split(), _converted),
    **dict.fromkeys(_REGROUPINGS.split(), _regrouped),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expanded),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transposed),
    **dict.fromkeys(("t", "adjoint"), _matrix_transposed),
    "permute": _permuted,
    "getattr": _attribute,
}
