"""The operator for products of few rows with several weights, as a decode step has them.

At one row each product is bound by reading its weight, and a launch for each of a layer's small ones costs as much as
the reading. Where the work is worth it is decided by `gemkv_compile.passes.few_rows`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemkv_compile.compat import autocast_off
from gemkv_compile.errors import ShapeMismatch, UnsupportedDtype
from gemkv_compile.kernels.dispatch import implementation

MAX_ROWS = 16
MAX_WEIGHTS = 4
STEP = 64  # in_features is a multiple of it
DTYPES = torch.bfloat16, torch.float16


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
    _check(x, weights, biases)
    with autocast_off():
        return list(implementation("linears", x.device)(x, weights, biases))


@linears.register_fake
def _(x, weights, biases, version):
    return [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]


def _check(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> None:
    features = x.shape[-1]
    if x.dtype not in DTYPES or any(tensor.dtype != x.dtype for tensor in (*weights, *biases)):
        found = ", ".join(str(tensor.dtype) for tensor in (x, *weights, *biases))
        raise UnsupportedDtype(found, "the tensors of linears", "all bfloat16 or all float16")
    if not x.numel() or features % STEP:
        raise ShapeMismatch(f"linears takes rows of a multiple of {STEP} features, got {tuple(x.shape)}.")
    if not 1 <= len(weights) <= MAX_WEIGHTS or len(biases) not in (0, len(weights)):
        raise ShapeMismatch(
            f"linears takes 1 to {MAX_WEIGHTS} weights, and a bias for each or none: got {len(weights)} weights and "
            f"{len(biases)} biases."
        )
    for weight in weights:
        if weight.ndim != 2 or weight.shape[1] != features or not weight.is_contiguous():
            raise ShapeMismatch(
                f"linears takes contiguous weights [out_features, {features}], got {tuple(weight.shape)} with strides "
                f"{weight.stride()}."
            )
    for weight, bias in zip(weights, biases, strict=False):
        if bias.shape != weight.shape[:1] or not bias.is_contiguous():
            raise ShapeMismatch(f"The bias of a weight {tuple(weight.shape)} has shape {tuple(bias.shape)}.")
