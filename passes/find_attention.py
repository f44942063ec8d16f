"""Stage 2: find every attention of the graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node

from gemkv_compile.passes.rules import attention_flex, attention_matmul, attention_sdpa, attention_sinks
from gemkv_compile.passes.sites import Attention, Refusal

RULES = (attention_sdpa, attention_matmul, attention_sinks, attention_flex)


@dataclass(frozen=True)
class AttentionReport:
    """The attentions that were read; and the outputs of those that were seen but not read, with the reason."""

    found: tuple[Attention, ...]
    refused: tuple[tuple[Node, Refusal], ...]


def find_attention(graph: Graph) -> AttentionReport:
    """Apply each rule to each node, in graph order."""
    found: list[Attention] = []
    refused: list[tuple[Node, Refusal]] = []
    for node in list(graph.nodes):
        rule = next((rule for rule in RULES if rule.pattern(node)), None)
        if rule is None:
            if _holds_attention(node):
                refused.append((node, _inside(node)))
            continue
        refusal = rule.check(node)
        if refusal is None:
            found.append(rule.rewrite(node))
        else:
            refused.append((node, refusal))
    return AttentionReport(tuple(found), tuple(refused))


def _holds_attention(node: Node) -> bool:
    """Whether a node is the body of a higher-order operator, such as checkpoint, with an attention in it."""
    owner = node.graph.owning_module
    body = getattr(owner, str(node.target), None) if node.op == "get_attr" and owner is not None else None
    if not isinstance(body, GraphModule):
        return False
    return any(any(rule.pattern(inner) for rule in RULES) or _holds_attention(inner) for inner in body.graph.nodes)


def _inside(node: Node) -> Refusal:
    operator = next(iter(node.users), node)
    name = getattr(operator.target, "__name__", operator.target)
    return Refusal("inside_higher_order_op", f"the attention is in the body of `{name}`, which is not read.", operator)
