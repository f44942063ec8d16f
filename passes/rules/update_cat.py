"""Rule: cached rows grow by torch.cat([past, new], dim), or start as the new rows themselves.

Reads Transformers' DynamicLayer (cat), its DynamicSlidingWindowLayer (cat, attention over all or over the last N rows,
the last W - 1 kept) and hand-written modules that return (keys, values) of a call and take them back as the past.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from gemkv_compile.compat import expr_of
from gemkv_compile.passes.lens import argument, op_of, rank_of, shape_of, value_of
from gemkv_compile.passes.sites import Refusal
from gemkv_compile.passes.symbols import is_known, same_size

NAME = "update_cat"


@dataclass(frozen=True)
class Rows:
    """Cached rows as attention reads them: `all_rows` = cat of `past` (or nothing) and `new` along `seq_dim`.

    With a `write` (`update_write.Write`), `all_rows` is the memory that it writes into.
    """

    all_rows: Node
    past: Node | None
    new: Node
    seq_dim: int
    visible: Any  # attention reads the last `visible` rows; None: all
    first: Any = None  # attention reads the first `first` rows of the memory; None: all
    write: Any = None


def match(source: Node, outputs: frozenset[Node]) -> Rows | Refusal | None:
    """Read the keys or values of an attention as cached rows.

    Args:
        source: [batch, num_kv_heads, kv_len, head_dim].
        outputs: Nodes that the graph returns, directly or as a slice of the last rows.
    Returns:
        None where no cache is involved.
    """
    node: Any = source
    seq_dim, visible = 2, None
    while True:
        if op_of(node) == "cat":
            return check(node, seq_dim, visible)
        if node in outputs:
            return Rows(node, None, node, seq_dim, visible)
        last = last_rows(node, seq_dim)
        if op_of(node) == "contiguous":
            node = node.args[0]
        elif swaps_heads_and_rows(node):
            node, seq_dim = node.args[0], 3 - seq_dim
        elif last is not None and visible is None:
            node, visible = node.args[0], last
        else:
            return None


def check(cat: Node, seq_dim: int, visible: Any) -> Rows | Refusal | None:
    """The cat appends to an input of the graph along the sequence dimension."""
    tensors = argument(cat, 0, "tensors")
    dim = argument(cat, 1, "dim", 0)
    if not isinstance(tensors, (list, tuple)) or len(tensors) != 2 or rank_of(cat) != 4 or dim % 4 != seq_dim:
        return None
    past, new = tensors
    if _is_empty_constant(past):
        return Rows(cat, None, new, seq_dim, visible)
    if past.op != "placeholder":
        return Refusal(
            "past_not_an_input",
            f"the past of this concatenation is computed in the graph ({past}); it must be an input, a cache.",
            cat,
        )
    before, after = shape_of(past), shape_of(new)
    if before == (0,):
        return Rows(cat, past, new, seq_dim, visible)
    assert before is not None and after is not None
    if len(before) != 4 or not all(
        same_size(a, b) for i, (a, b) in enumerate(zip(before, after, strict=True)) if i != seq_dim
    ):
        return Refusal(
            "cache_shapes_differ", "the past and the new rows do not have the same heads and head size.", cat
        )
    return Rows(cat, past, new, seq_dim, visible)


def last_rows(node: Node, seq_dim: int) -> Any:
    """N, if the node is its argument's last N rows, x[:, :, -N:, :]; else None. N may be a SymInt."""
    if op_of(node) != "getitem" or not isinstance(node.args[1], tuple) or rank_of(node) != 4:
        return None
    key = list(node.args[1])
    if any(part is Ellipsis for part in key):
        at = next(i for i, part in enumerate(key) if part is Ellipsis)
        key[at : at + 1] = [slice(None)] * (5 - len(key))
    key += [slice(None)] * (4 - len(key))
    if len(key) != 4 or any(part != slice(None) for i, part in enumerate(key) if i != seq_dim):
        return None
    part = key[seq_dim]
    if not isinstance(part, slice) or part.stop is not None or part.step not in (None, 1):
        return None
    start = value_of(part.start)
    return -start if start is not None and _is_negative(start) else None


def _is_negative(size: Any) -> bool:
    return is_known(expr_of(size) < 0, size)


def _is_empty_constant(node: Any) -> bool:
    """torch.tensor([]), which Transformers concatenates to at a cache's first update."""
    return op_of(node) == "tensor" and len(node.args[0]) == 0


def swaps_heads_and_rows(node: Any) -> bool:
    """Whether a node is its argument with dimensions 1 and 2 exchanged."""
    if op_of(node) == "transpose":
        return {argument(node, 1, "dim0") % 4, argument(node, 2, "dim1") % 4} == {1, 2}
    if op_of(node) == "permute":
        dims = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
        return [dim % 4 for dim in dims] == [0, 2, 1, 3]
    return False
