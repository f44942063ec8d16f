"""Bodies of score_mod and mask_mod, and how what they compute per (b, h, q, kv) is put into the graph as a tensor."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from gemkv_compile.compat import expr_of, fake_mode_of
from gemkv_compile.passes.effects import first_write
from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.masks.names import operation_name
from gemkv_compile.passes.symbols import SymbolTable

BATCH, HEAD, QUERY, KEY = range(4)
_ELEMENTWISE = frozenset(
    """
    add radd sub subtract rsub mul multiply rmul floordiv floor_divide mod remainder neg negative abs absolute
    minimum maximum le less_equal lt less ge greater_equal gt greater eq ne not_equal and rand bitwise_and or ror
    bitwise_or xor rxor bitwise_xor invert inv bitwise_not logical_and logical_or logical_xor logical_not where
    masked_fill to bool int long float
    """.split()
)
_CREATION = frozenset(("new_ones", "new_zeros"))
_GATHERS = frozenset(("getitem", "index"))
_INTEGERS = (torch.int32, torch.int64)


class Body:
    """The graph of a score_mod or mask_mod.

    Attributes:
        inputs: (score,) b, h, q, kv, each a number, then captured tensors and sizes.
        result: What it returns.
    """

    def __init__(self, graph: Graph, num_numbers: int, captured: Sequence[Any]) -> None:
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.axes = self.inputs[num_numbers - 4 : num_numbers]
        self.captured = dict(zip(self.inputs[num_numbers:], captured, strict=True))
        output = next(node for node in reversed(graph.nodes) if node.op == "output")
        returned = output.args[0]
        self.result: Any = returned[0] if isinstance(returned, (tuple, list)) else returned

    def shows_all(self) -> bool:
        """Whether it returns True whatever its arguments."""
        return operation_name(self.result) == "new_ones"

    def unreadable(self, result: Any) -> str | None:
        """Why a result is not a condition that `Lanes.inline` can compute for all (b, h, q, kv) at once."""
        if not isinstance(result, Node) or not isinstance(value_of(result), torch.Tensor):
            return f"the mask is {result!r}, no tensor"
        if value_of(result).dtype is not torch.bool:
            return f"the mask is {value_of(result).dtype}, not bool"
        if value_of(result).dim() != 0:
            return f"the mask has {value_of(result).dim()} dimensions for one query and key"
        nodes, pending = set(), [result]
        while pending:
            node = pending.pop()
            if node in nodes or node in self.axes or node in self.captured:
                continue
            nodes.add(node)
            if node.op == "placeholder":
                return "the mask depends on the scores"
            if not self._readable(node):
                name = operation_name(node) or getattr(node.target, "__name__", str(node.target))
                return f"the mask goes through `{name}` (at {node})"
            pending += node.all_input_nodes
        return None

    def depends_on(self, axis: int) -> bool:
        """Whether the result takes the value of an index."""
        users = self.axes[axis].users
        return any(operation_name(user) not in _CREATION or self.axes[axis] is not user.args[0] for user in users)

    def gather(self, node: Node) -> tuple[Node, tuple[Any, ...]]:
        """(captured tensor, indices) of tensor[i, j] or tensor[i][j]."""
        indices: tuple[Any, ...] = ()
        while operation_name(node) in _GATHERS:
            own = node.args[1]
            indices = (*(own if isinstance(own, (tuple, list)) else (own,)), *indices)
            node = node.args[0]  # type: ignore[assignment]
        return node, indices

    def _readable(self, node: Node) -> bool:
        """An operation on numbers that gives a number, or part of a gather of one number."""
        name = operation_name(node) if node.op in ("call_function", "call_method") else None
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or "out" in node.kwargs:
            return False
        if name in _GATHERS:
            source, indices = self.gather(node)
            return source in self.captured and not node.kwargs and all(map(_is_index, indices))
        tensors = [arg for arg in node.all_input_nodes if isinstance(value_of(arg), torch.Tensor)]
        if value.dim() != 0 or any(value_of(arg).dim() != 0 for arg in tensors):
            return False
        return name in _ELEMENTWISE or (name in _CREATION and tuple(_size(node)) == ())


def _is_index(item: Any) -> bool:
    if isinstance(item, Node):
        value = value_of(item)
        return isinstance(value, torch.Tensor) and value.dim() == 0 and value.dtype in _INTEGERS
    return isinstance(item, int) and not isinstance(item, bool)


def _size(node: Node) -> Any:
    size = node.args[1] if len(node.args) > 1 else node.kwargs.get("size")
    return size if isinstance(size, (tuple, list)) and len(node.args) < 3 else (None,)


def _stand_in(arg: Any) -> Any:
    """The example value of an argument; Dynamo's own belong to another fake mode than what is made here."""
    value = value_of(arg)
    if isinstance(value, torch.Tensor) and not arg.meta.get("flex_lane"):
        return torch.empty(value.shape, dtype=value.dtype, device=value.device)
    return value


class Lanes:
    """The numbers of a body for all (b, h, q, kv) at once: tensors of four dimensions, put before a call.

    Equal nodes are made once, so that layers share their masks. Every number has four dimensions, also a constant:
    dtypes then promote as those of numbers among each other.
    """

    def __init__(self, call: Node) -> None:
        self._graph, self._call = call.graph, call
        query, keys = value_of(call.args[0]), value_of(call.args[1])
        self._sizes = (*query.shape[:3], keys.shape[2])
        self._device, self._mode = query.device, fake_mode_of([query])
        self._symbols = SymbolTable(call.graph)
        self._reuse = True

    @property
    def sizes_are_known(self) -> bool:
        """Whether batch, heads and lengths can be computed in the graph."""
        return all(self._symbols.knows(size) for size in self._sizes)

    def inline(self, body: Body, result: Node) -> Node:
        """The result of a body, [B|1, Hq|1, q_len|1, kv_len|1]; `body.unreadable(result)` is None."""
        done: dict[Node, Any] = {}
        self.share(tuple(body.captured.values()))

        def compute(node: Any) -> Any:
            if not isinstance(node, Node):
                return node
            if node not in done:
                done[node] = self._number(body, node, compute)
            return done[node]

        return compute(result)

    def call(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
        """A node before the call, with its example value; an equal one if there is."""
        kwargs = kwargs or {}
        for node in self._graph.find_nodes(op=op, target=target):
            if self._reuse and node.meta.get("flex_lane") and (node.args, node.kwargs) == (args, kwargs):
                return node
        with self._graph.inserting_before(self._call):
            node = self._graph.create_node(op, target, args, kwargs)
        with self._mode, torch.no_grad():
            values, named = map_aggregate((args, kwargs), _stand_in)
            function = target if op == "call_function" else getattr(values[0], target)
            value = function(*(values if op == "call_function" else values[1:]), **named)
        node.meta.update(example_value=value, stack_trace=self._call.meta.get("stack_trace"), flex_lane=True)
        return node

    def _number(self, body: Body, node: Node, compute: Any) -> Any:
        if node in body.axes:
            return self._index(body.axes.index(node))
        if node in body.captured:
            given = body.captured[node]
            is_number = isinstance(value_of(given), torch.Tensor) and value_of(given).dim() == 0
            return self._wide(given) if is_number else given
        if operation_name(node) in _GATHERS:
            source, indices = body.gather(node)
            arguments = (body.captured[source], tuple(map(compute, indices)))
            return self._wide(self.call("call_function", operator.getitem, arguments))
        if operation_name(node) in _CREATION:
            options = {name: value for name, value in node.kwargs.items() if name != "size"}
            return self.call("call_method", node.target, (compute(node.args[0]), (1, 1, 1, 1)), options)
        args, kwargs = map_aggregate((node.args, dict(node.kwargs)), compute)
        return self._wide(self.call(node.op, node.target, args, kwargs))

    def _index(self, axis: int) -> Node:
        """0, 1, 2, ... along one of the four dimensions."""
        return self._shaped(self.count(axis), axis)

    def count(self, axis: int) -> Node:
        """0, 1, 2, ... as many as there are along an axis, of one dimension."""
        size = self._sizes[axis]
        for node in self._graph.find_nodes(op="call_function", target=torch.arange):
            if node.meta.get("flex_size") == (expr_of(size), self._device):
                return node
        with self._graph.inserting_before(self._call):
            length = self._symbols.emit(self._graph, size)
        count = self.call("call_function", torch.arange, (length,), {"device": self._device})
        count.meta["flex_size"] = (expr_of(size), self._device)
        return count

    def share(self, tensors: Sequence[Any]) -> None:
        """Let equal nodes be made once if none of these tensors, which they are made of, is written in the graph."""
        nodes = [each for each in tensors if isinstance(value_of(each), torch.Tensor)]
        self._reuse = first_write(nodes) is None

    def _shaped(self, node: Node, axis: int) -> Node:
        shape = [-1 if position == axis else 1 for position in range(4)]
        return self.call("call_method", "view", (node, *shape))

    def _wide(self, node: Node) -> Node:
        return node if value_of(node).dim() == 4 else self.call("call_method", "view", (node, 1, 1, 1, 1))
