"""How far the outputs of one run of a graph are from those of another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 24  # numbers compared at a time, in float64

Figures = tuple[float, float, int, int]
"""Largest absolute difference, largest difference relative to the largest number of its reference, rows whose argmax
differs, rows."""


def measure(ours: Sequence[Any], reference: Sequence[Any], shown: Tensor | None) -> Figures | None:
    """Compare float outputs, pair by pair; None if there is none.

    Args:
        ours, reference: Outputs at the same positions; what is no float tensor is left out.
        shown: [batch, q_len] bool, the tokens that are no padding, or None for all. An output [batch, q_len, ...] is
            compared at these only: a padding row that sees no key is zero in a rewritten graph.
    Numbers that are not finite in the reference are left out. Rows are those of the output with the largest last
    dimension: the logits, if the graph computes them.
    """
    pairs = [(_rows(a, shown), _rows(b, shown)) for a, b in zip(ours, reference, strict=True) if _is_compared(b)]
    pairs = [(a, b) for a, b in pairs if b.numel()]
    if not pairs:
        return None
    differences = [_difference(a, b) for a, b in pairs]
    widest = max(pairs, key=lambda pair: pair[1].shape[-1])
    changed = sum(int((a.argmax(-1) != b.argmax(-1)).sum()) for a, b in _chunks(*widest))
    relative = max(absolute / scale if absolute else 0.0 for absolute, scale in differences)
    return max(absolute for absolute, _ in differences), relative, changed, len(widest[0])


def _is_compared(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _rows(value: Tensor, shown: Tensor | None) -> Tensor:
    """The numbers of an output as [rows, last dimension], without padding."""
    value = value.detach()
    if shown is not None and value.shape[:2] == shown.shape:
        value = value[shown]
    return value.flatten(0, -2) if value.dim() > 1 else value.reshape(1, -1)


def _difference(ours: Tensor, reference: Tensor) -> tuple[float, float]:
    """The largest difference, and the largest number of the reference."""
    absolute = scale = 0.0
    for a, b in _chunks(ours, reference):
        finite = torch.isfinite(b)
        exact = torch.where(finite, b, 0.0).double()
        difference = torch.where(finite, a.double() - exact, 0.0).abs().nan_to_num(nan=torch.inf)
        absolute, scale = max(absolute, float(difference.max())), max(scale, float(exact.abs().max()))
    return absolute, scale or torch.finfo(torch.float64).tiny


def _chunks(ours: Tensor, reference: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    size = max(1, CHUNK // reference.shape[-1])
    return zip(ours.split(size), reference.split(size), strict=True)
