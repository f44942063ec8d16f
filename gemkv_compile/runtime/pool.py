"""Page pools: fixed-size pages carved from slabs that are allocated when needed and given back when empty."""

from __future__ import annotations

import functools
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from gemkv_compile.errors import PoolExhausted
from gemkv_compile.kernels.layout import PageLayout
from gemkv_compile.runtime.streams import StreamOrder

MIN_SLAB_BYTES = 1 << 20
MAX_SLAB_BYTES = 64 << 20
GROWTH = 64  # a slab that one more page asks for has a 64th of what there is: no more stands unused for it


@dataclass
class Slab:
    """One allocation that holds `num_pages` pages; `free` are the addresses nobody uses."""

    memory: torch.Tensor  # uint8 [num_pages * page_bytes]
    num_pages: int
    free: list[int]


@dataclass(frozen=True)
class PoolStats:
    """Bytes of a pool: `reserved` in slabs, `in_use` in pages that a table holds; `pages` in use."""

    name: str
    reserved: int
    in_use: int
    pages: int


class PageObserver(Protocol):
    """Is told what happens to pages, under the lock of their pool: it must neither wait nor use the pool."""

    def __call__(self, pool: PagePool, event: str, pages: Sequence[int]) -> None:
        """Event: "reserved", "bound" (they hold rows now), "shared" or "dropped": one reference more or less each."""


class PagePool:
    """Hands out pages of one layout on one device, counts who shares them and takes them back.

    Args:
        layout: Byte layout of a page.
        device: Where slabs live.
        limit: Most bytes that slabs may take, or None.
    A page is named by its address (int); 0 names no page, and is ignored where pages are shared or given back. Slabs
    never move, so growing copies nothing.
    """

    def __init__(self, layout: PageLayout, device: torch.device, limit: int | None = None) -> None:
        self.layout = layout
        self.device = device
        self.limit = limit
        self.marker = marker_of(layout.model_dtype, device)
        self._slabs: dict[int, Slab] = {}  # base address -> slab
        self._slab_of: dict[int, int] = {}  # page in use -> base address of its slab
        self._references: Counter[int] = Counter()
        # Tables die in garbage collection, at any point of any thread: what they return waits here, and is taken in
        # by the next call that holds the lock.
        self._returned: deque[Sequence[int]] = deque()
        self._lock = threading.Lock()
        self._order = StreamOrder(device, lambda: [slab.memory for slab in self._slabs.values()])
        self.observers: tuple[PageObserver, ...] = ()

    @property
    def name(self) -> str:
        """What messages call this pool."""
        layout = self.layout
        heads = f"{layout.num_kv_heads}x{layout.head_dim}"
        return f"{layout.kv_format}[{heads}, page {layout.page_size}] on {self.device}"

    def can_allocate(self, count: int) -> bool:
        """Whether `allocate(count)` would succeed."""
        with self._lock:
            self._take_in_returned()
            return self._missing(count) <= self._room()

    def allocate(self, count: int, taken: list[int] | None = None) -> list[int]:
        """Take `count` pages, each with one reference. All or nothing.

        Work on the pages that the current CUDA stream gets comes after what their former owners have launched.
        Args:
            taken: An empty list that the pages are put into: its owner gives them back, also if it is interrupted
                before it sees what this function returns, which is this list.
        Raises:
            PoolExhausted: the limit does not allow it; nothing has changed.
        """
        pages = [] if taken is None else taken
        with self._lock:
            self._take_in_returned()
            missing = self._missing(count)
            if missing > self._room():
                raise PoolExhausted(self.name, missing * self.layout.page_bytes, self.limit or 0, self._in_use_bytes())
            if missing:
                self._grow(missing)
            self._order.follow()
            try:
                self._pick(count, pages)
                self._references.update(pages)
                for observe in self.observers:
                    observe(self, "reserved", pages)
            except BaseException:
                self._put_back(pages)
                raise
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add one reference to each page."""
        pages = _without_holes(pages)
        with self._lock:
            self._references.update(pages)
            for observe in self.observers:
                observe(self, "shared", pages)

    def note_bound(self, pages: Sequence[int]) -> None:
        """Tell the observers that pages hold rows that count; nothing else changes."""
        with self._lock:
            for observe in self.observers:
                observe(self, "bound", pages)

    def observe(self, observer: PageObserver, on: bool = True) -> dict[int, int]:
        """Start or stop telling `observer` what happens; returns the references of each page at this moment."""
        with self._lock:
            self._take_in_returned()
            others = tuple(each for each in self.observers if each is not observer)
            self.observers = (*others, observer) if on else others
            return dict(self._references)

    def is_shared(self, page: int) -> bool:
        """Whether more than one table refers to the page."""
        with self._lock:
            self._take_in_returned()
            return self._references[page] > 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Drop one reference of each page; safe to call from a finaliser, in any thread, at any point."""
        self._returned.append(pages)
        if self._lock.acquire(blocking=False):
            try:
                self._take_in_returned()
            finally:
                self._lock.release()

    def stats(self) -> PoolStats:
        """Bytes reserved and in use right now."""
        with self._lock:
            self._take_in_returned()
            reserved = sum(slab.memory.numel() for slab in self._slabs.values())
            return PoolStats(self.name, reserved, self._in_use_bytes(), len(self._references))

    def trim(self) -> int:
        """Give every empty slab back to PyTorch's allocator; returns the bytes given back."""
        with self._lock:
            self._take_in_returned()
            empty = [base for base, slab in self._slabs.items() if len(slab.free) == slab.num_pages]
            return sum(self._slabs.pop(base).memory.numel() for base in empty)

    def _in_use_bytes(self) -> int:
        return len(self._references) * self.layout.page_bytes

    def _missing(self, count: int) -> int:
        return max(0, count - sum(len(slab.free) for slab in self._slabs.values()))

    def _room(self) -> float:
        """Pages that new slabs may still hold."""
        if self.limit is None:
            return float("inf")
        taken = sum(slab.num_pages for slab in self._slabs.values())
        return self.limit // self.layout.page_bytes - taken

    def _grow(self, missing: int) -> None:
        reserved = sum(slab.memory.numel() for slab in self._slabs.values())
        wanted = min(max(reserved // GROWTH, MIN_SLAB_BYTES), MAX_SLAB_BYTES) // self.layout.page_bytes
        num_pages = int(min(max(missing, wanted), self._room()))
        with torch.inference_mode(False):
            memory = torch.empty(num_pages * self.layout.page_bytes, dtype=torch.uint8, device=self.device)
        base = memory.data_ptr()
        pages = [base + i * self.layout.page_bytes for i in range(num_pages)]
        self._slabs[base] = Slab(memory, num_pages, pages[::-1])

    def _pick(self, count: int, pages: list[int]) -> None:
        """Move `count` free pages to `pages`; what an interrupt leaves undone, `_put_back` undoes."""
        for base, slab in self._slabs.items():
            first = max(0, len(slab.free) - (count - len(pages)))
            chosen = slab.free[first:][::-1]
            self._slab_of.update(dict.fromkeys(chosen, base))
            pages += chosen
            del slab.free[first:]

    def _put_back(self, pages: list[int]) -> None:
        """Undo an allocation that failed after `_pick` began."""
        for page in pages:
            self._references.pop(page, None)
            slab = self._slabs[self._slab_of[page]]
            if page not in slab.free:
                slab.free.append(page)
        pages.clear()

    def _take_in_returned(self) -> None:
        if not self._returned:
            return
        while self._returned:
            pages = _without_holes(self._returned[0])
            self._returned.popleft()
            for observe in self.observers:
                observe(self, "dropped", pages)
            for page in pages:
                self._references[page] -= 1
                if self._references[page] == 0:
                    del self._references[page]
                    self._slabs[self._slab_of.pop(page)].free.append(page)
        self._drop_spare_slabs()

    def _drop_spare_slabs(self) -> None:
        """Keep at most one empty slab: enough that a cache at a page boundary does not allocate and free in turn."""
        empty = [base for base, slab in self._slabs.items() if len(slab.free) == slab.num_pages]
        for base in empty[1:]:
            del self._slabs[base]


def _without_holes(pages: Sequence[int]) -> Sequence[int]:
    return [page for page in pages if page] if 0 in pages else pages


@functools.cache
def marker_of(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The empty tensor inside every handle of a dtype and device: one object, so that Dynamo guards it once."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)


class PoolSet:
    """The pools of this process, by layout, device and limit."""

    def __init__(self) -> None:
        self._pools: dict[tuple[PageLayout, torch.device, int | None], PagePool] = {}
        self._lock = threading.Lock()
        self._observers: tuple[PageObserver, ...] = ()

    def get(self, layout: PageLayout, device: torch.device, limit: int | None) -> PagePool:
        """The pool for these pages, made at its first use."""
        key = (layout, device, limit)
        with self._lock:
            if key not in self._pools:
                self._pools[key] = PagePool(layout, device, limit)
                self._pools[key].observers = self._observers
            return self._pools[key]

    def observe(self, observer: PageObserver, on: bool = True) -> dict[PagePool, dict[int, int]]:
        """Start or stop observing all pools, also those to come; returns each one's references at that moment."""
        with self._lock:
            others = tuple(each for each in self._observers if each is not observer)
            self._observers = (*others, observer) if on else others
            return {pool: pool.observe(observer, on) for pool in self._pools.values()}

    def stats(self) -> list[PoolStats]:
        """Figures of every pool."""
        return [pool.stats() for pool in list(self._pools.values())]

    def trim(self) -> int:
        """Give back every empty slab of every pool; returns the bytes given back."""
        return sum(pool.trim() for pool in list(self._pools.values()))


pools = PoolSet()
