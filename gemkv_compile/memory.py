"""The life of every page while it is tracked: who allocated it, who shares it, and whether anybody can still read it.

with gemkv_compile.memory.track() as tracker:
    model.generate(...)
for leak in tracker.leaks():
    print(leak)
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from gemkv_compile.runtime.page_table import PageTable
from gemkv_compile.runtime.pool import PagePool, pools
from gemkv_compile.runtime.reservation import HeldPages

RESERVED, BOUND, SHARED, RELEASED = "reserved", "bound", "shared", "released"
"""States of a page: allocated by an append under way; holds rows that count; more than one table, or a backward pass,
refers to it; given back, which ends this life of its address."""

_UNSEEN = (os.path.dirname(torch.__file__) + os.sep, __file__, str(sys.modules[PagePool.__module__].__file__))
Frame = tuple[str, int, str]  # file, line, function


@dataclass(frozen=True)
class PageLife:
    """One page from its allocation to its release.

    Args:
        transitions: (step, state) in order; steps count the events of a tracker.
        stack: Where it was allocated, the innermost call first, without PyTorch's own frames; () if that was before.
    """

    pool: str
    address: int
    num_bytes: int
    transitions: tuple[tuple[int, str], ...]
    stack: tuple[str, ...]

    @property
    def state(self) -> str:
        """The state that it is in."""
        return self.transitions[-1][1]


@dataclass(frozen=True)
class Leak:
    """A page that takes memory and that nobody can read, with the reason."""

    page: PageLife
    reason: str

    def __str__(self) -> str:
        where = "\n    ".join(self.page.stack) or "before it was tracked"
        return f"page {self.page.address:#x} of {self.page.pool}: {self.reason}; allocated at\n    {where}"


@dataclass(frozen=True)
class Moment:
    """Bytes of pages by state after one event."""

    step: int
    reserved: int
    bound: int
    shared: int


class _Life:
    """A page's life as it is recorded."""

    def __init__(self, pool: PagePool, address: int, stack: tuple[Frame, ...]) -> None:
        self.pool, self.address, self.stack = pool, address, stack
        self.references = 0
        self.has_rows = False
        self.transitions: list[tuple[int, str]] = []

    def state(self) -> str:
        if not self.references:
            return RELEASED
        return SHARED if self.references > 1 else BOUND if self.has_rows else RESERVED

    def frozen(self) -> PageLife:
        stack = tuple(f"{file}:{line} {function}" for file, line, function in self.stack)
        layout = self.pool.layout
        return PageLife(self.pool.name, self.address, layout.page_bytes, tuple(self.transitions), stack)


class Tracker:
    """What `track` has recorded; answers are about this moment while it records, and afterwards about its end.

    Events only wait in a queue, as pools report them with their lock held, from finalisers too; they are told apart by
    whoever asks.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._steps = itertools.count()
        self._events: deque[tuple[int, PagePool, str, Sequence[int], tuple[Frame, ...]]] = deque()
        self._lock = threading.Lock()  # of those who ask
        self._lives: dict[tuple[PagePool, int], _Life] = {}
        self._ended: list[_Life] = []
        self._moments: list[Moment] = []
        self._bytes = dict.fromkeys((RESERVED, BOUND, SHARED, RELEASED), 0)
        self._final: list[Leak] | None = None

    def __call__(self, pool: PagePool, event: str, pages: Sequence[int]) -> None:
        """Note an event; called by pools."""
        stack = _stack(self._depth) if event == RESERVED else ()
        self._events.append((next(self._steps), pool, event, tuple(pages), stack))

    def live(self) -> list[PageLife]:
        """Pages that are in use, in the order of their allocation."""
        with self._lock:
            self._take_in()
            return [life.frozen() for life in self._lives.values()]

    def pages(self) -> list[PageLife]:
        """Every page's life: first those that have ended, in the order of their ends."""
        with self._lock:
            self._take_in()
            return [life.frozen() for life in (*self._ended, *self._lives.values())]

    def timeline(self) -> list[Moment]:
        """Bytes by state after each event, for plots."""
        with self._lock:
            self._take_in()
            return list(self._moments)

    def leaks(self) -> list[Leak]:
        """Pages in use that no handle can show, that no living table names, or that have references nobody holds.

        Ask between calls of a model: what another thread's call is about to use may look like a leak. Garbage is
        collected first, so pages of a cache that only waits for that are none.
        """
        if self._final is not None:
            return list(self._final)
        gc.collect()
        pools.stats()  # takes in what was given back
        holders, readable = _holders()
        with self._lock:
            self._take_in()
            found = [(life, _why(life, holders, readable)) for life in self._lives.values()]
        return [Leak(life.frozen(), why) for life, why in found if why]

    def _begin(self, references: dict[PagePool, dict[int, int]]) -> None:
        """Take in pages that were there before."""
        for pool, counts in references.items():
            for address, count in counts.items():
                life = _Life(pool, address, ())
                life.has_rows = True
                self._lives[pool, address] = life
                self._change(life, next(self._steps), count)

    def _take_in(self) -> None:
        while self._events:
            step, pool, event, pages, stack = self._events.popleft()
            for address in pages:
                life = self._lives.get((pool, address))
                if life is None:
                    life = self._lives[pool, address] = _Life(pool, address, stack)
                if event == BOUND:
                    life.has_rows = True
                self._change(life, step, {RESERVED: 1, SHARED: 1, "dropped": -1}.get(event, 0))
            now = self._bytes
            self._moments.append(Moment(step, now[RESERVED], now[BOUND], now[SHARED]))

    def _change(self, life: _Life, step: int, references: int) -> None:
        before = life.transitions[-1][1] if life.transitions else RELEASED
        life.references += references
        after, size = life.state(), life.pool.layout.page_bytes
        if after == before:
            return
        self._bytes[before] -= size
        self._bytes[after] += size
        life.transitions.append((step, after))
        if after == RELEASED:
            self._ended.append(self._lives.pop((life.pool, life.address)))


@contextmanager
def track(depth: int = 12) -> Iterator[Tracker]:
    """Record what happens to the pages of every pool of this process, in all threads, until the context ends.

    While nothing tracks, a pool looks at one empty tuple an event. What is recorded grows with the events: track a few
    calls, not a server's life.

    Args:
        depth: Frames that are kept of each allocation.
    Yields:
        A `Tracker`; it can be asked while it records and afterwards.
    """
    tracker = Tracker(depth)
    tracker._begin(pools.observe(tracker))
    try:
        yield tracker
    finally:
        tracker._final = tracker.leaks()
        pools.observe(tracker, on=False)


def _stack(depth: int) -> tuple[Frame, ...]:
    """The innermost frames that say something, innermost first."""
    frames: list[Frame] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(frames) < depth:
        code = frame.f_code
        if not code.co_filename.startswith(_UNSEEN):
            frames.append((code.co_filename, frame.f_lineno, code.co_qualname if _HAS_QUALNAME else code.co_name))
        frame = frame.f_back
    return tuple(frames)


_HAS_QUALNAME = sys.version_info >= (3, 11)


def _holders() -> tuple[Counter[Any], set[Any]]:
    """How often living objects name each (pool, page), and which of these pages somebody can read."""
    holders: Counter[Any] = Counter()
    readable: set[Any] = set()
    for found in gc.get_objects():
        kind = type(found)  # isinstance would ask proxies, which may do anything
        if kind is PageTable:
            _, replaced = found.under_way()
            named = [(found.pool, page) for page in (*itertools.chain(*list(found.pages.values())), *replaced)]
            is_readable = found.has_readers
        elif kind is HeldPages:
            named = [(pool, page) for pool, pages in found.items() for page in pages]
            is_readable = True
        else:
            continue
        holders.update(named)
        if is_readable:
            readable.update(named)
    return holders, readable


def _why(life: _Life, holders: Counter[Any], readable: set[Any]) -> str:
    """The reason why a page is lost, or ""."""
    key, held = (life.pool, life.address), holders[life.pool, life.address]
    if not held:
        return "no table refers to it"
    if life.references > held:
        return f"it has {life.references} references, of which {held} are held"
    return "" if key in readable else "no handle can show its rows"
