"""Stage 7: whether a decode graph is one and the same for every length of its caches, as a CUDA graph has to be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from gemkv_compile.compat import expr_of
from gemkv_compile.passes.decide import Rewrite, new_rows
from gemkv_compile.passes.lens import source_line, value_of
from gemkv_compile.passes.printing import op_name
from gemkv_compile.passes.symbols import free_symbols, static_int
from gemkv_compile.plan import Argument, Input


@dataclass(frozen=True)
class LengthReport:
    """Whether only the state of caches depends on their length; if not, why, at which node, and where that stands."""

    is_free: bool
    sentence: str = ""
    node: str = ""
    source: str = ""


def prove_length_free(graph: Graph, rewrites: Sequence[Rewrite], inputs: Sequence[Input]) -> LengthReport | None:
    """Prove that no size, stride or number of a rewritten graph depends on how long its caches are.

    A symbol that is not the batch's is taken to be such a length, whatever it is. What the executable prepares (page
    tables, lengths, tails, aligned padding) is left out: its sizes are those of its buffers.

    Args:
        graph: The rewritten graph.
        inputs: Where its inputs come from, in their order.
    Returns:
        None for a graph that is not a decode step over caches.
    """
    if not is_decode_step(rewrites):
        return None
    lengths = [_past_rows(rewrite) for rewrite in rewrites]
    for rewrite, length in zip(rewrites, lengths, strict=True):
        # A window that is full keeps its number of rows, and a static cache has as many as places; any other constant
        # is the length of one call.
        rows = static_int(length)
        if rows is not None and rows != rewrite.keep and rewrite.cache.buffer is None:
            sentence = f"this graph is for a past of exactly {rows} rows."
            return LengthReport(False, sentence, rewrite.cache.all_keys.name, source_line(rewrite.cache.all_keys))
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    prepared = {node for node, source in zip(placeholders, inputs, strict=True) if not isinstance(source, Argument)}
    for node, symbols in growing_nodes(graph, rewrites, prepared):
        names = ", ".join(sorted(map(str, symbols)))
        sentence = f"`{op_name(node)}` takes or gives a size or number that may change with the cache ({names})."
        return LengthReport(False, sentence, node.name, source_line(node))
    return LengthReport(True)


def is_decode_step(rewrites: Sequence[Rewrite]) -> bool:
    """Whether every rewritten cache has a past and gets one new row."""
    return bool(rewrites) and all(each.is_decode and each.cache.past_keys is not None for each in rewrites)


def growing_nodes(
    graph: Graph, rewrites: Sequence[Rewrite], prepared: set[Node]
) -> Iterator[tuple[Node, set[sympy.Symbol]]]:
    """Nodes of a decode step that take or give a size or number which may change with its caches, and its symbols.

    Args:
        prepared: Inputs that the executable prepares.
    """
    batch = free_symbols(new_rows(rewrite.cache)[0] for rewrite in rewrites)
    fixed = batch - free_symbols(map(_past_rows, rewrites))
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or _is_arithmetic(node):
            continue
        given = [value_of(source) for source in node.all_input_nodes if source not in prepared]
        symbols = {symbol for value in (*given, value_of(node)) for symbol in _symbols(value)} - fixed
        if symbols:
            yield node, symbols


def _past_rows(rewrite: Rewrite) -> Any:
    return value_of(rewrite.cache.past_keys).shape[rewrite.cache.seq_dim]


def _is_arithmetic(node: Node) -> bool:
    """Whether a node computes a number from numbers: what takes the result is asked instead."""
    return all(isinstance(value_of(each), _NUMBERS) for each in (node, *node.all_input_nodes))


def _symbols(value: Any) -> Iterator[sympy.Symbol]:
    """Symbols in a number, in the sizes and strides of a tensor, or in a tuple of these."""
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout == torch.strided else ()
        yield from free_symbols((*value.shape, *strides))
    elif isinstance(value, _NUMBERS):
        yield from expr_of(value).free_symbols  # type: ignore[arg-type]
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _symbols(item)


_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
