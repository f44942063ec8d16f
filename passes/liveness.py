"""Which nodes a graph still needs. FX's own dead-code removal would take in-place methods for pure ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch.fx import Graph, Node

from gemkv_compile.passes.effects import has_effect, private_memory


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
    private: dict[Node, set[Node]] = {}  # writes that matter only if what they write into does
    for node in graph.nodes:
        if node.op == "output":
            results = node.args[0] if isinstance(node.args[0], (tuple, list)) else [node.args[0]]
            live.add(node)
            stack += [r for i, r in enumerate(results) if isinstance(r, Node) and i not in dropped]
        elif node.op != "placeholder" and has_effect(node):
            memory = private_memory(node)
            if memory is None:
                stack.append(node)
            else:
                private[node] = memory
    while stack:
        while stack:
            node = stack.pop()
            if node not in live:
                live.add(node)
                stack += replaced.get(node, node.all_input_nodes)
        stack = [node for node, memory in private.items() if node not in live and memory & live]
    return live


def remove_dead(graph: Graph) -> int:
    """Erase nodes that nothing needs; placeholders stay. Returns how many went."""
    live, count = live_nodes(graph), 0
    for node in reversed(list(graph.nodes)):
        if node not in live and node.op != "placeholder":
            graph.erase_node(node)
            count += 1
    return count
