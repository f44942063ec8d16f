"""Products of few rows with several weights on a GPU: one launch, each weight read once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gemkv_compile.kernels.linears.kernel_gated import gated_few_rows, gated_one_row
from gemkv_compile.kernels.linears.kernel_rows import few_rows, one_row
from gemkv_compile.kernels.linears.reference import gated_linear_reference, linears_reference
from gemkv_compile.kernels.linears.sizes import gated_sizes, sizes
from gemkv_compile.kernels.ops_linear import MAX_ROWS, MAX_WEIGHTS

ALIGNMENT = 16  # bytes, of every weight, bias and result


def linears_triton(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """Arguments and results as in `gemkv_compile.kernels.ops_linear.linears`."""
    features = x.shape[-1]
    rows = x.reshape(-1, features).contiguous()
    if len(rows) > MAX_ROWS or any(tensor.data_ptr() % ALIGNMENT for tensor in (rows, *weights, *biases)):
        return linears_reference(x, weights, biases)
    outs = _results(x, weights)
    chosen = sizes(len(rows), features)
    programs = sum(-(-weight.shape[0] // chosen.block_out) for weight in weights)
    kernel: Any = one_row if len(rows) == 1 else few_rows
    with torch.cuda.device_of(x):
        kernel[(programs,)](
            rows, *_four(weights), *_four(biases or weights), *_four(outs),
            *[weight.shape[0] for weight in weights], *[0] * (MAX_WEIGHTS - len(weights)), len(rows), features,
            HAS_BIAS=bool(biases), BLOCK_OUT=chosen.block_out, BLOCK_IN=chosen.block_in, ROWS=MAX_ROWS,
            STAGES=chosen.stages, num_warps=chosen.warps,
        )  # fmt: skip
    return outs


def _results(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]


def _four(tensors: Sequence[Tensor]) -> list[Tensor]:
    """As many as the kernels take; those too many have no features."""
    return [*tensors, *[tensors[0]] * (MAX_WEIGHTS - len(tensors))]


def gated_linear_triton(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: str,
) -> Tensor:
    """Arguments and results as in `gemkv_compile.kernels.ops_linear.gated_linear`."""
    width, features = gate_weight.shape
    rows = x.reshape(-1, features).contiguous()
    tensors = [each for each in (rows, gate_weight, up_weight, gate_bias, up_bias) if each is not None]
    if len(rows) > MAX_ROWS or any(tensor.data_ptr() % ALIGNMENT for tensor in tensors):
        return gated_linear_reference(x, gate_weight, up_weight, gate_bias, up_bias, activation)
    (out,) = _results(x, [gate_weight])
    chosen = gated_sizes(len(rows), features)
    kernel: Any = gated_one_row if len(rows) == 1 else gated_few_rows
    biases = (gate_weight, up_weight) if gate_bias is None else (gate_bias, up_bias)
    with torch.cuda.device_of(x):
        kernel[(-(-width // chosen.block_out),)](
            rows, gate_weight, up_weight, *biases, out, len(rows), features, width, ACTIVATION=activation,
            HAS_BIAS=gate_bias is not None, BLOCK_OUT=chosen.block_out, BLOCK_IN=chosen.block_in, ROWS=MAX_ROWS,
            STAGES=chosen.stages, num_warps=chosen.warps,
        )  # fmt: skip
    return out
