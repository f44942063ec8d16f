"""Compares a proof with the formula that was read, at chosen points: for masks too large to write out."""

from __future__ import annotations

import math
from collections.abc import Mapping

import sympy
import torch
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import Boolean
from torch import fx

from gemkv_compile.passes.masks.describing import described, lengths
from gemkv_compile.passes.masks.inputs import Inputs
from gemkv_compile.passes.masks.numeric import Mismatch, Run
from gemkv_compile.passes.masks.predicate import KV, AtLeast, B, H, Q, Zero
from gemkv_compile.passes.masks.proof import MaskProof

_RANDOM_POINTS = 512


class Evaluator:
    """Computes formulas at points given as one int64 tensor per index, all of one length.

    Args:
        sources: The graph inputs, by the function that stands for their values.
    """

    def __init__(
        self, points: Mapping[sympy.Symbol, torch.Tensor], sources: Mapping[type[sympy.Function], fx.Node], run: Run
    ) -> None:
        self._points, self._sources, self._run = points, sources, run

    def holds(self, formula: Boolean) -> torch.Tensor:
        """Where the formula holds, one bool per point; its sizes are numbers already."""
        if isinstance(formula, sympy.And):
            return torch.stack([self.holds(part) for part in formula.args]).all(0)
        if isinstance(formula, sympy.Or):
            return torch.stack([self.holds(part) for part in formula.args]).any(0)
        if formula in (sympy.true, sympy.false):
            return torch.full_like(self._points[KV], bool(formula), dtype=torch.bool)
        number = self.number(formula.args[0])
        if isinstance(formula, AtLeast):
            return number >= 0
        return number == 0 if isinstance(formula, Zero) else number != 0

    def number(self, expr: sympy.Expr) -> torch.Tensor:
        """The value of an integer expression at each point."""
        if expr in self._points:
            return self._points[expr]
        if expr.is_Integer:
            return torch.full_like(self._points[KV], int(expr))
        parts = [self.number(part) for part in expr.args]
        if isinstance(expr, AppliedUndef):
            return self._run.tensor(self._sources[expr.func])[tuple(parts)].long()
        if expr.is_Add:
            return torch.stack(parts).sum(0)
        if expr.is_Mul:
            return math.prod(parts[1:], start=parts[0])
        if isinstance(expr, sympy.Abs):
            return parts[0].abs()
        raise Mismatch(f"{expr} cannot be evaluated")


def compare_samples(
    proof: MaskProof,
    formula: Boolean,
    sizes: Mapping[sympy.Symbol, sympy.Expr],
    sources: Mapping[type[sympy.Function], fx.Node],
    run: Run,
    inputs: Inputs,
) -> None:
    """Check a proof against the formula, at corners, at both sides of each bound and at random points.

    Raises:
        Mismatch: they differ somewhere.
    """
    numbers = {index: inputs.number(size) for index, size in sizes.items()}
    points = _points(proof, numbers, run, inputs)
    expected = described(proof, points, numbers[KV] - numbers[Q], run, inputs)
    actual = Evaluator(points, sources, run).holds(inputs.fixed(formula))
    if not torch.equal(expected, actual):
        at = int((expected != actual).nonzero()[0])
        raise Mismatch(f"it differs from the mask at (q, kv) = ({int(points[Q][at])}, {int(points[KV][at])})")


def _points(
    proof: MaskProof, sizes: Mapping[sympy.Symbol, int], run: Run, inputs: Inputs
) -> dict[sympy.Symbol, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    edges = torch.tensor([0, 1, sizes[Q] // 2, sizes[Q] - 2, sizes[Q] - 1])
    query = torch.cat([edges, torch.randint(0, sizes[Q], (_RANDOM_POINTS,), generator=random)]).clamp(min=0)
    row = torch.randint(0, sizes.get(B, 1), query.shape, generator=random)
    diagonal = query + (sizes[KV] - sizes[Q])
    limits = [diagonal + distance for distance in (0, proof.right or 0, -(proof.window or 0))]
    limits += [] if proof.prefix is None else [lengths(proof.prefix, row, run, inputs) - 1]
    keys = [limit + step for limit in limits for step in (-1, 0, 1, 2)]
    keys += [torch.zeros_like(query), torch.full_like(query, sizes[KV] - 1)]
    keys.append(torch.randint(0, sizes[KV], query.shape, generator=random))
    points = {Q: query.repeat(len(keys)), KV: torch.cat(keys).clamp(0, sizes[KV] - 1), B: row.repeat(len(keys))}
    points[H] = torch.randint(0, sizes.get(H, 1), points[Q].shape, generator=random)
    return points
