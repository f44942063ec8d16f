"""A page table: the keys and values of one layer for a batch of sequences, as pages plus a small tail."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gemkv_compile.errors import DroppedRows, GemkvError, ReleasedHandle
from gemkv_compile.runtime.handle_refs import HandleRefs
from gemkv_compile.runtime.observed import Observed
from gemkv_compile.runtime.page_state import PageState
from gemkv_compile.runtime.pool import PagePool
from gemkv_compile.runtime.reservation import Reservation


class PageTable(PageState):
    """Keys and values of `length` tokens for each of `batch` sequences; rows are only ever appended.

    An append is a transaction: `begin` finds the pages, an operator writes, `commit` makes the rows count. After
    `abort` the table is what it was. A handle names rows [start, length) of a table; a table that has grown since, or
    whose rows another table shares, is continued through `fork`.

    Whoever appends claims the table from its look at `length` until `end`; other threads that read or continue the
    table wait for that. Nothing that a finaliser may do waits.
    """

    def __init__(self, pool: PagePool, batch: int) -> None:
        super().__init__(pool, batch)
        self.last_selection: tuple[Any, weakref.ref[PageTable]] | None = None  # see `handle_views.select_rows`
        self.observed: Observed | None = None
        self._reservation: Reservation | None = None
        self._unused = Reservation({})  # for appends that change no page, which most are
        self._leaving: Sequence[int] = ()  # pages to give back next, also after an interrupt
        self._lock = threading.RLock()
        self.handles = HandleRefs()

    def __del__(self) -> None:
        reservation: Reservation | None = getattr(self, "_reservation", None)
        pages = getattr(self, "pages", {}) if reservation is None else reservation.before
        for addresses in pages.values():
            self.pool.give_back(addresses)
        if reservation is not None:
            self.pool.give_back(reservation.taken)
        self.pool.give_back(getattr(self, "_leaving", ()))

    @property
    def has_readers(self) -> bool:
        """Whether a handle shows rows of the table, or a call is using it."""
        alive = (ref() for ref in list(self.handles))
        shown = any(handle is not None and handle.table is self for handle in alive)
        return shown or self.is_appending or self._is_used_elsewhere()

    def _is_used_elsewhere(self) -> bool:
        if not self._lock.acquire(blocking=False):
            return True
        self._lock.release()
        return False

    @property
    def is_appending(self) -> bool:
        """Whether an append is under way."""
        return self._reservation is not None

    def under_way(self) -> tuple[torch.Tensor | None, list[int]]:
        """What an append under way holds besides the table: a copy of the tail, and pages that new ones stand for."""
        reservation = self._reservation
        return (None, []) if reservation is None else (reservation.saved_tail, reservation.replaced())

    def register(self, handle: Any) -> None:
        """Note that `handle` can see rows from `handle.start` on, for as long as it lives."""
        self.handles.append(weakref.ref(handle))

    def unregister(self, handle: Any) -> None:
        """Hold no reference to `handle`, for a caller that has claimed the table or alone knows it."""
        self.handles.leave_out(handle)

    def claim(self) -> None:
        """Wait for other threads that use this table, and keep them out until `end` or `unclaim`."""
        self._lock.acquire()

    def try_claim(self) -> bool:
        """Claim the table if no other thread uses it; returns whether it did."""
        return self._lock.acquire(blocking=False)

    def claim_newest(self, length: int) -> bool:
        """Claim the table, as `claim` does, unless it has not `length` rows or may not be appended to."""
        self._lock.acquire()
        if self.length == length and self._reservation is None and not self.released:
            return True
        self.unclaim()
        return False

    def unclaim(self) -> None:
        """Let other threads in again."""
        self._lock.release()
        if self.released and self.pages:
            self._drop_pages()

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """A context that has claimed the table."""
        self.claim()
        try:
            yield
        finally:
            self.unclaim()

    def end(self) -> None:
        """Undo what was begun and not committed, and let other threads in again."""
        try:
            if self._reservation is not None or self._leaving:
                self.abort()
        finally:
            self.unclaim()

    def begin(
        self, num_tokens: int, keep: int | None, start: int = 0, without: Mapping[int, Sequence[bool]] | None = None
    ) -> None:
        """Find pages for the groups that `num_tokens` more tokens complete, and give back those out of sight.

        Args:
            keep: If given, only the last `keep` tokens stay visible afterwards; groups wholly before them get no page.
            start: First token that this call attends to.
            without: Page index -> which sequences need no page there: what `drop` would drop is never allocated then.
        Raises:
            PoolExhausted, SequenceTooLong: nothing has changed.
            ReleasedHandle: the table was released.
            GemkvError: an append is under way.
        """
        if self.released:
            raise ReleasedHandle("A paged key/value cache")
        if self._reservation is not None:
            raise GemkvError("This page table has an append under way: commit or abort it before the next one begins.")
        if start and self.pages and next(iter(self.pages)) < start // self.page_size:
            self.release_unreachable()
        if len(self.handles) > self.handles.room:
            self.handles.forget(self)
        first, last = self.length // self.group_size, self.groups_after(num_tokens)
        if first == last:
            self._unused.before = self.pages
            self._reservation = self._unused
            return
        self._reservation = reservation = Reservation(self.pages)
        try:
            self._reserve(reservation, self._wanted_pages(first, last, num_tokens, keep), num_tokens, without or {})
        except BaseException:
            self.abort()
            raise

    def _wanted_pages(self, first: int, last: int, num_tokens: int, keep: int | None) -> list[int]:
        """Page indices of the groups in [first, last) that somebody can see after `num_tokens` more tokens."""
        layout = self.pool.layout
        seen = first if keep is None else max(first, (self.length + num_tokens - keep) // layout.group_size)
        # Groups between `first` and `seen` get no page: their columns must not be those of pages in sight.
        lowest = first if self.pages or self.length % layout.group_size else seen
        self.ensure_columns(range(lowest // layout.groups_per_page, -(-last // layout.groups_per_page)))
        wanted = set(range(seen // layout.groups_per_page, -(-last // layout.groups_per_page)))
        if self.length % layout.group_size:
            wanted.add(first // layout.groups_per_page)  # older handles see its rows, which leave the tail now
        return sorted(wanted)

    def _reserve(
        self, reservation: Reservation, wanted: Sequence[int], num_tokens: int, without: Mapping[int, Sequence[bool]]
    ) -> None:
        """Give each page index in `wanted` a page that no other table shares, and save rows that would be lost."""
        fresh = [index for index in wanted if index not in self.pages]
        shared = [i for i in wanted if i in self.pages and any(map(self.pool.is_shared, self.pages[i]))]
        new = reservation.take(self, fresh, shared, without)
        for index in shared:
            self.copy_pages(self.pages[index], new[index])
        self.pages = dict(sorted((self.pages | new).items()))
        reservation.has_entries = True
        self.write_entries(new)
        if num_tokens > 1 and self.length % self.pool.layout.group_size:
            # The rows left over overwrite rows of the group that this append completes.
            reservation.saved_tail = self.tail.clone()

    def drop(self, chosen: Mapping[int, Sequence[bool]]) -> None:
        """Give pages back when the append under way is committed; every handle of the table shows holes there.

        Args:
            chosen: Page index -> which sequences lose the page; its tokens have all been written.
        """
        reservation = self._reservation
        assert reservation is not None
        if reservation is self._unused:
            self._reservation = reservation = Reservation(self.pages)
        reservation.drop(self, chosen)

    def commit(self, num_tokens: int) -> None:
        """Count `num_tokens` rows that an operator has written since `begin`."""
        reservation = self._reservation
        replaced: Sequence[int] = ()
        if reservation is not None and (reservation.new or reservation.dropped):
            replaced = reservation.replaced()
            if self.pool.observers:
                self.pool.note_bound(reservation.taken)
        # At once, so that nothing can come in between.
        self._reservation, self.length, self._leaving = None, self.length + num_tokens, replaced
        if replaced:
            self._give_back_leaving()

    def _give_back_leaving(self) -> None:
        leaving = self._leaving
        if leaving:
            self._leaving = ()
            self.pool.give_back(leaving)

    def abort(self) -> None:
        """Undo `begin` and whatever an operator has written since; does nothing after `commit`.

        If that fails, what the device holds is not known, and the table is released.
        """
        reservation = self._reservation
        if reservation is None:
            self._give_back_leaving()
            return
        try:
            reservation.undo(self)
        except BaseException:
            self.released = True
            raise
        finally:
            self.pages, self._reservation, self._leaving = reservation.before, None, reservation.taken
            self._give_back_leaving()

    def release_unreachable(self, newer: bool = False) -> None:
        """Give back every page before all rows that a living handle can see and, if `newer`, every page after them."""
        alive, size = self.handles.alive(self), self.page_size
        if not alive:
            return
        first = min(handle.start for handle in alive) // size
        end = max(handle.length for handle in alive) if newer and not self.is_appending else self.length
        if dead := [index for index in self.pages if index < first or index * size >= end]:
            self.clear_entries(dead)
            for index in dead:
                self.pool.give_back(self.pages.pop(index))

    def release(self) -> None:
        """Give back every page now; handles that still exist raise ReleasedHandle when used.

        If a call is using the table, in whatever thread, its pages are given back as that call ends.
        """
        self.released = True
        self._drop_pages()

    def _drop_pages(self) -> None:
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not self.is_appending:
                pages, self.pages = self.pages, {}
                for addresses in pages.values():
                    self.pool.give_back(addresses)
                self.page_table.zero_()  # no entry may lead to what is another table's page by then
        finally:
            self._lock.release()

    def fork(self, start: int, length: int, rows: Sequence[int] | None = None) -> PageTable:
        """A table with the same tokens [start, length), sharing full pages and copying the rest.

        Args:
            rows: The sequence that each sequence of the new table continues; default: all, in order.
        Raises:
            ReleasedHandle: a row of [start, length) has been given back; holes are no reason, unless one is cut.
        """
        rows, layout = range(self.batch) if rows is None else rows, self.pool.layout
        stored = length - length % layout.group_size
        other = PageTable(self.pool, len(rows))
        with self.claimed():
            indices = self.page_indices(start, stored)
            for index in indices:
                shared = [self.pages[index][row] for row in rows]
                if 0 in shared and (index + 1) * self.page_size > stored:
                    raise DroppedRows(index * self.page_size, stored)
                self.pool.share(shared)
                other.pages[index] = shared
            newest = self.read(stored, length) if length > stored else []
        if indices:
            other.ensure_columns(range(indices[0], indices[-1] + 1))
            other.write_entries(other.pages)
        chosen, at = torch.tensor(rows, dtype=torch.int64, device=self.pool.device), layout.tail_row(length)
        if layout.is_guarded and stored:
            other.tail[:, :, :, : layout.group_size] = self.tail[chosen][:, :, :, : layout.group_size]
        for role, dense in enumerate(newest):
            other.tail[:, role, :, at : at + length - stored] = dense[chosen]
        if self.observed is not None:
            other.observed = self.observed.selected(chosen, length)
        other.length = length
        other.seq_lens.fill_(length)
        other.expose_from(start)
        return other

    def read(self, start: int, length: int) -> list[torch.Tensor]:
        """Keys and values of tokens [start, length) in model precision, each [batch, Hkv, length - start, D].

        Raises:
            ReleasedHandle: one of the rows has been given back.
        """
        with self.claimed():
            # An operator may have written newer rows over the tail already.
            saved = self._reservation.saved_tail if self._reservation is not None else None
            return self.read_rows(start, length, self.tail if saved is None else saved)
