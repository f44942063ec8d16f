"""Graphs as text, one node a line: `%name = op(arguments) : dtype[shape]`. Used by reports and golden files."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from gemkv_compile.passes.lens import value_of

_DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
}


def format_graph(graph: Graph) -> str:
    """The graph as text; names are renumbered, so equal graphs give equal text."""
    names: dict[Node, str] = {}
    lines = []
    for node in graph.nodes:
        names[node] = f"%{len(names)}"
        if node.op == "output":
            lines.append(f"return {_argument(node.args[0], names)}")
        elif node.op == "placeholder":
            lines.append(f"{names[node]} = input({node.target}) : {describe(value_of(node))}")
        else:
            arguments = [_argument(arg, names) for arg in node.args]
            arguments += [f"{key}={_argument(arg, names)}" for key, arg in node.kwargs.items()]
            lines.append(f"{names[node]} = {op_name(node)}({', '.join(arguments)}) : {describe(value_of(node))}")
    return "\n".join(lines)


def op_name(node: Node) -> str:
    """Short name of what a node calls."""
    if node.op == "call_function" and not isinstance(node.target, str):
        schema = getattr(node.target, "_schema", None)
        return schema.name if schema is not None else getattr(node.target, "__name__", str(node.target))
    return f".{node.target}" if node.op == "call_method" else f"{node.op}:{node.target}"


def describe(value: Any) -> str:
    """Dtype and shape of an example value, such as bf16[1, 4, s0, 256]."""
    if isinstance(value, torch.Tensor):
        shape = ", ".join(str(size) for size in value.shape)
        return f"{_DTYPES.get(value.dtype, str(value.dtype))}[{shape}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(describe(item) for item in value)})"
    return type(value).__name__ if value is not None else "none"


def _argument(value: Any, names: dict[Node, str]) -> str:
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_argument(item, names) for item in value)}]"
    if isinstance(value, slice):
        parts = [value.start, value.stop] + ([value.step] if value.step is not None else [])
        return ":".join("" if part is None else _argument(part, names) for part in parts)
    return repr(value)
