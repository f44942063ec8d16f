"""What the option `drop` means for one cache of a graph, and the queries that its policy observes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from gemkv_compile.compat import fake_mode_of
from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.sites import Cache
from gemkv_compile.passes.symbols import same_size
from gemkv_compile.passes.version import pass_version


@dataclass(frozen=True)
class DropFacts:
    """A policy, as far as passes need to know it; see `gemkv_compile.drop.Policy`."""

    name: str
    observes: int
    decodes: bool
    windowed: bool


@dataclass(frozen=True)
class DropVerdict:
    """What becomes of one cache: whether the policy is asked, how many queries it observes in this graph, in words."""

    drops: bool = False
    observes: int = 0
    sentence: str = ""


KEEPS = DropVerdict()


def judge_drop(
    facts: DropFacts | None, cache: Cache, is_windowed: bool, is_decode: bool, needs_grad: bool
) -> DropVerdict:
    """Whether pages of a cache are dropped, with the reason if not."""
    if facts is None:
        return KEEPS
    if cache.buffer is not None:
        return DropVerdict(sentence="kept whole: a static cache is read and reset as a tensor")
    if is_windowed and not facts.windowed:
        return DropVerdict(sentence="kept whole: it has a window")
    if needs_grad:
        return DropVerdict(sentence="kept whole: the graph needs gradients")
    if facts.observes:
        query = value_of(cache.readers[0].query)
        if not same_size(query.shape[2], value_of(cache.new_keys).shape[cache.seq_dim]):
            return DropVerdict(sentence="kept whole: its first attention has fewer queries than there are new rows")
    if is_decode and not facts.decodes:
        return DropVerdict(sentence=f"{facts.name}, after prompts only")
    return DropVerdict(True, (1 if is_decode else facts.observes) if facts.observes else 0, facts.name)


def newest_queries(graph: Graph, query: Node, count: int) -> Node:
    """The node, inserted here, that gives the last `count` queries of an attention, without a gradient."""
    value = value_of(query)
    node = graph.call_function(torch.ops.gemkv.newest_queries.default, (query, count, pass_version()))
    with fake_mode_of([value]):
        shape = (value.shape[0], value.shape[1], count, value.shape[3])
        node.meta["example_value"] = torch.empty(shape, dtype=value.dtype, device=value.device)
    return node


def add_outputs(graph: Graph, nodes: Sequence[Node]) -> None:
    """Let a graph return more nodes, after what it returns."""
    output: Any = next(node for node in reversed(graph.nodes) if node.op == "output")
    output.args = ((*output.args[0], *nodes),)
