"""The part of the rewrite that static caches need: memory of a fixed number of places becomes rows of pages."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from gemkv_compile.passes.decide import Rewrite
from gemkv_compile.passes.effects import has_effect
from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.sites import Cache
from gemkv_compile.passes.symbols import SymbolTable
from gemkv_compile.plan import BufferPlan


def buffer_plan(
    cache: Cache, placeholders: list[Node], symbols: SymbolTable, masks: Mapping[Node | None, GraphModule]
) -> BufferPlan | None:
    """How the call finds where a static cache's rows go; None for a cache without fixed places."""
    if cache.buffer is None:
        return None
    position, index = cache.buffer.position, placeholders.index
    return BufferPlan(
        places=symbols.size(cache.buffer.places),
        start=None if position.start is None else symbols.size(position.start),
        scalar=None if position.scalar is None else index(position.scalar),
        vector=None if position.vector is None else index(position.vector),
        only_new=cache.buffer.only_new,
        rolls=cache.buffer.rolls,
        in_place=cache.buffer.in_place,
        masks=tuple(masks.get(reader.mask) for reader in cache.readers if reader.over_places),
    )


def mask_functions(graph: Graph, rewrites: tuple[Rewrite, ...]) -> dict[Node | None, GraphModule]:
    """The masks over places of static caches as functions of the graph's inputs; not those with effects in them."""
    static = [rewrite.cache for rewrite in rewrites if rewrite.cache.buffer is not None]
    readers = [reader for cache in static for reader in cache.readers]
    kept = {node for cache in static for node in (cache.all_keys, cache.all_values)}
    found: dict[Node | None, GraphModule] = {}
    for mask in {reader.mask for reader in readers if reader.over_places and reader.mask is not None}:
        needed = _ancestors(mask)
        if not kept & needed and not any(has_effect(node) for node in needed if node.op != "placeholder"):
            copy, nodes = Graph(), dict[Node, Node]()
            for node in graph.nodes:
                if node.op == "placeholder" or node in needed:
                    nodes[node] = copy.node_copy(node, nodes.__getitem__)
            copy.output(nodes[mask])
            found[mask] = GraphModule(graph.owning_module or torch.nn.Module(), copy)
    return found


def _ancestors(node: Node) -> set[Node]:
    """A node and all that it is computed from."""
    found, pending = {node}, [node]
    while pending:
        new = set(pending.pop().all_input_nodes) - found
        found |= new
        pending += new
    return found


def erase_writes(graph: Graph, cache: Cache) -> None:
    """Take the writes into a static cache out of the graph: the cache itself stands for what they return."""
    assert cache.buffer is not None
    writes = cache.buffer.writes
    for node in writes:
        buffer = cache.all_keys if cache.all_keys in _under(node) else cache.all_values
        node.replace_all_uses_with(buffer, delete_user_cb=lambda user: user not in writes)
    for node in writes:
        graph.erase_node(node)


def _under(node: Node) -> set[Node]:
    """What a write, or the view that it writes through, is given."""
    return {above for arg in node.all_input_nodes for above in (arg, *arg.all_input_nodes)}


def by_tokens(graph: Graph, symbols: SymbolTable, mask: Node, seq_lens: Node, more: Any) -> Node:
    """A mask over the places of a static cache as one whose last column is the newest token, of seq_lens + more."""
    value = value_of(mask)
    places = value.shape[-1]
    count, before, last = (symbols.emit(graph, n) for n in (places, places - more, places - 1))
    steps, newest = (value.new_empty((n,), dtype=torch.int64) for n in (places, 1))
    columns = graph.call_function(torch.arange, (count,), {"device": value.device})
    columns.meta["example_value"] = steps
    ends = graph.call_function(operator.getitem, (seq_lens, slice(0, 1)))
    ends.meta["example_value"] = newest.to(torch.int32)
    shift = graph.call_function(operator.sub, (ends, before))
    shift.meta["example_value"] = newest.to(torch.int32)
    moved = graph.call_function(operator.add, (columns, shift))
    moved.meta["example_value"] = steps
    there = graph.call_method("clamp", (moved, 0, last))
    there.meta["example_value"] = steps
    result = graph.call_method("index_select", (mask, 3, there))
    result.meta["example_value"] = value.index_select(3, steps)
    return result
