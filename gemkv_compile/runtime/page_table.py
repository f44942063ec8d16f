"""A page table: the keys and values of one layer for a batch of sequences, as pages plus a small tail."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gemkv_compile.compat import bytes_at
from gemkv_compile.errors import ReleasedHandle
from gemkv_compile.kernels.memory import gather_pages, read_groups
from gemkv_compile.runtime.pool import PagePool

FIRST_MAX_PAGES = 8


@dataclass
class Reservation:
    """What `begin` changed, so that `abort` can undo it."""

    fresh: dict[int, list[int]] = field(default_factory=dict)  # page index -> new addresses
    saved_tail: torch.Tensor | None = None


class PageTable:
    """Keys and values of `length` tokens for each of `batch` sequences; rows are only ever appended.

    Device state, read and written by the operators (shapes and meaning: `gemkv_compile.kernels.ops`):
    page_table [batch, max_pages] int64, seq_lens [batch] int32, starts [batch] int32, tail [batch, 2, Hkv, G, D].
    Host state: `length`; `base`, the mirror of `starts`; `pages`, page index -> one address per sequence.

    An append is a transaction: `begin` finds the pages, an operator writes, `commit` makes the rows count. After
    `abort` the table is what it was. A handle names rows [start, length) of a table; a table that has grown since, or
    whose rows another table shares, is continued through `fork`.
    """

    def __init__(self, pool: PagePool, batch: int) -> None:
        layout, device = pool.layout, pool.device
        self.pool = pool
        self.batch = batch
        self.length = 0
        self.base = 0
        self.pages: dict[int, list[int]] = {}
        self.released = False
        self._reservation: Reservation | None = None
        self._handles: list[weakref.ref[Any]] = []
        tail_shape = (batch, 2, layout.num_kv_heads, layout.group_size, layout.head_dim)
        with torch.inference_mode(False):
            self.page_table = torch.zeros(batch, FIRST_MAX_PAGES, dtype=torch.int64, device=device)
            self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=device)
            self.starts = torch.zeros(batch, dtype=torch.int32, device=device)
            self.tail = torch.zeros(tail_shape, dtype=layout.model_dtype, device=device)

    def __del__(self) -> None:
        for addresses in getattr(self, "pages", {}).values():
            self.pool.give_back(addresses)

    @property
    def is_appending(self) -> bool:
        """Whether an append is under way."""
        return self._reservation is not None

    def register(self, handle: Any) -> None:
        """Note that `handle` can see rows from `handle.start` on, for as long as it lives."""
        self._handles.append(weakref.ref(handle))

    def begin(self, num_tokens: int, keep: int | None, start: int = 0) -> None:
        """Find pages for the groups that `num_tokens` more tokens complete, and give back those out of sight.

        Args:
            keep: If given, only the last `keep` tokens stay visible afterwards; groups wholly before them get no page.
            start: First token that this call attends to.
        Raises:
            PoolExhausted: nothing has changed.
        """
        layout = self.pool.layout
        if self.pages and next(iter(self.pages)) < start // layout.page_size:
            self.release_unreachable()
        first, last = self.length // layout.group_size, (self.length + num_tokens) // layout.group_size
        reservation = Reservation()
        if first < last:
            reservation.fresh = self._reserve_pages(self._wanted_pages(first, last, num_tokens, keep))
            if num_tokens > 1 and self.length % layout.group_size:
                # The rows left over overwrite rows of the group that this append completes.
                reservation.saved_tail = self.tail.clone()
        self._reservation = reservation

    def _wanted_pages(self, first: int, last: int, num_tokens: int, keep: int | None) -> list[int]:
        """Page indices of the groups in [first, last) that somebody can see after `num_tokens` more tokens."""
        layout = self.pool.layout
        seen = first if keep is None else max(first, (self.length + num_tokens - keep) // layout.group_size)
        # Groups between `first` and `seen` get no page: their columns must not be those of pages in sight.
        lowest = first if self.pages or self.length % layout.group_size else seen
        self._ensure_columns(range(lowest // layout.groups_per_page, -(-last // layout.groups_per_page)))
        wanted = set(range(seen // layout.groups_per_page, -(-last // layout.groups_per_page)))
        if self.length % layout.group_size:
            wanted.add(first // layout.groups_per_page)  # older handles see its rows, which leave the tail now
        return sorted(wanted)

    def commit(self, num_tokens: int) -> None:
        """Count `num_tokens` rows that an operator has written since `begin`."""
        self.length += num_tokens
        self._reservation = None

    def abort(self) -> None:
        """Undo `begin` and whatever an operator has written since; does nothing after `commit`."""
        reservation, self._reservation = self._reservation, None
        if reservation is None:
            return
        for index, addresses in reservation.fresh.items():
            self.pages.pop(index)
            self.pool.give_back(addresses)
        self._write_entries({index: [0] * self.batch for index in reservation.fresh})
        if reservation.saved_tail is not None:
            self.tail.copy_(reservation.saved_tail)
        self.seq_lens.fill_(self.length)

    def expose_from(self, start: int) -> None:
        """Make `start` the first token that may be attended to."""
        if start != self.base:
            self.starts.fill_(start)
            self.base = start

    def release_unreachable(self) -> None:
        """Give back every page that no living handle can see."""
        alive = [handle for ref in self._handles if (handle := ref()) is not None]
        self._handles = [weakref.ref(handle) for handle in alive]
        if not alive:
            return
        first = min(handle.start for handle in alive) // self.pool.layout.page_size
        dead = [index for index in self.pages if index < first]
        if dead:
            for index in dead:
                self.pool.give_back(self.pages.pop(index))
            self._write_entries({index: [0] * self.batch for index in dead})

    def release(self) -> None:
        """Give back every page now; handles that still exist raise ReleasedHandle when used."""
        self.released = True
        for addresses in self.pages.values():
            self.pool.give_back(addresses)
        self.pages = {}

    def fork(self, start: int, length: int, rows: Sequence[int] | None = None) -> PageTable:
        """A table with the same tokens [start, length), sharing full pages and copying the rest.

        Args:
            rows: The sequence that each sequence of the new table continues; default: all, in order.
        Raises:
            ReleasedHandle: a row of [start, length) has been given back.
        """
        layout = self.pool.layout
        rows = range(self.batch) if rows is None else rows
        stored = length // layout.group_size * layout.group_size
        indices = self._page_indices(start, stored)
        other = PageTable(self.pool, len(rows))
        for index in indices:
            other.pages[index] = [self.pages[index][row] for row in rows]
            self.pool.share(other.pages[index])
        if indices:
            other._ensure_columns(range(indices[0], indices[-1] + 1))
            other._write_entries(other.pages)
        if length > stored:
            chosen = torch.tensor(rows, device=self.pool.device)
            for role, newest in enumerate(self.read(stored, length)):
                other.tail[:, role, :, : length - stored] = newest[chosen]
        other.length = length
        other.seq_lens.fill_(length)
        other.expose_from(start)
        return other

    def read(self, start: int, length: int) -> list[torch.Tensor]:
        """Keys and values of tokens [start, length) in model precision, each [batch, Hkv, length - start, D].

        Raises:
            ReleasedHandle: one of the rows has been given back.
        """
        layout, device = self.pool.layout, self.pool.device
        in_tail = self.length // layout.group_size * layout.group_size
        stored = min(length, in_tail)
        shape = (self.batch, layout.num_kv_heads, length - start, layout.head_dim)
        with torch.inference_mode(False), torch.no_grad():
            both = [torch.empty(shape, dtype=layout.model_dtype, device=device) for _ in range(2)]
            for index in self._page_indices(start, stored):
                first = index * layout.page_size
                begin, end = max(start, first), min(stored, first + layout.page_size)
                data = gather_pages([[address] for address in self.pages[index]], layout, device)
                for rows, page in zip(both, read_groups(data, layout), strict=True):  # [batch, Hkv, page_size, D]
                    rows[:, :, begin - start : end - start] = page[:, :, begin - first : end - first]
            if length > max(start, in_tail):
                begin = max(start, in_tail)
                for rows, tail in zip(both, self.tail.unbind(1), strict=True):
                    rows[:, :, begin - start :] = tail[:, :, begin - in_tail : length - in_tail]
        return both

    def _page_indices(self, start: int, stored: int) -> list[int]:
        """Indices of the pages that hold tokens [start, stored); all of them must be there."""
        page_size = self.pool.layout.page_size
        indices = list(range(start // page_size, -(-stored // page_size))) if stored > start else []
        if self.released or any(index not in self.pages for index in indices):
            raise ReleasedHandle(f"Rows {start} to {stored} of a paged key/value cache")
        return indices

    def _reserve_pages(self, wanted: Sequence[int]) -> dict[int, list[int]]:
        """Give each page index in `wanted` a page that no other table shares; returns those that had none."""
        fresh = [index for index in wanted if index not in self.pages]
        shared = [i for i in wanted if i in self.pages and any(map(self.pool.is_shared, self.pages[i]))]
        addresses = self.pool.allocate(self.batch * (len(fresh) + len(shared)))
        new = {index: addresses[i * self.batch : (i + 1) * self.batch] for i, index in enumerate(fresh + shared)}
        for index in shared:
            self._copy_pages(self.pages[index], new[index])
            self.pool.give_back(self.pages[index])
        self.pages = dict(sorted((self.pages | new).items()))
        self._write_entries(new)
        return {index: new[index] for index in fresh}

    def _copy_pages(self, sources: Iterable[int], targets: Iterable[int]) -> None:
        num_bytes, device = self.pool.layout.page_bytes, self.pool.device
        for source, target in zip(sources, targets, strict=True):
            bytes_at(target, num_bytes, device).copy_(bytes_at(source, num_bytes, device))

    def _ensure_columns(self, more: range) -> None:
        """Grow page_table until the page indices `more` and those of all live pages have a column each."""
        indices = [*self.pages, *more[:1], *more[-1:]]
        needed = max(indices) - min(indices) + 1 if indices else 0
        max_pages = self.page_table.shape[1]
        if needed > max_pages:
            with torch.inference_mode(False):
                self.page_table = self.page_table.new_zeros(self.batch, 1 << (needed - 1).bit_length())
            self._write_entries(self.pages)

    def _write_entries(self, entries: dict[int, list[int]]) -> None:
        """Write page addresses (index -> one per sequence) to their columns on the device."""
        if entries:
            columns = torch.tensor([i % self.page_table.shape[1] for i in entries], device=self.pool.device)
            addresses = torch.tensor(list(entries.values()), dtype=torch.int64, device=self.pool.device)
            self.page_table[:, columns] = addresses.T
