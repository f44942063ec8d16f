"""Attention shares of the newest queries in plain torch: the oracle of the kernel, and what runs on CPUs.

One sequence at a time, keys dequantised as they are stored, weights [num_q_heads, queries, tokens] in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gemkv_compile.kernels.layout import PageLayout
from gemkv_compile.kernels.memory import gather_pages, read_keys
from gemkv_compile.kernels.softmax import NEVER
from gemkv_compile.kernels.visibility import check_padding


def attention_shares_reference(
    q: Tensor,
    positions: Tensor,
    page_table: Tensor,
    starts: Tensor,
    tail: Tensor,
    padding: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    tokens: int,
    layout: PageLayout,
) -> Tensor:
    """How some queries share out their attention among the tokens of complete pages, as a mean over the queries.

    Args:
        q: The queries, [B, Hq, n, D], model dtype, any strides.
        positions: Their tokens, int64 [n], contiguous, ascending, below `tokens`; the same for all sequences.
        page_table, starts, tail: As in `gemkv_compile.kernels.ops`. A guarded format's first group is read from the
            tail, if its page is there.
        padding: bool [B, at least tokens], False for tokens that nobody sees; queries of these do not count.
        tokens: How many each sequence has.
    Returns:
        float32 [B, Hq, tokens of complete pages]; 0 for tokens that are not there, and in all of a sequence without a
        query that counts. A query that sees nothing, or whose scores are not finite, counts with weights of 0.
    Raises:
        ShapeMismatch: padding has too few columns.
    """
    check_padding(padding, tokens)
    out = torch.zeros(*q.shape[:2], tokens // layout.page_size * layout.page_size, device=q.device)
    for row, (addresses, start) in enumerate(zip(page_table.tolist(), starts.tolist(), strict=True)):
        token, keys, exists, inside = _stored_keys(addresses, tail[row, 0], tokens, layout)
        exists, real = exists & (token >= start), torch.ones_like(positions, dtype=torch.bool)
        if padding is not None:
            exists, real = exists & padding[row, token.clamp(max=tokens - 1)], padding[row, positions]
        keys = keys.masked_fill(~exists[:, None], 0.0)  # a page that is not full holds garbage behind its rows
        seen = exists & (token <= positions[:, None])
        if window is not None:
            seen = seen & (token > positions[:, None] - window)
        weights = _mean_weights(q[row], keys, seen, real, scale, softcap)
        out[row].index_copy_(1, token[:inside], weights[:, :inside])
    return out


def _stored_keys(
    addresses: Sequence[int], tail: Tensor, tokens: int, layout: PageLayout
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Of one sequence, with its row of the page table and the keys [Hkv, tail_rows, D] of its tail.

    Returns:
        Tokens int64 [T], their keys [Hkv, T, D] float32, whether they are there, bool [T], and how many of them, the
        first, are in complete pages.
    """
    device, page_size, columns = tail.device, layout.page_size, len(addresses)
    stored = tokens - tokens % layout.group_size
    end = -(-stored // page_size)
    pages = [index for index in range(max(0, end - columns), end) if addresses[index % columns]]
    data = gather_pages([[addresses[index % columns] for index in pages]], layout, device)
    paged_keys, kept = read_keys(data, layout)[0], tail.to(torch.float32)
    if layout.is_guarded and 0 in pages:  # the first page, so its rows are the first ones
        paged_keys[:, : layout.group_size] = kept[:, : layout.group_size]
    at = layout.tail_row(tokens)
    keys = torch.cat((paged_keys, kept[:, at : at + tokens - stored]), 1)
    first = torch.tensor(pages, dtype=torch.int64, device=device)[:, None] * page_size
    paged = (first + torch.arange(page_size, device=device)).flatten()
    newest = torch.arange(stored, tokens, device=device)
    exists = torch.cat((paged < stored, torch.ones_like(newest, dtype=torch.bool)))
    inside = sum((index + 1) * page_size <= tokens for index in pages) * page_size
    return torch.cat((paged, newest)), keys, exists, inside


def _mean_weights(
    queries: Tensor, keys: Tensor, seen: Tensor, real: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """Weights [Hq, T], a mean over the real ones of queries [Hq, n, D]; keys [Hkv, T, D], seen [n, T], real [n]."""
    by_kv_head = queries.to(torch.float32).unflatten(0, (len(keys), -1)).flatten(1, 2)
    scores = by_kv_head @ keys.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.unflatten(1, (-1, len(real))).masked_fill(~seen, NEVER)  # [Hkv, groups, n, T]
    weights = scores.softmax(-1).nan_to_num(0.0)  # NaN: a query that sees nothing
    return ((weights * real[:, None]).sum(2) / real.sum().clamp(min=1)).flatten(0, 1)
