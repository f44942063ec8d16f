"""What attention operators return, before anything is in it."""

from __future__ import annotations

import torch
from torch import Tensor


def empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised out [B, Hq, Q, D] and lse [B, Hq, Q] float32 of an attention.

    The heads of a token lie side by side in memory, which is how the next projection wants them.
    """
    batch, heads, q_len, dim = q.shape
    out = torch.empty((batch, q_len, heads, dim), dtype=q.dtype, device=q.device).transpose(1, 2)
    return out, torch.empty((batch, heads, q_len), dtype=torch.float32, device=q.device)
