"""Stage 2: find every attention of the graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from gemkv_compile.passes.rules import attention_matmul, attention_sdpa
from gemkv_compile.passes.sites import Attention, Refusal

RULES = (attention_sdpa, attention_matmul)


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
            continue
        refusal = rule.check(node)
        if refusal is None:
            found.append(rule.rewrite(node))
        else:
            refused.append((node, refusal))
    return AttentionReport(tuple(found), tuple(refused))
