"""The stored tokens of a batch, a few pages at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gemkv_compile.kernels.layout import PageLayout
from gemkv_compile.kernels.memory import gather_pages


class Past:
    """Where the stored tokens of each sequence are that some query may attend to.

    Args:
        page_table, seq_lens, starts: As in `gemkv_compile.kernels.ops`.
        reach: No query sees more than this many of the newest stored tokens; None if there is no such bound.
    Attributes:
        lengths: The values of seq_lens.
        farthest: The largest distance of column 0 of the pages from the end of its sequence, a negative number.
    In a guarded format pages are read from the second group on, and the first is the tail's.
    A token whose page is 0, or whose column a later page of its sequence has taken, is nowhere.
    """

    def __init__(
        self, page_table: Tensor, seq_lens: Tensor, starts: Tensor, reach: int | None, layout: PageLayout
    ) -> None:
        self.layout, self.device = layout, page_table.device
        self.lengths: list[int] = seq_lens.tolist()
        lows = [
            max(start, 0, 0 if reach is None else length - reach)
            for start, length in zip(starts.tolist(), self.lengths, strict=True)
        ]
        # The tail begins where the pages end.
        ends = [length - length % layout.group_size for length in self.lengths]
        self._guard = layout.group_size if layout.is_guarded else 0
        self._has_tail = any(
            length % layout.group_size or low < min(length, self._guard)
            for length, low in zip(self.lengths, lows, strict=True)
        )
        tail_lows, lows = lows, [max(low, self._guard) for low in lows]
        firsts = [low // layout.page_size * layout.page_size for low in lows]
        self.farthest = max((first - length for first, length in zip(firsts, self.lengths, strict=True)), default=0)
        rows = [_addresses(*row, layout.page_size) for row in zip(page_table.tolist(), lows, ends, strict=True)]
        num_pages = max(map(len, rows), default=0)
        self.addresses = [row + [0] * (num_pages - len(row)) for row in rows]
        bounds = torch.tensor((firsts, lows, tail_lows, ends, self.lengths), dtype=torch.int64, device=self.device)
        self._bounds = bounds.unsqueeze(2).unbind()

    def pages(self) -> tuple[Tensor, Tensor]:
        """Positions of paged tokens, [batch, T] int64 from each sequence's first page on, and if they exist, bool."""
        firsts, lows, _, ends, _ = self._bounds
        page_size, num_pages = self.layout.page_size, len(self.addresses[0]) if self.addresses else 0
        positions = firsts + torch.arange(num_pages * page_size, device=self.device)
        exists = (positions >= lows) & (positions < ends)
        if not all(map(all, self.addresses)):
            kept = torch.tensor(self.addresses, device=self.device) != 0
            exists &= kept.repeat_interleave(page_size, 1)
        return positions, exists

    def tail(self) -> tuple[Tensor, Tensor] | None:
        """Positions of the tail's rows, [batch, tail_rows] int64, and if they exist, bool; None for empty tails."""
        if not self._has_tail:
            return None
        _, _, lows, ends, lengths = self._bounds
        rows = torch.arange(self.layout.group_size, device=self.device)
        positions = ends + rows
        exists = (positions >= lows) & (positions < lengths)
        if self._guard:
            first = rows.expand_as(positions)
            exists = torch.cat(((first >= lows) & (first < lengths), exists & (ends > 0)), dim=1)
            positions = torch.cat((first, positions), dim=1)
        return positions, exists

    def steps(self, max_tokens: int) -> Iterator[tuple[slice, Tensor]]:
        """Whole pages of up to about max_tokens tokens: their columns in `pages`, and the bytes of their groups.

        The bytes are [batch, Hkv, n, group_bytes] with n * group_size tokens; steps without any page are left out.
        """
        page_size = self.layout.page_size
        stride = max(1, max_tokens // page_size)
        for page in range(0, len(self.addresses[0]) if self.addresses else 0, stride):
            step = [row[page : page + stride] for row in self.addresses]
            if any(map(any, step)):
                columns = slice(page * page_size, (page + len(step[0])) * page_size)
                yield columns, gather_pages(step, self.layout, self.device)


def _addresses(table: list[int], low: int, end: int, page_size: int) -> list[int]:
    """Addresses of the pages of the tokens low .. end - 1 of a sequence whose pages end before token `end`."""
    if low >= end:
        return []
    newest, max_pages = (end - 1) // page_size, len(table)
    return [table[page % max_pages] if page > newest - max_pages else 0 for page in range(low // page_size, newest + 1)]
