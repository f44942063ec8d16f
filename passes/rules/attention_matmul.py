"""Rule: softmax(scale * q @ k^T, softcapped, masked) @ v written out with matmul, bmm, baddbmm or einsum."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from gemkv_compile.passes.lens import argument, op_of, rank_of
from gemkv_compile.passes.rules.folding import (
    Split,
    are_split,
    output_with_heads,
    skip_views,
    split_of,
    unfolded,
    with_heads,
)
from gemkv_compile.passes.rules.products import PRODUCTS, read_product
from gemkv_compile.passes.rules.repeat_kv import strip_repeat
from gemkv_compile.passes.rules.scores import FOLDED, RANKS, Scores, mask_of, read_scores
from gemkv_compile.passes.rules.softmax import Softmax, read_softmax
from gemkv_compile.passes.sites import Attention, Refusal

NAME = "attention_matmul"
MAX_SCORE_STEPS = 24  # nodes that are looked at between a softmax and its scores' product


def pattern(node: Node) -> bool:
    """A product of a softmax of something with a product in it, up to dropout, casts, and views of batch and heads."""
    if op_of(node) not in PRODUCTS or rank_of(node) not in (3, 4):
        return False
    splits: list[Split] = []
    softmax = _softmax_of(node, splits)
    if softmax is None or not _holds_product(softmax.scores):
        return False
    if rank_of(node) == 4:
        return True
    product = read_product(node)
    return product is not None and (bool(splits) or any(map(split_of, (product.right, *node.users))))


def check(node: Node) -> Refusal | None:
    """The softmax runs over the keys of scores that read as attention, and only this product uses it."""
    product = read_product(node)
    splits: list[Split] = []
    softmax = _softmax_of(node, splits)
    assert softmax is not None
    if product is None or product.flipped or product.added is not None:
        sentence = "this product of attention weights and values does not read as weights @ v."
        return Refusal("attention_not_recognised", sentence, node)
    weights = skip_views(product.left, [])
    if op_of(weights) == "dropout":
        return Refusal(
            "dropout_active",
            f"attention dropout is {argument(weights, 1, 'p', 0.5)}; call model.eval(), or set it to 0.",
            weights,
        )
    if not softmax.is_over_keys:
        return Refusal("softmax_dim", "the softmax does not run over the key dimension.", softmax.node)
    scores = read_scores(softmax.scores)
    if isinstance(scores, Refusal):
        return scores
    splits += scores.splits
    value = _read_value(product.right, splits)
    if rank_of(value) != 4 or rank_of(product.left) != rank_of(node):
        return Refusal("rank_unsupported", RANKS, node)
    folded = [product.left, product.right, node] if rank_of(node) == 3 else []
    if not are_split(folded, splits):
        return Refusal("attention_not_recognised", FOLDED, node)
    return check_weights(node, softmax.node)


def check_weights(node: Node, softmax: Node) -> Refusal | None:
    """Nothing but the product `node` uses the weights, from the softmax on."""
    product = read_product(node)
    weights: Any = product.left if product is not None else None
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
    product = read_product(node)
    splits: list[Split] = []
    softmax = _softmax_of(node, splits)
    assert softmax is not None and product is not None
    scores = read_scores(softmax.scores)
    assert isinstance(scores, Scores) and scores.query is not None and scores.key is not None
    values = _read_value(product.right, splits)
    splits += scores.splits
    return Attention(
        node=output_with_heads(node, splits[0]) if rank_of(node) == 3 else node,
        query=with_heads(scores.query, splits[0]) if rank_of(scores.query) == 3 else scores.query,
        keys=scores.key,
        values=values,
        scale=scores.scale,
        softcap=scores.softcap,
        mask=mask_of(scores),
        is_causal=False,
        rule=NAME,
    )


def _read_value(node: Node, splits: list[Split]) -> Node:
    """v, before it is folded and its heads are repeated."""
    if (whole := unfolded(node)) is not None:
        splits += filter(None, [split_of(node)])
        node = whole
    return strip_repeat(node)


def _softmax_of(node: Node, splits: list[Split]) -> Softmax | None:
    """The softmax whose weights a product takes, under dropout, casts, and views that are added to `splits`."""
    product = read_product(node)
    # Of an einsum that is no product, any operand may be the weights: it is to be refused with a reason.
    for weights in [product.left] if product is not None else node.all_input_nodes:
        inner = skip_views(weights, splits)
        inner = skip_views(inner.args[0], splits) if op_of(inner) == "dropout" else inner
        if (softmax := read_softmax(inner)) is not None:
            return softmax
    return None


def _holds_product(scores: Any) -> bool:
    """Whether the scores come from a product of two tensors by a few operations."""
    stack, seen = [scores], 0
    while stack and seen < MAX_SCORE_STEPS:
        node = stack.pop(0)
        seen += 1
        if op_of(node) in PRODUCTS:
            return True
        stack += node.all_input_nodes if isinstance(node, Node) else []
    return False
