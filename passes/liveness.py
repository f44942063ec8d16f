"""Which nodes a graph still needs. FX's own dead-code removal would take in-place methods for pure ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch.fx import Graph, Node

from gemkv_compile.passes.effects import has_effect, private_memory

Effects = Mapping[Node, set[Node] | None]
"""Each node that does more than return a value; a set where it only matters if one of these tensors does."""


def effects_of(graph: Graph) -> Effects:
    """What a graph does besides returning values, for several calls of `live_nodes` on it as it is now."""
    nodes = (node for node in graph.nodes if node.op not in ("placeholder", "output"))
    return {node: private_memory(node) for node in nodes if has_effect(node)}


def live_nodes(
    graph: Graph,
    replaced: Mapping[Node, Collection[Node]] | None = None,
    dropped: Collection[int] = (),
    effects: Effects | None = None,
) -> set[Node]:
    """Nodes that the graph's results and effects depend on.

    Args:
        replaced: Nodes that will depend on the given nodes instead of on their arguments.
        dropped: Positions of the output tuple that will no longer be returned.
        effects: `effects_of(graph)`, if it is known: it takes most of the time.
    """
    replaced = replaced or {}
    effects = effects_of(graph) if effects is None else effects
    private = {node: memory for node, memory in effects.items() if memory is not None}
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    results = output.args[0] if isinstance(output.args[0], (tuple, list)) else [output.args[0]]
    live = {output}
    stack = [node for node, memory in effects.items() if memory is None]
    stack += [result for i, result in enumerate(results) if isinstance(result, Node) and i not in dropped]
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
