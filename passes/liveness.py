"""Which nodes a graph still needs. FX's own dead-code removal would take in-place methods for pure ones."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping

from torch.fx import Graph, Node

from gemkv_compile.passes.lens import value_of

_IN_PLACE_OPERATORS = frozenset(
    [operator.setitem, operator.delitem]
    + [getattr(operator, name) for name in dir(operator) if name.startswith("i") and hasattr(operator, f"__{name}__")]
)


def has_effect(node: Node) -> bool:
    """Whether a node does more than return a value (an in-place method, an assertion, a context switch, ...)."""
    if node.op not in ("call_function", "call_method", "get_attr"):
        return True
    if node.op == "get_attr":
        return False
    if "out" in node.kwargs or node.kwargs.get("inplace"):
        return True
    if node.op == "call_method":
        return _is_in_place(str(node.target))
    if getattr(node.target, "__module__", "") == "_operator":
        return node.target in _IN_PLACE_OPERATORS
    return _is_in_place(getattr(node.target, "__name__", "")) or node.is_impure() or value_of(node) is None


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def live_nodes(
    graph: Graph, replaced: Mapping[Node, Collection[Node]] | None = None, dropped: Collection[int] = ()
) -> set[Node]:
    """Nodes that the graph's results and effects depend on.

    Args:
        replaced: Nodes that will depend on the given nodes instead of on their arguments.
        dropped: Positions of the output tuple that will no longer be returned.
    """
    replaced = replaced or {}
    live: set[Node] = set()
    stack: list[Node] = []
    for node in graph.nodes:
        if node.op == "output":
            results = node.args[0] if isinstance(node.args[0], (tuple, list)) else [node.args[0]]
            live.add(node)
            stack += [r for i, r in enumerate(results) if isinstance(r, Node) and i not in dropped]
        elif node.op != "placeholder" and has_effect(node):
            stack.append(node)
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack += replaced.get(node, node.all_input_nodes)
    return live


def remove_dead(graph: Graph) -> int:
    """Erase nodes that nothing needs; placeholders stay. Returns how many went."""
    live, count = live_nodes(graph), 0
    for node in reversed(list(graph.nodes)):
        if node not in live and node.op != "placeholder":
            graph.erase_node(node)
            count += 1
    return count
