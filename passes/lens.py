"""One name per meaning: how the rules read a node, whichever way the model spelled it."""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

_METHODS = frozenset(
    "matmul bmm mul div add sub softmax transpose permute reshape view expand unsqueeze contiguous to float half "
    "bfloat16 type type_as size dim numel tanh masked_fill repeat_interleave clone flatten swapaxes".split()
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
    operator.mul: "mul",
    torch.mul: "mul",
    operator.imul: "mul",
    operator.truediv: "div",
    torch.div: "div",
    torch.true_divide: "div",
    operator.itruediv: "div",
    operator.add: "add",
    torch.add: "add",
    operator.iadd: "add",
    operator.sub: "sub",
    torch.sub: "sub",
    F.softmax: "softmax",
    torch.softmax: "softmax",
    F.dropout: "dropout",
    torch.dropout: "dropout",
    torch.tanh: "tanh",
    F.tanh: "tanh",
    torch.transpose: "transpose",
    torch.swapaxes: "transpose",
    torch.permute: "permute",
    torch.reshape: "reshape",
    torch.unsqueeze: "unsqueeze",
    torch.repeat_interleave: "repeat_interleave",
    torch.cat: "cat",
    torch.concat: "cat",
    torch.concatenate: "cat",
    torch.where: "where",
    torch.masked_fill: "masked_fill",
    torch.narrow: "narrow",
    torch.tensor: "tensor",
    operator.getitem: "getitem",
    getattr: "getattr",
    F.scaled_dot_product_attention: "sdpa",
    torch.clone: "contiguous",
}


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
