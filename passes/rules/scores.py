"""Attention scores: mask, softcap and scale on q @ k^T, read from the softmax down."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from gemkv_compile.passes.lens import op_of, rank_of
from gemkv_compile.passes.rules.constants import constant_factor
from gemkv_compile.passes.rules.folding import Split, are_split, skip_casts, skip_views, split_of, unfolded
from gemkv_compile.passes.rules.products import PRODUCTS, Product, exchanged, read_product
from gemkv_compile.passes.rules.repeat_kv import strip_repeat
from gemkv_compile.passes.rules.score_masks import ScoreMask, leads_to_product, read_mask
from gemkv_compile.passes.sites import Refusal

RANKS = "query, key and value must be [batch, heads, tokens, head_dim]; unsqueeze them."
FOLDED = (
    "batch and heads are one dimension here, and query, key, value and mask are not known to be folded to it from the "
    "same [batch, heads, ...]; fold them with reshape or flatten right before the products."
)


@dataclass
class Scores:
    """The chain from the softmax down to q @ k^T.

    Args:
        query: As it is multiplied, or what it is folded from.
        key: [batch, num_kv_heads, rows, head_dim], before its heads are repeated.
        splits: Each batch and number of heads that become one dimension, or come from one, along the chain.
    """

    query: Node | None = None
    key: Node | None = None
    scale: float = 1.0
    softcap: float | None = None
    mask: ScoreMask | None = None
    splits: list[Split] = field(default_factory=list)


def read_scores(node: Any) -> Scores | Refusal:
    """Peel mask, softcap and scale off the scores, outermost first, in the only order in which they commute."""
    start, scores = node, Scores()
    node = skip_views(node, scores.splits)
    scores.mask = read_mask(node)
    node = skip_views(scores.mask.scores if scores.mask else node, scores.splits)
    node = _peel_scale(_peel_softcap(node, scores), scores)
    product = read_product(node)
    if product is None and op_of(node) in ("mul", "div") and any(map(leads_to_product, node.args)):
        return Refusal("scale_not_constant", "the scale of the scores is a tensor; make it a Python number.", node)
    if product is None:
        return _unread(node, start)
    return _peel_added(product, node, scores) or _read_sides(product, node, scores)


def mask_of(scores: Scores) -> Node | None:
    """The mask of some scores as the operators take it; a view or a negation of it may go into the graph."""
    return None if scores.mask is None else scores.mask.put(scores.splits)


def _unread(node: Any, start: Any) -> Refusal:
    what = "no q @ k^T" if op_of(node) in PRODUCTS else "not read as scale * q @ k^T with mask and softcap"
    place = node if isinstance(node, Node) else start
    return Refusal("attention_not_recognised", f"the scores of this softmax are {what} (stopped at {node}).", place)


def _peel_softcap(node: Any, scores: Scores) -> Any:
    """cap * tanh(x / cap)"""
    outer = constant_factor(node)
    tanh: Any = skip_views(outer[0], scores.splits) if outer is not None else None
    if outer is None or op_of(tanh) != "tanh":
        return node
    inner = constant_factor(skip_views(tanh.args[0], scores.splits))
    if inner is None or not math.isclose(outer[1] * inner[1], 1.0, rel_tol=1e-6):
        return node
    scores.softcap = abs(outer[1])  # tanh is odd
    return inner[0]


def _peel_scale(node: Any, scores: Scores) -> Any:
    """constant * x or x / constant, any number of times"""
    while (factor := constant_factor(node := skip_views(node, scores.splits))) is not None:
        node, scores.scale = factor[0], scores.scale * factor[1]
    return node


def _peel_added(product: Product, node: Node, scores: Scores) -> Refusal | None:
    """alpha, and what baddbmm adds: a mask, if nothing scales or caps the sum."""
    if not isinstance(product.alpha, (int, float)) or not isinstance(product.beta, (int, float)):
        return Refusal("scale_not_constant", "the scale of the scores is a tensor; make it a Python number.", node)
    scale, scores.scale = scores.scale, scores.scale * product.alpha
    if product.added is None or product.beta == 0:
        return None
    if product.beta != 1 or scale != 1.0 or scores.softcap is not None or scores.mask is not None:
        sentence = "what baddbmm adds is scaled, capped or masked once more, so that it is no mask."
        return Refusal("attention_not_recognised", sentence, node)
    scores.mask = ScoreMask(node, None, product.added)
    return None


def _read_sides(product: Product, node: Node, scores: Scores) -> Scores | Refusal:
    """Query and key of q @ k^T."""
    scores.query, scores.key = product.left, _read_key(product, scores)
    if scores.key is None:
        return _unread(node, node)
    if rank_of(node) == 3 and (whole := unfolded(product.left)) is not None:
        scores.splits += filter(None, [split_of(product.left)])
        scores.query = whole
    if rank_of(scores.key) != 4 or rank_of(product.left) != rank_of(node):
        return Refusal("rank_unsupported", RANKS, node)
    folded = [product.left, product.right, node] if rank_of(node) == 3 else []
    fits = scores.mask is None or scores.mask.fits(scores.splits)
    return scores if fits and are_split(folded, scores.splits) else Refusal("attention_not_recognised", FOLDED, node)


def _read_key(product: Product, scores: Scores) -> Node | None:
    """k, from k^T; numbers that it is multiplied with go to the scale, so that the cache holds rows without them.

    Scaled keys that something else uses, too, are left as they are: they may be what is cached.
    """
    node, flipped = product.right, product.flipped
    while True:
        node = node if flipped else skip_casts(node)
        if len(node.users) == 1 and (factor := constant_factor(node)) is not None:
            node, scores.scale = factor[0], scores.scale * factor[1]
        elif (whole := unfolded(node)) is not None:
            scores.splits += filter(None, [split_of(node)])
            node = whole
        elif not flipped and (inner := exchanged(node)) is not None:
            node, flipped = inner, True
        elif rank_of(node) == 4 and (source := strip_repeat(node)) is not node:
            node = source
        else:
            return node if flipped else None
