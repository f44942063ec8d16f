"""RMSNorm and rotary embedding of the heads of one token a sequence, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def qk_norm_rope_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    norm: str,
    eps: float,
) -> list[Tensor]:
    """Arguments and results as in `gemkv_compile.kernels.ops_rope.qk_norm_rope`; of float64, all in float64."""
    normed = [_norm(x, weight, norm, eps) for x, weight in ((q, q_weight), (k, k_weight))]
    results = [_rotated(x, cos, sin) for x in normed]
    if v is not None:
        results.append(_norm(v, None, norm, eps))
    return [x.clone(memory_format=torch.contiguous_format) for x in results]


def _norm(x: Tensor, weight: Tensor | None, norm: str, eps: float) -> Tensor:
    if norm == "none":
        return x
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return y.to(x.dtype)
    if norm == "rounded_weight":
        return weight * y.to(x.dtype)
    scale = weight.to(wide.dtype)
    return (y * (1 + scale if norm == "one_plus_weight" else scale)).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary = cos.shape[-1]
    part, rest = x[..., :rotary], x[..., rotary:]
    first, second = part.chunk(2, -1)
    return torch.cat([part * cos + torch.cat([-second, first], -1) * sin, rest], -1)
