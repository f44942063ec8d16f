"""Page pools: no page handed out twice, nothing lost, limits kept, memory given back."""

import gc
import itertools
import threading

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from paged_tables import CPU, layout_of

from gemkv_compile.errors import PoolExhausted
from gemkv_compile.runtime.pool import MIN_SLAB_BYTES, PagePool


class PoolMachine(RuleBasedStateMachine):
    """Random allocate / share / give back against a model that only counts."""

    def __init__(self):
        super().__init__()
        self.layout = layout_of(page_size=64, head_dim=64)
        self.limit = 3 * MIN_SLAB_BYTES
        self.pool = PagePool(self.layout, CPU, self.limit)
        self.references = {}

    @rule(count=st.integers(0, 60))
    def allocate(self, count):
        could, before = self.pool.can_allocate(count), self.pool.stats()
        try:
            pages = self.pool.allocate(count)
        except PoolExhausted:
            assert not could and self.pool.stats() == before
            return
        assert could and len(set(pages)) == count and not set(pages) & self.references.keys()
        self.references |= dict.fromkeys(pages, 1)

    # Drawn are positions, not pages: pages are addresses, which differ from run to run.
    @rule(position=st.integers(0, 1000))
    def share(self, position):
        for page in self.pages_at([position]):
            self.pool.share([page])
            self.references[page] += 1
            assert self.pool.is_shared(page)

    @rule(positions=st.lists(st.integers(0, 1000)))
    def give_back(self, positions):
        pages = self.pages_at(positions)
        self.pool.give_back(pages)
        for page in pages:
            self.references[page] -= 1
            if not self.references[page]:
                del self.references[page]

    def pages_at(self, positions):
        held = sorted(self.references)
        return list(dict.fromkeys(held[position % len(held)] for position in positions)) if held else []

    @rule()
    def trim(self):
        self.pool.trim()

    @invariant()
    def nothing_is_lost(self):
        stats = self.pool.stats()
        assert stats.pages == len(self.references) and stats.in_use == stats.pages * self.layout.page_bytes
        assert stats.in_use <= stats.reserved <= self.limit
        slabs = self.pool._slabs.values()
        assert sum(slab.num_pages for slab in slabs) == stats.pages + sum(len(slab.free) for slab in slabs)

    @invariant()
    def pages_do_not_overlap(self):
        pages = sorted(self.references)
        assert all(b - a >= self.layout.page_bytes for a, b in itertools.pairwise(pages))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)


def test_exhaustion_names_the_pool_the_need_and_the_option():
    layout = layout_of("int8", page_size=64)
    pool = PagePool(layout, CPU, limit=10 * layout.page_bytes)
    held = pool.allocate(8)
    with pytest.raises(
        PoolExhausted, match=rf"pool int8\[2x16, page 64\] on cpu is full: {layout.page_bytes} more bytes.*pool_bytes"
    ):
        pool.allocate(3)
    assert len(pool.allocate(2)) == 2 and pool.stats().pages == len(held) + 2


def test_slabs_grow_without_moving_and_are_given_back():
    layout = layout_of(page_size=64)
    pool = PagePool(layout, CPU)
    first = pool.allocate(1)
    pool.allocate(4 * MIN_SLAB_BYTES // layout.page_bytes)
    assert len(pool._slabs) > 1 and pool.stats().pages > 1
    pool.give_back(first)
    pool.give_back(list(pool._references))
    assert pool.stats().in_use == 0 and len(pool._slabs) <= 1
    assert pool.trim() == pool.stats().reserved + MIN_SLAB_BYTES or pool.stats().reserved == 0


def test_little_stands_unused_however_a_pool_has_grown():
    """A 64th of it, or the smallest slab; page by page, or a prompt first."""
    layout = layout_of(page_size=64)
    for prompt_pages in (0, 400 * MIN_SLAB_BYTES // layout.page_bytes):
        pool = PagePool(layout, CPU)
        pool.allocate(prompt_pages)
        for _ in range(3):
            pool.allocate(MIN_SLAB_BYTES // layout.page_bytes)
            for _ in range(3):
                pool.allocate(1)
                stats = pool.stats()
                assert stats.reserved - stats.in_use <= max(MIN_SLAB_BYTES, stats.reserved // 64)


def test_giving_back_inside_an_allocation_does_not_deadlock():
    """A cache may die in a garbage collection that an allocation sets off."""
    pool = PagePool(layout_of(page_size=64), CPU)
    page = pool.allocate(1)
    with pool._lock:
        pool.give_back(page)
        assert pool._references[page[0]] == 1
    assert pool.stats().pages == 0


def test_threads():
    pool = PagePool(layout_of(page_size=64), CPU)
    seen, lock = [], threading.Lock()

    def work():
        for _ in range(50):
            pages = pool.allocate(7)
            with lock:
                seen.append(pages)
            pool.give_back(pages[:3])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = [page for pages in seen for page in pages[3:]]
    assert len(set(kept)) == len(kept) == pool.stats().pages == 800


def test_pages_are_ordinary_memory_also_under_inference_mode():
    with torch.inference_mode():
        pool = PagePool(layout_of(page_size=64), CPU)
        pool.allocate(1)
    assert not next(iter(pool._slabs.values())).memory.is_inference()
    gc.collect()
