"""Products of few rows with several weights, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import linear


def linears_reference(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """Arguments and results as in `gemkv_compile.kernels.ops_linear.linears`."""
    if not biases:
        return [linear(x, weight) for weight in weights]
    return [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
