"""Concrete sizes to try a mask's graph with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import sympy
from torch import fx

from gemkv_compile import compat
from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.masks.linear import Facts


class Inputs:
    """Concrete sizes for a graph's symbols."""

    def __init__(self, values: Mapping[sympy.Symbol, int]) -> None:
        self._values = {symbol: sympy.Integer(value) for symbol, value in values.items()}
        self._numbers: dict[sympy.Expr, int] = {}

    def fixed(self, expr: Any) -> Any:
        """A formula or expression with numbers in place of its sizes."""
        return expr.xreplace(self._values)

    def number(self, size: Any) -> int:
        """The number that a size (int, SymInt or expression) stands for."""
        expr = size if isinstance(size, sympy.Basic) else compat.expr_of(size)
        if expr not in self._numbers:
            self._numbers[expr] = int(self.fixed(expr))
        return self._numbers[expr]

    def satisfies(self, conditions: Iterable[Any]) -> bool:
        """Whether all of these conditions hold."""
        return all(self.fixed(condition) == sympy.true for condition in conditions)

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The concrete shape of a tensor node."""
        return tuple(map(self.number, value_of(node).shape))


def inputs_for(facts: Facts, symbols: set[sympy.Symbol]) -> Iterator[Inputs]:
    """The traced sizes first, then others that satisfy the graph's guards: slightly larger, and the smallest."""
    env = facts.shape_env
    if env is None or not symbols:
        yield Inputs({})
        return
    ranges = {symbol: compat.size_range(env, symbol) for symbol in symbols}
    traced = {symbol: _within(5, ends) for symbol, ends in ranges.items()} | compat.size_hints(env)
    yield Inputs(traced)
    longer = {symbol: _within(traced[symbol] + 3, ends) for symbol, ends in ranges.items()}
    smallest = {symbol: traced[symbol] if low is None else low for symbol, (low, _) in ranges.items()}
    for changed in (longer, smallest):
        inputs = Inputs(traced | changed)
        if changed.items() - traced.items() and inputs.satisfies(compat.size_guards(env)):
            yield inputs


def _within(value: int, ends: tuple[int | None, int | None]) -> int:
    low, high = ends
    value = value if low is None else max(value, low)
    return value if high is None else min(value, high)
