"""Stage 8: products of few rows with weights, as a decode step has them, by one operator for those of one input.

A node is taken if it is `F.linear` of at most 16 rows, or of one row for each of several sequences however many, with a
weight that is an input of the graph, contiguous and in the dtype of the rows. Several weights share a launch if they
multiply the same node and nothing is written in between that could be the memory of the rows, a weight or a bias.
Nothing else of the graph changes.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gemkv_compile.kernels.ops_linear import DTYPES, MAX_ROWS, MAX_WEIGHTS, STEP, linears
from gemkv_compile.passes.effects import writes_of
from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.symbols import static_int
from gemkv_compile.passes.version import pass_version

DEVICES = frozenset({"cuda"})
WIDE = 65536  # output features of a single weight from which more rows than one gain


@dataclass(frozen=True)
class LinearsReport:
    """What was done: `products` products of `rows` rows in `launches` launches; those left, counted by reason.

    Args:
        rows: The most rows of a product; None if the number of sequences may change.
    """

    products: int
    launches: int
    rows: int | None
    left: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        rows = "1 row" if self.rows == 1 else f"{self.rows or 'a few'} rows"
        left = "".join(f"; {count} left: {reason}" for reason, count in self.left)
        return f"{self.products} products of {rows} with weights in {self.launches} launches{left}"


def fuse_linears(module: GraphModule) -> LinearsReport | None:
    """Let the operator `gemkv::linears` compute a graph's products of few rows, and say which.

    Returns:
        None if the graph has none, on a device that the operator has a kernel for.
    """
    graph = module.graph
    found = [node for node in graph.nodes if _is_few_rows(node)]
    if not found:
        return None
    counts = [_rows(node) for node in found]
    rows = None if None in counts else max(count for count in counts if count)
    if why := _not_at_all(graph):
        return LinearsReport(0, 0, rows, ((why, len(found)),))
    left: Counter[str] = Counter()
    taken = []
    for node in found:
        if reason := _why_not(node):
            left[reason] += 1
        else:
            taken.append(node)
    products = launches = 0
    for group in _groups(graph, taken):
        if len(group) == 1 and _rows(group[0]) != 1 and value_of(_arguments(group[0])[1]).shape[0] < WIDE:
            left["several rows, and no other weight of the same input"] += 1
            continue
        _replace(graph, group)
        products, launches = products + len(group), launches + 1
    module.recompile()
    return LinearsReport(products, launches, rows, tuple(left.items()))


def _arguments(node: Node) -> tuple[Any, Any, Any]:
    """Input, weight and bias of a call of F.linear."""
    named = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    return named.get("input"), named.get("weight"), named.get("bias")


def _is_few_rows(node: Node) -> bool:
    if node.op != "call_function" or node.target is not torch.nn.functional.linear:
        return False
    value = value_of(_arguments(node)[0])
    if not isinstance(value, torch.Tensor) or value.device.type not in DEVICES:
        return False
    *sizes, features = map(static_int, value.shape)
    if features is None:
        return False
    rows = _rows(node)
    return 0 < rows <= MAX_ROWS if rows is not None else sizes[1:] == [1]


def _rows(node: Node) -> int | None:
    """Rows of a product; None if their number may change."""
    sizes = list(map(static_int, value_of(_arguments(node)[0]).shape[:-1]))
    return None if None in sizes else prod(size for size in sizes if size is not None)


def _not_at_all(graph: Graph) -> str:
    """Why no product of the graph is taken, or ""."""
    if torch.is_grad_enabled():
        return "gradients may be asked for"
    switches = [node for node in graph.nodes if node.target is torch.amp.autocast_mode._enter_autocast]
    if any(map(torch.is_autocast_enabled, DEVICES)) or any(True in node.args[2:3] for node in switches):
        return "autocast is on"  # it chooses the dtype of products
    return ""


def _why_not(node: Node) -> str:
    """Why a product is left, or ""."""
    x, weight, bias = _arguments(node)
    tensors = [value_of(each) for each in (x, weight, bias) if each is not None]
    if not all(isinstance(each, Node) and each.op in ("placeholder", "get_attr") for each in (weight, bias) if each):
        return "its weight is computed in the graph"
    if any(is_traceable_wrapper_subclass(each) for each in tensors):
        return "its weight is a tensor subclass"
    if len({each.dtype for each in tensors}) > 1 or tensors[0].dtype not in DTYPES:
        return f"its dtype is {str(tensors[0].dtype).removeprefix('torch.')}"
    if tensors[0].shape[-1] % STEP:
        return f"{tensors[0].shape[-1]} input features are no multiple of {STEP}"
    if tensors[1].ndim != 2 or not all(each.is_contiguous() for each in tensors[1:]):
        return "its weight is not contiguous"
    return ""


def _groups(graph: Graph, nodes: Sequence[Node]) -> list[list[Node]]:
    """Nodes that multiply the same input, in order, as many as the operator takes, with no write in between."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    # An append writes to the state of a cache, which is nobody else's memory.
    writes = [order[node] for node in writes_of(graph) if node.target is not torch.ops.gemkv.append_kv.default]
    groups: list[list[Node]] = []
    open_groups: dict[tuple[Node, bool], list[Node]] = {}
    for node in nodes:
        x, _, bias = _arguments(node)
        group = open_groups.get((x, bias is None), [])
        if not 0 < len(group) < MAX_WEIGHTS or any(order[group[0]] < at < order[node] for at in writes):
            group = open_groups[x, bias is None] = []
            groups.append(group)
        group.append(node)
    return groups


def _replace(graph: Graph, group: Sequence[Node]) -> None:
    """Put the operator where the first of the products stands."""
    arguments = [_arguments(node) for node in group]
    weights, biases = [weight for _, weight, _ in arguments], [bias for _, _, bias in arguments if bias is not None]
    with graph.inserting_before(group[0]):
        products = graph.call_function(linears._opoverload, (arguments[0][0], weights, biases, pass_version()))
        products.meta = dict(group[0].meta) | {"example_value": [value_of(node) for node in group]}
        for i, node in enumerate(group):
            product = graph.call_function(operator.getitem, (products, i))
            product.meta = dict(node.meta)
            node.replace_all_uses_with(product)
    for node in group:
        graph.erase_node(node)
