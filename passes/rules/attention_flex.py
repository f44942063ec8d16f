"""Rule: FlexAttention's higher-order operator, with score_mod and mask_mod as subgraphs. Source: arXiv:2412.05496.

A query that a mask hides every key from gets zeros, as FlexAttention gives. Kernel options change speed and rounding.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gemkv_compile import compat, compat_flex
from gemkv_compile.passes.effects import subgraph, written_by
from gemkv_compile.passes.lens import rank_of, shape_of, value_of
from gemkv_compile.passes.liveness import live_nodes
from gemkv_compile.passes.rules import flex_blocks
from gemkv_compile.passes.rules.flex_body import Body, Lanes
from gemkv_compile.passes.rules.flex_scores import ScoreMod, read_score_mod
from gemkv_compile.passes.rules.repeat_kv import strip_repeat
from gemkv_compile.passes.sites import Attention, Refusal
from gemkv_compile.passes.symbols import static_int

NAME = "attention_flex"
SCALE, SCORE_BUFFERS, MASK_BUFFERS = 5, 7, 8


def pattern(node: Node) -> bool:
    """The node is a call of FlexAttention's operator."""
    return node.op == "call_function" and node.target is torch.ops.higher_order.flex_attention


def check(node: Node) -> Refusal | None:
    """Only the attention itself is used, and score_mod, mask_mod and the block mask read."""
    _show_the_caller(node)
    output = _output(node)
    if isinstance(output, Refusal):
        return output
    if any(rank_of(part) != 4 for part in node.args[:3]):
        return Refusal("rank_unsupported", "query, key and value must be [batch, heads, tokens, head_dim].", node)
    if static_int(shape_of(node.args[0])[-1]) is None:  # type: ignore[index]
        return Refusal("head_dim_unsupported", "the head size is not a constant of the graph.", node)
    if _scale(node) is None:
        return Refusal("scale_not_constant", "the scale is computed from sizes or tensors; pass a number.", node)
    bodies = _bodies(node)
    if bodies is None:
        return Refusal("inside_higher_order_op", "score_mod or mask_mod is no graph, so it is not read.", node)
    if written_by(node):
        return Refusal("written_in_place", "score_mod or mask_mod writes into a tensor.", node)
    return _check_bodies(node, *bodies)


def rewrite(node: Node) -> Attention:
    """What the call computes; its masks are put into the graph before it."""
    query, key, value = node.args[:3]
    scale, output, bodies = _scale(node), _output(node), _bodies(node)
    assert isinstance(query, Node) and isinstance(key, Node) and isinstance(value, Node)
    assert isinstance(output, Node) and scale is not None and bodies is not None
    score_mod = read_score_mod(bodies[0], node)
    assert isinstance(score_mod, ScoreMod)
    return Attention(
        node=output,
        query=query,
        keys=strip_repeat(key),
        values=strip_repeat(value),
        scale=scale * score_mod.scale,
        softcap=score_mod.softcap,
        mask=_mask(node, score_mod, bodies),
        is_causal=False,
        rule=NAME,
    )


def _check_bodies(node: Node, score_body: Body, mask_body: Body) -> Refusal | None:
    score_mod = read_score_mod(score_body, node)
    if isinstance(score_mod, Refusal):
        return score_mod
    lanes = Lanes(node)
    if not lanes.sizes_are_known:
        return Refusal("mask_unknown_op", "batch or lengths are computed from data.", node)
    shown = [(mask_body, mask_body.result), *((score_body, condition) for condition, _ in score_mod.conditions)]
    for body, condition in shown:
        trouble = body.unreadable(condition)
        if trouble is not None:
            sentence = f"{trouble}, which cannot be read as a mask over (batch, head, query, key)."
            return Refusal("mask_unknown_op", sentence, node)
    return flex_blocks.check(node, mask_body)


def _mask(node: Node, score_mod: ScoreMod, bodies: tuple[Body, Body]) -> Node | None:
    """mask_mod, and the conditions of score_mod, as one bool tensor [B|1, Hq|1, q_len|1, kv_len|1] in the graph."""
    score_body, mask_body = bodies
    lanes = Lanes(node)
    parts = [] if mask_body.shows_all() else [lanes.inline(mask_body, mask_body.result)]
    if not flex_blocks.is_proven(node, mask_body):
        parts = [flex_blocks.shown(node, lanes, parts[0] if parts else None)]
    for condition, is_shown in score_mod.conditions:
        part = lanes.inline(score_body, condition)
        parts.append(part if is_shown else lanes.call("call_function", torch.logical_not, (part,)))
    mask = parts[0] if parts else None
    for part in parts[1:]:
        mask = lanes.call("call_function", torch.logical_and, (mask, part))
    return mask


def _bodies(node: Node) -> tuple[Body, Body] | None:
    blocks: Any = node.args[4]
    score_mod, mask_mod = subgraph(node.args[3]), subgraph(blocks[-1])
    if not isinstance(score_mod, GraphModule) or not isinstance(mask_mod, GraphModule):
        return None
    score_buffers, mask_buffers = (node.args[at] if len(node.args) > at else () for at in (SCORE_BUFFERS, MASK_BUFFERS))
    return Body(score_mod.graph, 5, score_buffers), Body(mask_mod.graph, 4, mask_buffers)  # type: ignore[arg-type]


def _output(node: Node) -> Node | Refusal:
    """The attention, out of (attention, log-sum-exp, maxima of the scores), if nothing else is needed."""
    outputs = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
    others = [user for user in node.users if user not in outputs]
    if len(outputs) == 1 and (not others or not live_nodes(node.graph) & set(others)):
        return outputs[0]
    sentence = "the log-sum-exp or the largest scores of this attention are used; call it without return_aux."
    return Refusal("aux_outputs_used", sentence, others[0] if others else node)


def _scale(node: Node) -> float | None:
    return compat.number_of(value_of(node.args[SCALE]))


def _show_the_caller(node: Node) -> None:
    """Let reports name the line that calls FlexAttention, not the one in PyTorch's own file."""
    for shown in (node, *node.users):
        head, _, _ = (shown.stack_trace or "").partition(f'  File "{compat_flex.flex_attention_file()}"')
        if head.strip():
            shown.meta["stack_trace"] = head
