"""The operation that a graph node computes, by name."""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import fx

from gemkv_compile import compat

_HOMES = (operator, torch, F)


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
