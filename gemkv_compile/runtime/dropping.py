"""Ask a policy, at the end of a call, which pages its caches give back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gemkv_compile.drop import Pages, Policy
from gemkv_compile.errors import GemkvError
from gemkv_compile.plan import CallPlan, TablePlan
from gemkv_compile.runtime.observed import Observed, attention_of_pages
from gemkv_compile.runtime.padding import aligned_padding
from gemkv_compile.runtime.page_table import PageTable

Chosen = dict[int, list[bool]]
"""Page index -> which sequences lose the page."""


class Dropper:
    """Drops pages of the caches of one graph, as a policy says.

    Args:
        policy: Whom to ask.
        plan: How the graph is called.
        tell: Is told the number of a cache and how many pages it has given back, or done without.
    A policy is asked only if a call completes a page, and about caches where it does. What it observes is computed
    after the rows are written and before they count: if anything fails, the call has changed nothing.
    """

    def __init__(self, policy: Policy, plan: CallPlan, tell: Callable[[int, int], None]) -> None:
        self._policy = policy
        self._plan = plan
        self._tell = tell
        self._paddings = {padding.table: padding for padding in plan.paddings}
        self._is_blind = policy.observes == 0

    def chosen_before(self, number: int, table: PageTable, num_tokens: int) -> Chosen | None:
        """What a chunk's cache will lose, if that can be known now: such pages are never allocated."""
        plan = self._plan.tables[number]
        if not self._is_blind or num_tokens == 1 or not _completes_page(plan, table, num_tokens):
            return None
        return self._listed([self._ask(number, table, num_tokens, None)])[0]

    def drop(
        self,
        outputs: Sequence[Any],
        args: Sequence[Any],
        tables: Sequence[PageTable],
        starts: Sequence[int],
        sizes: Sequence[tuple[int, int]],
        before: Sequence[Chosen | None],
    ) -> None:
        """Make holes in tables whose append is under way, and keep their newest queries.

        Args:
            outputs: Of the rewritten graph.
            starts, sizes: First row, sequences and new tokens of each table.
            before: What `chosen_before` gave.
        Raises:
            GemkvError: the policy's answer is no mask of the pages.
        """
        asked: list[tuple[int, Tensor]] = []
        known = {number: chosen for number, chosen in enumerate(before) if chosen is not None}
        for number, (plan, table, (batch, num_tokens)) in enumerate(zip(self._plan.tables, tables, sizes, strict=True)):
            if plan.observed is not None:
                self._observe(plan, table, outputs, num_tokens)
            if number not in known and _completes_page(plan, table, num_tokens):
                padding = self._paddings.get(number)
                aligned = None if padding is None else aligned_padding(padding, args, starts[number], batch)
                asked.append((number, self._ask(number, table, num_tokens, aligned)))
        lists = self._listed([answer for _, answer in asked])
        known |= dict(zip((number for number, _ in asked), lists, strict=True))
        for number, chosen in known.items():
            tables[number].drop(chosen)
            if chosen:
                self._tell(number, sum(map(sum, chosen.values())))

    def _observe(self, plan: TablePlan, table: PageTable, outputs: Sequence[Any], num_tokens: int) -> None:
        assert plan.observed is not None
        queries = outputs[plan.observed.position]
        rows = min(num_tokens, queries.shape[2])  # zeros stand before them
        if rows < queries.shape[2]:
            queries = queries[:, :, queries.shape[2] - rows :]
        former = () if table.observed is None else table.observed.parts  # perhaps another policy's
        table.observed = Observed(self._policy.observes, former).after(table.length + num_tokens - rows, queries)

    def _ask(self, number: int, table: PageTable, num_tokens: int, padding: Tensor | None) -> Tensor:
        plan, tokens = self._plan.tables[number], table.length + num_tokens
        count, attention = tokens // table.page_size, None
        if not self._is_blind:
            assert table.observed is not None and plan.observed is not None
            attention = attention_of_pages(table, tokens, table.observed, plan.observed, padding)
        nowhere, new = (False,) * table.batch, (not table.is_appending,) * table.batch
        kept = 1 if table.pool.layout.is_guarded else 0  # the first group is read from the tail whatever happens to it
        there = [
            nowhere
            if index < kept
            else [address != 0 for address in table.pages[index]]
            if index in table.pages
            else (new if (index + 1) * table.page_size > table.length else nowhere)
            for index in range(count)
        ]
        exists = torch.tensor(there, dtype=torch.bool).view(count, table.batch).mT
        about = Pages(number, tokens, num_tokens, table.page_size, plan.window, exists, attention)
        with torch.no_grad():
            answer = self._policy.choose(about)
        if not isinstance(answer, Tensor) or answer.dtype != torch.bool or answer.shape != exists.shape:
            given = f"{answer.dtype} {list(answer.shape)}" if isinstance(answer, Tensor) else repr(answer)
            raise GemkvError(
                f"{self._policy!r}.choose must return a bool tensor [batch, pages], here {list(exists.shape)}, got "
                f"{given}. The caches of this call are as they were."
            )
        return answer & exists.to(answer.device)

    @staticmethod
    def _listed(answers: Sequence[Tensor]) -> list[Chosen]:
        """Answers as lists, with one wait for the device for all of them."""
        if not answers:
            return []
        device = answers[0].device
        flat = iter(torch.cat([answer.to(device).mT.reshape(-1) for answer in answers]).tolist())
        lists = []
        for batch, pages in (answer.shape for answer in answers):
            rows = [[next(flat) for _ in range(batch)] for _ in range(pages)]
            lists.append({index: row for index, row in enumerate(rows) if any(row)})
        return lists


def _completes_page(plan: TablePlan, table: PageTable, num_tokens: int) -> bool:
    page_size = table.page_size
    return plan.drops and (table.length + num_tokens) // page_size > table.length // page_size
