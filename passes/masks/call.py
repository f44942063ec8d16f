"""One call in a mask's graph, as the readers of single operations see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import sympy
import torch
from torch import fx

from gemkv_compile import compat
from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.masks.casting import cast
from gemkv_compile.passes.masks.indexed import Choice, Indexed, Unreadable, Value, num_atoms, replace
from gemkv_compile.passes.masks.linear import Facts, linear
from gemkv_compile.passes.masks.predicate import AXES

_MOST_ATOMS = 256  # nested selections double a formula, and real masks have fewer than ten terms


class Call:
    """A tensor node: its result's shape and dtype, and its arguments on demand."""

    def __init__(self, node: fx.Node, read: Callable[[fx.Node], Indexed], facts: Facts) -> None:
        self.facts = facts
        self.dims: tuple[sympy.Expr, ...] = tuple(map(compat.expr_of, value_of(node).shape))
        self.dtype: torch.dtype = value_of(node).dtype
        self._read = read

    def result(self, value: Value) -> Indexed:
        """The result of this call, with the value as the result's dtype holds it."""
        value = cast(value, self.dtype)
        if num_atoms(value) > _MOST_ATOMS:
            raise Unreadable(f"is a formula of more than {_MOST_ATOMS} terms")
        return Indexed(self.dims, value)

    def moved(self, value: Value) -> Indexed:
        """The result of a call that moves elements and leaves them as they are."""
        return Indexed(self.dims, value)

    def is_tensor(self, arg: object) -> bool:
        """Whether an argument is a tensor."""
        return isinstance(arg, fx.Node) and isinstance(value_of(arg), torch.Tensor)

    def tensor(self, arg: object) -> Indexed:
        """A tensor argument, in its own shape."""
        if not isinstance(arg, fx.Node):
            raise Unreadable(f"uses {arg!r} as a tensor")
        return self._read(arg)

    def size(self, arg: object) -> sympy.Expr:
        """An integer argument: a constant or a size of the graph."""
        value = value_of(arg)
        if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
            raise Unreadable(f"uses {arg} as a size or an index")
        return compat.expr_of(value)

    def operand(self, arg: object) -> Value:
        """An argument of an elementwise operation, tensor or scalar, broadcast to the result's shape."""
        if self.is_tensor(arg):
            return broadcast(self.tensor(arg), self.dims, self.facts)
        value = value_of(arg)
        if isinstance(value, bool):
            return sympy.sympify(value)
        if isinstance(value, float):
            return Choice.of([(value, sympy.true)])
        return cast(self.size(arg), torch.int64)

    def box(self) -> Mapping[sympy.Symbol, sympy.Expr]:
        """The size of each index of the result."""
        return Indexed(self.dims, sympy.S.Zero).sizes()

    def never_negative(self, index: Value) -> bool:
        """Whether an index formula is known to be at least 0 all over the result."""
        form = linear(index) if isinstance(index, sympy.Expr) else None
        return form is not None and self.facts.nonnegative(self.facts.lowest(form, self.box()))


def broadcast(tensor: Indexed, dims: tuple[sympy.Expr, ...], facts: Facts) -> Value:
    """The value of a tensor at the indices of a shape that it broadcasts to."""
    pinned = {}
    if len(tensor.dims) > len(dims):
        raise Unreadable("broadcasts a tensor to fewer dimensions")
    for axis, own, wanted in zip(AXES, reversed(tensor.dims), reversed(dims), strict=False):
        if own == 1 and wanted != 1:
            pinned[axis] = sympy.S.Zero
        elif not facts.equal(own, wanted):
            raise Unreadable(f"has a dimension of size {own} where {wanted} is needed")
    return replace(tensor.value, pinned) if pinned else tensor.value
