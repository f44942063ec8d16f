"""Page tables: transactions, forks, windows, exact bytes, and a state machine over all of them."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from paged_tables import CPU, dense_rows, layout_of, table_of
from tiny_models import prompt, tuple_model

import gemkv_compile
from gemkv_compile.compat import bytes_at
from gemkv_compile.errors import CacheMismatch, DroppedRows, GemkvError, PoolExhausted, ReleasedHandle, SequenceTooLong
from gemkv_compile.kernels import ops
from gemkv_compile.kernels.layout import CODE_BITS, MAX_TOKENS
from gemkv_compile.runtime.handle import KEYS, VALUES, make_handle
from gemkv_compile.runtime.importing import continue_past, import_dense
from gemkv_compile.runtime.page_table import PageTable
from gemkv_compile.runtime.pool import PagePool
from gemkv_compile.runtime.reservation import HeldPages, Reservation


def append(table, keys, values, keep=None, start=0):
    """What an executable does for one layer."""
    layout = table.pool.layout
    table.begin(keys.shape[2], keep, start)
    ops.append_kv(
        keys, values, table.page_table, table.seq_lens, table.tail, layout.page_size, layout.kv_format, "test"
    )
    table.commit(keys.shape[2])


def handles(table, start=0, length=None):
    return [make_handle(table, role, start, length or table.length) for role in (KEYS, VALUES)]


def assert_rows(table, start, length, keys, values):
    for got, expected in zip(table.read(start, length), (keys, values), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 127, 128, 129, 300])
def test_import_then_read(tokens):
    table = table_of(2, tokens)
    assert_rows(table, 0, tokens, *dense_rows(2, tokens))
    assert table.seq_lens.tolist() == [tokens, tokens] and len(table.pages) == -(-(tokens // 64) // 2)


def test_rows_appended_one_by_one_or_in_pieces_are_the_same():
    keys, values = dense_rows(2, 300)
    pool = PagePool(layout_of("int8"), CPU)
    tables = [PageTable(pool, 2) for _ in range(3)]
    for table, pieces in zip(tables, ([1] * 300, [7, 64, 128, 1, 100], [300]), strict=True):
        for k, v in zip(keys.split(pieces, 2), values.split(pieces, 2), strict=True):
            append(table, k, v)
    for table in tables[1:]:
        assert_rows(table, 0, 300, *tables[0].read(0, 300))


def test_failure_in_the_middle_leaves_the_table_as_it_was():
    keys, values = dense_rows(2, 300)
    table = import_dense(PagePool(layout_of(), CPU), keys[:, :, :100], values[:, :, :100])
    for tokens in (1, 20, 29, 200):
        table.begin(tokens, None)
        ops.append_kv(
            torch.full((2, 2, tokens, 16), 9.0), torch.full((2, 2, tokens, 16), 9.0),
            table.page_table, table.seq_lens, table.tail, 128, "model", "test",
        )  # fmt: skip
        table.abort()
        assert table.length == 100 and table.seq_lens.tolist() == [100, 100] and len(table.pages) == 1
        assert table.pool.stats().pages == 2
        assert_rows(table, 0, 100, keys[:, :, :100], values[:, :, :100])
    append(table, keys[:, :, 100:], values[:, :, 100:])
    assert_rows(table, 0, 300, keys, values)


def test_exhausted_pool_leaves_every_cache_valid():
    layout = layout_of(page_size=64)
    pool = PagePool(layout, CPU, limit=4 * layout.page_bytes)
    keys, values = dense_rows(2, 200)
    table = import_dense(pool, keys[:, :, :150], values[:, :, :150])
    with pytest.raises(PoolExhausted, match="pool_bytes"):
        append(table, keys[:, :, 150:], values[:, :, 150:])
    assert table.length == 150 and not table.is_appending
    assert_rows(table, 0, 150, keys[:, :, :150], values[:, :, :150])
    append(table, keys[:, :, 150:160], values[:, :, 150:160])
    assert_rows(table, 0, 160, keys[:, :, :160], values[:, :, :160])


def test_sequence_that_lengths_cannot_count():
    table = PageTable(PagePool(layout_of(), CPU), 2)
    table.length = MAX_TOKENS - 10
    table.begin(9, None)
    table.abort()
    with pytest.raises(SequenceTooLong, match=str(MAX_TOKENS)):
        table.begin(10, None)
    assert table.length == MAX_TOKENS - 10 and not table.is_appending


def test_pages_return_when_the_table_dies():
    table = table_of(3, 500)
    pool = table.pool
    fork = table.fork(0, 400)
    assert pool.stats().pages == 12
    del table
    gc.collect()
    assert pool.stats().pages == 9  # the fork's
    del fork
    gc.collect()
    assert pool.stats().pages == 0


def test_older_handle_is_continued_through_a_fork():
    keys, values = dense_rows(1, 200)
    table = import_dense(PagePool(layout_of(), CPU), keys[:, :, :100], values[:, :, :100])
    old = handles(table)
    append(table, keys[:, :, 100:], values[:, :, 100:])
    newer = handles(table)
    fork, start = continue_past(table.pool, 1, *old, 2)
    assert fork is not table and (fork.length, start) == (100, 0)
    fork.unclaim()
    append(fork, -keys[:, :, 100:], -values[:, :, 100:])
    assert_rows(table, 0, 200, keys, values)
    assert_rows(fork, 100, 200, -keys[:, :, 100:], -values[:, :, 100:])
    assert_rows(fork, 0, 100, keys[:, :, :100], values[:, :, :100])
    assert newer[0].table is table


def test_pages_of_a_dead_continuation_return_when_the_older_handle_goes_on():
    pool = PagePool(layout_of(page_size=64), CPU)
    table = table_of(1, 100, pool=pool)
    old, expected = handles(table), table.read(0, 100)
    append(table, *dense_rows(1, 400))
    newer = handles(table)
    for pages in (7, 2):
        fork, _ = continue_past(pool, 1, *old, 2)
        fork.unclaim()
        assert len(table.pages) == pages and (table.page_table != 0).sum() == pages
        del fork
        newer.clear()
    assert pool.stats().pages == 2
    assert_rows(table, 0, 100, *expected)


def test_writing_to_a_shared_page_copies_it():
    table = table_of(2, 64)
    fork = table.fork(0, 64, [1, 1])
    append(fork, *dense_rows(2, 64, seed=1))
    expected = dense_rows(2, 64)
    assert_rows(table, 0, 64, *expected)
    assert_rows(fork, 0, 64, *(x[[1, 1]] for x in expected))
    assert_rows(fork, 64, 128, *dense_rows(2, 64, seed=1))
    assert len(set(fork.pages[0])) == 2


def test_newest_pair_is_continued_in_place_and_dense_pairs_are_imported():
    table = table_of(2, 70)
    pair = handles(table)
    assert continue_past(table.pool, 2, *pair, 2) == (table, 0)
    dense = [handle.materialise() for handle in pair]
    imported, _ = continue_past(table.pool, 2, *dense, 2)
    assert imported is not table
    assert_rows(imported, 0, 70, *dense)
    mixed, _ = continue_past(table.pool, 2, pair[0], dense[1], 2)
    assert_rows(mixed, 0, 70, *dense)
    other_format = PagePool(layout_of("int8"), CPU)
    assert continue_past(other_format, 2, *pair, 2)[0].pool is other_format


def test_mismatched_pasts_are_errors():
    pool = PagePool(layout_of(), CPU)
    keys, values = dense_rows(2, 10)
    with pytest.raises(CacheMismatch, match=r"values must be \(2, 2, 10, 16\).*got \(2, 2, 9, 16\)"):
        continue_past(pool, 2, keys, values[:, :, :9], 2)
    with pytest.raises(CacheMismatch, match="float64"):
        continue_past(pool, 2, keys.double(), values.double(), 2)
    with pytest.raises(CacheMismatch, match="batch size 2, the new keys 3"):
        continue_past(pool, 3, keys, values, 2)
    assert pool.stats().pages == 0


def test_released_rows_are_an_error():
    table = table_of(1, 300)
    pair = handles(table, 250)
    table.release_unreachable()
    assert sorted(table.pages) == [1]
    with pytest.raises(ReleasedHandle, match="Rows 0 to 128"):
        table.fork(0, 128)
    assert continue_past(table.pool, 1, *pair, 2)[0] is table


@pytest.mark.parametrize("prompt", [1, 40, 700])
def test_window_keeps_a_bounded_number_of_pages_and_columns(prompt):
    keep, pool = 99, PagePool(layout_of(page_size=64), CPU)
    keys, values = dense_rows(1, 1400)
    table = PageTable(pool, 1)
    append(table, keys[:, :, :prompt], values[:, :, :prompt], keep)
    pair = handles(table, max(0, prompt - keep))
    for t in range(prompt, 1400):
        append(table, keys[:, :, t : t + 1], values[:, :, t : t + 1], keep, pair[0].start)
        pair = handles(table, max(0, t + 1 - keep))
        assert len(table.pages) <= 3 and pool.stats().pages == len(table.pages)
        assert table.page_table.count_nonzero() == len(table.pages)
    assert table.page_table.shape[1] == 8
    torch.testing.assert_close(pair[0].materialise(), keys[:, :, -keep:], rtol=0, atol=0)


def test_long_chunk_after_a_window_spares_the_pages_still_in_sight():
    """Groups that get no page must not be written through the columns of older pages."""
    keep, pool = 99, PagePool(layout_of(page_size=64), CPU)
    keys, values = dense_rows(1, 3000)
    table = PageTable(pool, 1)
    append(table, keys[:, :, :200], values[:, :, :200], keep)
    old = handles(table, 101)
    append(table, keys[:, :, 200:], values[:, :, 200:], keep, 101)
    torch.testing.assert_close(old[0].materialise(), keys[:, :, 101:200], rtol=0, atol=0)
    new = handles(table, 3000 - keep)
    torch.testing.assert_close(new[1].materialise(), values[:, :, -keep:], rtol=0, atol=0)


def test_a_released_table_is_neither_continued_nor_appended_to():
    table = table_of(1, 300)
    pair = handles(table)
    pair[0].release()
    assert table.page_table.count_nonzero() == 0 and table.pool.stats().pages == 0
    with pytest.raises(ReleasedHandle):
        continue_past(table.pool, 1, *pair, 2)
    with pytest.raises(ReleasedHandle):
        append(table, *dense_rows(1, 64))
    assert table.pool.stats().pages == 0


def fails_once(monkeypatch, owner, name):
    """Let a piece of device work fail the next time, as for lack of memory."""
    works = getattr(owner, name)

    def fail(*_):
        monkeypatch.setattr(owner, name, works)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(owner, name, fail)


@pytest.mark.parametrize(
    "owner, work", [(PageTable, "write_entries"), (PageTable, "copy_pages"), (torch.Tensor, "clone")]
)
def test_failure_inside_begin_leaves_the_table_as_it_was(monkeypatch, owner, work):
    pool, (keys, values) = PagePool(layout_of(), CPU), dense_rows(2, 300)
    table = import_dense(pool, keys[:, :, :100], values[:, :, :100])
    other = table.fork(0, 100)
    pages, entries = copy.deepcopy(table.pages), table.page_table.clone()
    fails_once(monkeypatch, owner, work)
    with pytest.raises(torch.OutOfMemoryError):
        table.begin(200, None)
    assert not table.is_appending and pool.stats().pages == 2
    assert table.pages == pages and torch.equal(table.page_table, entries)
    append(table, keys[:, :, 100:], values[:, :, 100:])
    assert_rows(table, 0, 300, keys, values)
    assert_rows(other, 0, 100, keys[:, :, :100], values[:, :, :100])
    del table
    assert pool.stats().pages == 2
    del other
    assert pool.stats().pages == 0


def test_a_table_that_cannot_be_undone_is_released(monkeypatch):
    table = table_of(1, 100)
    table.begin(100, None)
    fails_once(monkeypatch, PageTable, "write_entries")
    with pytest.raises(torch.OutOfMemoryError):
        table.abort()
    assert table.released and table.pool.stats().pages == 1
    with pytest.raises(ReleasedHandle):
        table.read(0, 100)


def test_a_failing_call_lets_go_of_all_its_caches(monkeypatch):
    """Undoing the first cache fails too; the second one is as it was, and free for other threads."""
    model = gemkv_compile.compile(tuple_model(), kv_format="model")
    with torch.no_grad():
        _, pasts = model(prompt(1, 100))
        model(prompt(1, 60), pasts)  # compiled by now
        _, pasts = model(prompt(1, 100))
    first, second = (pair[0].table for pair in pasts)
    fails_once(monkeypatch, Reservation, "undo")
    fails_once(monkeypatch, PageTable, "commit")
    with pytest.raises(torch.OutOfMemoryError), torch.no_grad():
        model(prompt(1, 60), pasts)
    assert first.released and not second.is_appending and (second.length, second.seq_lens.tolist()) == (100, [100])
    assert all(in_thread(lambda table=table: table._lock.acquire(blocking=False)) for table in (first, second))


def in_thread(function):
    """What a function returns in a thread of its own."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    thread.join(60)
    return results[0]


def test_an_append_under_way_is_not_begun_again():
    table = table_of(1, 100)
    table.begin(60, None)
    with pytest.raises(GemkvError, match="append under way: commit or abort"):
        table.begin(60, None)
    table.commit(60)
    assert table.length == 160


def half_appended(tokens=60):
    """A table, a pair of handles, and the dense rows; an operator has written `tokens` more that do not count yet."""
    keys, values = dense_rows(1, 100 + tokens)
    table = import_dense(PagePool(layout_of(), CPU), keys[:, :, :100], values[:, :, :100])
    pair = handles(table)
    table.claim()
    table.begin(tokens, None)
    state = table.page_table, table.seq_lens, table.tail
    ops.append_kv(keys[:, :, 100:], values[:, :, 100:], *state, 128, "model", "test")
    return table, pair, keys, values


def test_rows_are_right_while_an_append_is_under_way():
    table, pair, keys, values = half_appended()
    fork, _ = continue_past(table.pool, 1, *pair, 2)
    assert fork is not table
    for rows in (table, fork):
        assert_rows(rows, 0, 100, keys[:, :, :100], values[:, :, :100])
    table.commit(60)
    table.end()
    assert_rows(table, 0, 160, keys, values)


@pytest.mark.parametrize("completes", [True, False])
def test_another_thread_waits_for_an_append_and_then_forks(completes):
    table, pair, keys, values = half_appended()
    results = []

    def work():
        other, _ = continue_past(table.pool, 1, *pair, 2)
        append(other, -keys[:, :, 100:], -values[:, :, 100:])
        other.end()
        results.extend([other, pair[0].materialise(), pair[0].clone()])

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and not results
    if completes:
        table.commit(60)
    table.end()
    thread.join(60)
    assert (results[0] is table) != completes
    assert_rows(results[0], 100, 160, -keys[:, :, 100:], -values[:, :, 100:])
    torch.testing.assert_close(results[1], keys[:, :, :100], rtol=0, atol=0)
    if completes:
        assert_rows(table, 0, 160, keys, values)


def test_releasing_waits_for_nobody():
    """A finaliser may release a cache while another thread appends to it: the pages return when that ends."""
    table, _, *_ = half_appended()
    thread = threading.Thread(target=table.release, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and table.released and table.pool.stats().pages == 1
    table.commit(60)
    table.end()
    assert table.pool.stats().pages == 0


def test_batch_of_no_sequences():
    keys, values = dense_rows(0, 200)
    table = import_dense(PagePool(layout_of(), CPU), keys, values)
    assert [x.shape for x in table.read(10, 200)] == [(0, 2, 190, 16)] * 2
    assert continue_past(table.pool, 0, keys, values, 2)[0].length == 200
    fork = table_of(2, 200).fork(0, 200, [])
    append(fork, *dense_rows(0, 100))
    assert fork.read(0, 300)[0].shape == (0, 2, 300, 16)


def test_a_cache_before_its_first_call_may_hold_any_empty_tensor():
    pool = PagePool(layout_of(), CPU)
    assert continue_past(pool, 2, torch.tensor([]), torch.tensor([]), 2)[0].length == 0


def test_dead_handles_are_forgotten():
    table = table_of(1, 10)
    kept = make_handle(table, KEYS, 0, 10)
    for _ in range(500):
        make_handle(table, KEYS, 0, 10)
    append(table, *dense_rows(1, 1))
    assert len(table.handles) == 1 and kept.length == 10


def test_an_edited_handle_lets_go_of_the_pages_it_stood_for():
    table = table_of(1, 300)
    edited, _kept = handles(table)[0], handles(table, 280)
    edited.mul_(2)
    table.release_unreachable()
    assert not table.pages
    torch.testing.assert_close(edited.materialise(), 2 * dense_rows(1, 300)[0])


@pytest.mark.parametrize("kv_format, steps", [("int8", 254), ("k8v4", 254), ("k6v4", 62), ("int4", 14)])
def test_rows_are_rounded_once_when_their_group_completes(kv_format, steps):
    keys, values = dense_rows(1, 300)
    table = import_dense(PagePool(layout_of(kv_format), CPU), keys[:, :, :127], values[:, :, :127])
    handle = handles(table)[0]
    first = 64 if table.pool.layout.is_guarded else 0  # stays exact
    torch.testing.assert_close(handle.materialise()[:, :, 64:], keys[:, :, 64:127], rtol=0, atol=0)
    append(table, keys[:, :, 127:128], values[:, :, 127:128])
    rounded, half_a_scale = handle.materialise(), (keys.amax() - keys.amin()).item() / steps / 2
    assert not torch.equal(rounded[:, :, 64:], keys[:, :, 64:127])
    assert torch.equal(rounded[:, :, :first], keys[:, :, :first])
    assert first or not torch.equal(rounded[:, :, :64], keys[:, :, :64])
    torch.testing.assert_close(rounded, keys[:, :, :127], rtol=0, atol=half_a_scale * 1.01)
    append(table, keys[:, :, 128:], values[:, :, 128:])
    torch.testing.assert_close(handle.materialise(), rounded, rtol=0, atol=0)


@pytest.mark.parametrize("kv_format", CODE_BITS)
def test_reading_does_not_overflow_float16(kv_format):
    rows = torch.full((1, 2, 64, 16), 65504.0, dtype=torch.float16)
    rows[:, :, 0] = -65504.0
    table = import_dense(PagePool(layout_of(kv_format, dtype=torch.float16), CPU), rows, rows)
    assert all(part.isfinite().all() for part in table.read(0, 64))


@pytest.mark.parametrize("kv_format", CODE_BITS)
def test_a_fork_goes_on_from_the_bytes_that_are_there(kv_format):
    """Whole groups are shared or copied as they are; rows of a group that was cut are rounded with new neighbours."""
    table, (keys, values) = table_of(1, 200, kv_format), dense_rows(1, 200)
    fork, before = table.fork(0, 150), table.read(0, 200)
    append(fork, keys[:, :, 150:], values[:, :, 150:])
    for stored, again, exact in zip(before, fork.read(0, 200), (keys, values), strict=True):
        assert torch.equal(stored[:, :, :128], again[:, :, :128])
        assert not torch.equal(again[:, :, 128:192], exact[:, :, 128:192])
        assert torch.equal(again[:, :, 192:], exact[:, :, 192:])
        coarsest = (exact.amax() - exact.amin()) / 14
        torch.testing.assert_close(again, exact, rtol=0, atol=float(coarsest))
    for part, still in zip(before, table.read(0, 200), strict=True):
        assert torch.equal(part, still)


@pytest.mark.parametrize("kv_format", CODE_BITS)
def test_reading_under_autocast(kv_format):
    table = table_of(1, 130, kv_format)
    expected = table.read(0, 130)
    with torch.autocast("cpu", torch.bfloat16):
        assert_rows(table, 0, 130, *expected)
        assert_rows(table.fork(0, 130), 0, 130, *expected)


def test_a_selection_that_has_moved_on_is_selected_again():
    pool = PagePool(layout_of(page_size=64), CPU)
    base = handles(table_of(1, 200, pool=pool), 100)
    expected = dense_rows(1, 200)[0][:, :, 100:].repeat_interleave(2, 0)
    first = [handle.repeat_interleave(2, dim=0) for handle in base]
    table = first[0].table
    for _ in range(130):  # a window moves over all rows of the first selection, and their pages are given back
        append(table, *dense_rows(2, 1), 50, first[0].start)
        first = handles(table, table.length - 50)
    again = [handle.repeat_interleave(2, dim=0) for handle in base]
    assert again[0].table is again[1].table is not table
    torch.testing.assert_close(again[0].materialise(), expected, rtol=0, atol=0)


class TableMachine(RuleBasedStateMachine):
    """Random appends, drops, forks, crops, selections, releases, held pages, failures and deaths beside plain tensors.

    The pool has a limit that is reached now and then: then nothing has changed. `holes` says, for each table that has
    some, which (page, sequence) pairs were dropped.
    """

    @initialize(kv_format=st.just("model"), page_size=st.sampled_from([64, 128]), limit=st.sampled_from([4, 12, None]))
    def start(self, kv_format, page_size, limit):
        layout = layout_of(kv_format, page_size=page_size, heads=1)
        self.pool = PagePool(layout, CPU, limit and limit * layout.page_bytes)
        self.caches = []  # (handle pair, dense keys, dense values)
        self.held = []  # as a backward pass holds pages, with what they are
        self.holes = weakref.WeakKeyDictionary()
        self.seed = 0

    def alive(self, data):
        return data.draw(st.sampled_from([cache for cache in self.caches if not cache[0][0].table.released]))

    def has_alive(self):
        return any(not pair[0].table.released for pair, *_ in self.caches)

    @rule(batch=st.integers(1, 3), tokens=st.sampled_from([128, 100, 192, 64, 63, 65, 0, 1]) | st.integers(0, 150))
    def new(self, batch, tokens):
        self.seed += 1
        keys, values = dense_rows(batch, tokens, 1, seed=self.seed)
        try:
            table = import_dense(self.pool, keys, values)
        except PoolExhausted:
            assert self.pool.limit is not None
            return
        self.caches.append(([make_handle(table, role, 0, tokens) for role in (KEYS, VALUES)], keys, values))

    @precondition(has_alive)
    @rule(
        data=st.data(),
        tokens=st.sampled_from([64, 1, 128]) | st.integers(1, 140),
        keep=st.sampled_from([None, 40, 100]),
        fails=st.booleans(),
        drops=st.booleans(),
    )
    def append(self, data, tokens, keep, fails, drops):
        """Continue a cache, and drop some pages of the longer one; the one it continues stays as it was."""
        pair, keys, values = self.alive(data)
        if not pair[0].numel():
            return
        self.seed += 1
        batch, length = keys.shape[0], pair[0].length
        more = dense_rows(batch, tokens, 1, seed=self.seed)
        if length != pair[0].table.length and self.cuts(pair[0], range(batch)):
            with pytest.raises(DroppedRows, match="drop"):
                continue_past(self.pool, batch, *pair, 2)
            return
        table, first = continue_past(self.pool, batch, *pair, 2)
        self.inherit(pair[0], table, range(batch))
        if (old := pair[0].table) is not table:  # what continued it before and is dead by now holds no page
            reach = max(handle.length for own, *_ in self.caches for handle in own if handle.table is old)
            assert all(index * self.pool.layout.page_size < reach for index in old.pages)
        chosen = {}
        if drops:
            complete = range((length + tokens) // self.pool.layout.page_size)
            flags = st.lists(st.booleans(), min_size=batch, max_size=batch)
            chosen = data.draw(st.dictionaries(st.sampled_from(complete), flags)) if complete else {}
        try:
            table.expose_from(first)
            table.begin(tokens, keep, first, chosen if tokens > 1 else None)
            layout, state = self.pool.layout, (table.page_table, table.seq_lens, table.tail)
            ops.append_kv(*more, *state, layout.page_size, layout.kv_format, "test")
            table.drop(chosen)
            if not fails:
                table.commit(tokens)
                self.note_holes(table, chosen)
        except PoolExhausted:
            assert self.pool.limit is not None
            return
        finally:
            table.end()
        if fails:
            return
        visible = first if keep is None else max(first, table.length - keep)
        both = [torch.cat([a, b], 2)[:, :, visible - first :] for a, b in zip((keys, values), more, strict=True)]
        self.caches.append(([make_handle(table, role, visible, table.length) for role in (KEYS, VALUES)], *both))

    def note_holes(self, table, chosen):
        pairs = {(page, row) for page, flags in chosen.items() for row, flag in enumerate(flags) if flag}
        self.holes.setdefault(table, set()).update(pair for pair in pairs if pair[0] in table.pages)
        for page, flags in chosen.items():
            column = page % table.page_table.shape[1]
            if page in table.pages:
                assert [a == 0 for a in table.page_table[:, column].tolist()] == [a == 0 for a in table.pages[page]]
                assert all(table.pages[page][row] == 0 for row, flag in enumerate(flags) if flag)

    def inherit(self, handle, other, rows):
        """A fork has the holes of what it continues."""
        if other is not handle.table:
            stored = handle.length // 64 * 64
            seen = range(handle.start // self.pool.layout.page_size, -(-stored // self.pool.layout.page_size))
            old = self.holes.get(handle.table, set())
            new = {(page, new) for page, row in old for new, which in enumerate(rows) if which == row and page in seen}
            self.holes.setdefault(other, set()).update(new)

    def cuts(self, handle, rows):
        """Whether a fork of a handle needs rows of a dropped page, which it could not share."""
        size, stored = self.pool.layout.page_size, handle.length // 64 * 64
        holes = self.holes.get(handle.table, set())
        first = handle.start // size
        cut = any(
            row in rows and first <= page < -(-stored // size) and (page + 1) * size > stored for page, row in holes
        )
        tail = stored < handle.length and any(page == stored // size for page, _ in holes)
        return cut or tail

    @precondition(has_alive)
    @rule(data=st.data())
    def crop(self, data):
        pair, keys, values = self.alive(data)
        first = data.draw(st.integers(0, keys.shape[2]))
        last = data.draw(st.integers(first, keys.shape[2]))
        cropped = [handle[:, :, first:last] for handle in pair]
        self.caches.append((cropped, keys[:, :, first:last], values[:, :, first:last]))

    @precondition(has_alive)
    @rule(data=st.data())
    def select(self, data):
        pair, keys, values = self.alive(data)
        rows = torch.tensor(data.draw(st.lists(st.integers(0, keys.shape[0] - 1), min_size=1, max_size=4)))
        if self.cuts(pair[0], rows.tolist()):
            with pytest.raises(DroppedRows):
                pair[0].index_select(0, rows)
            return
        selected = [handle.index_select(0, rows) for handle in pair]
        self.inherit(pair[0], selected[0].table, rows.tolist())
        self.caches.append((selected, keys[rows], values[rows]))

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def forget(self, data):
        del self.caches[data.draw(st.integers(0, len(self.caches) - 1))]

    @precondition(has_alive)
    @rule(data=st.data())
    def release(self, data):
        """All handles of the table are dead from then on; forks live."""
        pair, keys, _ = self.alive(data)
        pair[0].release()
        assert pair[0].table.released and not pair[0].table.pages
        with pytest.raises(ReleasedHandle):
            continue_past(self.pool, keys.shape[0], *pair, 2) if pair[0].numel() else pair[0].copy()

    @precondition(has_alive)
    @rule(data=st.data())
    def hold(self, data):
        """Pages stay as they are for a backward pass, whatever becomes of the cache."""
        table = self.alive(data)[0][0].table
        pages = [address for row in table.pages.values() for address in row if address]
        data = [bytes_at(address, self.pool.layout.page_bytes, CPU).clone() for address in pages]
        stored = table.length // self.pool.layout.group_size * self.pool.layout.group_size
        if stored % self.pool.layout.page_size == 0:  # else rows may still be written into the last page
            self.held.append((HeldPages([table]), pages, data))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data):
        del self.held[data.draw(st.integers(0, len(self.held) - 1))]

    @rule()
    def trim(self):
        self.pool.trim()
        assert all(len(slab.free) < slab.num_pages for slab in self.pool._slabs.values())

    @invariant()
    def every_cache_is_what_it_should_be(self):
        for pair, *dense in getattr(self, "caches", ()):
            for handle, expected in zip(pair, dense, strict=True):
                if handle.table.released:
                    if expected.shape[2]:
                        with pytest.raises(ReleasedHandle):
                            handle.materialise()
                else:
                    self.check(handle, expected)

    def check(self, handle, expected):
        """Rows in holes cannot be read; all others are what they were."""
        size = self.pool.layout.page_size
        lost = {page for page, _ in self.holes.get(handle.table, ())}
        lost = {p for p in lost if p * size < handle.length and (p + 1) * size > handle.start}
        if not lost:
            torch.testing.assert_close(handle.materialise(), expected, rtol=0, atol=0)
            return
        if expected.shape[2] and expected.shape[0]:
            with pytest.raises(DroppedRows, match="were dropped"):
                handle.materialise()
        for page in range(handle.start // size, -(-handle.length // size)):
            first, last = max(handle.start, page * size), min(handle.length, (page + 1) * size)
            if page not in lost:
                rows = handle.table.read(first, last)[handle.role]
                torch.testing.assert_close(rows, expected[:, :, first - handle.start : last - handle.start])

    @invariant()
    def held_pages_keep_their_bytes(self):
        for _, pages, data in getattr(self, "held", ()):
            for address, expected in zip(pages, data, strict=True):
                assert torch.equal(bytes_at(address, self.pool.layout.page_bytes, CPU), expected)

    @invariant()
    def pages_are_counted(self):
        if hasattr(self, "pool"):
            tables = {id(h.table): h.table for pair, *_ in self.caches for h in pair}.values()
            used = {page for table in tables for pages in table.pages.values() for page in pages if page}
            used |= {page for held, *_ in self.held for _, pages in held.items() for page in pages}
            if self.pool.stats().pages != len(used):
                gc.collect()
            stats = self.pool.stats()
            assert stats.pages == len(used)
            assert stats.in_use <= stats.reserved <= (self.pool.limit or stats.reserved)

    def teardown(self):
        if hasattr(self, "pool"):
            self.caches.clear()
            self.held.clear()
            if self.pool.stats().pages:
                gc.collect()
            assert self.pool.stats().pages == 0
            self.pool.trim()
            assert self.pool.stats().reserved == 0


TestTables = TableMachine.TestCase
TestTables.settings = settings(max_examples=15, stateful_step_count=25, deadline=None, derandomize=True)
