"""Launch sizes of products of few rows, measured on an H200 (`examples/benchmarks/linears.py`; DESIGN.md)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """A program's part: output features, and input features at a time; pipeline stages and warps."""

    block_out: int
    block_in: int
    stages: int
    warps: int


def sizes(rows: int, features: int) -> Sizes:
    """How to launch the products of some rows of `features` input features, a multiple of 64.

    One row: each program a single output feature, since what limits is how many bytes are under way; programs of 256
    products at a time, one warp, which then has no sum to share with others. More rows: 32 output features, so that a
    projection of 4,096 of them gives work to all multiprocessors.
    """
    if rows == 1:
        block = min(256, features & -features)
        return Sizes(256 // block, block, 1, 1)
    return Sizes(32, min(128, features & -features), 4, 2)
