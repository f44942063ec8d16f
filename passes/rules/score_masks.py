"""Masks on attention scores: added, filled in, or chosen with where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from gemkv_compile.passes.lens import argument, op_of, rank_of, shape_of, value_of
from gemkv_compile.passes.rules.constants import constant_factor, number_of
from gemkv_compile.passes.rules.folding import Split, is_split, same_shape, skip_views, with_heads
from gemkv_compile.passes.rules.products import PRODUCTS


@dataclass(frozen=True)
class ScoreMask:
    """A mask, the scores that it is put on, and the node that does so.

    Args:
        tensor: Boolean or additive; it broadcasts to the scores, of three or four dimensions.
        hides: It is boolean and True where scores are replaced by the lowest value.
    """

    at: Node
    scores: Any
    tensor: Node
    hides: bool = False

    def fits(self, splits: Sequence[Split]) -> bool:
        """Whether it can be seen as [batch, heads, rows, keys], batch and heads being split in this way."""
        return not self._is_folded or (len(splits) > 0 and is_split(self.tensor, splits[0]))

    def put(self, splits: Sequence[Split]) -> Node:
        """The mask as the operators take it; a view and a negation go into the graph, where the mask is applied."""
        mask = with_heads(self.tensor, splits[0]) if self._is_folded else self.tensor
        if not self.hides:
            return mask
        with self.at.graph.inserting_before(self.at):
            shown = self.at.graph.call_function(torch.logical_not, (mask,))
        shown.meta["example_value"] = value_of(mask)
        shown.meta["stack_trace"] = self.tensor.meta.get("stack_trace")
        return shown

    @property
    def _is_folded(self) -> bool:
        return rank_of(self.at) == 3 == rank_of(self.tensor) and shape_of(self.tensor)[0] != 1  # type: ignore[index]


def read_mask(node: Any) -> ScoreMask | None:
    """scores + mask; scores.masked_fill(hidden, low); where(mask, scores, low); where(hidden, low, scores)"""
    read = {"add": _added, "masked_fill": _filled, "where": _chosen}.get(op_of(node))
    mask = read(node) if read is not None else None
    # A mask that the scores are broadcast to would give them another meaning.
    return mask if mask is not None and same_shape(mask.scores, node) else None


def leads_to_product(node: Any) -> bool:
    """Whether the node is a product under casts, views of batch and heads, constant factors and a tanh."""
    while isinstance(node, Node):
        node = skip_views(node, [])
        if op_of(node) in PRODUCTS:
            return True
        factor = constant_factor(node)
        node = factor[0] if factor else (node.args[0] if op_of(node) == "tanh" else None)
    return False


def _added(node: Node) -> ScoreMask | None:
    if len(node.args) != 2 or not all(isinstance(arg, Node) for arg in node.args) or node.kwargs:
        return None
    left, right = node.args
    scores, mask = (left, right) if leads_to_product(left) else (right, left)
    is_bias = isinstance(mask, Node) and value_of(mask).dtype.is_floating_point  # True and 1 add 1, and hide nothing
    return ScoreMask(node, scores, mask) if is_bias and leads_to_product(scores) else None  # type: ignore[arg-type]


def _filled(node: Node) -> ScoreMask | None:
    hidden = argument(node, 1, "mask")
    is_hiding = isinstance(hidden, Node) and _is_lowest(argument(node, 2, "value"), node)
    return ScoreMask(node, node.args[0], hidden, hides=True) if is_hiding else None


def _chosen(node: Node) -> ScoreMask | None:
    if len(node.args) != 3:
        return None
    first, second, other = node.args
    condition, chosen = (second, first) if node.op == "call_method" else (first, second)
    if not isinstance(condition, Node) or value_of(condition).dtype != torch.bool:
        return None
    if _is_lowest(other, node):
        return ScoreMask(node, chosen, condition)
    return ScoreMask(node, other, condition, hides=True) if _is_lowest(chosen, node) else None


def _is_lowest(value: Any, node: Node) -> bool:
    number, dtype = number_of(value), value_of(node).dtype
    return number is not None and dtype.is_floating_point and number <= torch.finfo(dtype).min
