"""Small edits of a graph that keep example values."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from gemkv_compile.passes.lens import op_of, value_of
from gemkv_compile.passes.symbols import SymbolTable, same_size


def call(graph: Graph, method: str, arguments: tuple[Any, ...], example: Any) -> Node:
    """Insert a method call with its example value."""
    node = graph.call_method(method, arguments)
    node.meta["example_value"] = example
    return node


def whole_mask(graph: Graph, symbols: SymbolTable, mask: Node | None, query: Node, keys: Node) -> Node | None:
    """A dense mask as [batch|1, Hq|1, q_len, kv_len], for queries [.., q_len, D] and keys [.., kv_len, D]."""
    if mask is None:
        return None
    while value_of(mask).ndim < 4:
        mask = call(graph, "unsqueeze", (mask, 0), value_of(mask).unsqueeze(0))
    wanted = value_of(query).shape[2], value_of(keys).shape[2]
    value = value_of(mask)
    if all(same_size(a, b) for a, b in zip(value.shape[2:], wanted, strict=True)):
        return mask
    sizes = [-1, -1, *(symbols.emit(graph, size) for size in wanted)]
    return call(graph, "expand", (mask, *sizes), value.expand(-1, -1, *wanted))


def replace_attention(graph: Graph, old: Node, new: Node) -> Node:
    """Let `new` stand for `old`; users that may depend on how memory is laid out get the layout that eager gives.

    Returns:
        What the users of `old` have now.
    """
    before, after = value_of(old), value_of(new)
    if not all(map(_ignores_layout, old.users)) and before.is_contiguous() and not after.is_contiguous():
        with graph.inserting_after(new):
            new = call(graph, "contiguous", (new,), before)
    old.replace_all_uses_with(new)
    return new


def _ignores_layout(user: Node) -> bool:
    """Whether a user's result, and its own layout, are the same for any layout of its input."""
    if op_of(user) in ("transpose", "permute"):
        return all(map(_ignores_layout, user.users))
    return user.target in ("reshape", "contiguous", torch.reshape)
