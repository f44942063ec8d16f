"""A tensor as a formula of its indices: what the mask reader computes with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import sympy
from sympy.logic.boolalg import Boolean

from gemkv_compile.passes.masks.predicate import AXES, AtLeast, Zero, at_least, equal, negation


class Unreadable(Exception):
    """A value that has no formula here; the text completes the sentence "the mask ..."."""


@dataclass(frozen=True)
class Choice:
    """A number chosen by conditions of which exactly one holds at every index."""

    cases: Mapping[float, Boolean]

    @staticmethod
    def of(pairs: Iterable[tuple[float, Boolean]]) -> Choice:
        """Collect cases, joining those of one number and dropping those that never hold."""
        cases: dict[float, Boolean] = {}
        for number, condition in pairs:
            if math.isnan(number):
                raise Unreadable("computes NaN")
            if condition is not sympy.false:
                cases[number] = sympy.Or(cases.get(number, sympy.false), condition)
        if len(cases) > 8:
            raise Unreadable("takes more than eight different values")
        return Choice(cases)

    def combine(self, other: Choice, operation: Callable[[float, float], float]) -> Choice:
        """The choice of operation(x, y) for numbers x of this choice and y of the other."""
        return Choice.of(
            (operation(x, y), sympy.And(a, b)) for x, a in self.cases.items() for y, b in other.cases.items()
        )

    def where(self, wanted: Callable[[float], bool]) -> Boolean:
        """Where the number is a wanted one."""
        return sympy.Or(*(condition for number, condition in self.cases.items() if wanted(number)))


Value: TypeAlias = Boolean | sympy.Expr | Choice  # a condition, an integer formula, or a number by cases


@dataclass(frozen=True)
class Indexed:
    """A tensor whose element at (..., b, h, q, kv) is `value`; the last dimension's index is AXES[0].

    The index of a dimension of size 1 may appear in the value, and is 0 there.
    """

    dims: tuple[sympy.Expr, ...]
    value: Value

    def axis(self, position: int) -> sympy.Symbol:
        """The index symbol of the dimension at a position, counted as torch does."""
        return AXES[len(self.dims) - 1 - position % len(self.dims)]

    def sizes(self) -> dict[sympy.Symbol, sympy.Expr]:
        """The size of each index symbol."""
        return {self.axis(position): size for position, size in enumerate(self.dims)}


def is_condition(value: Value) -> bool:
    """Whether a value is a condition, the value of a bool tensor."""
    return isinstance(value, Boolean) and not isinstance(value, sympy.Expr)


def num_atoms(value: Value) -> int:
    """How many atoms the conditions of a value have."""
    if isinstance(value, Choice):
        return sum(map(num_atoms, value.cases.values()))
    return sum(map(num_atoms, value.args)) if isinstance(value, sympy.And | sympy.Or) else 1


def replace(value: Value, indices: Mapping[sympy.Symbol, sympy.Expr]) -> Value:
    """The value with index symbols replaced, all at once."""
    if isinstance(value, Choice):
        return Choice.of((number, replace(condition, indices)) for number, condition in value.cases.items())
    if isinstance(value, sympy.Expr):
        return sympy.expand(value.xreplace(indices))
    return _settled(value.xreplace(indices))


def _settled(formula: Boolean) -> Boolean:
    # Rebuilt atoms are expanded again so that equal formulas stay equal objects.
    if isinstance(formula, sympy.And | sympy.Or):
        return formula.func(*map(_settled, formula.args))
    if formula in (sympy.true, sympy.false):
        return formula
    if isinstance(formula, Zero):
        return equal(formula.args[0], sympy.S.Zero)
    if isinstance(formula, AtLeast):
        return at_least(formula.args[0], sympy.S.Zero)
    return negation(equal(formula.args[0], sympy.S.Zero))
