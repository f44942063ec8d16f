"""Products of few rows with several weights on a GPU: one launch, each weight read once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gemkv_compile.kernels.linears.kernel_rows import few_rows, one_row
from gemkv_compile.kernels.linears.reference import linears_reference
from gemkv_compile.kernels.linears.sizes import sizes
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
