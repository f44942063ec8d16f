"""Runs a mask's own graph on concrete inputs and compares every element with what a proof describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_aggregate

from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.masks.inputs import Inputs
from gemkv_compile.passes.masks.proof import MaskProof

_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "meta")


class Mismatch(Exception):
    """A proof and the mask that it is about differ: an error in the prover."""


class Run:
    """One evaluation of a mask's graph on the CPU, with random values for the padding vectors.

    Args:
        formulas: The tensors whose values matter; of all others the mask takes only the shape or the dtype.
    """

    def __init__(self, formulas: Mapping[fx.Node, Any], inputs: Inputs) -> None:
        self._formulas, self._inputs = formulas, inputs
        self._random = torch.Generator().manual_seed(0)
        self.values: dict[fx.Node, torch.Tensor] = {}

    def tensor(self, node: fx.Node) -> torch.Tensor:
        """The concrete value of a tensor node."""
        if node not in self.values:
            self.values[node] = self._source(node) if node.op == "placeholder" else self._call(node)
        return self.values[node]

    def _source(self, node: fx.Node) -> torch.Tensor:
        # Any nonzero integer attends, so some of them are neither 0 nor 1.
        picks = torch.randint(0, 4, self._inputs.shape(node), generator=self._random, device="cpu")
        return torch.tensor([0, 1, 1, 3], device="cpu")[picks].to(value_of(node).dtype)

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


def described(proof: MaskProof, num_queries: int, num_keys: int, columns: torch.Tensor | None) -> torch.Tensor:
    """The mask that a proof describes, [rows or 1, 1, num_queries, num_keys]; `columns` is [rows, num_keys]."""
    query = torch.arange(num_queries, device="cpu")[:, None] + (num_keys - num_queries)
    key = torch.arange(num_keys, device="cpu")[None, :]
    shown = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device="cpu")
    if proof.causal:
        shown = shown & (key <= query)
    if proof.window is not None:
        shown = shown & (key > query - proof.window)
    return shown if columns is None else shown & (columns[:, None, None, :] != 0)


def compare(proof: MaskProof, mask: fx.Node, sizes: tuple[sympy.Expr, sympy.Expr], run: Run, inputs: Inputs) -> None:
    """Check a proof on one set of concrete inputs; sizes are (Q, K).

    Raises:
        Mismatch: they differ somewhere.
    """
    actual = visible(run.tensor(mask))
    num_queries, num_keys = map(inputs.number, sizes)
    columns = None
    if proof.padding is not None:
        first = inputs.number(proof.padding.column)
        rows = actual.shape[0] if actual.dim() == 4 else 1
        columns = run.tensor(proof.padding.source)[:rows, first : first + num_keys]
    expected = described(proof, num_queries, num_keys, columns)
    expected, actual = torch.broadcast_tensors(expected, actual)
    if not torch.equal(expected, actual):
        where = (expected != actual).nonzero()[0].tolist()
        raise Mismatch(f"it differs from the mask at (b, h, q, kv) = {tuple(where)}")
