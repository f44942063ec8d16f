"""Stage 1: a copy of Dynamo's graph in which sizes are sizes and operations that do nothing are gone.

Dynamo's own graph is never edited: its bookkeeping refers to it. Nothing here changes a value; differences of spelling
(mul or div, matmul or bmm, ...) are left in the graph and read through `gemkv_compile.passes.lens`, so that an
attention that is kept computes exactly what it did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gemkv_compile.passes.effects import write_after, writes_of
from gemkv_compile.passes.lens import argument, by_position, op_of, rank_of, value_of
from gemkv_compile.passes.symbols import SymbolTable

_TO_KEYWORDS = {"dtype", "device", "other"}


@dataclass(frozen=True)
class CanonicaliseReport:
    """What the stage found: inputs that are handles."""

    handle_inputs: frozenset[int]


def canonicalise(module: GraphModule) -> tuple[GraphModule, CanonicaliseReport]:
    """Copy the graph, bring calls to one form, fold size queries, remove operations that do nothing."""
    graph = Graph()
    output = graph.graph_copy(module.graph, {})
    source = next(node for node in module.graph.nodes if node.op == "output")
    graph.output(output).meta.update(source.meta)
    for node in graph.nodes:
        node.meta.pop("grapharg", None)  # it refers to the call's own tensors
    handles = _replace_handle_values(graph)
    for node in graph.nodes:
        by_position(node)
    _fold_sizes(graph)
    _fold_scales(graph)
    _remove_copied_pasts(graph)
    _remove_noops(graph)
    graph.lint()
    return GraphModule(module, graph), CanonicaliseReport(handles)


def _replace_handle_values(graph: Graph) -> frozenset[int]:
    """Give inputs that are cache handles the example value of a plain tensor; returns their positions."""
    handles: set[int] = set()
    for index, node in enumerate(node for node in graph.nodes if node.op == "placeholder"):
        value = value_of(node)
        if isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value) and hasattr(value, "_marker"):
            with value._marker.fake_mode:
                node.meta["example_value"] = torch.empty(value.shape, dtype=value.dtype, device=value.device)
            handles.add(index)
    return frozenset(handles)


def _fold_sizes(graph: Graph) -> None:
    """Replace size queries by constants and by SymInt inputs, so that only data uses of a tensor are left."""
    symbols = SymbolTable(graph)
    for node in list(graph.nodes):
        if not _is_size_query(node):
            continue
        try:
            with graph.inserting_before(node):
                value = value_of(node)
                whole = isinstance(value, tuple)
                folded = tuple(symbols.emit(graph, v) for v in value) if whole else symbols.emit(graph, value)
        except (KeyError, AttributeError):
            continue
        replace_uses(node, folded)
        if not node.users:
            graph.erase_node(node)


def _fold_scales(graph: Graph) -> None:
    """Replace symbolic floats that scale tensors of four dimensions by their values, which Dynamo then guards on.

    Dynamo makes a Python float symbolic when it has seen two values of it, such as the scales of two models.
    """
    for node in list(graph.nodes):
        value = value_of(node)
        if node.op == "placeholder" or not isinstance(value, torch.SymFloat) or not value.node.has_hint():
            continue
        if any(op_of(user) in ("mul", "div", "sdpa") and rank_of(user) == 4 for user in node.users):
            replace_uses(node, float(value))
            graph.erase_node(node)


def _is_size_query(node: Node) -> bool:
    name = op_of(node)
    if name == "getattr":
        return node.args[1] == "shape"
    if name == "getitem":
        return isinstance(value_of(node.args[0]), torch.Size) and isinstance(node.args[1], int)
    return name in ("size", "dim", "numel") and node.op == "call_method"


def _remove_noops(graph: Graph) -> None:
    for node in list(graph.nodes):
        if _is_noop(node):
            replace_uses(node, node.args[0])
            graph.erase_node(node)


def _remove_copied_pasts(graph: Graph) -> None:
    """Take an input for its copy cat([empty, input]), which Transformers' DynamicCache makes of a tuple's tensors.

    Only if nothing but other concatenations, which copy too, has the copy, and nothing is written that it may share.
    """
    copies = [node for node in graph.nodes if _copied_past(node) is not None]
    writes = writes_of(graph) if copies else {}
    for node in copies:
        past = _copied_past(node)
        assert past is not None
        if all(op_of(user) == "cat" for user in node.users) and write_after([past, node], writes) is None:
            replace_uses(node, past)
            graph.erase_node(node)


def _copied_past(node: Node) -> Node | None:
    """The input that torch.cat([torch.tensor([]), input], dim) is a copy of."""
    tensors = argument(node, 0, "tensors") if op_of(node) == "cat" else None
    if not isinstance(tensors, (list, tuple)) or len(tensors) != 2 or node.kwargs.keys() - {"dim"}:
        return None
    empty, past = map(value_of, tensors)
    if not isinstance(past, torch.Tensor) or not isinstance(tensors[1], Node) or tensors[1].op != "placeholder":
        return None
    is_empty = isinstance(empty, torch.Tensor) and tuple(empty.shape) == (0,) and past.dim() > 1
    return tensors[1] if is_empty and (empty.dtype, empty.device) == (past.dtype, past.device) else None


def _is_noop(node: Node) -> bool:
    name = op_of(node)
    if name == "dropout":
        probability = argument(node, 1, "p", 0.5)
        is_off = probability == 0 or argument(node, 2, "training", True) is False
        return is_off and argument(node, 3, "inplace", False) is False
    if name == "to" and not any(isinstance(arg, bool) for arg in node.args) and node.kwargs.keys() <= _TO_KEYWORDS:
        before, after = value_of(node.args[0]), value_of(node)
        tensors = isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)
        return tensors and (before.dtype, before.device) == (after.dtype, after.device)
    return False


def replace_uses(node: Node, value: Any) -> None:
    """Replace every use of `node` by a node or a constant."""
    replacement: Callable[[Node], Any] = lambda arg: value if arg is node else arg  # noqa: E731
    for user in list(node.users):
        user.args = map_arg(user.args, replacement)
        user.kwargs = map_arg(user.kwargs, replacement)
