"""Whether a tensor of the graph is a mask_mod mapped over batch, heads, queries and keys, as create_mask does it."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from gemkv_compile import compat_flex
from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.masks.names import operation_name
from gemkv_compile.passes.rules.flex_body import Body
from gemkv_compile.passes.symbols import same_size

LEVELS = (4, 3, 2, 1)  # keys are mapped innermost


def is_mapped_body(mask: Node, body: Body) -> bool:
    """mask[b, h, q, kv] == body(b, h, q, kv), node by node."""
    inner: Any = mask
    for level in reversed(LEVELS):
        if (
            not isinstance(inner, Node)
            or not compat_flex.is_vmap(inner, compat_flex.VMAP_TENSORS)
            or len(inner.args) != 4
        ):
            return False
        if "_remove" not in inner.target.__name__ or (inner.args[1], inner.args[3]) != (level, 0):  # type: ignore[union-attr]
            return False
        inner = inner.args[0]
    return _Comparison(body, value_of(mask).shape).same(inner, body.result)


class _Comparison:
    """Compares operations between the vmaps with those of the body."""

    def __init__(self, body: Body, sizes: Any) -> None:
        self._body, self._sizes = body, sizes
        self._known: set[tuple[Node, Node]] = set()

    def same(self, ours: Any, theirs: Any) -> bool:
        """Whether an argument between the vmaps (`ours`) is computed as one of the body (`theirs`) is."""
        if isinstance(theirs, (tuple, list)):
            alike = isinstance(ours, (tuple, list)) and len(ours) == len(theirs)
            return alike and all(map(self.same, ours, theirs))
        if not isinstance(theirs, Node):
            return not isinstance(ours, Node) and type(ours) is type(theirs) and bool(ours == theirs)
        if theirs in self._body.captured:
            return _same_input(ours, self._body.captured[theirs])
        if not isinstance(ours, Node):
            return False
        ours, theirs = _skip_noops(ours), _skip_noops(theirs)
        if (ours, theirs) not in self._known:
            is_index = theirs in self._body.axes
            if not (self._same_index(ours, theirs) if is_index else self._same_operation(ours, theirs)):
                return False
            self._known.add((ours, theirs))
        return True

    def _same_index(self, ours: Node, theirs: Node) -> bool:
        """vmap's slice of arange(0, size) along the axis of this index"""
        axis = self._body.axes.index(theirs)
        if not compat_flex.is_vmap(ours, compat_flex.VMAP_TENSORS) or "_add" not in ours.target.__name__:  # type: ignore[union-attr]
            return False
        numbers: Any = ours.args[0]
        if (
            ours.args[1:] != (0, axis + 1)
            or operation_name(numbers) != "arange"
            or not numbers.kwargs.keys() <= {"device"}
        ):
            return False
        start = numbers.args[0] if len(numbers.args) == 2 else 0
        end = value_of(numbers.args[-1]) if len(numbers.args) in (1, 2) else -1
        return start == 0 and same_size(end, self._sizes[axis])

    def _same_operation(self, ours: Node, theirs: Node) -> bool:
        left, right = _operation(ours), _operation(theirs)
        return left[0] is not None and left[0] == right[0] and all(map(self._same_part, left[1:], right[1:]))

    def _same_part(self, ours: Any, theirs: Any) -> bool:
        if isinstance(theirs, dict):
            return ours.keys() == theirs.keys() and all(self.same(ours[name], theirs[name]) for name in theirs)
        return self.same(ours, theirs)


def _operation(node: Node) -> tuple[str | None, Any, dict[str, Any]]:
    """Name, arguments and keywords; vmap writes x[i, j] as aten.index(x, [i, j])."""
    name, args = operation_name(node), tuple(node.args)
    if name in ("getitem", "index"):
        indices = args[1] if isinstance(args[1], (tuple, list)) else (args[1],)
        return "getitem", (args[0], tuple(indices)), dict(node.kwargs)
    return name, args, dict(node.kwargs)


def _same_input(ours: Any, captured: Any) -> bool:
    """The same tensor, or an equal size."""
    left, right = value_of(ours), value_of(captured)
    if isinstance(left, (int, torch.SymInt)) and isinstance(right, (int, torch.SymInt)):
        return same_size(left, right)
    return ours is captured


def _skip_noops(node: Node) -> Node:
    """The node under conversions to the dtype and device that it has; canonicalise takes them from the graph only."""
    while operation_name(node) == "to" and isinstance(node.args[0], Node):
        before, after = value_of(node.args[0]), value_of(node)
        if (before.dtype, before.device) != (after.dtype, after.device):
            break
        node = node.args[0]
    return node
