"""Products of two tensors, row by column: matmul, bmm, baddbmm, and the einsum equations that mean the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from gemkv_compile.passes.lens import argument, op_of, rank_of, shape_of
from gemkv_compile.passes.symbols import same_size

PRODUCTS = ("matmul", "baddbmm", "einsum")


@dataclass(frozen=True)
class Product:
    """alpha * left @ right + beta * added, with the last two dimensions of `right` exchanged first if `flipped`."""

    left: Node
    right: Node
    flipped: bool = False
    alpha: Any = 1
    beta: Any = 0
    added: Node | None = None


def read_product(node: Any) -> Product | None:
    """The product that a node computes, or None."""
    name = op_of(node)
    if name == "matmul":
        return Product(node.args[0], node.args[1])
    if name == "baddbmm":
        left, right = argument(node, 1, "batch1"), argument(node, 2, "batch2")
        factors = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
        return Product(left, right, False, *factors, added=node.args[0])
    return _read_einsum(node) if name == "einsum" else None


def exchanged(node: Any) -> Node | None:
    """x, if the node is x with its last two dimensions, and only those, exchanged; x has three or four."""
    name, rank = op_of(node), rank_of(node)
    if rank not in (3, 4):
        return None
    if name == "transpose":
        dims = {argument(node, 1, "dim0") % rank, argument(node, 2, "dim1") % rank}
        return node.args[0] if dims == {rank - 2, rank - 1} else None
    if name == "permute":
        order = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
        wanted = [*range(rank - 2), rank - 1, rank - 2]
        return node.args[0] if [dim % rank for dim in order] == wanted else None
    if name == "getattr" and node.args[1] == "mT":
        return node.args[0]
    return None


def _read_einsum(node: Node) -> Product | None:
    equation, *rest = node.args
    operands: Any = rest
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = operands[0]
    if not isinstance(equation, str) or len(operands) != 2 or node.kwargs:
        return None
    read = _read_equation(equation)
    if read is None:
        return None
    swapped, flipped = read
    left, right = reversed(operands) if swapped else operands
    shapes = shape_of(left), shape_of(right)
    if None in shapes or len({len(shape) for shape in shapes if shape is not None} | {rank_of(node)}) != 1:
        return None
    inner = shapes[0][-1], shapes[1][-1 if flipped else -2]  # type: ignore[index]
    # A letter of two sizes, one of which is 1, is broadcast, which a product does not do.
    return Product(left, right, flipped) if same_size(*inner) else None


def _read_equation(equation: str) -> tuple[bool, bool] | None:
    """Whether the operands of "bik,bjk->bij" are swapped, and the right one's last two letters exchanged.

    Any letters, any number of batch letters in one order, or "..." for them. None for every other equation.
    """
    inputs, _, output = equation.replace(" ", "").replace("...", ".").partition("->")
    first, _, second = inputs.partition(",")
    batch, row, column = output[:-2], output[-2:-1], output[-1:]
    for swapped, (left, right) in enumerate(((first, second), (second, first))):
        inner = left[-1:]
        letters = row + column + inner
        if not letters.isalpha() or len(set(batch + letters)) != len(batch) + 3 or left != batch + row + inner:
            continue
        if right in (batch + column + inner, batch + inner + column):
            return bool(swapped), right == batch + column + inner
    return None
