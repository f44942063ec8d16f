"""The two products of a gated MLP and its activation in Triton.

A program computes the same output features of both weights, so that it can multiply them; both are under way at once.
For one row the products are summed up in registers, more rows go through tensor cores, as in `kernel_rows`.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _activated(gate, ACTIVATION: tl.constexpr):
    """The activation of float32 numbers: "gelu_tanh", "gelu" or "silu"."""
    if ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)), which loses no digits where tanh is near -1; 2 z = 2 sqrt(2 / pi) ...
        return gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    elif ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(0.7071067811865476 * gate))
    else:
        return gate / (1.0 + tl.exp(-gate))


@triton.jit
def _gated(gates, ups, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    """activation(gates) * ups of sums in float32; what `F.linear`, the activation and the product round is rounded."""
    gates = gates.to(dtype).to(tl.float32)
    activated = _activated(gates, ACTIVATION).to(dtype).to(tl.float32)
    return (activated * ups.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def gated_one_row(
    x, gate_weight, up_weight, gate_bias, up_bias, y, num_rows, features, width, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y[o] = activation(sum over i of gate[o, i] x[i]) * (sum of up[o, i] x[i]); BLOCK_IN divides `features`."""
    out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    column = tl.arange(0, BLOCK_IN)
    first = tl.minimum(out, width - 1).to(tl.int64)[:, None] * features + column[None, :]
    gate_weights, up_weights = gate_weight + first, up_weight + first
    gates = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    ups = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    for start in tl.range(0, features, BLOCK_IN, num_stages=STAGES):
        gate_part = tl.load(gate_weights + start, eviction_policy="evict_first")
        up_part = tl.load(up_weights + start, eviction_policy="evict_first")
        row = tl.load(x + start + column).to(tl.float32)[None, :]
        gates += gate_part.to(tl.float32) * row
        ups += up_part.to(tl.float32) * row
    gate, up = tl.sum(gates, axis=1), tl.sum(ups, axis=1)
    is_out = out < width
    if HAS_BIAS:
        gate += tl.load(gate_bias + out, mask=is_out, other=0.0).to(tl.float32)
        up += tl.load(up_bias + out, mask=is_out, other=0.0).to(tl.float32)
    tl.store(y + out, _gated(gate, up, ACTIVATION, y.dtype.element_ty), mask=is_out)


@triton.jit
def gated_few_rows(
    x, gate_weight, up_weight, gate_bias, up_bias, y, num_rows, features, width, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y[r, o] = activation(sum over i of gate[o, i] x[r, i]) * (sum of up[o, i] x[r, i]), for up to ROWS rows."""
    out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    column = tl.arange(0, BLOCK_IN)
    row = tl.arange(0, ROWS)
    is_row = (row < num_rows)[None, :]
    first = tl.minimum(out, width - 1).to(tl.int64)[:, None] * features + column[None, :]
    gate_weights, up_weights = gate_weight + first, up_weight + first
    rows = x + row[None, :] * features + column[:, None]
    gates = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    ups = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    for start in tl.range(0, features, BLOCK_IN, num_stages=STAGES):
        gate_part = tl.load(gate_weights + start, eviction_policy="evict_first")
        up_part = tl.load(up_weights + start, eviction_policy="evict_first")
        part = tl.load(rows + start, mask=is_row, other=0.0)
        gates = tl.dot(gate_part, part, gates)
        ups = tl.dot(up_part, part, ups)
    is_out = (out < width)[:, None]
    if HAS_BIAS:
        gates += tl.load(gate_bias + out[:, None], mask=is_out, other=0.0).to(tl.float32)
        ups += tl.load(up_bias + out[:, None], mask=is_out, other=0.0).to(tl.float32)
    places = y + row[None, :] * width + out[:, None]
    tl.store(places, _gated(gates, ups, ACTIVATION, y.dtype.element_ty), mask=is_row & is_out)
