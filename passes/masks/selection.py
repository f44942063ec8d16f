"""How operations of a mask that choose between two tensors are read."""

from __future__ import annotations

from collections.abc import Callable

import sympy
from sympy.logic.boolalg import Boolean

from gemkv_compile.passes.masks.call import Call
from gemkv_compile.passes.masks.casting import select
from gemkv_compile.passes.masks.indexed import Indexed, Unreadable, is_condition
from gemkv_compile.passes.masks.predicate import AXES, at_least


def _where(call: Call, condition: object, input: object, other: object) -> Indexed:
    return call.result(select(_condition(call, condition), call.operand(input), call.operand(other)))


def _where_method(call: Call, input: object, condition: object, other: object) -> Indexed:
    return _where(call, condition, input, other)


def _masked_fill(call: Call, input: object, mask: object, value: object) -> Indexed:
    return _where(call, mask, value, input)


def _condition(call: Call, arg: object) -> Boolean:
    value = call.operand(arg)
    if not is_condition(value):
        raise Unreadable("selects by something that is no bool tensor")
    return value


def _triangle(lower: bool) -> Callable[..., Indexed]:
    def read(call: Call, input: object, diagonal: object = 0) -> Indexed:
        below, value = AXES[1] + call.size(diagonal) - AXES[0], call.operand(input)
        kept = at_least(below, sympy.S.Zero) if lower else at_least(-below, sympy.S.Zero)
        return call.result(select(kept, value, sympy.false if is_condition(value) else sympy.S.Zero))

    return read


READERS: dict[str, Callable[..., Indexed]] = {
    "where": _where,
    "call_method:where": _where_method,
    "masked_fill": _masked_fill,
    "tril": _triangle(lower=True),
    "triu": _triangle(lower=False),
}
