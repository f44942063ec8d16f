"""Attention of one new token to its paged past, in plain torch: the oracle of the kernel, and what runs on CPUs.

Codes are not dequantised: with k = code * scale + zero, q . k = (q * scale) . code + q . zero holds per group, and
the same goes for the values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemkv_compile.kernels.formats import spread_norms
from gemkv_compile.kernels.layout import PageLayout
from gemkv_compile.kernels.memory import split_groups, unpack_groups
from gemkv_compile.kernels.past import Past
from gemkv_compile.kernels.results import empty_results
from gemkv_compile.kernels.softmax import OnlineSoftmax
from gemkv_compile.kernels.visibility import Visibility, check_padding, grouped_mask, hide_rows, masked_scores

STEP_TOKENS = 1024


def attend_pages_reference(
    q: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    starts: Tensor,
    tail: Tensor,
    padding: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    layout: PageLayout,
) -> tuple[Tensor, Tensor]:
    """Arguments and result as in `gemkv_compile.kernels.ops.attend_pages`."""
    # For one query, the newest tokens that it reaches are all that the window and the mask's columns say.
    bounds = [bound for bound in (window, None if mask is None else mask.shape[-1]) if bound is not None]
    past = Past(page_table, seq_lens, starts, min(bounds, default=None), layout)
    check_padding(padding, max(past.lengths, default=0))
    rules = Visibility(seq_lens, seq_lens, padding, grouped_mask(mask, layout.num_kv_heads), False, None)
    query = q.unflatten(1, (layout.num_kv_heads, -1)).squeeze(3).to(torch.float32) * scale  # [B, Hkv, groups, D]
    softmax = OnlineSoftmax((*query.shape[:3], 1, layout.head_dim), q.device, sinks)
    positions, exists = past.pages()
    visible, bias = rules.pairs(positions, rules.tokens(positions, exists), 0, 1)
    for columns, data in past.steps(STEP_TOKENS):
        shown = visible[..., columns]
        step = _PagedTokens(data, shown, layout)
        scores = masked_scores(step.scores(query), shown, None if bias is None else bias[..., columns], softcap)
        softmax.update(scores, step.weigh)
    if (newest := past.tail()) is not None:
        _attend_tail(softmax, query, tail, *newest, rules, softcap)
    out, lse = softmax.finish()
    result = empty_results(q)
    result[0].copy_(out.view(q.shape))
    result[1].copy_(lse.view(q.shape[:3]))
    return result


def _attend_tail(
    softmax: OnlineSoftmax,
    query: Tensor,
    tail: Tensor,
    positions: Tensor,
    exists: Tensor,
    rules: Visibility,
    softcap: float | None,
) -> None:
    visible, bias = rules.pairs(positions, rules.tokens(positions, exists), 0, 1)
    k, v = tail.to(torch.float32).unbind(1)
    v = hide_rows(v, visible.flatten(1, 3).any(1))
    scores = masked_scores((query @ k.mT).unsqueeze(3), visible, bias, softcap)
    softmax.update(scores, lambda weights: (weights.squeeze(3) @ v).unsqueeze(3))


class _PagedTokens:
    """Groups of a step, [batch, Hkv, n, group_bytes], ready for products with float32 queries and weights.

    Args:
        visible: [batch, Hkv|1, groups|1, 1, n * group_size] bool; what nobody sees cannot reach the result.
    """

    def __init__(self, data: Tensor, visible: Tensor, layout: PageLayout) -> None:
        views = split_groups(data, layout)
        k, v = unpack_groups(views, layout)
        self.k, self.v = _packed_float(k), _packed_float(v.mT)
        shown = visible.flatten(1, 3).any(1).unflatten(1, (-1, layout.group_size))[:, None, :, None]  # [B, 1, n, 1, G]
        self.planes: tuple[Tensor, ...] = ()
        self.v_zero: Tensor | None = None
        if views.scales is None or views.v_last is None:
            self.v = self.v.masked_fill(~shown, 0.0)
            return
        hidden = ~shown.any(-1, keepdim=True)
        self.planes = _packed_float(views.scales).masked_fill(hidden, 0.0).split(1, dim=-2)  # each [B, Hkv, n, 1, D]
        if layout.has_norms:
            self.v *= spread_norms(views.v_last.masked_fill(hidden, 0.0), layout.head_dim).mT
        else:
            self.v_zero = _packed_float(views.v_last.unsqueeze(-2)).masked_fill(hidden, 0.0)

    def scores(self, query: Tensor) -> Tensor:
        """Products [batch, Hkv, groups, 1, n * group_size] of queries [batch, Hkv, groups, D] with the keys."""
        query = query.unsqueeze(2)
        if self.planes:
            k_scale, k_zero, _ = self.planes
            scores = (query * k_scale) @ self.k.mT + (query * k_zero).sum(-1, keepdim=True)
        else:
            scores = query @ self.k.mT
        return scores.transpose(2, 3).flatten(3).unsqueeze(3)  # from [B, Hkv, n, groups, G]

    def weigh(self, weights: Tensor) -> Tensor:
        """Sum of the values, [batch, Hkv, groups, 1, D], weighted by [batch, Hkv, groups, 1, n * group_size]."""
        grouped = weights.squeeze(3).unflatten(-1, (self.k.shape[2], -1)).transpose(2, 3)  # [B, Hkv, n, groups, G]
        values = grouped @ self.v.mT
        if self.planes:
            values = values * self.planes[2]
        if self.v_zero is not None:
            values = values + grouped.sum(-1, keepdim=True) * self.v_zero
        return values.sum(2).unsqueeze(3)


def _packed_float(part: Tensor) -> Tensor:
    return part.to(torch.float32, memory_format=torch.contiguous_format)
