"""Runs a mask's own graph on concrete inputs and compares every element with what a proof describes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_aggregate

from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.masks.inputs import Inputs
from gemkv_compile.passes.masks.predicate import KV, B, Q
from gemkv_compile.passes.masks.proof import Documents, MaskProof, Padding, Prefix, Spans

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


def described(
    proof: MaskProof, at: Mapping[sympy.Symbol, torch.Tensor], offset: int, run: Run, inputs: Inputs
) -> torch.Tensor:
    """Where a proof shows a key, bool; `at` has int64 tensors for b, q and kv that broadcast, `offset` is K - Q."""
    here, key = at[Q] + offset, at[KV]
    shown = torch.ones_like(here + key + at[B], dtype=torch.bool)
    excepted = {kind: _excepted(kind, at, offset, run, inputs) for kind in (proof.prefix, proof.spans) if kind}
    if proof.causal or proof.right is not None:
        shown &= _any(key <= here + (proof.right or 0), (e for kind, e in excepted.items() if kind.after_bound))
    if proof.window is not None:
        shown &= _any(key > here - proof.window, (e for kind, e in excepted.items() if kind.before_window))
    if proof.padding is not None:
        shown &= _value(proof.padding, key, at, run, inputs) != 0
    if proof.documents is not None:
        ids = (_value(proof.documents, place, at, run, inputs) for place in (here, key))
        shown &= torch.eq(*ids)
    return shown


def _any(shown: torch.Tensor, excepted: Iterator[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.logical_or, excepted, shown)


def _excepted(
    kind: Prefix | Spans, at: Mapping[sympy.Symbol, torch.Tensor], offset: int, run: Run, inputs: Inputs
) -> torch.Tensor:
    if isinstance(kind, Prefix):
        return at[KV] < lengths(kind, at[B], run, inputs)
    own, others = (_value(kind, place, at, run, inputs) for place in (at[Q] + offset, at[KV]))
    return own == others if kind.least is None else (own == others) & (own >= kind.least)


def lengths(prefix: Prefix, row: torch.Tensor, run: Run, inputs: Inputs) -> torch.Tensor:
    """How many keys the prefix of each sequence has, int64 of the shape of `row`."""
    extra = torch.full_like(row, inputs.number(prefix.extra))
    if prefix.source is None:
        return extra
    numbers = run.tensor(prefix.source).long()
    return numbers[row.clamp(max=numbers.shape[0] - 1)] + extra


def _value(
    kind: Padding | Documents | Spans,
    place: torch.Tensor,
    at: Mapping[sympy.Symbol, torch.Tensor],
    run: Run,
    inputs: Inputs,
) -> torch.Tensor:
    """source[b, place + column]; a source of one row is the only sequence's."""
    values = run.tensor(kind.source)
    return values[at[B].clamp(max=values.shape[0] - 1), place + inputs.number(kind.column)]


def compare(proof: MaskProof, mask: fx.Node, sizes: tuple[sympy.Expr, sympy.Expr], run: Run, inputs: Inputs) -> None:
    """Check a proof on one set of concrete inputs; sizes are (Q, K).

    Raises:
        Mismatch: they differ somewhere.
    """
    actual = visible(run.tensor(mask))
    num_queries, num_keys = map(inputs.number, sizes)
    rows = actual.shape[0] if actual.dim() == 4 else 1
    shapes = {B: (rows, 1, 1, 1), Q: (num_queries, 1), KV: (num_keys,)}
    at = {index: torch.arange(shape[0], device="cpu").view(shape) for index, shape in shapes.items()}
    expected = described(proof, at, num_keys - num_queries, run, inputs)
    expected, actual = torch.broadcast_tensors(expected, actual)
    if not torch.equal(expected, actual):
        where = (expected != actual).nonzero()[0].tolist()
        raise Mismatch(f"it differs from the mask at (b, h, q, kv) = {tuple(where)}")
