"""Reads a mask node and what it is computed from as one formula over the mask's indices."""

from __future__ import annotations

import functools
import inspect

import sympy
import torch
from torch import fx

from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.masks import creation, indexing, pointwise, selection, views
from gemkv_compile.passes.masks.call import Call
from gemkv_compile.passes.masks.casting import truth
from gemkv_compile.passes.masks.indexed import Indexed, Unreadable
from gemkv_compile.passes.masks.linear import Facts
from gemkv_compile.passes.masks.names import operation_name
from gemkv_compile.passes.masks.predicate import AXES
from gemkv_compile.passes.masks.proof import refuse

_DEEPEST = 64  # operations below one another; real masks have about fifteen, and Python's stack is finite
_signature = functools.cache(inspect.signature)
_READERS = {**creation.READERS, **pointwise.READERS, **selection.READERS, **views.READERS, **indexing.READERS}


class MaskReader:
    """Reads tensors of one graph; remembers what it read.

    Attributes:
        formulas: Every tensor node whose values the mask depends on, with its formula.
        sources: The graph inputs among them ([batch, n] or [batch]), by the function that stands for their values.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.formulas: dict[fx.Node, Indexed] = {}
        self.sources: dict[type[sympy.Function], fx.Node] = {}
        self._depth = 0

    def read(self, node: fx.Node) -> Indexed:
        """The formula of a tensor node.

        Raises:
            Refused: the node depends on another graph input, or on an operation that is not known here.
        """
        if node not in self.formulas:
            self._depth += 1
            try:
                self.formulas[node] = self._read(node)
            except Unreadable as trouble:
                sentence = f"the mask {trouble} (at {node.name}), which the mask reader does not follow"
                refuse("mask_unknown_op", sentence, node)
            self._depth -= 1
        return self.formulas[node]

    def _read(self, node: fx.Node) -> Indexed:
        if not isinstance(value_of(node), torch.Tensor):
            raise Unreadable(f"depends on {node.name}, which is no tensor with a known shape")
        if value_of(node).dim() > len(AXES) or self._depth > _DEEPEST:
            raise Unreadable(f"depends on a tensor of {len(AXES)} dimensions or {_DEEPEST} operations, or more")
        if node.op in ("placeholder", "get_attr"):
            return self._read_input(node)
        name = operation_name(node)
        reader = _READERS.get(f"{node.op}:{name}", _READERS.get(name or ""))
        if reader is None or "out" in node.kwargs:
            raise Unreadable(f"goes through `{name or _target(node)}`")
        call = Call(node, self.read, self.facts)
        try:
            _signature(reader).bind(call, *node.args, **node.kwargs)
        except TypeError as trouble:
            raise Unreadable(f"calls `{name}` in a form that is not known ({trouble})") from None
        return reader(call, *node.args, **node.kwargs)

    def _read_input(self, node: fx.Node) -> Indexed:
        call = Call(node, self.read, self.facts)
        whole = call.dtype is torch.bool or not (call.dtype.is_floating_point or call.dtype.is_complex)
        by_sequence = len(call.dims) == 2 or (len(call.dims) == 1 and call.dtype is not torch.bool)
        if node.op != "placeholder" or not by_sequence or not whole:
            kind = f"{len(call.dims)}-D {str(call.dtype).removeprefix('torch.')}"
            sentence = f"the mask depends on {node.name}, a {kind} input of the graph, not on a 2-D padding mask alone"
            refuse("mask_outside_graph", sentence, node)
        function = sympy.Function(node.name, integer=True)
        self.sources[function] = node
        value = function(*reversed(AXES[: len(call.dims)]))
        return Indexed(call.dims, truth(value) if call.dtype is torch.bool else value)


def _target(node: fx.Node) -> str:
    return str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
