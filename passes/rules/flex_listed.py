"""The keys that a block mask shows, from its own tensors: nothing has to be proven, and the mask is dense.

A key is shown where its block is listed as full, or is listed as partial and mask_mod shows it. This is what
FlexAttention's kernels compute, of lists that name no block twice. Source: torch.nn.attention.flex_attention.BlockMask.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch.fx import Node

from gemkv_compile.compat import expr_of
from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.rules.flex_body import KEY, QUERY, Lanes
from gemkv_compile.passes.symbols import is_known, same_size, static_int

_INTEGERS = (torch.int32, torch.int64)


def is_readable(call: Node, num_blocks: Any, order: Any, block: tuple[Any, Any]) -> bool:
    """Whether lists of blocks [B|1, Hq|1, blocks of queries(, blocks of keys)] cover the scores of a call."""
    counts, numbers = value_of(num_blocks), value_of(order)
    if not all(isinstance(each, torch.Tensor) and each.dtype in _INTEGERS for each in (counts, numbers)):
        return False
    if counts.dim() != 3 or numbers.dim() != 4 or not all(map(same_size, counts.shape, numbers.shape)):
        return False
    query, keys = value_of(call.args[0]), value_of(call.args[1])
    alike = zip(numbers.shape[:2], query.shape[:2], strict=True)
    if not all(static_int(own) == 1 or same_size(own, wanted) for own, wanted in alike):
        return False
    covered = zip(numbers.shape[2:], block, (query.shape[2], keys.shape[2]), strict=True)
    return all(isinstance(size, int) and _covers(rows, size, wanted) for rows, size, wanted in covered)


def _covers(blocks: Any, size: int, wanted: Any) -> bool:
    return is_known(sympy.Ge(expr_of(blocks) * size, expr_of(wanted)), blocks, wanted)


def listed(lanes: Lanes, num_blocks: Node, order: Node, block: tuple[int, int]) -> Node:
    """Where a query's and key's block is one of the first `num_blocks` in `order`: bool [B|1, Hq|1, q_len, kv_len]."""
    lanes.share((num_blocks, order))
    ones = lanes.call("call_function", torch.ones_like, (order,))
    place = lanes.call("call_method", "cumsum", (ones, -1))
    count = lanes.call("call_method", "unsqueeze", (num_blocks, -1))
    is_listed = lanes.call("call_function", operator.le, (place, count))
    # Numbers after the first `num_blocks` mean nothing, and need not be numbers of blocks.
    number = lanes.call("call_function", torch.where, (is_listed, order, 0))
    zeros = lanes.call("call_function", torch.zeros_like, (place,))
    index = lanes.call("call_method", "to", (number, torch.int64))
    added = lanes.call("call_method", "to", (is_listed, torch.int64))
    times = lanes.call("call_method", "scatter_add", (zeros, -1, index, added))
    shown = lanes.call("call_function", operator.gt, (times, 0))
    for axis, size in zip((QUERY, KEY), block, strict=True):
        at = lanes.call("call_function", operator.floordiv, (lanes.count(axis), size))
        shown = lanes.call("call_method", "index_select", (shown, axis, at))
    return shown
