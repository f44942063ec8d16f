"""A softmax over one dimension, as torch's function or written out with exp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from gemkv_compile.passes.lens import argument, op_of, rank_of


@dataclass(frozen=True)
class Softmax:
    """The node with the weights, and what it is the softmax of."""

    node: Node
    scores: Any
    dim: Any

    @property
    def is_over_keys(self) -> bool:
        """Whether it runs over the last dimension."""
        return _is_last(self.dim, self.scores)


def read_softmax(node: Any) -> Softmax | None:
    """The softmax that a node computes, or None.

    Written out, it is e / e.sum(-1, keepdim=True) with e = exp(x - the largest x of the row): without the largest taken
    off it overflows where softmax does not, and is not read.
    """
    if op_of(node) == "softmax":
        return Softmax(node, node.args[0], argument(node, 1, "dim"))
    if op_of(node) != "div" or node.kwargs or len(node.args) != 2:
        return None
    powers, total = node.args
    if op_of(powers) != "exp" or len(powers.args) != 1 or powers.kwargs or _reduced(total, "sum") is not powers:
        return None
    shifted: Any = powers.args[0]
    if op_of(shifted) != "sub" or shifted.kwargs or len(shifted.args) != 2:
        return None
    scores, peak = shifted.args
    return Softmax(node, scores, -1) if isinstance(scores, Node) and _peak_of(peak) is scores else None


def _peak_of(node: Any) -> Any:
    """x, from x.amax(-1, keepdim=True) or x.max(-1, keepdim=True).values"""
    if op_of(node) in ("getitem", "getattr") and node.args[1] in (0, "values"):
        return _reduced(node.args[0], "max")
    return _reduced(node, "amax")


def _reduced(node: Any, name: str) -> Any:
    """x, if the node is the reduction of that name of x's last dimension, which stays with one column; else None."""
    if op_of(node) != name or not node.args or not node.kwargs.keys() <= {"dim", "keepdim"}:
        return None
    dim = argument(node, 1, "dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    return node.args[0] if _is_last(dim, node.args[0]) and argument(node, 2, "keepdim", False) is True else None


def _is_last(dim: Any, tensor: Any) -> bool:
    rank = rank_of(tensor)
    return isinstance(dim, int) and (dim == -1 or 0 < rank == dim + 1)
