"""How a score_mod reads: where(condition, softcap(scale * score), -inf), or any part of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from gemkv_compile import compat
from gemkv_compile.passes.lens import argument, op_of, value_of
from gemkv_compile.passes.rules.flex_body import Body
from gemkv_compile.passes.sites import Refusal

# FlexAttention computes scores in float32; no score is as low as the lowest bfloat16 number.
HIDDEN = torch.finfo(torch.bfloat16).min
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass
class ScoreMod:
    """What a score_mod does to scores.

    Attributes:
        conditions: Nodes of the body that hide keys, each with whether it names what is shown (or what is hidden).
    """

    scale: float = 1.0
    softcap: float | None = None
    conditions: list[tuple[Node, bool]] = field(default_factory=list)


def read_score_mod(body: Body, call: Node) -> ScoreMod | Refusal:
    """Peel conditions, softcap and scale off the score, outermost first."""
    found, score = ScoreMod(), body.inputs[0]
    node = _peel_conditions(body.result, found)
    node = _peel_softcap(node, found)
    node = _peel_scale(node, found)
    if node is score:
        return found
    sentence = (
        "score_mod does not read as where(condition, softcap(scale * score), -inf) or a part of it "
        f"(stopped at {node}); a constant scale, tanh(score / c) * c and -inf where a key is hidden are known."
    )
    return Refusal("score_mod_not_recognised", sentence, call)


def _peel_conditions(node: Any, found: ScoreMod) -> Any:
    """where(shown, x, -inf); where(hidden, -inf, x); x.masked_fill(hidden, -inf); any number of times"""
    while True:
        node = _skip_casts(node)
        name = op_of(node)
        if name == "masked_fill" and _hides(argument(node, 2, "value")):
            found.conditions.append((argument(node, 1, "mask"), False))
            node = node.args[0]
        elif name == "where" and len(node.args) == 3 and _hides(node.args[2]):
            found.conditions.append((node.args[0], True))
            node = node.args[1]
        elif name == "where" and len(node.args) == 3 and _hides(node.args[1]):
            found.conditions.append((node.args[0], False))
            node = node.args[2]
        else:
            return node


def _peel_softcap(node: Any, found: ScoreMod) -> Any:
    """cap * tanh(x / cap)"""
    outer = _constant_factor(node)
    tanh: Any = _skip_casts(outer[0]) if outer else None
    if outer is None or op_of(tanh) != "tanh":
        return node
    inner = _constant_factor(_skip_casts(tanh.args[0]))
    if inner is None or outer[1] <= 0 or not math.isclose(outer[1] * inner[1], 1.0, rel_tol=1e-6):
        return node
    found.softcap = outer[1]
    return _skip_casts(inner[0])


def _peel_scale(node: Any, found: ScoreMod) -> Any:
    """constant * x or x / constant, any number of times"""
    while (factor := _constant_factor(node)) is not None:
        node, found.scale = _skip_casts(factor[0]), found.scale * factor[1]
    return node


def _constant_factor(node: Any) -> tuple[Any, float] | None:
    """(x, c) if the node is c * x for a number c."""
    name = op_of(node)
    if name not in ("mul", "div") or node.kwargs or len(node.args) != 2:
        return None
    left, right = node.args
    number = compat.number_of(value_of(right))
    if number is not None and (name == "mul" or number != 0):
        return left, number if name == "mul" else 1.0 / number
    number = compat.number_of(value_of(left))
    return (right, number) if number is not None and name == "mul" else None


def _hides(value: Any) -> bool:
    """Whether a number, or a constant tensor, is so low that its key takes no part."""
    if op_of(value) == "tensor":
        value = argument(value, 0, "data")
    return isinstance(value, (int, float)) and value <= HIDDEN


def _skip_casts(node: Any) -> Any:
    while op_of(node) == "to" and value_of(node).dtype in _FLOATS:
        node = node.args[0]
    return node
