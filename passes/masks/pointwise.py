"""How elementwise operations of a mask are read: arithmetic, comparisons and logic."""

from __future__ import annotations

import operator
from collections.abc import Callable

import sympy
from sympy.logic.boolalg import Boolean

from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.masks.call import Call
from gemkv_compile.passes.masks.casting import cast, choice, truth
from gemkv_compile.passes.masks.indexed import Choice, Indexed, Unreadable, Value, is_condition
from gemkv_compile.passes.masks.predicate import at_least, either, equal, negation

Reader = Callable[..., Indexed]


def _arithmetic(operation: Callable[..., object], swap: bool = False) -> Reader:
    def read(call: Call, input: object, other: object) -> Indexed:
        left, right = call.operand(input), call.operand(other)
        left, right = (right, left) if swap else (left, right)
        if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr):
            return call.result(sympy.expand(operation(left, right)))
        return call.result(choice(left).combine(choice(right), operation))  # type: ignore[arg-type]

    return read


def _floor_divide(call: Call, input: object, other: object) -> Indexed:
    left, right = call.operand(input), call.operand(other)
    if not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr) and right.is_Integer and right > 0):
        raise Unreadable("divides by something that is no positive constant")
    return call.result(sympy.floor(left / right))


def _negative(call: Call, input: object) -> Indexed:
    value = call.operand(input)
    return call.result(-value if isinstance(value, sympy.Expr) else _mapped(value, operator.neg))


def _absolute(call: Call, input: object) -> Indexed:
    value = call.operand(input)
    return call.result(sympy.Abs(value) if isinstance(value, sympy.Expr) else _mapped(value, abs))


def _mapped(value: Value, operation: Callable[[float], float]) -> Choice:
    return Choice.of((operation(number), condition) for number, condition in choice(value).cases.items())


def _comparison(
    formula: Callable[[sympy.Expr, sympy.Expr], Boolean], numbers: Callable[[float, float], bool]
) -> Reader:
    def read(call: Call, input: object, other: object) -> Indexed:
        left, right = call.operand(input), call.operand(other)
        if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr):
            return call.result(formula(left, right))
        left, right = _rounded(call, left, other), _rounded(call, right, input)
        return call.result(choice(left).combine(choice(right), numbers))

    return read


def _rounded(call: Call, value: Value, partner: object) -> Value:
    # torch compares in the tensor's own precision: 0.1 as a scalar equals 0.1 as a bfloat16.
    dtype = value_of(partner).dtype if call.is_tensor(partner) else None
    return cast(value, dtype) if dtype is not None and dtype.is_floating_point else value


def _conjunction(left: Boolean, right: Boolean) -> Boolean:
    return sympy.And(left, right)


def _disjunction(left: Boolean, right: Boolean) -> Boolean:
    return sympy.Or(left, right)


def _exclusive(left: Boolean, right: Boolean) -> Boolean:
    return either(left, negation(right), right)


def _logic(formula: Callable[[Boolean, Boolean], Boolean], bitwise: bool) -> Reader:
    def read(call: Call, input: object, other: object) -> Indexed:
        operands = [call.operand(input), call.operand(other)]
        if bitwise and not all(map(is_condition, operands)):
            raise Unreadable("combines the bits of integers")
        return call.result(formula(*map(truth, operands)))

    return read


def _not(bitwise: bool) -> Reader:
    def read(call: Call, input: object) -> Indexed:
        value = call.operand(input)
        if bitwise and not is_condition(value):
            raise Unreadable("inverts the bits of integers")
        return call.result(negation(truth(value)))

    return read


READERS: dict[str, Reader] = {
    **dict.fromkeys(("add", "radd"), _arithmetic(operator.add)),
    **dict.fromkeys(("sub", "subtract"), _arithmetic(operator.sub)),
    "rsub": _arithmetic(operator.sub, swap=True),
    **dict.fromkeys(("mul", "multiply", "rmul"), _arithmetic(operator.mul)),
    **dict.fromkeys(("floordiv", "floor_divide"), _floor_divide),
    **dict.fromkeys(("neg", "negative"), _negative),
    **dict.fromkeys(("abs", "absolute"), _absolute),
    **dict.fromkeys(("le", "less_equal"), _comparison(lambda x, y: at_least(y, x), operator.le)),
    **dict.fromkeys(("lt", "less"), _comparison(lambda x, y: at_least(y, x + 1), operator.lt)),
    **dict.fromkeys(("ge", "greater_equal"), _comparison(at_least, operator.ge)),
    **dict.fromkeys(("gt", "greater"), _comparison(lambda x, y: at_least(x, y + 1), operator.gt)),
    "eq": _comparison(equal, operator.eq),
    **dict.fromkeys(("ne", "not_equal"), _comparison(lambda x, y: negation(equal(x, y)), operator.ne)),
    **dict.fromkeys(("and", "rand", "bitwise_and"), _logic(_conjunction, bitwise=True)),
    **dict.fromkeys(("or", "ror", "bitwise_or"), _logic(_disjunction, bitwise=True)),
    **dict.fromkeys(("xor", "rxor", "bitwise_xor"), _logic(_exclusive, bitwise=True)),
    "logical_and": _logic(_conjunction, bitwise=False),
    "logical_or": _logic(_disjunction, bitwise=False),
    "logical_xor": _logic(_exclusive, bitwise=False),
    **dict.fromkeys(("invert", "inv", "bitwise_not"), _not(bitwise=True)),
    "logical_not": _not(bitwise=False),
}
