"""Products of few rows with several weights, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor
from torch.nn.functional import gelu, linear, silu

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "gelu": gelu,
    "silu": silu,
}
"""The functions that `gemkv_compile.kernels.ops_linear.ACTIVATIONS` names."""


def linears_reference(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """Arguments and results as in `gemkv_compile.kernels.ops_linear.linears`."""
    if not biases:
        return [linear(x, weight) for weight in weights]
    return [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def gated_linear_reference(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: str,
) -> Tensor:
    """Arguments and results as in `gemkv_compile.kernels.ops_linear.gated_linear`."""
    return ACTIVATIONS[activation](linear(x, gate_weight, gate_bias)) * linear(x, up_weight, up_bias)
