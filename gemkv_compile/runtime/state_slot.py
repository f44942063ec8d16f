"""Device state at fixed addresses, which the caches of decode steps use in turn: what a captured graph refers to."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack

from gemkv_compile.runtime.page_state import DeviceState
from gemkv_compile.runtime.page_table import PageTable
from gemkv_compile.runtime.pool import PagePool

_page_table = operator.attrgetter("page_table")
FULL_COLUMNS = 1024  # of a table that keeps everything: 256K tokens in pages of 256, 8 KiB a sequence and layer


class StateSlot:
    """The device state of all tables of a decode step, at addresses that never change.

    Args:
        pools, batches, columns: Of each table: its pool, sequences, and columns of its page_table.
    Whoever binds tables to the slot holds `lock` until their step is over.
    """

    def __init__(self, pools: Sequence[PagePool], batches: Sequence[int], columns: Sequence[int]) -> None:
        self.states = [
            DeviceState.new(pool.layout, batch, width, pool.device)
            for pool, batch, width in zip(pools, batches, columns, strict=True)
        ]
        self._page_tables = [state.page_table for state in self.states]
        self.batches = list(batches)
        self.columns = list(columns)
        self.device = pools[0].device
        self.lock = threading.Lock()
        self._owners: list[weakref.ref[PageTable]] = []

    def holds(self, tables: Sequence[PageTable]) -> bool:
        """Whether the tables are here."""
        return all(map(operator.is_, map(_page_table, tables), self._page_tables))  # fast: each step asks

    def has_room_for(self, tables: Sequence[PageTable]) -> bool:
        """Whether the tables are here, or could be."""
        return self.holds(tables) or all(
            _is_in(table, state) or (table.batch == batch and table.page_table.shape[1] <= columns)
            for table, state, batch, columns in zip(tables, self.states, self.batches, self.columns, strict=True)
        )

    def bind(self, tables: Sequence[PageTable]) -> bool:
        """Let tables that the caller has claimed go on in this slot; those that were here get tensors of their own.

        Returns:
            False if another thread uses the tables that are here; nothing has changed then.
        """
        if self.holds(tables):
            return True
        former = [table for ref in self._owners if (table := ref()) is not None]
        with ExitStack() as claims:
            for table in former:
                if not table.try_claim():
                    return False
                claims.callback(table.unclaim)
            for table, state in zip(former, self.states, strict=len(former) == len(self.states)):
                if _is_in(table, state):
                    table.move_to(DeviceState.new(table.pool.layout, table.batch, state.columns, table.pool.device))
        self._owners = []
        for table, state in zip(tables, self.states, strict=True):
            table.move_to(state)
        self._owners = [weakref.ref(table) for table in tables]
        return True


class SlotSet:
    """The slots of this process, by what their tables are."""

    def __init__(self) -> None:
        self._slots: dict[tuple[tuple[PagePool, int, int], ...], StateSlot] = {}
        self._lock = threading.Lock()

    def get(self, tables: Sequence[PageTable], keeps: Sequence[int | None]) -> StateSlot:
        """A slot that has room for tables which keep their last `keeps` tokens, or all (None)."""
        key = tuple((table.pool, table.batch, _columns(table, keep)) for table, keep in zip(tables, keeps, strict=True))
        with self._lock:
            if key not in self._slots:
                self._slots[key] = StateSlot(*map(list, zip(*key, strict=True)))
            return self._slots[key]

    def clear(self) -> None:
        """Forget all slots; tables that are in one stay there, on their own."""
        with self._lock:
            self._slots.clear()


def _is_in(table: PageTable, state: DeviceState) -> bool:
    return table.page_table is state.page_table


def _columns(table: PageTable, keep: int | None) -> int:
    """Columns that a table needs at any length: a power of two."""
    wanted = FULL_COLUMNS if keep is None else keep // table.pool.layout.page_size + 2
    return max(table.page_table.shape[1], 1 << (wanted - 1).bit_length())


slots = SlotSet()
