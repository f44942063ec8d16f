"""Softmax over keys that arrive tile by tile."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

NEVER = float("-inf")
LOWEST = torch.finfo(torch.float32).min


class OnlineSoftmax:
    """Running softmax-weighted sum of values, in float32, for queries [batch, Hkv, groups, Q].

    Args:
        shape: (batch, num_kv_heads, groups, Q, head_dim).
        sinks: One logit per query head, [num_kv_heads * groups], or None; it counts in the sum and has no value.
    Source: online softmax, arXiv:1805.02867; sinks, arXiv:2309.17453.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device, sinks: Tensor | None) -> None:
        rows = shape[:-1]
        # The peak is finite even before the first key: -inf - -inf is NaN.
        self.peak = torch.full(rows, LOWEST, dtype=torch.float32, device=device)
        self.total = torch.zeros(rows, dtype=torch.float32, device=device)
        self.weighted = torch.zeros(shape, dtype=torch.float32, device=device)
        if sinks is not None:
            self.peak.copy_(sinks.view(1, *rows[1:3], 1)).clamp_(min=LOWEST)
            self.total += (sinks.view(1, *rows[1:3], 1) != NEVER).to(torch.float32)

    def update(self, scores: Tensor, weigh: Callable[[Tensor], Tensor]) -> None:
        """Take in a tile.

        Args:
            scores: [batch, Hkv, groups, Q, T] float32, -inf where a query may not attend.
            weigh: Maps weights of that shape to the weighted sum of the tile's values, [batch, Hkv, groups, Q, D].
        """
        peak = torch.maximum(self.peak, scores.amax(-1))
        weights = torch.exp(scores - peak.unsqueeze(-1))
        decay = torch.exp(self.peak - peak)
        self.total.mul_(decay).add_(weights.sum(-1))
        self.weighted.mul_(decay.unsqueeze(-1)).add_(weigh(weights))
        self.peak = peak

    def finish(self) -> tuple[Tensor, Tensor]:
        """The weighted mean [batch, Hkv, groups, Q, D], 0 for rows that saw no key, and lse [batch, Hkv, groups, Q]."""
        divisor = self.total.masked_fill(self.total == 0, 1.0)
        return self.weighted / divisor.unsqueeze(-1), self.peak + torch.log(self.total)
