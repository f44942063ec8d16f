"""State that lies in memory with gaps: pages wider than their bytes, and views as table, lengths and tail."""

import math

import numpy as np
import paged_cases as cases
import pytest
import torch
from triton_devices import DEVICES, close_enough

from gemkv_compile.errors import ShapeMismatch
from gemkv_compile.kernels.append_kv.kernel import append_kv_triton
from gemkv_compile.kernels.append_kv.reference import append_kv_reference
from gemkv_compile.kernels.attend_chunk.kernel import attend_chunk_triton
from gemkv_compile.kernels.attend_chunk.reference import attend_chunk_reference
from gemkv_compile.kernels.attend_pages.kernel import attend_pages_triton
from gemkv_compile.kernels.attend_pages.reference import attend_pages_reference
from gemkv_compile.kernels.layout import KV_FORMATS

GAP = 48
LENGTHS = (128, 190)
TRITON = (append_kv_triton, attend_pages_triton, attend_chunk_triton)
REFERENCE = (append_kv_reference, attend_pages_reference, attend_chunk_reference)


class GappedCache(cases.PagedCache):
    """Pages 48 bytes apart in shuffled order; the table is every other column, lengths every third number."""

    def __init__(self, batch, heads, head_dim, kv_format, device, max_pages=2):
        super().__init__(batch, heads, head_dim, 128, 64, kv_format, torch.float32, max_pages, device=device)
        width = self.layout.page_bytes + GAP
        self.memory = torch.full((batch * max_pages, width), 0xFF, dtype=torch.uint8, device=device)
        order = torch.randperm(batch * max_pages, generator=cases.generator("gaps")).view(batch, max_pages)
        self.wide_table = torch.zeros(batch, 2 * max_pages + 1, dtype=torch.int64, device=device)
        self.page_table = self.wide_table[:, 1::2]
        self.page_table.copy_(self.memory.data_ptr() + order * width)
        self.wide_lens = torch.full((3 * batch,), 77, dtype=torch.int32, device=device)
        self.seq_lens = self.wide_lens[::3].zero_()
        self.starts = torch.full((2 * batch,), 77, dtype=torch.int32, device=device)[::2].zero_()
        self.wide_tail = torch.full((batch, 3, heads, self.layout.tail_rows, head_dim), math.nan, device=device)
        self.tail = self.wide_tail[:, :2]

    def page(self, row, page):
        number = (int(self.page_table[row, page]) - self.memory.data_ptr()) // self.memory.shape[1]
        groups = self.memory[number, : self.layout.page_bytes]
        return groups.view(self.layout.num_kv_heads, -1, self.layout.group_bytes).cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("operators", [TRITON, REFERENCE], ids=["triton", "reference"])
def test_every_slot_round_trips(device, kv_format, operators):
    append, attend_pages, attend_chunk = operators
    cache = GappedCache(2, 2, 32, kv_format, device)
    layout, groups = cache.layout, 2
    for row, length in enumerate(LENGTHS):
        rows = cases.normal(2, 1, layout.num_kv_heads, length, layout.head_dim, seed=row)
        cache.history[row] = rows[:, 0]
        state = [x[row : row + 1] for x in cache.state]
        for part in (rows[..., : length - 1, :], rows[..., length - 1 :, :]):  # the last token alone: a decode step
            append(*part.to(device), *state, layout)
    assert cache.seq_lens.tolist() == list(LENGTHS)
    for row, length in enumerate(LENGTHS):
        whole = length - length % 64
        stored = torch.cat([cache.stored(row, page) for page in range(2)], 2)[:, :, :whole]
        expected = cache.coded(row)[:, :, :whole]
        np.testing.assert_allclose(stored.double(), expected, rtol=1e-6, atol=1e-6)

    state = cache.page_table, cache.seq_lens, cache.starts, cache.tail
    rules = None, None, None, 0.25, None
    shape = 2, groups * layout.num_kv_heads, 5, layout.head_dim
    q, k, v = cases.normal(*shape), *cases.normal(2, 2, layout.num_kv_heads, 5, layout.head_dim, seed=9)
    on = [x.to(device) for x in (q, k, v)]
    cache.starts = torch.zeros(2)  # for the dense attention, on the CPU
    got = attend_pages(on[0][:, :, :1], *state, *rules, None, layout)
    exact = [cases.dense_attention(cache, q[:, :, :1], scale=0.25, dtype=d) for d in (torch.float64, torch.float32)]
    close_enough(got, *exact)
    got = attend_chunk(*on, *state, *rules, True, None, layout)
    exact = [cases.dense_attention(cache, q, k, v, scale=0.25, dtype=d) for d in (torch.float64, torch.float32)]
    close_enough(got, *exact)

    assert (cache.memory[:, layout.page_bytes :] == 0xFF).all()
    assert (cache.wide_table[:, ::2] == 0).all() and cache.wide_tail[:, 2].isnan().all()
    assert (cache.wide_lens.view(-1, 3)[:, 1:] == 77).all()


def test_a_tail_with_gaps_inside_is_refused():
    cache = cases.PagedCache(1, 2, 16)
    cache.tail = cache.tail.transpose(3, 4).contiguous().transpose(3, 4)
    with pytest.raises(ShapeMismatch, match="contiguous"):
        cache.append(*cases.normal(2, 1, 2, 3, 16))
