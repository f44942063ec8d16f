"""The newest queries of a cache's attention, and how they share their attention out among its tokens.

In plain torch operations beside the kernels: one sequence at a time, keys dequantised as they are stored, and weights
[num_q_heads, queries, tokens] in float32. That is little beside a prompt's attention, and a step in which no page
becomes complete does not do it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gemkv_compile.kernels.memory import gather_pages, read_keys
from gemkv_compile.plan import ObservedPlan
from gemkv_compile.runtime.page_state import PageState

NEVER = float("-inf")


@dataclass(frozen=True)
class Observed:
    """Queries of the newest tokens of a table, in order.

    Args:
        count: How many of them are wanted.
        parts: The number of a first token, and the queries of it and the tokens after it, [batch, Hq, n, D].
    """

    count: int
    parts: tuple[tuple[int, Tensor], ...] = ()

    def after(self, first: int, queries: Tensor) -> Observed:
        """With the queries of the tokens from `first` on, without what is too old then.

        Queries of another shape are those of another model that has continued the cache: they are forgotten.
        """
        oldest, same = first + queries.shape[2] - self.count, (queries.dtype, queries.shape[1], queries.shape[3])
        kept = ((at, q) for at, q in self._until(first) if (q.dtype, q.shape[1], q.shape[3]) == same)
        return replace(self, parts=(*((at, q) for at, q in kept if at + q.shape[2] > oldest), (first, queries)))

    def selected(self, rows: Tensor, length: int) -> Observed:
        """Of the sequences `rows` (int64 [n]) and the tokens before `length`."""
        return replace(self, parts=tuple((first, q.index_select(0, rows)) for first, q in self._until(length)))

    def newest(self, length: int) -> tuple[Tensor, Tensor]:
        """Tokens before `length`, int64 [n], and their queries, [batch, Hq, n, D]."""
        parts = self._until(length)
        tokens = [torch.arange(first, first + q.shape[2], device=q.device) for first, q in parts]
        return torch.cat(tokens)[-self.count :], torch.cat([q for _, q in parts], 2)[:, :, -self.count :]

    def _until(self, length: int) -> list[tuple[int, Tensor]]:
        parts = ((first, q, length - first) for first, q in self.parts if first < length)
        return [(first, q if rows >= q.shape[2] else q[:, :, :rows]) for first, q, rows in parts]


def attention_of_pages(
    table: PageState, tokens: int, observed: Observed, plan: ObservedPlan, padding: Tensor | None
) -> Tensor:
    """How the observed queries share out their attention, as a mean over them.

    Args:
        table: Its pages and tail hold `tokens` tokens of each sequence.
        plan: The attention that the queries are of.
        padding: bool [batch, at least tokens], False for tokens that nobody sees; queries of these do not count.
    Returns:
        float32 [batch, Hq, complete pages, page_size]; 0 for what is not there.
    Dense masks and sinks are no part of it.
    """
    positions, queries = observed.newest(tokens)
    out = torch.zeros(*queries.shape[:2], tokens // table.page_size * table.page_size, device=queries.device)
    for row in range(table.batch):
        token, keys, exists, inside = _stored_keys(table, row, tokens)
        real = torch.ones_like(positions, dtype=torch.bool)
        if padding is not None:
            exists = exists & padding[row, token.clamp(max=tokens - 1)]
            real = padding[row, positions]
        keys = keys.masked_fill(~exists[:, None], 0.0)  # a page that is not full holds garbage behind its rows
        seen = exists & (token <= positions[:, None])
        if plan.window is not None:
            seen = seen & (token > positions[:, None] - plan.window)
        weights = _mean_weights(queries[row], keys, seen, real, plan)
        out[row].index_copy_(1, token[:inside], weights[:, :inside])
    return out.unflatten(2, (-1, table.page_size))


def _stored_keys(table: PageState, row: int, tokens: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Of one sequence, without a wait for the device.

    Returns:
        Tokens int64 [T], their keys [Hkv, T, D] float32, whether they are there, bool [T], and how many of them, the
        first, are in complete pages.
    """
    layout, device, page_size = table.pool.layout, table.pool.device, table.page_size
    stored = tokens - tokens % layout.group_size
    pages = [index for index, addresses in table.pages.items() if addresses[row] and index * page_size < stored]
    data = gather_pages([[table.pages[index][row] for index in pages]], layout, device)
    paged_keys, kept = read_keys(data, layout)[0], table.tail[row, 0].to(torch.float32)
    if layout.is_guarded and 0 in pages:  # the first group is read from the tail
        first_row = pages.index(0) * page_size
        paged_keys[:, first_row : first_row + layout.group_size] = kept[:, : layout.group_size]
    at = layout.tail_row(tokens)
    keys = torch.cat((paged_keys, kept[:, at : at + tokens - stored]), 1)
    first = torch.tensor(pages, dtype=torch.int64, device=device)[:, None] * page_size
    paged = (first + torch.arange(page_size, device=device)).flatten()
    newest = torch.arange(stored, tokens, device=device)
    exists = torch.cat((paged < stored, torch.ones_like(newest, dtype=torch.bool)))
    token = torch.cat((paged, newest))
    inside = sum((index + 1) * page_size <= tokens for index in pages) * page_size
    return token, keys, exists & (token >= table.base), inside


def _mean_weights(queries: Tensor, keys: Tensor, seen: Tensor, real: Tensor, plan: ObservedPlan) -> Tensor:
    """Weights [Hq, T], a mean over the real ones of queries [Hq, n, D]; keys [Hkv, T, D], seen [n, T], real [n]."""
    by_kv_head = queries.to(torch.float32).unflatten(0, (len(keys), -1)).flatten(1, 2)
    scores = by_kv_head @ keys.mT * plan.scale
    if plan.softcap is not None:
        scores = plan.softcap * torch.tanh(scores / plan.softcap)
    scores = scores.unflatten(1, (-1, len(real))).masked_fill(~seen, NEVER)  # [Hkv, groups, n, T]
    weights = scores.softmax(-1).nan_to_num(0.0)  # NaN: a query that sees nothing
    return ((weights * real[:, None]).sum(2) / real.sum().clamp(min=1)).flatten(0, 1)
