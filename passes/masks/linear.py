"""Integer expressions that are linear in the mask's indices, and what is known about their range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from sympy.core.function import AppliedUndef

from gemkv_compile import compat
from gemkv_compile.passes.masks.predicate import AXES

_AXES = frozenset(AXES)


@dataclass(frozen=True)
class Linear:
    """sum(slope[x] * x) + rest, with integer slopes and no index in the rest."""

    slope: Mapping[sympy.Symbol, int]
    rest: sympy.Expr


def linear(expr: sympy.Expr) -> Linear | None:
    """The linear form of an integer expression, or None when it has another shape."""
    slope: dict[sympy.Symbol, int] = {}
    rest = []
    for term in sympy.Add.make_args(sympy.expand(expr)):
        factor, symbol = term.as_coeff_Mul()
        if symbol in _AXES and factor.is_Integer:
            slope[symbol] = int(factor)
        elif term.free_symbols & _AXES or term.has(AppliedUndef):
            return None
        else:
            rest.append(term)
    return Linear(slope, sympy.Add(*rest))


class Facts:
    """What the shapes of a graph are known to satisfy, by sympy's rules or by the guards of its ShapeEnv."""

    def __init__(self, shape_env: Any | None) -> None:
        self.shape_env = shape_env
        self._known: dict[sympy.Expr, bool] = {}

    def nonnegative(self, expr: sympy.Expr) -> bool:
        """Whether expr >= 0 is known; it has no indices."""
        expr = self.resolve(sympy.expand(expr))
        if expr.is_nonnegative is not None:
            return bool(expr.is_nonnegative)
        if expr not in self._known:
            self._known[expr] = compat.known_true(self.shape_env, sympy.Ge(expr, 0)) is True
        return self._known[expr]

    def equal(self, left: sympy.Expr, right: sympy.Expr) -> bool:
        """Whether left == right is known; neither has indices."""
        if left == right:
            return True
        difference = self.resolve(sympy.expand(left - right))
        if difference.is_Integer:
            return bool(difference == 0)
        return compat.known_true(self.shape_env, sympy.Eq(difference, 0)) is True

    def resolve(self, expr: sympy.Expr) -> sympy.Expr:
        """The expression with each Max and Min that the facts decide replaced by the side that wins."""
        extrema = compat.max_min_nodes(expr)
        if not extrema:
            return expr
        decided = {node: self._winner(node, is_max) for node, is_max in extrema}
        return sympy.expand(expr.xreplace({node: winner for node, winner in decided.items() if winner is not None}))

    def _winner(self, node: sympy.Expr, is_max: bool) -> sympy.Expr | None:
        for side in node.args:
            gaps = [side - other if is_max else other - side for other in node.args if other is not side]
            if all(self.nonnegative(gap) for gap in gaps):
                return side
        return None

    def lowest(self, form: Linear, sizes: Mapping[sympy.Symbol, sympy.Expr]) -> sympy.Expr:
        """The smallest value of a linear form while each index runs over range(its size)."""
        corners = [slope * (sizes[index] - 1) for index, slope in form.slope.items() if slope < 0]
        return sympy.Add(form.rest, *corners)
