"""Boolean formulas over the indices of a mask: two kinds of atoms under And and Or, and nothing else.

The atoms are classes of our own because sympy's relations evaluate themselves: `kv > -6` turns into True, and the
window that it states would be lost.
"""

from __future__ import annotations

from typing import Any

import sympy
from sympy.logic.boolalg import Boolean, BooleanFunction
from sympy.printing.precedence import PRECEDENCE

# AXES[a] indexes the dimension at distance a from the last one, so broadcasting never renames anything.
AXES = tuple(sympy.symbols("kv q h b x4 x5 x6 x7", integer=True, nonnegative=True))
KV, Q, H, B = AXES[:4]


class _Atom(BooleanFunction):
    precedence = PRECEDENCE["Relational"]

    @classmethod
    def eval(cls, *_: sympy.Basic) -> None:
        return None

    def _sides(self, printer: Any) -> tuple[str, str]:
        """The terms above zero, and those below it with their signs turned."""
        terms = sympy.Add.make_args(self.args[0])
        above = [term for term in terms if not term.could_extract_minus_sign()]
        below = [-term for term in terms if term.could_extract_minus_sign()]
        return printer._print(sympy.Add(*above)), printer._print(sympy.Add(*below))


class AtLeast(_Atom):
    """The atom `expr >= 0`, over integers."""

    def _sympystr(self, printer: Any) -> str:
        return "{1} <= {0}".format(*self._sides(printer))


class Nonzero(_Atom):
    """The atom `expr != 0`, over integers."""

    def _sympystr(self, printer: Any) -> str:
        return "{} != {}".format(*self._sides(printer))


class Zero(_Atom):
    """The atom `expr == 0`, over integers."""

    def _sympystr(self, printer: Any) -> str:
        return "{} == {}".format(*self._sides(printer))


def at_least(left: sympy.Expr, right: sympy.Expr) -> Boolean:
    """The formula left >= right."""
    difference = sympy.expand(left - right)
    return sympy.sympify(bool(difference >= 0)) if difference.is_Integer else AtLeast(_reduced(difference))


def _reduced(expr: sympy.Expr) -> sympy.Expr:
    """The integer expression without a common factor g: g * x + c >= 0 is x + floor(c / g) >= 0."""
    constant, rest = expr.as_coeff_Add()
    factors = [term.as_coeff_Mul()[0] for term in sympy.Add.make_args(rest)]
    if not all(factor.is_Integer for factor in factors):
        return expr
    common = sympy.igcd(*factors, 0)
    return expr if common == 1 else sympy.expand(rest / common) + constant // common


def equal(left: sympy.Expr, right: sympy.Expr) -> Boolean:
    """The formula left == right."""
    difference = sympy.expand(left - right)
    if difference.could_extract_minus_sign():
        difference = -difference
    return sympy.sympify(bool(difference == 0)) if difference.is_Integer else Zero(difference)


def negation(formula: Boolean) -> Boolean:
    """The opposite formula, pushed down to the atoms."""
    if isinstance(formula, AtLeast):
        return at_least(-formula.args[0], sympy.S.One)
    if isinstance(formula, Zero):
        return Nonzero(*formula.args)
    if isinstance(formula, Nonzero):
        return Zero(*formula.args)
    if isinstance(formula, sympy.And):
        return sympy.Or(*map(negation, formula.args))
    if isinstance(formula, sympy.Or):
        return sympy.And(*map(negation, formula.args))
    return sympy.Not(formula)  # true or false


def either(condition: Boolean, then: Boolean, otherwise: Boolean) -> Boolean:
    """`then` where the condition holds, else `otherwise`."""
    return sympy.Or(sympy.And(condition, then), sympy.And(negation(condition), otherwise))
