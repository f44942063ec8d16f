"""Gradients of `attend_chunk` with respect to the chunk's own queries, keys and values, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from gemkv_compile.kernels.attend_chunk.tiles import Chunk, KeyTile, multiply_heads
from gemkv_compile.kernels.layout import PageLayout
from gemkv_compile.kernels.softmax import NEVER
from gemkv_compile.kernels.visibility import hide_rows


class _Gradients:
    """What the score tiles of the backward pass need of the forward pass, [batch, Hkv, groups, Q, ...] float32."""

    def __init__(self, chunk: Chunk, grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor) -> None:
        self.chunk = chunk
        self.grad_out = chunk.by_kv_head(grad_out).to(torch.float32)
        # d lse / d score is the weight itself, so its gradient joins the row's constant.
        rows = (self.grad_out * chunk.by_kv_head(out).to(torch.float32)).sum(-1)
        self.constant = rows - chunk.by_kv_head(grad_lse)
        self.lse = chunk.by_kv_head(lse.masked_fill(lse == NEVER, 0.0))

    def of_scores(self, tile: KeyTile, queries: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, and gradients of the products q . k * scale, [batch, Hkv, groups, Q, T]; seen keys, [batch, T]."""
        scores, seen = self.chunk.scores(tile, queries)
        weights = torch.exp(scores - self.lse[..., queries].unsqueeze(-1))
        towards = multiply_heads(self.grad_out[..., queries, :], tile.v.mT)
        grad = weights * (towards - self.constant[..., queries].unsqueeze(-1))
        if self.chunk.softcap is not None:
            products = multiply_heads(self.chunk.query[..., queries, :], tile.k.mT)
            grad = grad * (1.0 - torch.tanh(products / self.chunk.softcap).square())
        return weights, grad.masked_fill(scores == NEVER, 0.0), seen


def attend_chunk_backward_reference(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    starts: Tensor,
    tail: Tensor,
    padding: Tensor | None,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float | None,
    causal: bool,
    window: int | None,
    layout: PageLayout,
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments and result as in `gemkv_compile.kernels.ops.attend_chunk_backward`.

    Source: weights recomputed from lse tile by tile, FlashAttention, arXiv:2205.14135, section 3.
    """
    rules = padding, mask, scale, softcap, causal, window, layout
    chunk = Chunk(q, k.shape[2], page_table, seq_lens, starts, tail, *rules)
    gradients = _Gradients(chunk, grad_out, grad_lse, out, lse)
    grad_query = torch.zeros_like(chunk.query)
    grad_k, grad_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    for tile in chunk.key_tiles(k, v):
        own_k, own_v = torch.zeros_like(tile.k), torch.zeros_like(tile.v)
        for queries in chunk.query_tiles(tile):
            weights, grad, seen = gradients.of_scores(tile, queries)
            grad_query[..., queries, :] += multiply_heads(grad, hide_rows(tile.k, seen))
            if tile.own is not None:
                own_k += grad.flatten(2, 3).mT @ chunk.query[..., queries, :].flatten(2, 3)
                own_v += weights.flatten(2, 3).mT @ gradients.grad_out[..., queries, :].flatten(2, 3)
        if tile.own is not None:
            grad_k[:, :, tile.own], grad_v[:, :, tile.own] = own_k, own_v
    return grad_query.mul_(scale).flatten(1, 2).to(q.dtype), grad_k, grad_v
