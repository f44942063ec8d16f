"""Cuts a graph at its layers, so that equal layers can be compiled once.

A layer is an element of a module list: the first number in a node's module path. Nodes stay in the order of the graph;
what stands before the first layer and after the last one are parts of their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from gemkv_compile import compat
from gemkv_compile.passes.lens import module_path, value_of
from gemkv_compile.passes.symbols import SymbolTable

NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
MIN_LAYERS = 3  # fewer are not worth the calls between them


@dataclass(frozen=True)
class Part:
    """A run of a graph's nodes as a graph of its own.

    Args:
        inputs: Nodes of the whole graph that it takes, in the order of its placeholders.
        outputs: Nodes of the whole graph that it returns as a tuple.
    """

    module: GraphModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


def split_layers(graph: Graph) -> list[Part]:
    """The parts of a graph, in order; none if it has fewer than three layers, or modules or attributes of its own."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    if any(node.op in ("get_attr", "call_module") for node in nodes):
        return []
    if len({layer for layer in map(_layer, nodes) if layer is not None}) < MIN_LAYERS:
        return []
    runs = _runs(nodes)
    part_of = {node: index for index, run in enumerate(runs) for node in run}
    symbols = SymbolTable(graph).nodes
    parts = [_part(run, index, part_of, symbols) for index, run in enumerate(runs)]
    passed = [value_of(node) for part in parts for node in part.outputs]
    return parts if all(isinstance(value, torch.Tensor) for value in passed) else []


def _runs(nodes: list[Node]) -> list[list[Node]]:
    """The nodes before the first layer, of each layer, and after the last."""
    layers = [_layer(node) for node in nodes]
    last = max((i for i, layer in enumerate(layers) if layer is not None), default=-1)
    runs: list[list[Node]] = [[]]
    current: int | None = None
    for i, (node, layer) in enumerate(zip(nodes, layers, strict=True)):
        if i == last + 1 and current is not None:
            runs.append([])
        elif layer is not None and layer != current:
            runs.append([])
            current = layer
        runs[-1].append(node)
    return [run for run in runs if run]


def _layer(node: Node) -> int | None:
    """The number of a node's layer in its module list."""
    found = re.search(r"\.(\d+)(?=\.|$)", module_path(node))
    return int(found[1]) if found else None


def _part(run: list[Node], index: int, part_of: dict[Node, int], symbols: dict[sympy.Symbol, Node]) -> Part:
    inside = set(run)
    numbers = [node for node in _with_arithmetic(run, inside) if node not in inside]
    own = [*numbers, *run]
    inputs = tuple(dict.fromkeys(arg for node in own for arg in node.all_input_nodes if arg not in {*own}))
    inputs += _numbers_for(inputs, symbols)
    outputs = tuple(
        node for node in run if not _is_arithmetic(node) and any(part_of.get(user) != index for user in node.users)
    )
    graph, new = Graph(), {}
    for i, node in enumerate(inputs):
        new[node] = graph.placeholder(f"input_{i}")
        kept = ("example_value", "_dynamo_source")
        new[node].meta = {key: node.meta[key] for key in kept if key in node.meta}
    for node in own:
        new[node] = graph.node_copy(node, lambda arg: new[arg])
    graph.output(tuple(new[node] for node in outputs))
    return Part(GraphModule(torch.nn.Module(), graph), inputs, outputs)


def _numbers_for(inputs: tuple[Node, ...], symbols: dict[sympy.Symbol, Node]) -> tuple[Node, ...]:
    """Placeholders for the symbols that sizes of the inputs contain and none is: Inductor must find each of them."""
    sizes = {
        compat.expr_of(size)
        for value in map(value_of, inputs)
        for size in (value.shape if isinstance(value, torch.Tensor) else (value,))
        if isinstance(size, (int, torch.SymInt))
    }
    absent = sorted({symbol for size in sizes for symbol in size.free_symbols} - sizes, key=str)
    return tuple(symbols[symbol] for symbol in absent if symbol in symbols)


def _with_arithmetic(run: list[Node], inside: set[Node]) -> list[Node]:
    """Arithmetic of earlier parts that the nodes of a run take, which is done once more, in its order."""
    needed: dict[Node, None] = {}

    def visit(node: Node) -> None:
        for arg in node.all_input_nodes:
            if arg not in inside and arg not in needed and _is_arithmetic(arg):
                visit(arg)
                needed[arg] = None

    for node in run:
        visit(node)
    return list(needed)


def _is_arithmetic(node: Node) -> bool:
    """Whether a node computes a number from numbers."""
    if node.op == "placeholder":
        return False
    return all(isinstance(value_of(each), (int, float, *NUMBERS)) for each in (node, *node.all_input_nodes))
