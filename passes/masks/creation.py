"""How operations that make tensors from nothing but sizes and constants are read.

A reader takes the call and the node's own arguments under their own names; a call that does not fit its signature is
one that the reader does not know. Shape, dtype and device arguments are ignored: the node's example value has them.
"""

from __future__ import annotations

from collections.abc import Callable

import sympy
import torch

from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.masks.call import Call
from gemkv_compile.passes.masks.indexed import Indexed, Unreadable
from gemkv_compile.passes.masks.predicate import AXES

_MISSING = object()


def _arange(call: Call, start: object = 0, end: object = _MISSING, step: object = 1, **options: object) -> Indexed:
    if call.dtype.is_floating_point:
        raise Unreadable("uses a floating-point arange")
    first = sympy.S.Zero if end is _MISSING else call.size(start)
    return call.result(first + call.size(step) * AXES[0])


def _ones(call: Call, *size: object, **options: object) -> Indexed:
    return call.result(sympy.S.One)


def _zeros(call: Call, *size: object, **options: object) -> Indexed:
    return call.result(sympy.S.Zero)


def _full(call: Call, size: object, fill_value: object, **options: object) -> Indexed:
    return call.result(call.operand(fill_value))


def _new_full(call: Call, input: object, size: object, fill_value: object, **options: object) -> Indexed:
    return call.result(call.operand(fill_value))


def _full_like(call: Call, input: object, fill_value: object, **options: object) -> Indexed:
    return call.result(call.operand(fill_value))


def _tensor(call: Call, data: object, **options: object) -> Indexed:
    if not isinstance(value_of(data), bool | int | float | torch.SymInt):
        raise Unreadable("holds a list of constants")
    return call.result(call.operand(data))


READERS: dict[str, Callable[..., Indexed]] = {
    "arange": _arange,
    "full": _full,
    "new_full": _new_full,
    "full_like": _full_like,
    **dict.fromkeys(("tensor", "scalar_tensor"), _tensor),
    **dict.fromkeys(("ones", "new_ones", "ones_like"), _ones),
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like"), _zeros),
}
