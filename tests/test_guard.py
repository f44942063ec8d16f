"""The guard of small formats: a sequence's first group stays exact, whatever happens to the table."""

import pytest
import torch
from paged_tables import CPU, dense_rows, layout_of

from gemkv_compile.kernels import ops
from gemkv_compile.kernels.layout import GUARDED, KV_FORMATS, PageLayout
from gemkv_compile.runtime.importing import import_dense
from gemkv_compile.runtime.page_table import PageTable
from gemkv_compile.runtime.pool import PagePool

guarded = pytest.mark.parametrize("kv_format", GUARDED)


def append(table, keys, values, commit=True):
    layout = table.pool.layout
    table.begin(keys.shape[2], keep=None)
    state = table.page_table, table.seq_lens, table.tail
    ops.append_kv(keys, values, *state, layout.page_size, layout.kv_format, "test")
    table.commit(keys.shape[2]) if commit else table.abort()


def exact(table, rows, first=64):
    """Whether the first tokens of a table are these rows, bit by bit, and all others are near."""
    for got, wanted in zip(table.read(0, table.length), rows, strict=True):
        assert torch.equal(got[:, :, :first], wanted[:, :, : min(first, table.length)])
        torch.testing.assert_close(got, wanted[:, :, : table.length], rtol=0, atol=0.5)


def test_which_formats_have_one():
    assert GUARDED == ("k8v4", "k6v4", "int4")
    for name in KV_FORMATS:
        layout = PageLayout(1, 16, 64, 64, name, torch.float32)
        assert (layout.is_guarded, layout.tail_rows) == ((True, 128) if name in GUARDED else (False, 64))
        assert [layout.tail_row(length) for length in (0, 63, 64, 640)] == (
            [0, 0, 64, 64] if layout.is_guarded else [0] * 4
        )


@guarded
@pytest.mark.parametrize("split", [(1,) * 70, (63, 1, 6), (64, 6), (10, 300), (130, 63, 1)])
def test_the_first_group_is_exact_after_any_split(kv_format, split):
    table, rows = PageTable(PagePool(layout_of(kv_format), CPU), 2), dense_rows(2, sum(split))
    for keys, values in zip(*(part.split(split, 2) for part in rows), strict=True):
        append(table, keys, values)
        exact(table, rows)


@guarded
@pytest.mark.parametrize("length", [5, 63, 64, 65, 128, 190])
def test_a_fork_has_it_too_and_goes_its_own_way(kv_format, length):
    rows, others = dense_rows(2, 200), dense_rows(2, 200, seed=1)
    table = import_dense(PagePool(layout_of(kv_format), CPU), *rows)
    fork = table.fork(0, length, rows=[1, 0, 1])
    mine = [
        torch.cat((a[[1, 0, 1], :, :length], b[[1, 0, 1], :, length:]), 2) for a, b in zip(rows, others, strict=True)
    ]
    append(fork, *(part[:, :, length:] for part in mine))
    exact(fork, mine)
    exact(table, rows)


@guarded
@pytest.mark.parametrize("length, more", [(10, 100), (63, 1), (100, 40)])
def test_an_aborted_append_leaves_it(kv_format, length, more):
    rows = dense_rows(1, 200)
    table = import_dense(PagePool(layout_of(kv_format), CPU), *(part[:, :, :length] for part in rows))
    before = table.read(0, length)
    append(table, *(part[:, :, :more] for part in dense_rows(1, 200, seed=2)), commit=False)
    assert all(torch.equal(a, b) for a, b in zip(before, table.read(0, length), strict=True))
    append(table, *(part[:, :, length:] for part in rows))
    exact(table, rows)
