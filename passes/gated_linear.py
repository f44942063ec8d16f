"""The pattern of a gated MLP: activation(gate) * up, where gate and up are products of the same rows.

A candidate is a product `up` multiplied by what is computed from one other product of its input. It is a pair if that
is one of the operator's activations, a call of its function in `torch.nn.functional`, and nothing else reads what is in
between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch.fx import Graph, Node

from gemkv_compile.kernels.ops_linear import gated_linear
from gemkv_compile.passes.lens import argument, op_of, value_of
from gemkv_compile.passes.version import pass_version

WriteBetween = Callable[[Node, Node], bool]
"""Whether something between two nodes of a graph, in their order, may write what a product reads."""


@dataclass(frozen=True)
class GatedPair:
    """Two products of one input, and what is made of them.

    Args:
        activated: The node that is activation(gate).
        result: The node that is activation(gate) * up.
        later: That of the two products which comes later in the graph.
    """

    gate: Node
    up: Node
    activated: Node
    result: Node
    later: Node

    @property
    def activation(self) -> str:
        """The operator's name of the activation; "" for one that it does not have."""
        node = self.activated
        if argument(node, 0, "input") is not self.gate:
            return ""
        if node.target is F.gelu:
            return {"none": "gelu", "tanh": "gelu_tanh"}.get(str(node.kwargs.get("approximate", "none")), "")
        return "silu" if node.target is F.silu and argument(node, 1, "inplace", False) is False else ""


def find_gated(
    graph: Graph, products: Collection[Node], write_between: WriteBetween
) -> tuple[list[GatedPair], Counter[str]]:
    """The pairs of a graph's products, in order, and those that look like one, counted by what they lack.

    Args:
        products: Calls of `F.linear` that the operator may compute.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    found = []
    left: Counter[str] = Counter()
    for pair in _candidates(graph, products, order):
        if reason := _why_not(pair, write_between):
            left[reason] += 1
        else:
            found.append(pair)
    return found, left


def replace_gated(graph: Graph, pair: GatedPair) -> None:
    """Put the operator where the later of the two products stands."""
    (x, gate_weight, gate_bias), (_, up_weight, up_bias) = map(linear_arguments, (pair.gate, pair.up))
    arguments = (x, gate_weight, up_weight, gate_bias, up_bias, pair.activation, pass_version())
    with graph.inserting_before(pair.later):
        node = graph.call_function(gated_linear._opoverload, arguments)
    node.meta = dict(pair.result.meta)
    pair.result.replace_all_uses_with(node)
    for each in (pair.result, pair.activated, pair.gate, pair.up):
        graph.erase_node(each)


def linear_arguments(node: Node) -> tuple[Any, Any, Any]:
    """Input, weight and bias of a call of `F.linear`."""
    return argument(node, 0, "input"), argument(node, 1, "weight"), argument(node, 2, "bias")


def _candidates(graph: Graph, products: Collection[Node], order: Mapping[Node, int]) -> Iterator[GatedPair]:
    """Each product that is multiplied by what is computed from another one of the same input alone."""
    for node in graph.nodes:
        if op_of(node) != "mul" or len(node.args) != 2 or node.kwargs:
            continue
        for up, activated in (node.args, node.args[::-1]):
            if up not in products or not isinstance(activated, Node) or activated in products:
                continue
            gate = _only_source(activated, products)
            if gate not in (None, up) and linear_arguments(gate)[0] is linear_arguments(up)[0]:
                yield GatedPair(gate, up, activated, node, max(gate, up, key=order.__getitem__))
                break


def _only_source(node: Node, products: Collection[Node]) -> Node | None:
    """The product that a node is computed from, by whatever operations; None if it takes anything else."""
    sources: set[Node] = set()
    seen: set[Node] = set()
    pending = [node]
    while pending:
        each = pending.pop()
        if each in products:
            sources.add(each)
        elif not each.all_input_nodes:
            return None
        elif each not in seen:
            seen.add(each)
            pending += each.all_input_nodes
    return sources.pop() if len(sources) == 1 else None


def _why_not(pair: GatedPair, write_between: WriteBetween) -> str:
    """Why a candidate is left, or ""."""
    gate, up, activated = pair.gate, pair.up, pair.activated
    if not pair.activation:
        name = getattr(activated.target, "__name__", str(activated.target))
        return f"it is {name if activated.all_input_nodes == [gate] else 'several operations'}"
    if any(len(node.users) > 1 for node in (gate, up, activated)):
        return "something else reads it, or one of its products"
    (_, gate_weight, gate_bias), (_, up_weight, up_bias) = map(linear_arguments, (gate, up))
    if value_of(gate_weight).shape != value_of(up_weight).shape:
        return "its weights have different shapes"
    if (gate_bias is None) != (up_bias is None):
        return "only one of its products has a bias"
    earlier = gate if pair.later is up else up
    return "memory is written between its products" if write_between(earlier, pair.later) else ""
