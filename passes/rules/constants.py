"""Numbers of a graph: Python's own, and tensors that are made of one number and never written to."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from gemkv_compile.passes.effects import first_write
from gemkv_compile.passes.lens import argument, op_of, rank_of, value_of

_FILL_AT = {"tensor": 0, "full": 1, "full_like": 1}
_FILL_NAME = {"tensor": "data", "full": "fill_value", "full_like": "fill_value"}


def number_of(value: Any) -> int | float | None:
    """The Python number that `value` is, or that a float tensor holds in every place; else None."""
    if isinstance(value, (int, float)):
        return value
    name = op_of(value)
    if name not in _FILL_AT or not value_of(value).dtype.is_floating_point:
        return None
    fill = argument(value, _FILL_AT[name], _FILL_NAME[name])
    if not isinstance(fill, (int, float)) or not _keeps(value_of(value).dtype, fill):
        return None
    return fill if first_write([value]) is None else None


def _keeps(dtype: torch.dtype, number: float) -> bool:
    """Whether the number stays, up to rounding, in a tensor of this dtype: neither 0 nor inf is made of it."""
    limits = torch.finfo(dtype)
    return number == 0 or math.isinf(number) or limits.tiny <= abs(number) <= limits.max


def constant_factor(node: Any) -> tuple[Node, float] | None:
    """(x, c) if the node is c * x for a number c."""
    name = op_of(node)
    if name not in ("mul", "div") or node.kwargs or len(node.args) != 2:
        return None
    left, right = node.args
    if isinstance(left, Node) and (number := _scalar(right)) is not None and (name == "mul" or number != 0):
        return left, float(number) if name == "mul" else 1.0 / number
    if isinstance(right, Node) and (number := _scalar(left)) is not None and name == "mul":
        return right, float(number)
    return None


def _scalar(value: Any) -> int | float | None:
    """A number that leaves the shape of what it is multiplied with as it is."""
    return number_of(value) if not isinstance(value, Node) or rank_of(value) == 0 else None
