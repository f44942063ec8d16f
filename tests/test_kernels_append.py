"""What append_kv leaves in pages and tails, byte for byte, and the views over pages."""

import numpy as np
import paged_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemkv_compile.errors import InvalidOption, ShapeMismatch, UnsupportedDtype, UnsupportedHeadDim
from gemkv_compile.kernels.layout import KV_FORMATS, PageLayout
from gemkv_compile.kernels.memory import gather_pages, group_views, pack_groups, read_groups, read_page, write_groups
from gemkv_compile.kernels.validate import check_state

one_thread = cases.one_thread

CPU = torch.device("cpu")
FORMATS = [
    ("int8", torch.float32),
    ("int8", torch.bfloat16),
    ("int8", torch.float16),
    ("k8v4", torch.bfloat16),
    ("k6v4", torch.float32),
    ("int4", torch.float32),
    ("int4", torch.float16),
    ("model", torch.float32),
    ("model", torch.bfloat16),
    ("model", torch.float16),
]
formats = pytest.mark.parametrize("kv_format, dtype", FORMATS)


def tokens(cache, q_len, seed=0):
    """Keys and values for every sequence of a cache."""
    layout = cache.layout
    shape = (len(cache.history), layout.num_kv_heads, q_len, layout.head_dim)
    return tuple(cases.normal(*shape, dtype=layout.model_dtype, seed=(seed, i)) for i in range(2))


def raw_group(cache, row, token):
    """The bytes of the groups of all heads that hold a token, found with arithmetic on the layout's offsets."""
    layout = cache.layout
    page, group = cache.page(row, token // layout.page_size).flatten(), token % layout.page_size // layout.group_size
    starts = [layout.group_offset(head, group) for head in range(layout.num_kv_heads)]
    return [page[start : start + layout.group_bytes].numpy() for start in starts]


def same_caches(a, b):
    """Whether two caches hold the same bytes, page tables aside."""
    rows, columns = a.page_table.shape
    pages = all(torch.equal(a.page(r, c), b.page(r, c)) for r in range(rows) for c in range(columns))
    tails = torch.equal(a.tail.view(torch.uint8), b.tail.view(torch.uint8))
    return pages and tails and torch.equal(a.seq_lens, b.seq_lens)


def as_bytes(codes, bits):
    """Codes [tokens, head_dim] as they are stored, uint8 [tokens, head_dim * bits / 8]."""
    if bits == 8:
        return codes.view(np.uint8)
    if bits == 6:
        numbers = codes.astype(np.int32) % 64
        rests = sum(part % 4 * 4**i for i, part in enumerate(np.split(numbers, 4, axis=1)))
        return np.concatenate((as_bytes(numbers // 4, 4), rests.astype(np.uint8)), axis=1)
    low, high = np.split(codes.astype(np.int32) % 16, 2, axis=1)
    return (low + 16 * high).astype(np.uint8)


@pytest.mark.parametrize("kv_format", list(cases.BITS))
@pytest.mark.parametrize(
    "page_size, group_size, heads, head_dim", [(64, 64, 1, 16), (128, 32, 2, 48), (192, 64, 3, 32)]
)
def test_bytes_of_codes(page_size, group_size, heads, head_dim, kv_format):
    cache = cases.PagedCache(2, heads, head_dim, page_size, group_size, kv_format)
    k, v = tokens(cache, page_size + group_size)
    cache.append(k, v)
    k_bits, v_bits = cases.BITS[kv_format]
    k_end = group_size * head_dim * k_bits // 8
    v_end = k_end + group_size * head_dim * v_bits // 8
    for token in range(0, page_size + group_size, group_size):
        for head, data in enumerate(raw_group(cache, 1, token)):
            keys, values = (x[1, head, token : token + group_size].numpy() for x in (k, v))
            k_codes, *k_scales = cases.numpy_quantise(keys, k_bits)
            v_codes, *v_scales = cases.numpy_quantise(values) if v_bits == 8 else cases.numpy_quantise_values(values)
            np.testing.assert_array_equal(data[:k_end].reshape(group_size, -1), as_bytes(k_codes, k_bits))
            np.testing.assert_array_equal(data[k_end:v_end].reshape(-1, group_size), as_bytes(v_codes, v_bits).T)
            scales = np.concatenate([part.flatten() for part in (*k_scales, *v_scales)])
            np.testing.assert_array_equal(data[v_end:].view(np.float16), scales)
            assert k_end % 16 == v_end % 16 == cache.layout.group_bytes % 16 == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_model_bytes(dtype):
    cache = cases.PagedCache(1, 2, 32, 128, 64, "model", dtype)
    k, v = tokens(cache, 128)
    cache.append(k, v)
    for token in (0, 64):
        for head, data in enumerate(raw_group(cache, 0, token)):
            keys, values = torch.from_numpy(data).view(dtype).view(2, -1)
            assert torch.equal(keys.view(64, 32), k[0, head, token : token + 64])
            assert torch.equal(values.view(32, 64).T, v[0, head, token : token + 64])


@formats
def test_one_by_one_equals_one_shot(kv_format, dtype):
    one_shot, one_by_one = (cases.PagedCache(2, 2, 16, 32, 16, kv_format, dtype, shuffle=i) for i in range(2))
    k, v = tokens(one_shot, 83)
    one_shot.append(k, v)
    for t in range(83):
        one_by_one.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
    assert one_shot.seq_lens.tolist() == [83, 83]
    at, both = one_shot.layout.tail_row(83), torch.stack((k, v), 1)
    assert torch.equal(one_shot.tail[:, :, :, at : at + 3], both[:, :, :, 80:])
    assert torch.equal(one_shot.tail[:, :, :, :at], both[:, :, :, :at])
    # Rows behind the newest token may hold anything.
    one_shot.tail[:, :, :, at + 3 :], one_by_one.tail[:, :, :, at + 3 :] = 0, 0
    assert same_caches(one_shot, one_by_one)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.sampled_from(FORMATS))
def test_any_split_equals_one_shot(splits, kv_format_dtype):
    one_shot, split = (cases.PagedCache(1, 1, 16, 32, 8, *kv_format_dtype, max_pages=8, shuffle=i) for i in range(2))
    k, v = tokens(one_shot, sum(splits))
    one_shot.append(k, v)
    for new_k, new_v in zip(k.split(splits, 2), v.split(splits, 2), strict=True):
        split.append(new_k, new_v)
    rest = one_shot.layout.tail_row(sum(splits)) + sum(splits) % 8
    one_shot.tail[:, :, :, rest:], split.tail[:, :, :, rest:] = 0, 0
    assert same_caches(one_shot, split)


@pytest.mark.parametrize("lengths", [(0, 63, 64, 65, 130), (1, 1, 1, 1, 1), (64, 0, 0, 64, 5)])
@pytest.mark.parametrize("q_len", [1, 63, 64, 65, 200])
def test_sequences_of_different_lengths(lengths, q_len):
    together, alone = (cases.PagedCache(5, 2, 16, 64, 64, max_pages=8).fill(lengths) for _ in range(2))
    k, v = tokens(together, q_len)
    together.append(k, v)
    for row in range(5):
        alone.append(k[row : row + 1], v[row : row + 1], slice(row, row + 1))
    assert together.seq_lens.tolist() == [length + q_len for length in lengths]
    assert same_caches(together, alone)


@formats
def test_strides_do_not_matter(kv_format, dtype):
    plain, strided = (cases.PagedCache(2, 2, 16, 64, 32, kv_format, dtype) for _ in range(2))
    k, v = tokens(plain, 70)
    plain.append(k, v)
    strided.append(cases.strided(k), cases.strided(v))
    assert same_caches(plain, strided)


def test_nothing_else_is_written():
    cache = cases.PagedCache(1, 1, 16, 128, 32, max_pages=3).fill([40])
    before = cache.memory.clone(), cache.tail.clone()
    cache.append(*tokens(cache, 10))
    assert torch.equal(cache.memory, before[0])
    assert torch.equal(cache.tail[:, :, :, :8].view(torch.int32), before[1][:, :, :, :8].view(torch.int32))
    assert cache.tail[:, :, :, 18:].isnan().all()
    cache.append(*tokens(cache, 20))
    changed = (cache.memory != before[0]).view(-1, 4, cache.layout.group_bytes).any(-1)
    assert changed.sum() == 1
    assert (cache.page(0, 0)[:, 2:] == 0xFF).all()
    assert cache.tail[:, :, :, 18:].isnan().all()


def test_no_tokens_change_nothing():
    cache = cases.PagedCache(2, 1, 16).fill([70, 3])
    before = cache.memory.clone(), cache.tail.clone()
    cache.append(*tokens(cache, 0))
    assert cache.seq_lens.tolist() == [70, 3]
    assert torch.equal(cache.memory, before[0])
    assert torch.equal(cache.tail.view(torch.int32), before[1].view(torch.int32))


@pytest.mark.parametrize("q_len", [256, 300])
def test_groups_without_a_page_are_dropped(q_len):
    whole, partly = (cases.PagedCache(1, 1, 16, 64, 32, max_pages=5, holes=h) for h in ((), [(0, 0), (0, 2)]))
    k, v = tokens(whole, q_len)
    whole.append(k, v)
    partly.append(k, v)
    assert all(torch.equal(whole.page(0, p), partly.page(0, p)) for p in (1, 3, 4))
    untouched = (partly.memory == 0xFF).all(1)
    assert untouched.sum() == 2 + (whole.memory == 0xFF).all(1).sum()


def test_a_table_without_pages_keeps_the_tail():
    cache = cases.PagedCache(2, 1, 16, max_pages=0)
    k, v = tokens(cache, 70)
    cache.append(k, v)
    assert cache.seq_lens.tolist() == [70, 70]
    assert torch.equal(cache.tail[:, 0, :, :6], k[:, :, 64:])


@pytest.mark.parametrize("split", [(330,), (1,) * 330, (100, 230), (320, 10), (31, 299)])
def test_ring_keeps_the_newest_pages(split):
    ring = cases.PagedCache(1, 2, 16, 64, 32, max_pages=2)
    k, v = tokens(ring, 330)
    for new_k, new_v in zip(k.split(split, 2), v.split(split, 2), strict=True):
        ring.append(new_k, new_v)
    # 320 tokens in groups: page 4 (tokens 256 .. 319) is full, and page 3 is the other one that the ring holds.
    for page in (3, 4):
        keys, values = read_page(int(ring.page_table[0, page % 2]), ring.layout, CPU)
        groups = torch.stack((k, v), 1)[0, :, :, page * 64 : page * 64 + 64].unflatten(2, (2, 32))
        expected = torch.from_numpy(cases.numpy_dequantise(groups.numpy())).flatten(2, 3)
        torch.testing.assert_close(torch.stack((keys, values)), expected.float(), rtol=1e-6, atol=1e-6)


def test_a_column_taken_by_a_later_page_is_not_written_by_an_older_one():
    ring = cases.PagedCache(1, 1, 16, 64, 32, max_pages=2)
    ring.append(*tokens(ring, 5 * 32 + 1))
    # Page 2 (tokens 128 ..) has taken column 0 and holds one group; page 0's second group must not stand behind it.
    assert (ring.page(0, 0)[:, 1] == 0xFF).all()
    assert (ring.page(0, 0)[:, 0] != 0xFF).any()


def test_numbers_next_to_the_end_of_float16_stay_finite():
    """Half a scale more than the largest float16 is no float16; infinities and NaNs stay what they are."""
    cache = cases.PagedCache(1, 1, 16, 64, 64, "int8", torch.float16)
    k = torch.full((1, 1, 64, 16), 65504.0, dtype=torch.float16)
    k[:, :, 0], k[..., 3, 1], k[..., 3, 2] = -65504.0, float("inf"), float("nan")
    cache.append(k, k)
    for rows in read_page(int(cache.page_table[0, 0]), cache.layout, CPU, torch.float16):
        assert not rows[..., 1:3].isfinite().any()
        assert rows[..., 3:].isfinite().all() and rows[..., 0].isfinite().all()
        torch.testing.assert_close(rows[..., 3:].float(), k[0, ..., 3:].float(), rtol=0, atol=260)


@formats
def test_pages_read_back(kv_format, dtype):
    cache = cases.PagedCache(1, 2, 32, 128, 32, kv_format, dtype).fill([256])
    dense = cache.coded(0)
    for page in (0, 1):
        keys, values = read_page(int(cache.page_table[0, page]), cache.layout, CPU)
        expected = dense[:, :, page * 128 : page * 128 + 128].float()
        torch.testing.assert_close(torch.stack((keys, values)), expected, rtol=1e-6, atol=1e-6)
        assert read_page(int(cache.page_table[0, page]), cache.layout, CPU, dtype)[0].dtype == dtype


def test_groups_are_packed_written_and_gathered():
    cache = cases.PagedCache(2, 2, 16, 96, 32, max_pages=2)
    k, v = (cases.normal(2, 3, 32, 16, seed=i) for i in range(2))
    write_groups(int(cache.page_table[0, 1]), 1, pack_groups(k, v, cache.layout)[:, :2], cache.layout)
    data = gather_pages([[int(cache.page_table[0, 1]), 0], [0, 0]], cache.layout, CPU)
    assert data.shape == (2, 2, 6, cache.layout.group_bytes)
    assert (data[0, :, 0] == 0xFF).all()
    assert (data[0, :, 3:] == 0).all() and (data[1] == 0).all()
    keys, values = read_groups(data[0, :, 1:3], cache.layout)
    for got, x in ((keys, k), (values, v)):
        expected = torch.from_numpy(cases.numpy_dequantise(x[:, :2].numpy())).flatten(1, 2)
        torch.testing.assert_close(got, expected.float(), rtol=1e-6, atol=1e-6)


def test_views_share_the_page_memory():
    cache = cases.PagedCache(1, 1, 16, 64, 32)
    views = group_views(int(cache.page_table[0, 0]), cache.layout, CPU)
    assert views.k.shape == (1, 2, 32, 16) and views.v.shape == (1, 2, 16, 32) and views.scales.shape == (1, 2, 3, 16)
    views.k.fill_(1), views.v.fill_(2), views.scales.fill_(1), views.v_last.fill_(1)
    assert (cache.page(0, 0) != 0xFF).all()
    assert (cache.memory == 0xFF).all(1).sum() == len(cache.memory) - 1


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (lambda c, k: {"v": k[:, :, :1]}, ShapeMismatch, r"values must be torch.float32 \[2, 1, 3, 16\] on cpu, got"),
        (lambda c, k: {"k": k[:1], "v": k[:1]}, ShapeMismatch, r"keys must be torch.float32 \[2, 1, any, 16\] on cpu"),
        (lambda c, k: {"k": k.half()}, ShapeMismatch, "keys must be torch.float32 .*, got torch.float16"),
        (lambda c, k: {"k": k.double()}, UnsupportedDtype, "K/V must be float16, .* got torch.float64"),
        (lambda c, k: {"k": k[0]}, ShapeMismatch, "keys must be"),
        (lambda c, k: {"tail": c.tail[:, 0]}, ShapeMismatch, "tail must be"),
        (lambda c, k: {"tail": c.tail.double()}, UnsupportedDtype, "got torch.float64"),
        (lambda c, k: {"tail": c.tail[..., :8]}, UnsupportedHeadDim, "head_dim must be a multiple of 16"),
        (lambda c, k: {"page_table": c.page_table.int()}, ShapeMismatch, r"page_table must be torch.int64 \[2, any\]"),
        (lambda c, k: {"page_table": c.page_table[:1]}, ShapeMismatch, "page_table must be"),
        (lambda c, k: {"seq_lens": c.seq_lens.long()}, ShapeMismatch, r"seq_lens must be torch.int32 \[2\] on cpu"),
        (lambda c, k: {"seq_lens": c.seq_lens[:1]}, ShapeMismatch, "seq_lens must be"),
        (
            lambda c, k: {"page_size": 100},
            InvalidOption,
            r"page_size must be a positive multiple of group_size \(64\), got 100",
        ),
        (
            lambda c, k: {"kv_format": "int3"},
            InvalidOption,
            "kv_format must be one of int8, k8v4, k6v4, int4, model, got 'int3'",
        ),
    ],
)
def test_errors(changes, error, message):
    cache = cases.PagedCache(2, 1, 16)
    k, v = tokens(cache, 3)
    names = ("k", "v", "page_table", "seq_lens", "tail", "page_size", "kv_format", "version")
    args = dict(zip(names, (k, v, *cache.state, *cache.format_args), strict=True))
    with pytest.raises(error, match=message):
        torch.ops.gemkv.append_kv(**args | changes(cache, k))
    assert cache.seq_lens.tolist() == [0, 0]


@pytest.mark.parametrize("head_dim, expected", [(256, (544, 412, 348, 284, 1024)), (64, (136, 106, 90, 74, 256))])
def test_bytes_of_a_token(head_dim, expected):
    """What the README says of every format, the model's being bfloat16; one K/V head."""
    layouts = [PageLayout(1, head_dim, 256, 64, name, torch.bfloat16) for name in KV_FORMATS]
    assert tuple(layout.group_bytes / 64 for layout in layouts) == expected


@pytest.mark.parametrize("page_size", [0, -64, -128])
def test_a_page_holds_at_least_one_group(page_size):
    with pytest.raises(
        InvalidOption, match=rf"page_size must be a positive multiple of group_size \(64\), got {page_size}"
    ):
        PageLayout(1, 16, page_size, 64, "int8", torch.float32)


def test_gathering_for_an_empty_batch():
    layout = cases.PagedCache(0, 2, 16).layout
    assert gather_pages([], layout, CPU).shape == (0, 2, 0, layout.group_bytes)


def test_error_for_another_device():
    # Asked of the check itself: an operator with a meta tensor among its arguments only computes shapes.
    table, seq_lens, tail = cases.PagedCache(2, 1, 16).state
    with pytest.raises(ShapeMismatch, match=r"page_table must be .* on cpu, got torch.int64 \[2, 4\] on meta"):
        check_state(table.to("meta"), seq_lens, tail, 64, "int8")
