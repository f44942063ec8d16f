"""Attention of a chunk of new tokens to their paged past and to themselves, in plain torch.

It is the oracle of the kernel, and what runs on CPUs. No tile of scores is larger than TILE queries by TILE keys (or by
one page of keys), and tiles that causality or the window exclude are not computed.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from gemkv_compile.kernels.attend_chunk.tiles import TILE, Chunk, multiply_heads
from gemkv_compile.kernels.layout import PageLayout
from gemkv_compile.kernels.results import empty_results
from gemkv_compile.kernels.softmax import OnlineSoftmax
from gemkv_compile.kernels.visibility import hide_rows


def attend_chunk_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    starts: Tensor,
    tail: Tensor,
    padding: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    causal: bool,
    window: int | None,
    layout: PageLayout,
) -> tuple[Tensor, Tensor]:
    """Arguments and result as in `gemkv_compile.kernels.ops.attend_chunk`.

    Source: tiles with an online softmax, FlashAttention, arXiv:2205.14135.
    """
    rules = padding, mask, scale, softcap, causal, window, layout
    chunk = Chunk(q, k.shape[2], page_table, seq_lens, starts, tail, *rules)
    heads = chunk.query.shape[:3]
    sizes = [min(TILE, chunk.q_len - begin) for begin in range(0, chunk.q_len, TILE)]
    states = [OnlineSoftmax((*heads, size, layout.head_dim), q.device, sinks) for size in sizes]
    for tile in chunk.key_tiles(k, v):
        for queries in chunk.query_tiles(tile):
            scores, seen = chunk.scores(tile, queries)
            states[queries.start // TILE].update(scores, partial(multiply_heads, columns=hide_rows(tile.v, seen)))
    out, lse = empty_results(q)
    for index, state in enumerate(states):
        queries = slice(index * TILE, index * TILE + sizes[index])
        part, part_lse = state.finish()
        out[:, :, queries], lse[:, :, queries] = part.flatten(1, 2), part_lse.flatten(1, 2)
    return out, lse
