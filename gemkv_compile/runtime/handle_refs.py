"""Which handles of a page table are alive."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

MANY_HANDLES = 64  # dead ones included, until they are looked through


class HandleRefs(deque[weakref.ref[Any]]):
    """Weak references to handles, oldest first. Any thread appends; only who has claimed the table takes out.

    `room` is how many there may be, dead ones included, before it is time to `forget` those that are dead.
    """

    room = MANY_HANDLES

    def alive(self, table: Any) -> list[Any]:
        """Living handles that show rows of `table`; all others are forgotten."""
        alive = []
        for _ in range(len(self)):
            handle = self[0]()
            if handle is not None and handle.table is table:
                self.append(self[0])  # before it leaves: an interrupt in between loses none
                alive.append(handle)
            self.popleft()
        self.room = max(MANY_HANDLES, 2 * len(alive))
        return alive

    def forget(self, table: Any) -> None:
        """Forget the dead: usually those are the oldest; else all are looked through."""
        while self and self[0]() is None:
            self.popleft()
        if 2 * len(self) > self.room:
            self.alive(table)

    def leave_out(self, handle: Any) -> None:
        """Hold no reference to `handle`."""
        for _ in range(len(self)):
            if self[0]() is not handle:
                self.append(self[0])
            self.popleft()
