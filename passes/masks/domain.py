"""What is known of a formula over all queries and keys of an attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy
from sympy.logic.boolalg import Boolean

from gemkv_compile.passes.masks.linear import Facts, Linear, linear
from gemkv_compile.passes.masks.predicate import KV, AtLeast, Nonzero, Q, Zero, at_least


@dataclass(frozen=True)
class Domain:
    """The ranges of the indices of one attention.

    Attributes:
        sizes: Number of keys and queries, and of heads and batch rows where the mask has such dimensions.
    """

    facts: Facts
    sizes: Mapping[sympy.Symbol, sympy.Expr]

    @property
    def offset(self) -> sympy.Expr:
        """K - Q: query i is at the position of key i + offset."""
        return self.sizes[KV] - self.sizes[Q]

    @property
    def one_query(self) -> bool:
        """Whether there is a single query, so that its index is 0 and stands for nothing."""
        return bool(self.sizes[Q] == 1)

    def decide(self, formula: Boolean) -> bool | None:
        """Whether a formula holds everywhere (True), nowhere (False), or neither is known."""
        if isinstance(formula, sympy.And | sympy.Or):
            return self._decide_parts(formula)
        if isinstance(formula, AtLeast):
            return self._decide_bound(linear(formula.args[0]))
        if isinstance(formula, Zero | Nonzero):
            return self._decide_equation(formula)
        return bool(formula)

    def _decide_parts(self, formula: Boolean) -> bool | None:
        deciding = isinstance(formula, sympy.Or)  # one True decides an Or, one False decides an And
        answers = [self.decide(part) for part in formula.args]
        if deciding in answers:
            return deciding
        return None if None in answers else not deciding

    def _decide_bound(self, form: Linear | None) -> bool | None:
        if form is None:
            return None
        if self.facts.nonnegative(self.facts.lowest(form, self.sizes)):
            return True
        opposite = Linear({index: -slope for index, slope in form.slope.items()}, -form.rest - 1)
        return False if self.facts.nonnegative(self.facts.lowest(opposite, self.sizes)) else None

    def _decide_equation(self, formula: Boolean) -> bool | None:
        expr = formula.args[0]
        at_both_sides = [self.decide(at_least(side, sympy.S.Zero)) for side in (expr, -expr)]
        if False in at_both_sides:
            return isinstance(formula, Nonzero)
        return None if None in at_both_sides else isinstance(formula, Zero)
