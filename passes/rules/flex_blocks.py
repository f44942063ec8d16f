"""Whether a block mask leaves out only what its mask_mod hides, and calls full only what it shows.

FlexAttention skips blocks that the block tensors leave out, and does not ask mask_mod in those that they call full.
That follows from mask_mod if one block covers all scores, or if the tensors are computed in the graph, from this
mask_mod and for these lengths, as torch.nn.attention.flex_attention.create_block_mask does. The blocks of queries
serve the backward of keys and values only. Where it does not follow, the tensors are read: `shown`, densely.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from gemkv_compile.passes.effects import first_write
from gemkv_compile.passes.lens import argument, value_of
from gemkv_compile.passes.masks.names import operation_name
from gemkv_compile.passes.rules.flex_body import BATCH, HEAD, Body, Lanes
from gemkv_compile.passes.rules.flex_listed import is_readable, listed
from gemkv_compile.passes.rules.flex_vmap import is_mapped_body
from gemkv_compile.passes.sites import Refusal
from gemkv_compile.passes.symbols import same_size, static_int

LARGEST = 1 << 30  # the one block of an attention without a block mask


@dataclass(frozen=True)
class Blocks:
    """The parts of a block mask that the attention itself reads."""

    num_partial: Any
    partial: Any
    num_full: Any
    full: Any
    q_block: Any
    kv_block: Any


def check(call: Node, mask_body: Body) -> Refusal | None:
    """The block mask of a call of FlexAttention follows from its mask_mod, or its tensors can be read."""
    given: Any = call.args[4]
    blocks = _blocks(call)
    if is_proven(call, mask_body) or _are_readable(call, blocks):
        return None
    outside = [node.name for node in given[2:6] if isinstance(node, Node) and node.op == "placeholder"]
    where = f"comes from outside the graph ({outside[0]})" if outside else "is not made by create_block_mask here"
    return Refusal(
        "block_mask_not_proven",
        f"the block mask {where}, so nothing proves that its blocks are those of its mask_mod; call "
        "create_block_mask in the compiled function, or mask in score_mod. With Transformers, set "
        "attn_implementation='sdpa'.",
        call,
    )


def is_proven(call: Node, mask_body: Body) -> bool:
    """Whether mask_mod alone says which keys are shown."""
    blocks = _blocks(call)
    return _is_one_block(blocks) or _is_created(call, blocks, mask_body)


def shown(call: Node, lanes: Lanes, mask: Node | None) -> Node:
    """mask_mod's mask (None: all), as far as the blocks show it: bool [B|1, Hq|1, q_len, kv_len]."""
    blocks = _blocks(call)
    size = blocks.q_block, blocks.kv_block
    result = listed(lanes, blocks.num_partial, blocks.partial, size)
    if mask is not None:
        result = lanes.call("call_function", torch.logical_and, (result, mask))
    if blocks.full is None:
        return result
    full = listed(lanes, blocks.num_full, blocks.full, size)
    return lanes.call("call_function", torch.logical_or, (full, result))


def _blocks(call: Node) -> Blocks:
    given: Any = call.args[4]
    return Blocks(*given[2:6], *given[-3:-1])


def _are_readable(call: Node, blocks: Blocks) -> bool:
    size = blocks.q_block, blocks.kv_block
    if not is_readable(call, blocks.num_partial, blocks.partial, size):
        return False
    none = blocks.num_full is None and blocks.full is None
    return none or is_readable(call, blocks.num_full, blocks.full, size)


def _is_one_block(blocks: Blocks) -> bool:
    """One partial block, number 0, of 2**30 queries and keys: mask_mod is asked everywhere."""
    count, index = blocks.num_partial, blocks.partial
    return (
        (blocks.num_full, blocks.full, blocks.q_block, blocks.kv_block) == (None, None, LARGEST, LARGEST)
        and operation_name(count) == "ones"
        and tuple(value_of(count).shape) == (1, 1, 1)
        and operation_name(index) == "zeros"
        and tuple(value_of(index).shape) == (1, 1, 1, 1)
        and first_write([count, index]) is None
    )


def _is_created(call: Node, blocks: Blocks, mask_body: Body) -> bool:
    """The blocks are counted in the mask that mask_mod gives for every index of this attention."""
    if not isinstance(blocks.q_block, int) or not isinstance(blocks.kv_block, int):
        return False
    sums = _counted(blocks)
    mask = _divided(sums, blocks) if sums is not None else None
    if mask is None or not is_mapped_body(mask, mask_body) or not _covers(call, mask, mask_body):
        return False
    return first_write(_ancestors((blocks.num_partial, blocks.partial, blocks.num_full, blocks.full))) is None


def _counted(blocks: Blocks) -> Node | None:
    """How many keys each block shows, if partial and full blocks are chosen by that."""
    partial, size = _listed(blocks.num_partial, blocks.partial), blocks.q_block * blocks.kv_block
    if blocks.num_full is None and blocks.full is None:
        return _compared(partial, "gt", 0)
    full: Any = _compared(_listed(blocks.num_full, blocks.full), "eq", size)
    if full is None or operation_name(partial) != "and" or len(partial.args) != 2:
        return None
    some, not_all = partial.args
    return full if _compared(some, "gt", 0) is full and _compared(not_all, "lt", size) is full else None


def _listed(count: Any, order: Any) -> Any:
    """chosen, from chosen.sum(-1) and chosen.argsort(-1, descending=True, stable=True), in int32"""
    count, order = _skip_integers(count), _skip_integers(order)
    if not _is(count, "sum") or not _is(order, "argsort") or argument(count, 1, "dim") != -1:
        return None
    options = {name: value for name, value in order.kwargs.items() if name != "dim"}
    if argument(order, 1, "dim") != -1 or options != {"descending": True, "stable": True}:
        return None
    chosen = count.args[0]
    return _skip_integers(chosen) if chosen is order.args[0] and _is_plain_sum(count) else None


def _compared(node: Any, name: str, number: int) -> Any:
    return node.args[0] if _is(node, name) and len(node.args) == 2 and node.args[1] == number else None


def _divided(sums: Node, blocks: Blocks) -> Node | None:
    """mask [B, H, Q, K], from its sums over blocks, hidden places added at the end of queries and keys"""
    plain = _is(sums, "sum") and _is_plain_sum(sums) and list(argument(sums, 1, "dim") or ()) == [-2, -1]
    ordered: Any = sums.args[0] if plain else None
    divided: Any = ordered.args[0] if _is(ordered, "permute") and _dims(ordered) == [0, 1, 2, 4, 3, 5] else None
    padded: Any = divided.args[0] if _is(divided, "view") else None
    if padded is None or getattr(padded.target, "__name__", "") != "pad" or padded.op != "call_function":
        return None
    mask, amounts, *mode = padded.args
    if len(amounts) != 4 or amounts[0] != 0 or amounts[2] != 0 or mode not in ([], ["constant"], ["constant", None]):
        return None
    shape, whole = value_of(divided).shape, value_of(padded).shape
    if not all(map(same_size, shape[:2], whole[:2])):
        return None
    for at, block in ((2, blocks.q_block), (3, blocks.kv_block)):
        size = value_of(mask).shape[at]
        rounded = (size + block - 1) // block * block
        if static_int(shape[2 * at - 1]) != block or not same_size(shape[2 * at - 2] * block, whole[at]):
            return None
        if not same_size(whole[at], rounded):
            return None
    return mask if not padded.kwargs and value_of(mask).dtype is torch.bool else None


def _covers(call: Node, mask: Node, mask_body: Body) -> bool:
    """The mask has the attention's own lengths, and its batch and heads unless these do not matter."""
    (batch, heads, queries, _), keys = value_of(call.args[0]).shape, value_of(call.args[1]).shape[2]
    shape = value_of(mask).shape
    if not same_size(shape[2], queries) or not same_size(shape[3], keys):
        return False
    for axis, wanted in ((BATCH, batch), (HEAD, heads)):
        if not same_size(shape[axis], wanted) and (static_int(shape[axis]) != 1 or mask_body.depends_on(axis)):
            return False
    return True


def _is_plain_sum(node: Node) -> bool:
    """Whether a sum has no other dtype that could wrap, and no keepdim."""
    return len(node.args) < 3 and node.kwargs.keys() <= {"dim"}


def _is(node: Any, name: str) -> bool:
    return isinstance(node, Node) and operation_name(node) == name


def _dims(node: Node) -> list[Any]:
    dims = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
    return list(dims)


def _skip_integers(node: Any) -> Any:
    """The node under conversions between integers that hold 0, 1 and counts of blocks, and from bool."""
    while _is(node, "to") and value_of(node).dtype in (torch.int8, torch.int32):
        source = value_of(node.args[0]).dtype
        if value_of(node).dtype is torch.int8 and source is not torch.bool:
            break
        node = node.args[0]
    return node


def _ancestors(nodes: Iterable[Any]) -> set[Node]:
    found: set[Node] = set()
    pending = [node for node in nodes if isinstance(node, Node)]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [arg for arg in node.all_input_nodes if isinstance(value_of(arg), torch.Tensor)]
    return found
