"""Rule: written-out attention with sinks: softmax(cat([scores, sinks]))[..., :-1] @ v, as gpt-oss has it.

A sink is one logit per query head that takes part in the softmax and has no value. Source: arXiv:2309.17453.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from gemkv_compile.passes.lens import argument, op_of, rank_of, shape_of
from gemkv_compile.passes.rules.attention_matmul import check_weights
from gemkv_compile.passes.rules.folding import skip_casts
from gemkv_compile.passes.rules.repeat_kv import strip_repeat
from gemkv_compile.passes.rules.scores import Scores, mask_of, read_scores
from gemkv_compile.passes.sites import Attention, Refusal

NAME = "attention_sinks"
LAST = (-1, 3)


def pattern(node: Node) -> bool:
    """matmul of a softmax without its last column, which is the sink's."""
    return op_of(node) == "matmul" and rank_of(node) == 4 and _softmax_of(node) is not None


def check(node: Node) -> Refusal | None:
    """The last column comes from one number per query head; the others read as scores; weights serve this product."""
    softmax = _softmax_of(node)
    assert softmax is not None
    if op_of(skip_casts(node.args[0])) == "dropout":
        return Refusal("dropout_active", "attention dropout is active; call model.eval(), or set it to 0.", node)
    both = _joined(softmax)
    if both is None or argument(softmax, 1, "dim") not in LAST:
        return Refusal("attention_not_recognised", "the last column of this softmax does not read as a sink.", softmax)
    scores = read_scores(both[0])
    if isinstance(scores, Refusal):
        return scores
    if any(rank_of(part) != 4 for part in (scores.query, scores.key, node.args[1])):
        return Refusal(
            "rank_unsupported", "query, key and value must be [batch, heads, tokens, head_dim]; unsqueeze them.", node
        )
    return check_weights(node, softmax)


def rewrite(node: Node) -> Attention:
    """What the chain computes."""
    softmax = _softmax_of(node)
    assert softmax is not None
    both = _joined(softmax)
    assert both is not None
    scores, value = read_scores(both[0]), node.args[1]
    assert isinstance(scores, Scores) and scores.query is not None and scores.key is not None
    assert isinstance(value, Node)
    return Attention(
        node=node,
        query=scores.query,
        keys=strip_repeat(scores.key),
        values=strip_repeat(value),
        scale=scores.scale,
        softcap=scores.softcap,
        mask=mask_of(scores),
        is_causal=False,
        rule=NAME,
        sinks=both[1],
    )


def _softmax_of(product: Node) -> Node | None:
    """The softmax, from softmax(x)[..., :-1] under dropout and casts."""
    node = skip_casts(product.args[0])
    if op_of(node) == "dropout":
        node = skip_casts(node.args[0])
    if op_of(node) != "getitem" or rank_of(node) != 4 or not isinstance(node.args[1], tuple):
        return None
    *others, columns = node.args[1]
    whole = all(part is Ellipsis or part == slice(None) for part in others)
    is_last_dim = len(node.args[1]) == 4 or any(part is Ellipsis for part in others)
    if not whole or not is_last_dim or columns not in (slice(None, -1), slice(0, -1), slice(None, -1, 1)):
        return None
    softmax = skip_casts(node.args[0])
    return softmax if op_of(softmax) == "softmax" else None


def _joined(softmax: Node) -> tuple[Node, Node] | None:
    """Scores and the sinks [Hq], from cat([scores, sinks of every row], -1), less its largest number or not."""
    node = skip_casts(softmax.args[0])
    if op_of(node) == "sub" and not node.kwargs and len(node.args) == 2:
        if _peak_of(node.args[1]) is not node.args[0]:
            return None
        node = skip_casts(node.args[0])
    is_cat = op_of(node) == "cat" and argument(node, 1, "dim", 0) in LAST
    tensors: Any = argument(node, 0, "tensors") if is_cat else ()
    if len(tensors) != 2:
        return None
    sinks = _per_head(tensors[1])
    return (tensors[0], sinks) if sinks is not None else None


def _peak_of(node: Any) -> Any:
    """x, from x.max(-1, keepdim=True).values"""
    is_values = op_of(node) == "getitem" and node.args[1] == 0
    is_values = is_values or (op_of(node) == "getattr" and node.args[1] == "values")
    peak: Any = node.args[0] if is_values else None
    if op_of(peak) != "max" or argument(peak, 1, "dim") not in LAST or not argument(peak, 2, "keepdim", False):
        return None
    return peak.args[0]


def _per_head(node: Any) -> Node | None:
    """The vector of one number per head that is spread over [batch, heads, tokens, 1]."""
    shape = shape_of(node)
    while op_of(node) == "expand" or (op_of(node) == "reshape" and rank_of(node) == 4):
        node = node.args[0]
    is_vector = shape is not None and len(shape) == 4 and shape[3] == 1 and shape_of(node) == (shape[1],)
    return node if is_vector else None
