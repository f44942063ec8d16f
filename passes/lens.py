"""One name per meaning: how the rules read a node, whichever way the model spelled it."""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

_METHODS = frozenset(
    "matmul bmm mul div add sub max softmax transpose permute reshape view expand unsqueeze contiguous to float half "
    "bfloat16 type type_as size dim numel tanh masked_fill repeat_interleave clone flatten unflatten swapaxes baddbmm "
    "exp sum amax where".split()
)
_SAME = {
    "view": "reshape",
    "bmm": "matmul",
    "float": "to",
    "half": "to",
    "bfloat16": "to",
    "type": "to",
    "type_as": "to",
    "swapaxes": "transpose",
    "clone": "contiguous",
}
_FUNCTIONS: dict[Any, str] = {
    torch.matmul: "matmul",
    operator.matmul: "matmul",
    torch.bmm: "matmul",
    torch.baddbmm: "baddbmm",
    torch.einsum: "einsum",
    operator.mul: "mul",
    torch.mul: "mul",
    operator.imul: "mul",
    operator.truediv: "div",
    torch.div: "div",
    torch.true_divide: "div",
    operator.itruediv: "div",
    operator.sub: "sub",
    torch.sub: "sub",
    torch.max: "max",
    operator.add: "add",
    torch.add: "add",
    operator.iadd: "add",
    F.softmax: "softmax",
    torch.softmax: "softmax",
    torch.special.softmax: "softmax",
    torch.ops.aten._safe_softmax.default: "softmax",
    torch.exp: "exp",
    torch.sum: "sum",
    torch.amax: "amax",
    F.dropout: "dropout",
    torch.dropout: "dropout",
    torch.tanh: "tanh",
    F.tanh: "tanh",
    torch.transpose: "transpose",
    torch.swapaxes: "transpose",
    torch.permute: "permute",
    torch.reshape: "reshape",
    torch.flatten: "flatten",
    torch.unflatten: "unflatten",
    torch.unsqueeze: "unsqueeze",
    torch.repeat_interleave: "repeat_interleave",
    torch.cat: "cat",
    torch.concat: "cat",
    torch.concatenate: "cat",
    torch.where: "where",
    torch.masked_fill: "masked_fill",
    torch.tensor: "tensor",
    torch.full: "full",
    torch.full_like: "full_like",
    operator.getitem: "getitem",
    getattr: "getattr",
    F.scaled_dot_product_attention: "sdpa",
    torch.clone: "contiguous",
}


_POSITIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    name: tuple(tuple(one.split("|")) for one in names.split())
    for name, names in {
        "matmul": "input other|mat2",
        "mul": "input other",
        "div": "input other",
        "add": "input other",
        "sub": "input other",
        "softmax": "input dim|axis",
        "dropout": "input p",
        "tanh": "input",
        "transpose": "input dim0|axis0 dim1|axis1",
        "permute": "input dims",
        "reshape": "input shape",
        "expand": "input size",
        "unsqueeze": "input dim",
        "repeat_interleave": "input repeats dim",
        "cat": "tensors dim|axis",
        "where": "condition input other",
        "baddbmm": "input batch1 batch2",
        "full": "size fill_value",
        "full_like": "input fill_value",
        "masked_fill": "input mask value",
        "contiguous": "input",
        "tensor": "data",
    }.items()
}
"""The leading parameters of each operation, as its functions and methods name them."""


def by_position(node: Node) -> None:
    """Move leading keyword arguments of an operation that the rules read to their positions; nothing else changes."""
    args, kwargs = list(node.args), dict(node.kwargs)
    for names in _POSITIONS.get(op_of(node), ())[len(args) :]:
        name = next((name for name in names if name in kwargs), None)
        if name is None:
            break
        args.append(kwargs.pop(name))
    if len(args) > len(node.args):
        node.args, node.kwargs = tuple(args), kwargs


def op_of(node: Any) -> str:
    """The canonical name of what a node computes; "" for anything the rules do not read."""
    if not isinstance(node, Node):
        return ""
    if node.op == "call_function":
        return _FUNCTIONS.get(node.target, "")
    if node.op == "call_method" and node.target in _METHODS:
        return _SAME.get(str(node.target), str(node.target))
    return ""


def value_of(node: Any) -> Any:
    """The example value of a node (a fake tensor, SymInt, tuple, ...); anything else is its own value."""
    return node.meta.get("example_value") if isinstance(node, Node) else node


def shape_of(node: Any) -> tuple[Any, ...] | None:
    """Shape of a tensor node (ints and SymInts), or None."""
    value = value_of(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def rank_of(node: Any) -> int:
    """Number of dimensions of a tensor node, -1 if it is none."""
    shape = shape_of(node)
    return -1 if shape is None else len(shape)


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, by position or by keyword."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def source_line(node: Node) -> str:
    """ "file:line, in function: code" of the innermost user frame that made the node, or "" if unknown."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip()]
    frames = [i for i, line in enumerate(lines) if line.startswith("File ")]
    if not frames:
        return ""
    at = frames[-1]
    place = lines[at].removeprefix("File ").replace('"', "").replace(", line ", ":")
    code = lines[at + 1] if at + 1 < len(lines) else ""
    return f"{place}: {code}" if code else place


def module_path(node: Node) -> str:
    """Path of the module whose forward made the node, such as model.layers.3.self_attn, or ""."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return re.sub(r"^L\['[^']*'\]\.?", "", path)
