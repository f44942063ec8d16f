"""The mask that a proof describes, at concrete places, and its comparison with every element of the graph's own."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import sympy
import torch
from torch import fx

from gemkv_compile.passes.masks.inputs import Inputs
from gemkv_compile.passes.masks.numeric import Mismatch, Run, visible
from gemkv_compile.passes.masks.predicate import KV, B, Q
from gemkv_compile.passes.masks.proof import Documents, MaskProof, Padding, Prefix, Spans


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
