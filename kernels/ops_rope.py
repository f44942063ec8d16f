"""The operator for RMSNorm and rotary embedding of the heads of one token a sequence, as a decode step has them.

A layer's queries and keys take a launch each from an inner compiler, since the append of the keys stands between them.
Which of them this operator makes instead is decided by `gemkv_compile.passes.rope`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemkv_compile.compat import autocast_off
from gemkv_compile.errors import InvalidOption, ShapeMismatch, UnsupportedDtype
from gemkv_compile.kernels.dispatch import implementation

DTYPES = torch.bfloat16, torch.float16, torch.float32
NORMS = "none", "weight", "one_plus_weight", "rounded_weight"


@torch.library.custom_op("gemkv::qk_norm_rope", mutates_args=())
def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    norm: str,
    eps: float,
    version: str,
) -> list[Tensor]:
    """RMSNorm over head_dim, then x * cos + rotate_half(x) * sin, of queries and keys in one launch.

    Args:
        q, k: [B, Hq, 1, D] and [B, Hkv, 1, D], one of DTYPES, any strides.
        v: Values [B, Hkv, 1, D] that get the norm without a weight and are not rotated; None: no values.
        q_weight, k_weight: [D], contiguous, one of DTYPES; both, or None for both.
        cos, sin: [B|1, 1, 1, R], dtype of q, any strides; R even, at most D. Channels from R on are not rotated.
        norm: "none"; "weight", n * w in float32, where n is x / sqrt(mean(x^2) + eps), and n itself without weights;
            "one_plus_weight", n * (1 + w) in float32; "rounded_weight", n rounded to x's dtype, then times w in it.
        eps: Of the norm.
        version: Names the passes that built the graph, for compile caches.
    Returns:
        q, k and v if given, each contiguous. Every step is rounded to the dtype of q where Transformers' eager models
        round it: after the norm, after both products with cos and sin, and after their sum. It has no gradient.
    Raises:
        ShapeMismatch, UnsupportedDtype, InvalidOption: an argument is not as said above.
    Source: arXiv:2104.09864 (rotary embedding), arXiv:1910.07467 (RMSNorm).
    """
    _check_heads(q, k, v, cos, sin)
    _check_norm(q, v, q_weight, k_weight, norm)
    with autocast_off():
        run = implementation("qk_norm_rope", q.device)
        return list(run(q, k, v, q_weight, k_weight, cos, sin, norm, eps))


@qk_norm_rope.register_fake
def _(q, k, v, *args):
    return [x.new_empty(x.shape) for x in (q, k, v) if x is not None]


def _check_heads(q: Tensor, k: Tensor, v: Tensor | None, cos: Tensor, sin: Tensor) -> None:
    given = [x for x in (q, k, v, cos, sin) if x is not None]
    if q.dtype not in DTYPES or any(x.dtype != q.dtype for x in given):
        found = ", ".join(str(x.dtype) for x in given)
        raise UnsupportedDtype(found, "the tensors of qk_norm_rope", "of one dtype, float16, bfloat16 or float32")
    batch, dim = q.shape[0], q.shape[-1]
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is not None and (x.ndim != 4 or not x.numel() or (x.shape[0], *x.shape[2:]) != (batch, 1, dim)):
            raise ShapeMismatch(f"qk_norm_rope takes {name} as [{batch}, heads, 1, {dim}], got {tuple(x.shape)}.")
    rotary = cos.shape[-1]
    for name, x in (("cos", cos), ("sin", sin)):
        fits = x.ndim == 4 and x.shape[0] in (1, batch) and x.shape[1:] == (1, 1, rotary)
        if not fits or rotary % 2 or not 0 < rotary <= dim:
            raise ShapeMismatch(
                f"qk_norm_rope takes {name} as [{batch} or 1, 1, 1, R], R even and at most {dim}, got {tuple(x.shape)}."
            )


def _check_norm(q: Tensor, v: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, norm: str) -> None:
    if norm not in NORMS:
        raise InvalidOption(f"norm must be one of {', '.join(map(repr, NORMS))}, got {norm!r}.")
    weights = [weight for weight in (q_weight, k_weight) if weight is not None]
    if len(weights) not in {"none": (0,), "weight": (0, 2)}.get(norm, (2,)) or (v is not None and norm == "none"):
        raise ShapeMismatch(
            f"norm={norm!r} does not go with {len(weights)} weights and {'no ' * (v is None)}values: give weights for "
            "both queries and keys or, without a norm or with norm='weight', for neither; values need a norm."
        )
    for weight in weights:
        if weight.shape != q.shape[-1:] or not weight.is_contiguous():
            raise ShapeMismatch(
                f"qk_norm_rope takes contiguous weights [{q.shape[-1]}], got {tuple(weight.shape)} with strides "
                f"{weight.stride()}."
            )
        expected = str(q.dtype) if norm == "rounded_weight" else "float16, bfloat16 or float32"
        if weight.dtype not in DTYPES or (norm == "rounded_weight" and weight.dtype != q.dtype):
            raise UnsupportedDtype(weight.dtype, f"a weight of norm={norm!r} of {q.dtype}", expected)
