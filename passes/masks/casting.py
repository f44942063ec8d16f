"""Conversions between conditions, integer formulas and numbers by cases, as tensors of a dtype hold them."""

from __future__ import annotations

import math

import sympy
import torch
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import Boolean

from gemkv_compile.passes.masks.indexed import Choice, Unreadable, Value, is_condition
from gemkv_compile.passes.masks.predicate import either, equal, negation

# An index formula with larger constants could overflow in the tensor it describes.
_LARGEST = 2**30


def choice(value: Value) -> Choice:
    """The value as a number by cases; a condition counts as 1 and 0."""
    if isinstance(value, Choice):
        return value
    if is_condition(value):
        return Choice.of([(1, value), (0, negation(value))])
    if value.is_Integer:
        return Choice.of([(int(value), sympy.true)])
    raise Unreadable(f"computes with {value} as a number of its own")


def truth(value: Value) -> Boolean:
    """Where the value is not zero."""
    if isinstance(value, Choice):
        return value.where(bool)
    return value if is_condition(value) else negation(equal(value, sympy.S.Zero))


def select(condition: Boolean, then: Value, otherwise: Value) -> Value:
    """`then` where the condition holds, else `otherwise`."""
    if is_condition(then) and is_condition(otherwise):
        return either(condition, then, otherwise)
    taken = [(number, sympy.And(condition, case)) for number, case in choice(then).cases.items()]
    other = [(number, sympy.And(negation(condition), case)) for number, case in choice(otherwise).cases.items()]
    return Choice.of(taken + other)


def cast(value: Value, dtype: torch.dtype) -> Value:
    """The value as a tensor of this dtype holds it: rounded, or refused where it would wrap."""
    if dtype is torch.bool:
        return truth(value)
    if isinstance(value, sympy.Expr) and not value.is_Integer:
        return _cast_formula(value, dtype)
    exact = choice(value)
    if dtype.is_floating_point:
        return Choice.of((torch.tensor(n, dtype=dtype).item(), condition) for n, condition in exact.cases.items())
    if dtype.is_complex or any(not _fits(number, dtype) for number in exact.cases):
        raise Unreadable(f"computes with {sorted(exact.cases)} in {dtype}, which may overflow")
    whole = Choice.of((int(number), condition) for number, condition in exact.cases.items())
    constant = [number for number, condition in whole.cases.items() if condition is sympy.true]
    return sympy.Integer(int(constant[0])) if constant else whole


def _fits(number: float, dtype: torch.dtype) -> bool:
    limits = torch.iinfo(dtype)
    whole = math.isfinite(number) and number == int(number)
    return whole and max(limits.min, -_LARGEST) <= number <= min(limits.max, _LARGEST)


def _cast_formula(value: sympy.Expr, dtype: torch.dtype) -> sympy.Expr:
    if dtype not in (torch.int32, torch.int64):
        raise Unreadable(f"converts the integers {value} to {dtype}, which may round or wrap")
    if dtype is torch.int32 and value.atoms(AppliedUndef):
        raise Unreadable(f"computes with {value} in int32, which may wrap")
    if any(abs(number) > _LARGEST for number in value.atoms(sympy.Integer)):
        raise Unreadable(f"computes with {value}, which may overflow")
    return value
