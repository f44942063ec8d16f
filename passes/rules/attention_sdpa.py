"""Rule: torch.nn.functional.scaled_dot_product_attention, with all its keywords."""

from __future__ import annotations

from torch.fx import Node

from gemkv_compile.passes.lens import argument, op_of, rank_of, shape_of
from gemkv_compile.passes.rules.repeat_kv import strip_repeat
from gemkv_compile.passes.sites import Attention, Refusal
from gemkv_compile.passes.symbols import static_int

NAME = "attention_sdpa"


def pattern(node: Node) -> bool:
    """The node is a call of scaled_dot_product_attention."""
    return op_of(node) == "sdpa"


def check(node: Node) -> Refusal | None:
    """It has four dimensions, no dropout and a constant scale."""
    if any(rank_of(argument(node, i, name)) != 4 for i, name in enumerate(("query", "key", "value"))):
        return Refusal(
            "rank_unsupported", "query, key and value must be [batch, heads, tokens, head_dim]; unsqueeze them.", node
        )
    dropout = argument(node, 4, "dropout_p", 0.0)
    if dropout != 0.0:
        return Refusal(
            "dropout_active",
            f"attention dropout is {dropout}; call model.eval(), or set it to 0 to train with a cache.",
            node,
        )
    scale = argument(node, 6, "scale")
    if scale is not None and not isinstance(scale, (int, float)):
        return Refusal("scale_not_constant", "the scale is a tensor; pass a Python number.", node)
    if not isinstance(argument(node, 5, "is_causal", False), bool):
        return Refusal("mask_unknown_op", "is_causal is computed in the graph; pass True or False.", node)
    if static_int(shape_of(argument(node, 0, "query"))[-1]) is None:  # type: ignore[index]
        return Refusal("head_dim_unsupported", "the head size is not a constant of the graph.", node)
    return None


def rewrite(node: Node) -> Attention:
    """What the call computes."""
    query, key, value = (argument(node, i, name) for i, name in enumerate(("query", "key", "value")))
    scale = argument(node, 6, "scale")
    head_dim = static_int(shape_of(query)[-1])  # type: ignore[index]
    assert head_dim is not None
    return Attention(
        node=node,
        query=query,
        keys=strip_repeat(key),
        values=strip_repeat(value),
        scale=float(scale) if scale is not None else head_dim**-0.5,
        softcap=None,
        mask=argument(node, 3, "attn_mask"),
        is_causal=bool(argument(node, 5, "is_causal", False)),
        rule=NAME,
    )
