"""What an append under way has changed, and pages that outlive the table that named them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from gemkv_compile.runtime.page_state import PageState
from gemkv_compile.runtime.pool import PagePool


@dataclass(slots=True)
class Reservation:
    """What `PageTable.begin` changes, noted before each change, so that as much as has happened can be undone.

    Pages of `before` that `new` ones stand for are shared with other tables; `commit` gives them back, and `dropped`
    ones, which nothing stands for.
    """

    before: dict[int, list[int]]  # the table's pages
    taken: list[int] = field(default_factory=list)  # addresses of all new pages
    new: dict[int, list[int]] = field(default_factory=dict)  # page index -> addresses
    has_entries: bool = False  # whether page_table may name new pages
    dropped: list[int] = field(default_factory=list)  # addresses
    holes: set[int] = field(default_factory=set)  # page indices whose entries dropping may have changed
    saved_tail: torch.Tensor | None = None

    def replaced(self) -> list[int]:
        """Addresses of the pages that new ones stand for, and of dropped ones."""
        return [*(address for index in self.new for address in self.before.get(index, ())), *self.dropped]

    def take(
        self, state: PageState, fresh: list[int], shared: list[int], without: Mapping[int, Sequence[bool]]
    ) -> dict[int, list[int]]:
        """Allocate pages by index, for fresh ones without the sequences that `PageTable.begin` is told of."""
        nobody = (False,) * state.batch
        spared = [without.get(index, nobody) for index in fresh] + [nobody] * len(shared)
        count = state.batch * len(spared) - sum(map(sum, spared))
        addresses = iter(state.pool.allocate(count, self.taken))
        indices = zip(fresh + shared, spared, strict=True)
        self.new = {index: [0 if flag else next(addresses) for flag in flags] for index, flags in indices}
        return self.new

    def drop(self, state: PageState, chosen: Mapping[int, Sequence[bool]]) -> None:
        """Make holes of pages; arguments as in `PageTable.drop`."""
        holes, leaving = {}, list[int]()
        for index in chosen.keys() & state.pages.keys():
            pairs = list(zip(state.pages[index], chosen[index], strict=True))
            gone = [address for address, flag in pairs if flag and address]
            if gone:
                holes[index] = [0 if flag else address for address, flag in pairs]
                leaving += gone
        if holes:
            self.holes.update(holes)
            state.write_entries(holes)
            state.pages = state.pages | holes  # the keys keep their order
            self.dropped += leaving

    def undo(self, state: PageState) -> None:
        """Make the state what it was, also after an operator has written; giving pages back is left to the caller."""
        state.pages = self.before
        if self.has_entries or self.holes:
            none = [0] * state.batch
            state.write_entries({index: self.before.get(index, none) for index in self.holes.union(self.new)})
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
            pages = [address for index, row in table.pages.items() if index < written for address in row if address]
            table.pool.share(pages)
            self._held.append((table.pool, pages))

    def items(self) -> list[tuple[PagePool, list[int]]]:
        """Pools and the pages that are held of each."""
        return list(self._held)

    def __del__(self) -> None:
        for pool, pages in self._held:
            pool.give_back(pages)
