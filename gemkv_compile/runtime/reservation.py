"""What an append under way has changed, and pages that outlive the table that named them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from gemkv_compile.runtime.page_state import PageState
from gemkv_compile.runtime.pool import PagePool


@dataclass(slots=True)
class Reservation:
    """What `PageTable.begin` changes, noted before each change, so that as much as has happened can be undone.

    Pages of `before` that `new` ones stand for are shared with other tables; `commit` gives them back.
    """

    before: dict[int, list[int]]  # the table's pages
    taken: list[int] = field(default_factory=list)  # addresses of all new pages
    new: dict[int, list[int]] = field(default_factory=dict)  # page index -> addresses
    has_entries: bool = False  # whether page_table may name new pages
    saved_tail: torch.Tensor | None = None

    def replaced(self) -> list[int]:
        """Addresses of the pages that new ones stand for."""
        return [address for index in self.new for address in self.before.get(index, ())]

    def undo(self, state: PageState) -> None:
        """Make the state what it was, also after an operator has written; giving pages back is left to the caller."""
        state.pages = self.before
        if self.has_entries:
            none = [0] * state.batch
            state.write_entries({index: self.before.get(index, none) for index in self.new})
        if self.saved_tail is not None:
            state.tail.copy_(self.saved_tail)
        state.seq_lens.fill_(state.length)


class HeldPages:
    """One reference to every page that holds the past of some tables, given back when this object dies.

    A backward pass reads pages that its forward pass saved the addresses of. By then the tables may have been edited,
    released, or given pages of their own.
    """

    def __init__(self, tables: Sequence[PageState]) -> None:
        self._held: list[tuple[PagePool, list[int]]] = []
        for table in tables:
            written = -(-table.length // table.pool.layout.page_size)
            pages = [address for index, row in table.pages.items() if index < written for address in row]
            table.pool.share(pages)
            self._held.append((table.pool, pages))

    def items(self) -> list[tuple[PagePool, list[int]]]:
        """Pools and the pages that are held of each."""
        return list(self._held)

    def __del__(self) -> None:
        for pool, pages in self._held:
            pool.give_back(pages)
