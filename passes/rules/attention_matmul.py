"""Rule: softmax(scale * q @ k^T, softcapped, masked) @ v written out with matmul and softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from gemkv_compile.passes.lens import argument, op_of, rank_of, value_of
from gemkv_compile.passes.rules.repeat_kv import strip_repeat
from gemkv_compile.passes.sites import Attention, Refusal

NAME = "attention_matmul"
MAX_SCORE_STEPS = 24  # nodes that are looked at between a softmax and its scores' matmul
_ROUNDING_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass
class Scores:
    """The chain from the softmax down to q @ k^T."""

    query: Node | None = None
    key: Node | None = None
    scale: float = 1.0
    softcap: float | None = None
    mask: Node | None = None
    hidden: Node | None = None  # a boolean tensor, True where scores are replaced by the lowest value


def pattern(node: Node) -> bool:
    """matmul of a softmax of something with a matmul in it, up to dropout, dtype changes and layout copies."""
    if op_of(node) != "matmul" or rank_of(node) != 4:
        return False
    softmax = _softmax_of(node)
    return softmax is not None and _holds_matmul(softmax.args[0])


def check(node: Node) -> Refusal | None:
    """The softmax runs over the last dimension of scores that read as attention, and only this product uses it."""
    softmax = _softmax_of(node)
    assert softmax is not None
    weights = skip_casts(node.args[0])
    if op_of(weights) == "dropout":
        return Refusal(
            "dropout_active",
            f"attention dropout is {argument(weights, 1, 'p', 0.5)}; call model.eval(), or set it to 0.",
            weights,
        )
    if argument(softmax, 1, "dim") not in (-1, 3):
        return Refusal("softmax_dim", "the softmax does not run over the key dimension.", softmax)
    scores = read_scores(softmax.args[0])
    if isinstance(scores, Refusal):
        return scores
    if any(rank_of(part) != 4 for part in (scores.query, scores.key, node.args[1])):
        return Refusal(
            "rank_unsupported", "query, key and value must be [batch, heads, tokens, head_dim]; unsqueeze them.", node
        )
    return check_weights(node, softmax)


def check_weights(node: Node, softmax: Node) -> Refusal | None:
    """Nothing but the product `node` uses the weights, from the softmax on."""
    weights = node.args[0]
    while isinstance(weights, Node):
        if len(weights.users) > 1:
            return Refusal(
                "attention_weights_used",
                "the attention weights themselves are used or returned; set output_attentions=False.",
                weights,
            )
        weights = weights.args[0] if weights is not softmax else None
    return None


def rewrite(node: Node) -> Attention:
    """What the chain computes."""
    softmax = _softmax_of(node)
    assert softmax is not None
    scores = read_scores(softmax.args[0])
    assert isinstance(scores, Scores) and scores.query is not None and scores.key is not None
    value = node.args[1]
    assert isinstance(value, Node)
    return Attention(
        node=node,
        query=scores.query,
        keys=strip_repeat(scores.key),
        values=strip_repeat(value),
        scale=scores.scale,
        softcap=scores.softcap,
        mask=mask_of(scores, node),
        is_causal=False,
        rule=NAME,
    )


def read_scores(node: Any) -> Scores | Refusal:
    """Peel mask, softcap and scale off the scores, outermost first, in the only order in which they commute."""
    start, scores = node, Scores()
    node = skip_casts(node)
    node = _peel_mask(node, scores)
    node = _peel_softcap(skip_casts(node), scores)
    node = _peel_scale(skip_casts(node), scores)
    node = skip_casts(node)
    key = _transposed(node.args[1]) if op_of(node) == "matmul" else None
    if key is None and op_of(node) in ("mul", "div") and any(map(_leads_to_matmul, node.args)):
        return Refusal("scale_not_constant", "the scale of the scores is a tensor; make it a Python number.", node)
    if key is None:
        return Refusal(
            "attention_not_recognised",
            f"the scores of this softmax do not read as scale * q @ k^T with mask and softcap (stopped at {node}).",
            node if isinstance(node, Node) else start,
        )
    scores.query, scores.key = node.args[0], key
    return scores


def mask_of(scores: Scores, node: Node) -> Node | None:
    """The mask of some scores, before `node`; where they name what is hidden, its negation is put into the graph."""
    if scores.hidden is None:
        return scores.mask
    with node.graph.inserting_before(node):
        mask = node.graph.call_function(torch.logical_not, (scores.hidden,))
    mask.meta["example_value"] = value_of(scores.hidden)
    mask.meta["stack_trace"] = scores.hidden.meta.get("stack_trace")
    return mask


def _softmax_of(product: Node) -> Node | None:
    node = skip_casts(product.args[0])
    if op_of(node) == "dropout":
        node = skip_casts(node.args[0])
    return node if op_of(node) == "softmax" else None


def _holds_matmul(scores: Any) -> bool:
    """Whether the scores come from a product of two tensors by a few operations."""
    stack, seen = [scores], 0
    while stack and seen < MAX_SCORE_STEPS:
        node = stack.pop(0)
        seen += 1
        if op_of(node) == "matmul":
            return True
        stack += node.all_input_nodes if isinstance(node, Node) else []
    return False


def skip_casts(node: Any) -> Any:
    """The node under layout copies and casts to a float dtype, which keep values up to rounding."""
    while op_of(node) == "contiguous" or (op_of(node) == "to" and value_of(node).dtype in _ROUNDING_DTYPES):
        node = node.args[0]
    return node


def _peel_mask(node: Any, scores: Scores) -> Any:
    """scores + mask; scores.masked_fill(hidden, low); where(mask, scores, low)"""
    name = op_of(node)
    if name == "add" and all(isinstance(arg, Node) for arg in node.args[:2]) and not node.kwargs:
        inner = next((arg for arg in node.args[:2] if _leads_to_matmul(arg)), None)
        mask = node.args[1] if inner is node.args[0] else node.args[0]
        if inner is not None and value_of(mask).dtype.is_floating_point:  # True and 1 add 1, and hide nothing
            scores.mask = mask
            return inner
    if name == "masked_fill" and _is_lowest(argument(node, 2, "value"), node):
        scores.hidden = argument(node, 1, "mask")
        return node.args[0]
    if name == "where" and len(node.args) == 3 and _is_lowest(node.args[2], node):
        scores.mask = node.args[0]
        return node.args[1]
    return node


def _peel_softcap(node: Any, scores: Scores) -> Any:
    """cap * tanh(x / cap)"""
    outer = _constant_factor(node)
    if outer is None or op_of(outer[0]) != "tanh":
        return node
    inner = _constant_factor(outer[0].args[0])
    if inner is None or not math.isclose(outer[1] * inner[1], 1.0, rel_tol=1e-6):
        return node
    scores.softcap = outer[1]
    return inner[0]


def _peel_scale(node: Any, scores: Scores) -> Any:
    """constant * x or x / constant, any number of times"""
    while (factor := _constant_factor(node)) is not None:
        node, scores.scale = factor[0], scores.scale * factor[1]
    return node


def _constant_factor(node: Any) -> tuple[Node, float] | None:
    """(x, c) if the node is c * x for a Python number c."""
    name = op_of(node)
    if name not in ("mul", "div") or node.kwargs or len(node.args) != 2:
        return None
    left, right = node.args
    if isinstance(left, Node) and isinstance(right, (int, float)) and (name == "mul" or right != 0):
        return left, float(right) if name == "mul" else 1.0 / right
    if isinstance(right, Node) and isinstance(left, (int, float)) and name == "mul":
        return right, float(left)
    return None


def _leads_to_matmul(node: Any) -> bool:
    """Whether the node is a matmul under casts, constant factors and a tanh."""
    while isinstance(node, Node):
        node = skip_casts(node)
        if op_of(node) == "matmul":
            return True
        factor = _constant_factor(node)
        node = factor[0] if factor else (node.args[0] if op_of(node) == "tanh" else None)
    return False


def _is_lowest(value: Any, node: Node) -> bool:
    dtype = value_of(node).dtype
    return isinstance(value, (int, float)) and dtype.is_floating_point and value <= torch.finfo(dtype).min


def _transposed(node: Any) -> Node | None:
    """k, if the node is k with its last two dimensions, and only those, exchanged."""
    node = skip_casts(node)
    name = op_of(node)
    if name == "transpose" and rank_of(node) == 4:
        dims = {argument(node, 1, "dim0") % 4, argument(node, 2, "dim1") % 4}
        return node.args[0] if dims == {2, 3} else None
    if name == "permute" and rank_of(node) == 4:
        order = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
        return node.args[0] if [dim % 4 for dim in order] == [0, 1, 3, 2] else None
    if name == "getattr" and node.args[1] == "mT":
        return node.args[0]
    return None
