"""The newest queries of a cache's attention, and how they share their attention out among its tokens.

That is a launch of its own (`kernels/attention_shares`), which a step in which no page becomes complete does not do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gemkv_compile.compat import autocast_off
from gemkv_compile.kernels.dispatch import implementation
from gemkv_compile.plan import ObservedPlan
from gemkv_compile.runtime.page_state import PageState


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
        runs: list[tuple[int, int]] = []  # of tokens without a gap: a step's single ones are one launch together
        for first, q in parts:
            begin = runs.pop()[0] if runs and runs[-1][1] == first else first
            runs.append((begin, first + q.shape[2]))
        tokens = [torch.arange(*run, device=parts[0][1].device) for run in runs]
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
    Dense masks and sinks are no part of it. Nothing waits for a GPU.
    """
    positions, queries = observed.newest(tokens)
    state, rules = (table.page_table, table.starts, table.tail, padding), (plan.scale, plan.softcap, plan.window)
    shares_of = implementation("attention_shares", queries.device)
    with autocast_off():
        shares: Tensor = shares_of(queries, positions, *state, *rules, tokens, table.pool.layout)
    return shares.unflatten(2, (-1, table.page_size))
