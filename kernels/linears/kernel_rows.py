"""Products of few rows with several weights in Triton.

A program computes some output features of one weight. For one row the products are summed up in registers, more rows
go through tensor cores, where the weight is the operand with many rows. Weights are the first to leave the L2 cache
(evict_first): nothing of them is read again before the next token.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _choose(first_1, first_2, first_3, tile, a, b, c, d):
    """The argument of the weight that a tile is of; the addresses are multiples of 16."""
    address = tl.where(
        tile < first_2,
        tl.where(tile < first_1, a.to(tl.int64), b.to(tl.int64)),
        tl.where(tile < first_3, c.to(tl.int64), d.to(tl.int64)),
    )
    return tl.multiple_of(address.to(tl.pointer_type(a.dtype.element_ty)), 16)


@triton.jit
def _outputs(w0, w1, w2, w3, b0, b1, b2, b3, y0, y1, y2, y3, n0, n1, n2, n3, BLOCK_OUT: tl.constexpr):
    """Weight, bias, result and number of output features of this program's weight, and which features are its own."""
    tile = tl.program_id(0)
    first_1 = tl.cdiv(n0, BLOCK_OUT)
    first_2 = first_1 + tl.cdiv(n1, BLOCK_OUT)
    first_3 = first_2 + tl.cdiv(n2, BLOCK_OUT)
    w = _choose(first_1, first_2, first_3, tile, w0, w1, w2, w3)
    b = _choose(first_1, first_2, first_3, tile, b0, b1, b2, b3)
    y = _choose(first_1, first_2, first_3, tile, y0, y1, y2, y3)
    n = tl.where(tile < first_2, tl.where(tile < first_1, n0, n1), tl.where(tile < first_3, n2, n3))
    first = tl.where(tile < first_2, tl.where(tile < first_1, 0, first_1), tl.where(tile < first_3, first_2, first_3))
    return w, b, y, n, (tile - first) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)


@triton.jit
def one_row(
    x, w0, w1, w2, w3, b0, b1, b2, b3, y0, y1, y2, y3, n0, n1, n2, n3, num_rows, features,
    HAS_BIAS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y[o] = sum over i of w[o, i] x[i], and a bias; BLOCK_IN divides `features`."""
    w, b, y, n, out = _outputs(w0, w1, w2, w3, b0, b1, b2, b3, y0, y1, y2, y3, n0, n1, n2, n3, BLOCK_OUT)
    column = tl.arange(0, BLOCK_IN)
    weights = w + tl.minimum(out, n - 1).to(tl.int64)[:, None] * features + column[None, :]
    sums = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    for start in tl.range(0, features, BLOCK_IN, num_stages=STAGES):
        row = tl.load(x + start + column).to(tl.float32)
        sums += tl.load(weights + start, eviction_policy="evict_first").to(tl.float32) * row[None, :]
    result = tl.sum(sums, axis=1)
    if HAS_BIAS:
        result += tl.load(b + out, mask=out < n, other=0.0).to(tl.float32)
    tl.store(y + out, result.to(y.dtype.element_ty), mask=out < n)


@triton.jit
def few_rows(
    x, w0, w1, w2, w3, b0, b1, b2, b3, y0, y1, y2, y3, n0, n1, n2, n3, num_rows, features,
    HAS_BIAS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y[r, o] = sum over i of w[o, i] x[r, i], and a bias, for up to ROWS rows; BLOCK_IN divides `features`."""
    w, b, y, n, out = _outputs(w0, w1, w2, w3, b0, b1, b2, b3, y0, y1, y2, y3, n0, n1, n2, n3, BLOCK_OUT)
    column = tl.arange(0, BLOCK_IN)
    row = tl.arange(0, ROWS)
    is_row = (row < num_rows)[None, :]
    weights = w + tl.minimum(out, n - 1).to(tl.int64)[:, None] * features + column[None, :]
    rows = x + row[None, :] * features + column[:, None]
    sums = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    for start in tl.range(0, features, BLOCK_IN, num_stages=STAGES):
        part = tl.load(weights + start, eviction_policy="evict_first")
        sums = tl.dot(part, tl.load(rows + start, mask=is_row, other=0.0), sums)
    if HAS_BIAS:
        sums += tl.load(b + out, mask=out < n, other=0.0).to(tl.float32)[:, None]
    places = y + row[None, :] * n + out[:, None]
    tl.store(places, sums.to(y.dtype.element_ty), mask=is_row & (out < n)[:, None])
