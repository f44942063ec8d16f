"""Sizes of a graph: comparing them without adding guards, computing them at run time, putting them into a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.utils._sympy import functions

from gemkv_compile.compat import expr_of, known_true, shape_env_of
from gemkv_compile.passes.lens import value_of
from gemkv_compile.plan import Size


def same_size(left: Any, right: Any) -> bool:
    """Whether two sizes (int or SymInt) are known to be equal; asking adds no guard."""
    return is_known(sympy.Eq(expr_of(left), expr_of(right)), left, right)


def is_known(condition: sympy.Basic, *values: Any) -> bool:
    """Whether a condition over sizes is known to hold, from the guards that `values` (SymInts) already carry."""
    if condition in (sympy.true, sympy.false):
        return condition is sympy.true
    shape_env = next((env for value in values if (env := shape_env_of(value)) is not None), None)
    return shape_env is not None and known_true(shape_env, condition) is True


def static_int(value: Any) -> int | None:
    """The value of a size that is a constant, else None."""
    if isinstance(value, int):
        return value
    expr = expr_of(value) if isinstance(value, torch.SymInt) else None
    return int(expr) if expr is not None and expr.is_Integer else None


def free_symbols(values: Iterable[Any]) -> set[sympy.Symbol]:
    """Symbols in sizes and in the shapes of tensors."""
    found: set[sympy.Symbol] = set()
    for value in values:
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            found |= expr_of(size).free_symbols
    return found


class SymbolTable:
    """Where the symbols of a graph's sizes come from: SymInt placeholders first, else a tensor's dimension."""

    def __init__(self, graph: Graph) -> None:
        self.nodes: dict[sympy.Symbol, Node] = {}
        self._readers: dict[sympy.Symbol, Callable[[Sequence[Any]], int]] = {}
        self._sizes: dict[sympy.Expr, Size] = {}
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        for index, node in enumerate(placeholders):
            value = value_of(node)
            if isinstance(value, torch.SymInt) and expr_of(value).is_Symbol:
                self.nodes.setdefault(expr_of(value), node)
                self._readers.setdefault(expr_of(value), operator.itemgetter(index))
        for index, node in enumerate(placeholders):
            value = value_of(node)
            for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if isinstance(size, torch.SymInt) and expr_of(size).is_Symbol:
                    self._readers.setdefault(expr_of(size), _dim_reader(index, dim))

    def knows(self, value: Any) -> bool:
        """Whether `size` can compute a value from the call's arguments."""
        return expr_of(value).free_symbols <= self._readers.keys()

    def size(self, value: Any) -> Size:
        """`value` (int, SymInt or sympy expression) as an int, or as a function of the call's arguments.

        Equal values have one function, so that whoever calls it may remember the result.
        """
        expr = value if isinstance(value, sympy.Basic) else expr_of(value)
        if expr not in self._sizes:
            self._sizes[expr] = self._size(expr)
        return self._sizes[expr]

    def _size(self, expr: sympy.Expr) -> Size:
        if expr.is_Integer:
            return int(expr)
        symbols = sorted(expr.free_symbols, key=str)
        readers = [self._readers[symbol] for symbol in symbols]
        if expr.is_Symbol:
            return readers[0]
        if len(readers) == 1 and (expr - symbols[0]).is_Integer:
            return _shifted(readers[0], int(expr - symbols[0]))
        compute = sympy.lambdify(symbols, expr, modules=[_RUNTIME, "math"])
        return lambda args: int(compute(*(read(args) for read in readers)))

    def emit(self, graph: Graph, value: Any) -> Any:
        """`value` as an int or as a node of `graph` computed from SymInt placeholders.

        Raises:
            KeyError: a symbol has no placeholder, or an operation has no node form.
        """
        expr = value if isinstance(value, sympy.Basic) else expr_of(value)
        if expr.is_Integer:
            return int(expr)
        if expr.is_Symbol:
            return self.nodes[expr]
        target = _NODE_FORMS[expr.func]
        parts = [self.emit(graph, argument) for argument in expr.args]
        result = parts[0]
        for part in parts[1:]:
            result = graph.call_function(target, (result, part))
        if isinstance(value, torch.SymInt):
            result.meta["example_value"] = value
        return result


def _dim_reader(index: int, dim: int) -> Callable[[Sequence[Any]], int]:
    return lambda args: int(args[index].shape[dim])


def _shifted(read: Callable[[Sequence[Any]], int], by: int) -> Callable[[Sequence[Any]], int]:
    """A length after a step: at each call one is asked for in every layer."""
    return lambda args: read(args) + by


_NODE_FORMS: dict[Any, Callable[..., Any]] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    sympy.Max: torch.sym_max,
    sympy.Min: torch.sym_min,
    functions.Max: torch.sym_max,
    functions.Min: torch.sym_min,
    functions.FloorDiv: operator.floordiv,
    functions.PythonMod: operator.mod,
    functions.Mod: operator.mod,
}
_RUNTIME = {
    "Max": max,
    "Min": min,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "PythonMod": operator.mod,
    "Mod": operator.mod,
    "ModularIndexing": lambda base, divisor, modulus: base // divisor % modulus,
}
