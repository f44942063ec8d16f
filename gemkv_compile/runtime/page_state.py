"""The state of one layer's cache: tensors that the operators work on, and what the host knows of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gemkv_compile.compat import bytes_at
from gemkv_compile.errors import DroppedRows, ReleasedHandle, SequenceTooLong
from gemkv_compile.kernels.formats import clamp_finite
from gemkv_compile.kernels.layout import FIRST_MAX_PAGES, MAX_TOKENS, PageLayout
from gemkv_compile.kernels.memory import gather_pages, read_groups
from gemkv_compile.runtime.pool import PagePool


@dataclass(frozen=True)
class DeviceState:
    """What the operators read and write of one layer's cache; shapes and meaning: `gemkv_compile.kernels.ops`."""

    page_table: torch.Tensor  # [batch, max_pages] int64
    seq_lens: torch.Tensor  # [batch] int32
    starts: torch.Tensor  # [batch] int32
    tail: torch.Tensor  # [batch, 2, Hkv, G, D], 2 G in a guarded format

    @classmethod
    def new(cls, layout: PageLayout, batch: int, columns: int, device: torch.device) -> DeviceState:
        """The state of empty sequences; plain tensors, also in inference mode."""
        tail_shape = (batch, 2, layout.num_kv_heads, layout.tail_rows, layout.head_dim)
        with torch.inference_mode(False):
            return cls(
                torch.zeros(batch, columns, dtype=torch.int64, device=device),
                torch.zeros(batch, dtype=torch.int32, device=device),
                torch.zeros(batch, dtype=torch.int32, device=device),
                torch.zeros(tail_shape, dtype=layout.model_dtype, device=device),
            )

    @property
    def columns(self) -> int:
        """Pages that the table has room for."""
        return self.page_table.shape[1]


class PageState:
    """Pages, tail and tables of `batch` sequences of `length` tokens each, and reading and writing them.

    Device state: the tensors of a `DeviceState`, by name.
    Host state: `length`; `base`, the mirror of `starts`; `pages`, page index -> one address per sequence, in order. An
    address of 0 is a page that a policy has dropped: a hole. Only complete pages become holes, so that nothing is ever
    written to one.
    """

    def __init__(self, pool: PagePool, batch: int) -> None:
        self.pool = pool
        self.batch = batch
        self.length = 0
        self.base = 0
        self.pages: dict[int, list[int]] = {}
        self.released = False
        self.marker = pool.marker
        self.page_size, self.group_size = pool.layout.page_size, pool.layout.group_size
        self.num_kv_heads, self.head_dim = pool.layout.num_kv_heads, pool.layout.head_dim
        self._use(DeviceState.new(pool.layout, batch, FIRST_MAX_PAGES, pool.device))

    def shape_of(self, rows: int, seq_dim: int) -> tuple[int, int, int, int]:
        """The shape of that many rows of keys or values, with the tokens in dimension 1 or 2."""
        heads = self.num_kv_heads
        return (self.batch, heads, rows, self.head_dim) if seq_dim == 2 else (self.batch, rows, heads, self.head_dim)

    def _use(self, state: DeviceState) -> None:
        self.page_table, self.seq_lens = state.page_table, state.seq_lens
        self.starts, self.tail = state.starts, state.tail

    def move_to(self, state: DeviceState) -> None:
        """Go on in other tensors, of the same shapes but for the number of columns; what they hold is overwritten."""
        state.page_table.zero_()
        _write(state.page_table, self.pages)
        for source, target in ((self.seq_lens, state.seq_lens), (self.starts, state.starts), (self.tail, state.tail)):
            target.copy_(source)
        self._use(state)

    def expose_from(self, start: int) -> None:
        """Make `start` the first token that may be attended to."""
        if start != self.base:
            self.starts.fill_(start)
            self.base = start

    def write_entries(self, entries: dict[int, list[int]]) -> None:
        """Write page addresses (index -> one per sequence) to their columns on the device."""
        _write(self.page_table, entries)

    def clear_entries(self, indices: Sequence[int]) -> None:
        """Write 0, no page, to the columns of some page indices."""
        _write(self.page_table, {index: [0] * self.batch for index in indices})

    def ensure_columns(self, more: range) -> None:
        """Grow page_table until the page indices `more` and those of all live pages have a column each."""
        indices = [*self.pages, *more[:1], *more[-1:]]
        needed = max(indices) - min(indices) + 1 if indices else 0
        if needed > self.page_table.shape[1]:
            with torch.inference_mode(False):
                grown = self.page_table.new_zeros(self.batch, 1 << (needed - 1).bit_length())
            _write(grown, self.pages)
            self.page_table = grown

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the bytes of pages, address by address."""
        num_bytes, device = self.pool.layout.page_bytes, self.pool.device
        for source, target in zip(sources, targets, strict=True):
            bytes_at(target, num_bytes, device).copy_(bytes_at(source, num_bytes, device))

    def page_indices(self, start: int, stored: int) -> range:
        """Indices of the pages that hold tokens [start, stored); `stored` is the end of a group.

        Raises:
            ReleasedHandle: one of them is not there.
        """
        indices = self._indices(start, stored)
        if self.released or any(index not in self.pages for index in indices):
            raise ReleasedHandle(f"Rows {start} to {stored} of a paged key/value cache")
        return indices

    def has_newest(self, start: int, length: int) -> bool:
        """Whether rows [start, length) are the newest ones, and all of them are there."""
        if self.released or length != self.length:
            return False
        return all(index in self.pages for index in self._indices(start, self.tail_begin))

    @property
    def stored(self) -> torch.Tensor:
        """`length` as an int64 tensor [] on the host, for operators that must not wait for the device."""
        with torch.inference_mode(False):
            return torch.tensor(self.length, dtype=torch.int64, device="cpu")

    def groups_after(self, num_tokens: int) -> int:
        """Groups of a sequence that are complete after `num_tokens` more tokens.

        Raises:
            SequenceTooLong: seq_lens cannot count so many.
        """
        length = self.length + num_tokens
        if length >= MAX_TOKENS:
            raise SequenceTooLong(length, MAX_TOKENS)
        return length // self.group_size

    @property
    def tail_begin(self) -> int:
        """The first token that is in the tail."""
        return self.length - self.length % self.pool.layout.group_size

    def read_rows(self, start: int, length: int, tail: torch.Tensor) -> list[torch.Tensor]:
        """Keys and values of tokens [start, length) in model precision, each [batch, Hkv, length - start, D].

        Args:
            tail: Where the newest rows are, shaped as the table's own tail.
        Raises:
            ReleasedHandle: one of the rows has been given back.
        """
        layout, in_tail = self.pool.layout, self.tail_begin
        guarded = min(layout.group_size, in_tail, length) if layout.is_guarded else 0
        shape = (self.batch, layout.num_kv_heads, length - start, layout.head_dim)
        with torch.inference_mode(False), torch.no_grad():
            both = [torch.empty(shape, dtype=layout.model_dtype, device=self.pool.device) for _ in range(2)]
            self._read_pages(both, start, max(start, guarded), min(length, in_tail))
            begin, at = max(start, in_tail), layout.tail_row(self.length) - in_tail
            for rows, kept in zip(both, tail.unbind(1), strict=True):
                if start < guarded:
                    rows[:, :, : guarded - start] = kept[:, :, start:guarded]
                if length > begin:
                    rows[:, :, begin - start :] = kept[:, :, at + begin : at + length]
        return both

    def _read_pages(self, both: list[torch.Tensor], start: int, first_row: int, stored: int) -> None:
        """Read tokens [first_row, stored) from pages into rows that begin with token `start`."""
        layout, dtype = self.pool.layout, self.pool.layout.model_dtype
        for index in self.page_indices(first_row, stored):
            first = index * layout.page_size
            begin, end = max(first_row, first), min(stored, first + layout.page_size)
            if 0 in self.pages[index]:
                raise DroppedRows(begin, end)
            if self.batch:
                data = gather_pages([[address] for address in self.pages[index]], layout, self.pool.device)
                for rows, page in zip(both, read_groups(data, layout), strict=True):  # [batch, Hkv, page_size, D]
                    wanted = page[:, :, begin - first : end - first]
                    rows[:, :, begin - start : end - start] = clamp_finite(wanted, dtype)

    def _indices(self, start: int, stored: int) -> range:
        page_size = self.pool.layout.page_size
        return range(start // page_size, -(-stored // page_size)) if stored > start else range(0)


def _write(page_table: torch.Tensor, entries: dict[int, list[int]]) -> None:
    """Write entries (page index -> address of each sequence) to their columns; no wait for the device."""
    if entries:
        device, columns = page_table.device, [i % page_table.shape[1] for i in entries]
        rows = [columns, *zip(*entries.values(), strict=True)]
        numbers = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        numbers = numbers.to(device, non_blocking=True)
        page_table[:, numbers[0]] = numbers[1:]
