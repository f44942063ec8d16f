"""Where rows are written: indices and positions along one dimension of a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from gemkv_compile.compat import expr_of
from gemkv_compile.passes.lens import op_of, rank_of, shape_of, value_of
from gemkv_compile.passes.masks.names import operation_name
from gemkv_compile.passes.sites import Position
from gemkv_compile.passes.symbols import same_size


def one_index(key: Any) -> tuple[int, Any] | None:
    """The dimension and the index of a key that takes everything of the other dimensions."""
    parts = list(key) if isinstance(key, tuple | list) else [key]
    if any(part is None for part in parts) or len(parts) > 4:
        return None
    if any(part is Ellipsis for part in parts):
        at = next(i for i, part in enumerate(parts) if part is Ellipsis)
        parts[at : at + 1] = [slice(None)] * (5 - len(parts))
    chosen = [(i, part) for i, part in enumerate(parts) if part != slice(None)]
    return chosen[0] if len(chosen) == 1 else None


def position_of_slice(part: slice, buffer: Node, dim: int) -> Position | None:
    """The position that a slice of a dimension starts at, with its number of rows; None if it is not read."""
    start, stop = (value_of(end) for end in (part.start or 0, part.stop))
    if part.step not in (None, 1) or not isinstance(start, int | torch.SymInt):
        return None
    stop = shape_of(buffer)[dim] if stop is None else stop  # type: ignore[index]
    return Position(start=start, rows=expr_of(stop) - expr_of(start)) if isinstance(stop, int | torch.SymInt) else None


def position_of(index: Any, write: Node) -> Position | None:
    """Where an index tensor points: a counter and arange(q), or an input whose numbers the call checks."""
    if not isinstance(index, Node) or rank_of(index) != 1 or value_of(index).dtype not in (torch.int32, torch.int64):
        return None
    if index.op == "placeholder":
        return Position(vector=index)
    if op_of(index) == "add" and not index.kwargs:
        pairs: tuple[Any, Any] = (index.args, index.args[::-1])
        for steps, counter in pairs:
            while op_of(counter) == "to":  # on its way to the keys' device
                counter = counter.args[0]
            is_counter = isinstance(counter, Node) and counter.op == "placeholder" and rank_of(counter) == 0
            if is_counter and _from_zero(steps):
                return Position(scalar=counter, read_at=index)
    return Position(start=0) if _from_zero(index) else None


def _from_zero(node: Any) -> bool:
    """Whether a node is arange(n)."""
    if not isinstance(node, Node) or operation_name(node) != "arange":
        return False
    return bool(len(node.args) == 1 or (len(node.args) == 2 and node.args[0] == 0))


def first_rows(node: Node, seq_dim: int) -> Any:
    """N, if the node is its argument's first N rows, x[:, :, :N, :]; else None. N may be a SymInt."""
    at = one_index(node.args[1]) if op_of(node) == "getitem" and rank_of(node) == 4 else None
    if at is None or at[0] != seq_dim or not isinstance(at[1], slice) or at[1].step not in (None, 1):
        return None
    stop = value_of(at[1].stop)
    whole = at[1].start in (None, 0) and isinstance(stop, int | torch.SymInt)
    return stop if whole else None


def same_position(left: Position, right: Position) -> bool:
    """Whether two positions are known to be one."""
    same_inputs = left.scalar is right.scalar and left.vector is right.vector
    return same_inputs and same_if_any(left.start, right.start)


def same_if_any(left: Any, right: Any) -> bool:
    """Whether two sizes are known to be equal, or both are None."""
    return left is right or (left is not None and right is not None and same_size(left, right))
