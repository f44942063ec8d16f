"""What a graph node does, by name: the operation it computes, and the tensors that it writes to."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import fx

from gemkv_compile import compat

_HOMES = (operator, torch, F)
_IN_PLACE = "iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor setitem delitem"
# Operations whose result may be the memory of their input; splitting ones give a tuple that getitem picks from.
_VIEWS = """
    getitem view view_as reshape reshape_as expand expand_as broadcast_to broadcast_tensors transpose permute swapaxes
    swapdims movedim moveaxis t adjoint squeeze unsqueeze flatten unflatten ravel contiguous to type type_as bool int
    long float half bfloat16 double cpu cuda detach alias narrow select slice chunk split tensor_split hsplit vsplit
    dsplit unbind diagonal as_strided unfold real imag getattr atleast_1d atleast_2d atleast_3d meshgrid positive
    dropout
"""


def operation_name(node: fx.Node) -> str | None:
    """The plain name of a torch or Python operation, without underscores; None for anything else."""
    if node.op == "call_method":
        return _plain(str(node.target))
    if node.op != "call_function" or not callable(node.target):
        return None
    if node.target is getattr:
        return "getattr"
    schemas = compat.schemas_of(node.target)
    if schemas:
        namespace, name = schemas[0].name.split("::")
        return _plain(name) if namespace == "aten" else None
    name = getattr(node.target, "__name__", "")
    home = next((home for home in _HOMES if getattr(home, name, None) == node.target), None)
    if home is operator:
        return name.rstrip("_")
    return _plain(name) if home is not None else None


def _plain(name: str) -> str | None:
    if name.startswith("__") and name.endswith("__"):
        return name.strip("_")
    return None if name.endswith("_") else name


def write_into(tensors: Iterable[fx.Node]) -> fx.Node | None:
    """The first node of the graph that writes into the memory of one of these tensors, or None."""
    wanted = set(tensors)
    graph = next(iter(wanted)).graph if wanted else fx.Graph()
    for node in graph.nodes:
        if node.op in ("call_method", "call_function") and wanted & _memory_of(_written(node)):
            return node
    return None


def _written(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory a node changes."""
    written: list[object] = [node.kwargs["out"]] if "out" in node.kwargs else []
    if node.kwargs.get("inplace") is True:
        written += node.all_input_nodes[:1]
    for position, name in _written_arguments(node.op, node.target):
        if position is None:
            written += node.all_input_nodes
        else:
            written.append(node.args[position] if position < len(node.args) else node.kwargs.get(name))
    found: list[fx.Node] = []
    for argument in written:
        fx.node.map_arg(argument, found.append)  # type: ignore[type-var]
    return found


@functools.cache
def _written_arguments(op: str, target: object) -> tuple[tuple[int | None, str], ...]:
    """Position and name of each argument that a call to this target writes; position None stands for any of them."""
    schemas = compat.schemas_of(target) if op == "call_function" else []
    if schemas:
        arguments = [pair for schema in schemas for pair in enumerate(schema.arguments)]
        written = [(at, arg.name) for at, arg in arguments if arg.alias_info is not None and arg.alias_info.is_write]
        return tuple(dict.fromkeys(written))
    name = str(target) if op == "call_method" else getattr(target, "__name__", "")
    if "mutation" in name or "auto_functionalized" in name:
        return ((None, ""),)  # a kernel call without a schema
    ends_in_place = name.endswith("_") and not name.startswith("__") and getattr(operator, name, None) is not target
    return ((0, "input"),) if ends_in_place or name.strip("_") in _IN_PLACE.split() else ()


def _memory_of(tensors: list[fx.Node]) -> set[fx.Node]:
    """The tensors and all that they may be views of."""
    found: set[fx.Node] = set()
    pending = list(tensors)
    while pending:
        node = pending.pop()
        if node in found:
            continue
        found.add(node)
        name = operation_name(node) if node.op in ("call_method", "call_function") else ""
        if name is None or name in _VIEWS.split():  # an unnamed operation may be in place, and return its input
            pending.extend(node.all_input_nodes)
    return found
