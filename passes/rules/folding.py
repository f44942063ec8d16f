"""What rules look through: casts, and views between [batch * heads, rows, columns] and [batch, heads, ...]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from gemkv_compile.passes.lens import op_of, rank_of, shape_of, value_of
from gemkv_compile.passes.symbols import same_size, static_int

Split = tuple[Any, Any]  # batch and heads, ints or SymInts
_ROUNDING_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def skip_casts(node: Any) -> Any:
    """The node under layout copies and casts to a float dtype, which keep values up to rounding."""
    while op_of(node) == "contiguous" or (op_of(node) == "to" and value_of(node).dtype in _ROUNDING_DTYPES):
        node = node.args[0]
    return node


def skip_views(node: Any, splits: list[Split]) -> Any:
    """The node under casts, copies, and batch and heads becoming one dimension or two; adds the latter to `splits`."""
    while (split := split_of(node := skip_casts(node))) is not None:
        splits.append(split)
        node = node.args[0]
    return node


def split_of(node: Any) -> Split | None:
    """(batch, heads), if the node only makes one dimension of the two, or two of the one; else None.

    With rows and columns as they were, no other order of elements has these shapes.
    """
    if op_of(node) not in ("reshape", "flatten", "unflatten") or not node.args:
        return None
    folded, whole = sorted((shape_of(node.args[0]) or (), shape_of(node) or ()), key=len)
    if (len(folded), len(whole)) != (3, 4) or not _equal(folded[1:], whole[2:]):
        return None
    return whole[0], whole[1]


def unfolded(node: Any) -> Node | None:
    """The tensor of four dimensions that the node folds to three."""
    return node.args[0] if rank_of(node) == 3 and split_of(node) is not None else None


def are_split(nodes: Sequence[Node], splits: Sequence[Split]) -> bool:
    """Whether all splits are known to be one, with a constant number of heads, and the nodes are folded from it."""
    if not splits:
        return not nodes
    first, *others = splits
    is_one = static_int(first[1]) is not None and all(_equal(first, other) for other in others)
    return is_one and all(is_split(node, first) for node in nodes)


def same_shape(left: Any, right: Any) -> bool:
    """Whether two tensors are known to have the same shape."""
    shapes = shape_of(left), shape_of(right)
    return None not in shapes and _equal(*shapes)  # type: ignore[arg-type]


def is_split(node: Node, split: Split) -> bool:
    """Whether the node has three dimensions and the first is this batch times these heads."""
    return rank_of(node) == 3 and same_size(shape_of(node)[0], split[0] * split[1])  # type: ignore[index]


def with_heads(node: Node, split: Split) -> Node:
    """The node as [batch, heads, ...]: itself, what it is folded from, or a new view after it."""
    if rank_of(node) == 4:
        return node
    graph, heads = node.graph, static_int(split[1])
    if (whole := unfolded(node)) is not None:
        return whole
    with graph.inserting_after(_last_input(graph) if node.op == "placeholder" else node):
        view = graph.call_method("unflatten", (node, 0, (-1, heads)))
    view.meta["example_value"] = value_of(node).unflatten(0, (-1, heads))
    view.meta["stack_trace"] = node.meta.get("stack_trace")
    return view


def output_with_heads(node: Node, split: Split) -> Node:
    """The output [batch, heads, ...] that stands for `node`: the one view that is made of it, or one put after it."""
    users = list(node.users)
    if len(users) == 1 and (split_now := split_of(users[0])) is not None and _equal(split, split_now):
        return users[0]
    whole = with_heads(node, split)
    with node.graph.inserting_after(whole):
        folded = node.graph.call_method("flatten", (whole, 0, 1))
    folded.meta["example_value"] = value_of(node)
    folded.meta["stack_trace"] = node.meta.get("stack_trace")
    node.replace_all_uses_with(folded, delete_user_cb=lambda user: user is not whole)
    return whole


def _last_input(graph: Graph) -> Node:
    """Inputs come first in a graph."""
    return [node for node in graph.nodes if node.op == "placeholder"][-1]


def _equal(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    return len(left) == len(right) and all(same_size(a, b) for a, b in zip(left, right, strict=True))
