"""How heads are normalised and rotated on their way from a projection, in the forms that models trace to.

Read backward from the end: transposes of heads and tokens, x * cos + rotate_half(x) * sin (of all channels or of the
first ones), transposes, RMSNorm or none. Casts count as steps: where a value is rounded is part of a form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from gemkv_compile.passes.lens import argument, rank_of, value_of
from gemkv_compile.passes.masks.names import operation_name
from gemkv_compile.passes.symbols import static_int

_CASTS = {"to", "float", "half", "bfloat16", "type", "type_as"}


@dataclass(frozen=True)
class Norm:
    """RMSNorm of the last dimension as `gemkv_compile.kernels.ops_rope` names it.

    Args:
        source: What is normalised.
        steps: The nodes that do it, without those that only read the weight.
    """

    source: Node
    name: str
    eps: float
    weight: Node | None
    steps: tuple[Node, ...]


@dataclass(frozen=True)
class Rotation:
    """x * cos + rotate_half(x) * sin of the first channels of a source."""

    source: Node
    cos: Node
    sin: Node
    steps: tuple[Node, ...]


@dataclass(frozen=True)
class Chain:
    """Heads from a source, [B, H, 1, D] or, if `is_swapped`, [B, 1, H, D], to an end [B, H, 1, D], the first step."""

    source: Node
    is_swapped: bool
    norm: Norm | None
    rotation: Rotation | None
    steps: tuple[Node, ...]


def read_chain(end: Node, *, rotated: bool = True) -> Chain | None:
    """The chain that ends in a node; None if it should be rotated and is not, in a known form."""
    node, swaps = _before_transposes(end)
    steps, rotation = list(swaps), None
    if rotated:
        rotation = _rotation(node)
        if rotation is None:
            return None
        node, more = _before_transposes(rotation.source)
        swaps, steps = swaps + more, [*steps, *rotation.steps, *more]
    norm = _norm(node)
    if norm is not None:
        node, steps = norm.source, [*steps, *norm.steps]
    return Chain(node, len(swaps) % 2 == 1, norm, rotation, tuple(dict.fromkeys(steps)))


def _before_transposes(node: Node) -> tuple[Node, list[Node]]:
    """What is before transposes of the two middle dimensions, and these."""
    found = []
    while _is(node, "transpose") and rank_of(node) == 4:
        dims = argument(node, 1, "dim0"), argument(node, 2, "dim1")
        if {dim % 4 for dim in dims if isinstance(dim, int)} != {1, 2}:
            break
        found.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return node, found


def _rotation(node: Node) -> Rotation | None:
    """Of all channels, or of the first ones with the others put behind them."""
    whole, pair = _whole_rotation(node), _cat_of_two(node)
    if whole is not None or pair is None:
        return whole
    part, rest = _whole_rotation(pair[0]), _slice(pair[1])
    first = _slice(part.source) if part is not None else None
    if part is None or first is None or rest is None or first[0] is not rest[0]:
        return None
    if first[1] != 0 or first[2] != rest[1] or rest[2] != static_int(value_of(rest[0]).shape[-1]):
        return None
    return Rotation(first[0], part.cos, part.sin, (node, pair[1], *part.steps, part.source))


def _whole_rotation(node: Any) -> Rotation | None:
    for straight, turned in _operands(node, "add"):
        for halves, sin in _operands(turned, "mul"):
            found = _rotate_half(halves)
            for x, cos in _operands(straight, "mul") if found else ():
                if found and x is found[0]:
                    return Rotation(x, cos, sin, (node, straight, turned, *found[1]))
    return None


def _rotate_half(node: Node) -> tuple[Node, tuple[Node, ...]] | None:
    """x of cat([-x2, x1]) of its halves, and the steps."""
    pair = _cat_of_two(node)
    if pair is None or not _is(pair[0], "neg") or not isinstance(pair[0].args[0], Node):
        return None
    second, first = pair[0].args[0], pair[1]
    high, low = _slice(second), _slice(first)
    if high is None or low is None or high[0] is not low[0]:
        return None
    size = static_int(value_of(low[0]).shape[-1])
    if size is None or size % 2 or (low[1:], high[1:]) != ((0, size // 2), (size // 2, size)):
        return None
    return low[0], (node, pair[0], second, first)


def _norm(node: Node) -> Norm | None:
    """A norm that ends in a node; rounded once at the end, or before the weight as well."""
    body, cast = _before_cast(node)
    if value_of(body).dtype == torch.float32:
        if (found := _normalised(body)) is not None:
            return Norm(found[0], "weight", found[1], None, (*cast, *found[2]))
        for scaled, scale in _operands(body, "mul"):
            if (found := _normalised(scaled)) is not None:
                name, weight = _weight(scale)
                return Norm(found[0], name, found[1], weight, (*cast, body, *found[2]))
    for scaled, weight in _operands(node, "mul"):
        inner, cast = _before_cast(scaled)
        if (found := _normalised(inner)) is not None:
            return Norm(found[0], "rounded_weight", found[1], weight, (node, *cast, *found[2]))
    return None


def _normalised(node: Node) -> tuple[Node, float, tuple[Node, ...]] | None:
    """x, eps and the steps of x / sqrt(mean(x^2) + eps) in float32, the cast to it included."""
    if value_of(node).dtype != torch.float32:
        return None
    for wide, root in _operands(node, "mul"):
        is_root = _is(root, "rsqrt") or (_is(root, "pow") and root.args[1:] == (-0.5,))
        shifted: Any = root.args[0] if is_root else None
        mean, eps = _plus_number(shifted)
        square: Any = mean.args[0] if mean is not None and _is_mean_of_last(mean) else None
        if square is not None and _is(square, "pow") and square.args[0] is wide and square.args[1:] in ((2,), (2.0,)):
            source, cast = _before_cast(wide)
            return source, eps, (node, root, shifted, mean, square, *cast)
    return None


def _weight(scale: Node) -> tuple[str, Node]:
    """The weight that rows are multiplied with, and whether one is added to it."""
    plain, number = _plus_number(scale)
    if plain is not None and number == 1.0 and value_of(plain).dtype == torch.float32:
        return "one_plus_weight", _before_cast(plain)[0]
    return "weight", _before_cast(scale)[0] if value_of(scale).dtype == torch.float32 else scale


def _before_cast(node: Node) -> tuple[Node, tuple[Node, ...]]:
    """What a cast of a floating dtype is of, and the cast; a node that is none, and nothing."""
    if operation_name(node) not in _CASTS or not isinstance(node.args[0], Node):
        return node, ()
    before, after = value_of(node.args[0]), value_of(node)
    is_cast = isinstance(before, torch.Tensor) and before.is_floating_point() and before.device == after.device
    return (node.args[0], (node,)) if is_cast else (node, ())


def _is(node: Any, name: str, keywords: tuple[str, ...] = ()) -> bool:
    """Whether a node computes this, with no other keyword arguments."""
    return isinstance(node, Node) and operation_name(node) == name and node.kwargs.keys() <= {*keywords}


def _operands(node: Any, name: str) -> Iterator[tuple[Node, Node]]:
    """The two tensors of a sum or product, in both orders."""
    if _is(node, name) and len(node.args) == 2 and all(isinstance(value_of(each), torch.Tensor) for each in node.args):
        left, right = node.args
        yield left, right
        yield right, left


def _plus_number(node: Any) -> tuple[Node | None, float]:
    """The tensor and the number of a sum; None if it is no such sum."""
    if _is(node, "add") and len(node.args) == 2:
        for tensor, number in (node.args, node.args[::-1]):
            if isinstance(tensor, Node) and isinstance(number, (int, float)) and not isinstance(number, bool):
                return tensor, float(number)
    return None, 0.0


def _is_mean_of_last(node: Node) -> bool:
    if not _is(node, "mean", ("dim", "keepdim")):
        return False
    dim, rank = argument(node, 1, "dim"), rank_of(node)
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    return dim in (-1, rank - 1) and argument(node, 2, "keepdim", False) is True


def _cat_of_two(node: Any) -> tuple[Node, Node] | None:
    """The two tensors of a cat of the last dimension."""
    tensors = node.args[0] if _is(node, "cat", ("dim",)) else ()
    if not isinstance(tensors, (tuple, list)) or len(tensors) != 2 or tensors[0] is tensors[1]:
        return None
    return (tensors[0], tensors[1]) if argument(node, 1, "dim", 0) in (-1, rank_of(node) - 1) else None


def _slice(node: Any) -> tuple[Node, int, int] | None:
    """Source, first and last channel (excluded) of x[..., a:b]."""
    index = node.args[1] if _is(node, "getitem") else ()
    if not isinstance(index, tuple) or not index or not isinstance(node.args[0], Node):
        return None
    *others, last = index
    full = others in ([Ellipsis], [slice(None)] * (rank_of(node.args[0]) - 1))
    size = static_int(value_of(node.args[0]).shape[-1]) if full else None
    if size is None or not isinstance(last, slice) or last.step not in (None, 1):
        return None
    if not all(bound is None or type(bound) is int for bound in (last.start, last.stop)):
        return None
    return node.args[0], *last.indices(size)[:2]
