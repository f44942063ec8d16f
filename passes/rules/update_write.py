"""Rule: rows are written in place into a buffer of a fixed number of places, at a position.

Reads Transformers' StaticLayer (index_copy_ at arange(q) + a counter), gpt-fast's `cache[:, :, input_pos] = rows`,
slices and narrow with copy_, slice_scatter, into an input of the graph (a cache's tensor, a registered buffer) or into
zeros that the graph makes and returns. Places are consecutive; a position that only the call knows is checked there.
StaticSlidingWindowLayer moves all rows up by one (roll), assigns the last and copies all back, or copies the last rows
of a long prompt into its zeros.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from gemkv_compile.compat import expr_of
from gemkv_compile.passes.effects import writes_of
from gemkv_compile.passes.lens import argument, op_of, rank_of, shape_of, value_of
from gemkv_compile.passes.masks.names import operation_name
from gemkv_compile.passes.rules.positions import (
    first_rows,
    one_index,
    position_of,
    position_of_slice,
    same_if_any,
    same_position,
)
from gemkv_compile.passes.rules.update_cat import Rows, last_rows, swaps_heads_and_rows
from gemkv_compile.passes.sites import Attention, Cache, Position, Refusal
from gemkv_compile.passes.symbols import is_known, same_size, static_int

NAME = "update_write"
_CREATIONS = (torch.zeros, torch.empty)


@dataclass(frozen=True)
class Write:
    """The rows `new` are written into `buffer` along `seq_dim`, from `position` on, by `node` and its helper `view`."""

    node: Node
    view: Node | None
    buffer: Node
    new: Node
    seq_dim: int
    position: Position
    rolls: bool = False
    fills: bool = False  # with the last of the new rows; attention reads these themselves
    gives_new: bool = False  # the node is a new tensor with the rows in it, and the buffer stays as it is

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes that write, and the views that they write through."""
        if self.gives_new:
            return ()
        return (self.node,) if self.view is None else (self.node, self.view)


def match(attention: Attention, writes: Mapping[Node, Write]) -> tuple[Rows, Rows] | Refusal | None:
    """Read keys and values of an attention as buffers that the graph writes rows into; None if they are not."""
    keys, values = (_read(source, writes) for source in (attention.keys, attention.values))
    if keys is None or values is None:
        return None
    alike = keys.seq_dim == values.seq_dim and keys.write.gives_new == values.write.gives_new
    alike = alike and (keys.past is None) == (values.past is None)
    if (
        not alike
        or not same_if_any(keys.first, values.first)
        or not same_position(keys.write.position, values.write.position)
    ):
        return Refusal("cache_shapes_differ", "keys and values are not cached in the same way.", attention.node)
    if keys.first is not None and not same_size(keys.first, shape_of(keys.new)[keys.seq_dim]):  # type: ignore[index]
        sentence = "attention sees the first rows of a static cache, and not as many as there are new ones."
        return Refusal("rows_hidden", sentence, attention.node)
    return keys, values


def _read(source: Node, writes: Mapping[Node, Write]) -> Rows | None:
    """Keys or values of an attention, [batch, heads, rows, dim], as the rows of a buffer after its write."""
    buffers = {**writes, **{write.node: write for write in writes.values()}}
    buffers |= {write.new: write for write in writes.values() if write.fills}
    node, seq_dim, first = source, 2, None
    while node not in buffers:
        rows = first_rows(node, seq_dim)
        if op_of(node) == "contiguous":
            node = node.args[0]  # type: ignore[assignment]
        elif swaps_heads_and_rows(node):
            node, seq_dim = node.args[0], 3 - seq_dim  # type: ignore[assignment]
        elif rows is not None and first is None:
            node, first = node.args[0], rows  # type: ignore[assignment]
        else:
            return None
    write = buffers[node]
    if write.seq_dim != seq_dim:
        return None
    past = write.buffer if write.buffer.op == "placeholder" else None
    if write.fills:
        if node is not write.new or first is not None:
            return None
        first = shape_of(node)[seq_dim]  # type: ignore[index]
    return Rows(write.node if write.gives_new else write.buffer, past, write.new, seq_dim, None, first, write)


def check(cache: Cache) -> Refusal | None:
    """Nothing reads a buffer before its write, and its counter is read before the graph changes that."""
    if cache.buffer is None:
        return None
    graph, counter = cache.all_keys.graph, cache.buffer.position.scalar
    order = {node: i for i, node in enumerate(graph.nodes)}
    for buffer in (cache.all_keys, cache.all_values) if cache.buffer.in_place else ():
        own = [node for node in cache.buffer.writes if buffer in node.all_input_nodes]
        written = max(order[user] for node in own for user in (node, *node.users) if user in cache.buffer.writes)
        others = (user for user in buffer.users if user.op != "output" and not cache.buffer.writes_through(user))
        early = next((user for user in others if order[user] < written), None)
        if early is not None:
            sentence = "a static cache is read before this call's rows are written into it."
            return Refusal("cache_used_elsewhere", sentence, early)
    read_at = cache.buffer.position.read_at
    for writer, memory in writes_of(graph).items() if counter is not None and read_at is not None else ():
        if counter in memory and order[writer] < order[read_at]:
            return Refusal("written_in_place", "the position in a static cache is changed before it is read.", writer)
    return None


def find_writes(graph: Graph) -> dict[Node, Write]:
    """The buffers of the graph that are written once, by a form that is read here."""
    found: dict[Node, list[Write | None]] = {}
    for node in graph.nodes:
        for buffer, write in _written(node):
            found.setdefault(buffer, []).append(write)
    once = {buffer: ws[0] for buffer, ws in found.items() if len(ws) == 1 and ws[0] is not None}
    return once | {node: write for node in graph.nodes if (write := _scattered(node)) is not None}


def _scattered(node: Node) -> Write | None:
    """slice_scatter and index_copy give a new tensor with the rows in it."""
    name = _name(node)
    if name not in ("slice_scatter", "index_copy") or not node.args or not _is_buffer(node.args[0]):
        return None
    buffer: Any = node.args[0]
    if name == "index_copy":
        dim, index, new = (argument(node, i, n) for i, n in ((1, "dim"), (2, "index"), (3, "source")))
        position = position_of(index, node)
    else:
        new, dim = argument(node, 1, "src"), argument(node, 2, "dim", 0)
        ends = (argument(node, i, n) for i, n in ((3, "start"), (4, "end"), (5, "step")))
        position = position_of_slice(slice(*ends), buffer, dim) if isinstance(dim, int) else None
    write = _write(node, None, buffer, new, dim % 4 if isinstance(dim, int) else -1, position)
    return None if write is None else replace(write, gives_new=True)


def _written(node: Node) -> Iterator[tuple[Node, Write | None]]:
    name = _name(node)
    if name == "index_copy_" and len(node.args) == 4 and not node.kwargs:
        buffer, dim, index, new = node.args
        yield from _indexed(node, buffer, dim, index, new)
    elif node.target is operator.setitem:
        buffer, key, new = node.args
        yield from _assigned(node, buffer, key, new)
    elif name == "copy_" and len(node.args) == 2 and not node.kwargs and isinstance(node.args[0], Node):
        yield from _copied(node, node.args[0], node.args[1])


def _name(node: Node) -> str:
    """The name of an operation, with the underscore of one that writes."""
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "").split(".")[0]


def _indexed(node: Node, buffer: Any, dim: Any, index: Any, new: Any) -> Iterator[tuple[Node, Write | None]]:
    if _is_buffer(buffer) and isinstance(dim, int) and dim % 4 in (1, 2):
        position = position_of(index, node)
        yield buffer, _write(node, None, buffer, new, dim % 4, position)


def _assigned(node: Node, buffer: Any, key: Any, new: Any) -> Iterator[tuple[Node, Write | None]]:
    if not _is_buffer(buffer):
        return
    at = one_index(key)
    if at is None:
        yield buffer, None
        return
    dim, part = at
    position = position_of_slice(part, buffer, dim) if isinstance(part, slice) else position_of(part, node)
    yield buffer, _write(node, None, buffer, new, dim, position)


def _copied(node: Node, view: Node, new: Any) -> Iterator[tuple[Node, Write | None]]:
    if _is_buffer(view):
        yield view, _moved(node, view, new)
        return
    buffer: Any = view.args[0] if view.args else None
    if not _is_buffer(buffer) or len(view.users) != 1 or view.op == "placeholder":
        return
    dim, position = -1, None
    if op_of(view) == "getitem" and (at := one_index(view.args[1])) is not None and isinstance(at[1], slice):
        dim, position = at[0], position_of_slice(at[1], buffer, at[0])
    elif operation_name(view) == "narrow" and len(view.args) == 4 and isinstance(view.args[1], int):
        start = value_of(view.args[2])
        dim, position = view.args[1] % 4, Position(start=start) if isinstance(start, int | torch.SymInt) else None
    yield buffer, _write(node, view, buffer, new, dim, position)


def _moved(node: Node, buffer: Node, source: Any) -> Write | None:
    """copy_ of the buffer's own rows after a roll, with a new last one; or of the last rows of a prompt."""
    for dim in (1, 2):
        if last_rows(source, dim) is not None and buffer.op != "placeholder":
            places = _write(node, None, buffer, source, dim, Position(start=0))
            new = source.args[0]
            return None if places is None or rank_of(new) != 4 else replace(places, new=new, fills=True)
        if (assign := _new_last(source, buffer, dim)) is not None and set(source.users) == {assign, node}:
            write = _write(node, assign, buffer, assign.args[2], dim, Position())
            is_one = write is not None and static_int(shape_of(write.new)[dim]) == 1  # type: ignore[index]
            return replace(write, rolls=True) if write is not None and is_one else None
    return None


def _new_last(rolled: Any, buffer: Node, dim: int) -> Node | None:
    """The assignment to the last place of roll(buffer, -1, dim), or None."""
    if not isinstance(rolled, Node) or operation_name(rolled) != "roll" or rolled.args[:2] != (buffer, -1):
        return None
    dims = rolled.args[2] if len(rolled.args) > 2 else rolled.kwargs.get("dims")
    if not isinstance(dims, int) or dims % 4 != dim:
        return None
    for user in rolled.users:
        if user.target is operator.setitem and user.args[0] is rolled:
            at = one_index(user.args[1])
            return user if at is not None and at[0] == dim and _is_last(at[1]) else None
    return None


def _is_last(index: Any) -> bool:
    """Whether an index is torch.tensor([-1])."""
    return op_of(index) == "tensor" and index.args[0] in ([-1], (-1,))


def _write(node: Node, view: Node | None, buffer: Any, new: Any, dim: int, position: Position | None) -> Write | None:
    """The write, if it is one of whole rows of the buffer's dtype; the operations broadcast and convert others."""
    whole, rows = shape_of(buffer), shape_of(new) if isinstance(new, Node) else None
    if position is None or whole is None or rows is None or len(rows) != 4 or dim not in (1, 2):
        return None
    same = all(same_size(a, b) for i, (a, b) in enumerate(zip(whole, rows, strict=True)) if i != dim)
    values = value_of(buffer), value_of(new)
    if not same or values[0].dtype != values[1].dtype:
        return None
    if position.rows is not None and not is_known(
        sympy.Eq(position.rows, expr_of(rows[dim])), rows[dim], position.start
    ):
        return None
    return Write(node, view, buffer, new, dim, position)


def _is_buffer(node: Any) -> bool:
    """Whether a node is memory that a cache may be: an input of four dimensions, or zeros that the graph makes."""
    if not isinstance(node, Node) or rank_of(node) != 4:
        return False
    made = node.op == "call_function" and (node.target in _CREATIONS or operation_name(node) in ("zeros", "zeros_like"))
    return node.op == "placeholder" or made
