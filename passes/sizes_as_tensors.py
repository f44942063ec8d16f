"""Numbers that grow with a cache, given to a decode graph as tensors: then no kernel of it depends on a length.

arange(s, s + 1)  ->  arange(0, 1) + size            size: int64 [], filled before each call
tensor + s        ->  tensor + size
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from gemkv_compile.compat import expr_of
from gemkv_compile.passes.graph_edits import call
from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.symbols import static_int

# A dimensionless int64 tensor takes part in type promotion as a Python int does, beside a tensor that has dimensions.
_NAMES = "add sub mul lt le gt ge eq ne"
_POINTWISE = frozenset(
    [getattr(module, name) for module in (torch, operator) for name in _NAMES.split()]
    + [operator.iadd, operator.isub, operator.imul]
)
_METHODS = frozenset([*_NAMES.split(), "add_", "sub_", "mul_"])


def lift_sizes(
    graph: Graph, dependents: Iterable[tuple[Node, set[sympy.Symbol]]], as_input: Callable[[Any, torch.device], Node]
) -> bool:
    """Let nodes take numbers as tensors; all of them, or none.

    Args:
        dependents: Nodes that take or give a size or number that may change with the cache, and its symbols.
        as_input: Gives the input of the graph that holds a number (SymInt) on a device, int64 [].
    Returns:
        Whether it did.
    """
    nodes = list(dependents)
    if not nodes or not all(_can_be_lifted(node, symbols) for node, symbols in nodes):
        return False
    for node, symbols in nodes:
        if _is_arange(node):
            _lift_arange(graph, node, as_input)
        else:
            device = value_of(node).device
            node.args = tuple(
                as_input(value_of(arg), device) if _is_growing(arg, symbols) else arg for arg in node.args
            )
    return True


def _can_be_lifted(node: Node, symbols: set[sympy.Symbol]) -> bool:
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or _symbols_of(value) & symbols:
        return False
    if _is_arange(node):
        return _arange_bounds(node) is not None
    known = node.target in (_METHODS if node.op == "call_method" else _POINTWISE)
    if not known or node.kwargs or len(node.args) != 2:
        return False
    tensors = [value_of(arg) for arg in node.args if isinstance(value_of(arg), torch.Tensor)]
    return len(tensors) == 1 and tensors[0].ndim > 0 and not _symbols_of(tensors[0]) & symbols


def _is_growing(arg: Any, symbols: set[sympy.Symbol]) -> bool:
    value = value_of(arg)
    return isinstance(value, torch.SymInt) and bool(expr_of(value).free_symbols & symbols)


def _symbols_of(value: torch.Tensor) -> set[sympy.Symbol]:
    sizes = (*value.shape, *value.stride())
    return {symbol for size in sizes for symbol in expr_of(size).free_symbols}


def _is_arange(node: Node) -> bool:
    return node.op == "call_function" and node.target is torch.arange


def _arange_bounds(node: Node) -> tuple[Any, int] | None:
    """The first number of an arange and how many there are, if that is a constant and the step is 1."""
    if set(node.kwargs) - {"device", "dtype", "start", "end"}:
        return None
    given = [*node.args]
    start = node.kwargs.get("start", given[0] if len(given) > 1 else 0)
    end = node.kwargs.get("end", given[-1] if given and "start" not in node.kwargs else None)
    if (
        len(given) > 2
        or end is None
        or not all(isinstance(value_of(each), (int, torch.SymInt)) for each in (start, end))
    ):
        return None
    length = static_int(value_of(end) - value_of(start))
    integral = not value_of(node).is_floating_point()  # float numbers of an arange are rounded in another order
    return None if length is None or not integral else (start, length)


def _lift_arange(graph: Graph, node: Node, as_input: Callable[[Any, torch.device], Node]) -> None:
    bounds, value = _arange_bounds(node), value_of(node)
    assert bounds is not None
    start, length = bounds
    kwargs = {name: given for name, given in node.kwargs.items() if name in ("device", "dtype")}
    with graph.inserting_before(node):
        numbers = graph.call_function(torch.arange, (length,), kwargs)
        numbers.meta.update(example_value=value, stack_trace=node.meta.get("stack_trace"))
        moved = call(graph, "add", (numbers, as_input(value_of(start), value.device)), value)
        moved.meta["stack_trace"] = node.meta.get("stack_trace")
    node.replace_all_uses_with(moved)
    graph.erase_node(node)
