"""Attention of a whole prompt with int8 scores, in plain torch: the oracle of `kernel_int8`."""

from __future__ import annotations

import torch
from torch import Tensor

from gemkv_compile.kernels.results import empty_results
from gemkv_compile.kernels.softmax import NEVER

BLOCK = 64  # tokens whose keys share a scale
TILE = 512  # queries in a tile of scores


def attend_int8_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Tensor | None,
    scale: float,
    softcap: float | None,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Arguments and result as in `gemkv_compile.kernels.attend_chunk.kernel_int8.attend_int8_triton`.

    Source: SageAttention, arXiv:2410.02367.
    """
    out, lse = empty_results(q)
    tokens, groups = q.shape[2], q.shape[1] // k.shape[1]
    token = torch.arange(tokens, device=q.device)
    counts = torch.ones(q.shape[0], tokens, dtype=torch.bool, device=q.device)
    if padding is not None:
        counts = torch.nn.functional.pad(padding, (0, max(0, tokens - padding.shape[1])))[:, :tokens]
    keys, means = quantised_keys(k, counts)
    keys, means = keys.repeat_interleave(groups, 1), means.repeat_interleave(groups, 1)
    values = v.float().masked_fill(~counts[:, None, :, None], 0).repeat_interleave(groups, 1)
    for begin in range(0, tokens, TILE):
        query = token[begin : begin + TILE, None]
        rows = q[:, :, begin : begin + TILE].float()
        shift = rows @ means.mT * scale
        steps = rows.abs().amax(-1, keepdim=True) / 127
        steps = torch.where(steps > 0, steps, 1.0)
        scores = (rows / steps).round() * steps @ keys.mT * scale
        if softcap is not None:
            scores, shift = softcap * torch.tanh((scores + shift) / softcap), torch.zeros_like(shift)
        seen = counts[:, None, None]
        if causal:
            seen = seen & (token <= query)
        if window is not None:
            seen = seen & (token > query - window)
        scores = scores.masked_fill(~seen, NEVER)
        result = scores.logsumexp(-1, keepdim=True)
        weights = torch.where(seen, (scores - result).exp(), 0.0)
        out[:, :, begin : begin + TILE] = weights @ values
        lse[:, :, begin : begin + TILE] = (result + shift).squeeze(-1)
    return out, lse


def quantised_keys(k: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [B, Hkv, N, D] as their codes say, less their mean, and that mean [B, Hkv, 1, D]; both float32.

    Args:
        counts: Which tokens are there, bool [B, N]; the keys of others are 0.
    """
    there = counts[:, None, :, None]
    keys = k.float().masked_fill(~there, 0)
    means = keys.sum(2, keepdim=True) / there.sum(2, keepdim=True).clamp(min=1)
    keys = (keys - means).masked_fill(~there, 0)
    tokens = k.shape[2]
    blocks = torch.nn.functional.pad(keys, (0, 0, 0, -tokens % BLOCK)).unflatten(2, (-1, BLOCK))
    steps = blocks.abs().amax((-1, -2), keepdim=True) / 127
    steps = torch.where(steps > 0, steps, 1.0)
    return ((blocks / steps).round() * steps).flatten(2, 3)[:, :, :tokens], means
