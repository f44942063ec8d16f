"""Runs a mask's own graph on concrete inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_aggregate

from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.masks.inputs import Inputs

_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "meta")


class Mismatch(Exception):
    """A proof and the mask that it is about differ: an error in the prover."""


class Run:
    """One evaluation of a mask's graph on the CPU, with random values for its inputs.

    Args:
        formulas: The tensors whose values matter; of all others the mask takes only the shape or the dtype.
        num_keys: K, which lengths of prefixes are drawn around.
    """

    def __init__(self, formulas: Mapping[fx.Node, Any], inputs: Inputs, num_keys: sympy.Expr, seed: int = 0) -> None:
        self._formulas, self._inputs, self._num_keys = formulas, inputs, inputs.number(num_keys)
        self._random = torch.Generator().manual_seed(seed)
        self.values: dict[fx.Node, torch.Tensor] = {}

    def tensor(self, node: fx.Node) -> torch.Tensor:
        """The concrete value of a tensor node."""
        if node not in self.values:
            self.values[node] = self._source(node) if node.op == "placeholder" else self._call(node)
        return self.values[node]

    def _source(self, node: fx.Node) -> torch.Tensor:
        shape, dtype = self._inputs.shape(node), value_of(node).dtype
        if len(shape) == 1:  # as many keys as there may be, and none
            return torch.randint(0, self._num_keys + 2, shape, generator=self._random, device="cpu").to(dtype)
        # Any nonzero integer attends, so some of them are neither 0 nor 1; groups below 0 are none.
        picks = torch.randint(0, 5, shape, generator=self._random, device="cpu")
        return torch.tensor([0, 1, 1, 3, -1], device="cpu")[picks].to(dtype)

    def _call(self, node: fx.Node) -> torch.Tensor:
        args: Any = map_aggregate(node.args, self._argument)
        kwargs = {name: map_aggregate(arg, self._argument) for name, arg in node.kwargs.items() if name != "pin_memory"}
        if node.op == "call_function":
            return node.target(*args, **kwargs)  # type: ignore[operator]
        if node.target in ("cpu", "cuda"):
            return args[0]
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)

    def _argument(self, arg: Any) -> Any:
        value = value_of(arg)
        if isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] in _DEVICES):
            return torch.device("cpu")
        if isinstance(value, tuple):
            return tuple(map(self._argument, value))
        if isinstance(arg, fx.Node) and isinstance(value, torch.Tensor):
            known = arg in self._formulas
            return self.tensor(arg) if known else torch.empty((), dtype=value.dtype).expand(self._inputs.shape(arg))
        return self._inputs.number(value) if isinstance(value, torch.SymInt) else value


def visible(mask: torch.Tensor) -> torch.Tensor:
    """Which keys a concrete mask shows, as a bool tensor.

    Raises:
        Mismatch: an additive mask has elements that neither show nor hide.
    """
    if mask.dtype is torch.bool:
        return mask
    shown, hidden = mask == 0, mask <= torch.finfo(mask.dtype).min
    if not bool((shown | hidden).all()):
        raise Mismatch("the mask has values between 0 and the lowest one")
    return shown
