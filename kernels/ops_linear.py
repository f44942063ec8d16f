"""The operators for products of few rows with several weights, as a decode step has them.

At one row each product is bound by reading its weight, and a launch for each of a layer's small ones, or for an
activation between them, costs as much as the reading. Where the work is worth it is decided by
`gemkv_compile.passes.few_rows`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemkv_compile.compat import autocast_off
from gemkv_compile.errors import InvalidOption, ShapeMismatch, UnsupportedDtype
from gemkv_compile.kernels.dispatch import implementation

MAX_ROWS = 16
MAX_WEIGHTS = 4
STEP = 64  # in_features is a multiple of it
DTYPES = torch.bfloat16, torch.float16
ACTIVATIONS = "gelu_tanh", "gelu", "silu"  # GELU by its tanh approximation, by erf; SiLU


@torch.library.custom_op("gemkv::linears", mutates_args=())
def linears(x: Tensor, weights: list[Tensor], biases: list[Tensor], version: str) -> list[Tensor]:
    """The products of the rows of x with each weight, plus its bias: what `F.linear` gives for each, in one launch.

    Args:
        x: [..., in_features], bfloat16 or float16; in_features a multiple of STEP. The kernel is for at most MAX_ROWS
            rows; more are multiplied as `F.linear` does it, one launch a weight.
        weights: 1 to MAX_WEIGHTS tensors [out_features, in_features], contiguous, dtype of x.
        biases: A tensor [out_features] for each weight, contiguous, or none at all.
        version: Names the passes that built the graph, for compile caches.
    Returns:
        For each weight [..., out_features], summed up in float32 and rounded once. It has no gradient.
    Raises:
        ShapeMismatch, UnsupportedDtype: an argument is not as said above.
    """
    _check("linears", x, weights, biases)
    with autocast_off():
        return list(implementation("linears", x.device)(x, weights, biases))


@linears.register_fake
def _(x, weights, biases, version):
    return [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]


@torch.library.custom_op("gemkv::gated_linear", mutates_args=())
def gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: str,
    version: str,
) -> Tensor:
    """The first half of a gated MLP, activation(gate) * up, where gate and up are products of x: in one launch.

    Args:
        x: [..., in_features], bfloat16 or float16; in_features a multiple of STEP. The kernel is for at most MAX_ROWS
            rows; more are computed as the unfused operations do it.
        gate_weight, up_weight: [out_features, in_features], contiguous, dtype of x.
        gate_bias, up_bias: [out_features], contiguous, or None, both.
        activation: One of ACTIVATIONS.
        version: Names the passes that built the graph, for compile caches.
    Returns:
        [..., out_features]. It is rounded where the unfused operations round: gate and up are each summed up in float32
        and rounded once, as by `F.linear`; the activation is computed in float32 and rounded, then the product. It has
        no gradient.
    Raises:
        ShapeMismatch, UnsupportedDtype: an argument is not as said above.
        InvalidOption: the activation is another one.
    Source: gated linear units in Transformers, arXiv:2002.05202; GELU, arXiv:1606.08415.
    """
    _check_gated(x, gate_weight, up_weight, gate_bias, up_bias, activation)
    with autocast_off():
        out: Tensor = implementation("gated_linear", x.device, "linears")(
            x, gate_weight, up_weight, gate_bias, up_bias, activation
        )
    return out


@gated_linear.register_fake
def _(x, gate_weight, up_weight, gate_bias, up_bias, activation, version):
    return x.new_empty((*x.shape[:-1], gate_weight.shape[0]))


def _check_gated(
    x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None, activation: str
) -> None:
    if activation not in ACTIVATIONS:
        raise InvalidOption(f"gated_linear has the activations {', '.join(ACTIVATIONS)}, got {activation!r}.")
    if gate.shape != up.shape:
        raise ShapeMismatch(
            f"gated_linear takes two weights of one shape, got {tuple(gate.shape)} and {tuple(up.shape)}."
        )
    if (gate_bias is None) != (up_bias is None):
        raise ShapeMismatch("gated_linear takes a bias for each of its two weights or none: got one.")
    _check("gated_linear", x, [gate, up], [bias for bias in (gate_bias, up_bias) if bias is not None])


def _check(name: str, x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> None:
    features = x.shape[-1]
    if x.dtype not in DTYPES or any(tensor.dtype != x.dtype for tensor in (*weights, *biases)):
        found = ", ".join(str(tensor.dtype) for tensor in (x, *weights, *biases))
        raise UnsupportedDtype(found, f"the tensors of {name}", "all bfloat16 or all float16")
    if not x.numel() or features % STEP:
        raise ShapeMismatch(f"{name} takes rows of a multiple of {STEP} features, got {tuple(x.shape)}.")
    if not 1 <= len(weights) <= MAX_WEIGHTS or len(biases) not in (0, len(weights)):
        raise ShapeMismatch(
            f"{name} takes 1 to {MAX_WEIGHTS} weights, and a bias for each or none: got {len(weights)} weights and "
            f"{len(biases)} biases."
        )
    for weight in weights:
        if weight.ndim != 2 or weight.shape[1] != features or not weight.is_contiguous():
            raise ShapeMismatch(
                f"{name} takes contiguous weights [out_features, {features}], got {tuple(weight.shape)} with strides "
                f"{weight.stride()}."
            )
    for weight, bias in zip(weights, biases, strict=False):
        if bias.shape != weight.shape[:1] or not bias.is_contiguous():
            raise ShapeMismatch(f"The bias of a weight {tuple(weight.shape)} has shape {tuple(bias.shape)}.")
