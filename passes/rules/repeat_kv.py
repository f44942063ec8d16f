"""Rule: keys or values repeated so that every query head has its own, head h taking kv head h // repeats."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from gemkv_compile.passes.lens import argument, op_of, rank_of, shape_of
from gemkv_compile.passes.symbols import same_size, static_int


def strip_repeat(node: Node) -> Node:
    """The tensor [batch, num_kv_heads, rows, head_dim] whose heads `node` repeats; `node` itself if it repeats none.

    Reads expand + reshape, repeat_interleave, and a plain expand of a single head. A tiled repetition (head h taking
    kv head h % num_kv_heads) means something else and is not read.
    """
    return _from_expand_reshape(node) or _from_interleave(node) or _from_single_head(node) or node


def _from_expand_reshape(node: Node) -> Node | None:
    """reshape(expand(x[:, :, None], [B, Hkv, n, S, D]), [B, Hkv * n, S, D])"""
    if op_of(node) not in ("reshape", "flatten") or rank_of(node) != 4:
        return None
    expanded: Any = node.args[0]
    if op_of(expanded) != "expand" or rank_of(expanded) != 5:
        return None
    inserted = expanded.args[0]
    source = _without_inserted_dim(inserted)
    if source is None:
        return None
    batch, heads, repeats, rows, dim = shape_of(expanded)  # type: ignore[misc]
    if not _same_shape(shape_of(source), (batch, heads, rows, dim)):
        return None
    static_heads, static_repeats = static_int(heads), static_int(repeats)
    if static_heads is None or static_repeats is None:
        return None
    return source if _same_shape(shape_of(node), (batch, static_heads * static_repeats, rows, dim)) else None


def _without_inserted_dim(node: Any) -> Node | None:
    """x, from x.unsqueeze(2) or x[:, :, None, :, :]."""
    if op_of(node) == "unsqueeze" and argument(node, 1, "dim") in (2, -3) and rank_of(node) == 5:
        return node.args[0]
    if op_of(node) == "getitem" and isinstance(node.args[1], tuple) and rank_of(node) == 5:
        key = node.args[1]
        full = [part == slice(None) for part in key]
        if len(key) >= 3 and key[2] is None and all(f for i, f in enumerate(full) if i != 2):
            return node.args[0]
    return None


def _from_interleave(node: Node) -> Node | None:
    """repeat_interleave(x, n, dim=1)"""
    if op_of(node) != "repeat_interleave" or rank_of(node) != 4:
        return None
    dim = argument(node, 2, "dim")
    return argument(node, 0, "input") if isinstance(argument(node, 1, "repeats"), int) and dim in (1, -3) else None


def _from_single_head(node: Node) -> Node | None:
    """x.expand(B, n, S, D) with x of one head"""
    if op_of(node) != "expand" or rank_of(node) != 4 or rank_of(node.args[0]) != 4:
        return None
    source: Any = node.args[0]
    before, after = shape_of(source), shape_of(node)
    assert before is not None and after is not None
    return source if before[1] == 1 and _same_shape(before[:1] + before[2:], after[:1] + after[2:]) else None


def _same_shape(left: tuple[Any, ...] | None, right: tuple[Any, ...] | None) -> bool:
    if left is None or right is None or len(left) != len(right):
        return False
    return all(same_size(a, b) for a, b in zip(left, right, strict=True))
