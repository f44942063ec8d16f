"""The Triton attention of a chunk against dense float64 attention: lengths, rules, rings, memory nobody has written."""

import math

import paged_cases as cases
import pytest
import torch
from tiers import tiers
from triton_devices import DEVICES, FORMATS, close_enough, to_device

from gemkv_compile.errors import InvalidOption
from gemkv_compile.kernels.attend_chunk import kernel
from gemkv_compile.kernels.attend_chunk.kernel import attend_chunk_triton
from gemkv_compile.kernels.layout import KV_FORMATS

devices = pytest.mark.parametrize("device", DEVICES)
HALF, FULL = torch.bfloat16, torch.float32


def attend(cache, device, q, k, v, padding=None, mask=None, sinks=None, scale=0.25, softcap=None, causal=True, window=None):  # fmt: skip  # noqa: E501
    on_device = [None if x is None else x.to(device) for x in (padding, mask, sinks)]
    q, k, v = (x.to(device) for x in (q, k, v))
    state = to_device(cache, device)
    return attend_chunk_triton(q, k, v, *state, *on_device, scale, softcap, causal, window, cache.layout)


def check(cache, device, new, **rules):
    """Compare with dense attention; the results."""
    got = attend(cache, device, *new, **rules)
    rules = {"scale": 0.25} | rules
    close_enough(got, *(cases.dense_attention(cache, *new, **rules, dtype=d) for d in (torch.float64, new[0].dtype)))
    assert got[0].transpose(1, 2).is_contiguous() and got[1].is_contiguous()
    assert (got[0].dtype, got[1].dtype) == (new[0].dtype, torch.float32)
    return got


def chunk(cache, groups, q_len, seed=0):
    """q, k and v of a chunk."""
    layout, batch = cache.layout, len(cache.history)
    heads = layout.num_kv_heads * groups, layout.num_kv_heads, layout.num_kv_heads
    shapes = ((batch, h, q_len, layout.head_dim) for h in heads)
    return [cases.normal(*shape, dtype=layout.model_dtype, seed=(seed, i)) for i, shape in enumerate(shapes)]


@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_lengths(device, kv_format, dtype):
    cache = cases.PagedCache(3, 1, 64, 128, 64, kv_format, dtype).fill([0, 63, 201])
    check(cache, device, chunk(cache, 2, 37))


@devices
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("head_dim", tiers([64, 80, 512], [(16,), (96,), (128,), (256,)]))
def test_head_sizes(device, head_dim, kv_format):
    cache = cases.PagedCache(1, 1, head_dim, 64, 64, kv_format, HALF).fill([100])
    check(cache, device, chunk(cache, 1, 67), scale=head_dim**-0.5)


@devices
@pytest.mark.parametrize(
    "groups, q_len, packed, rules",
    [
        (1, 1, 1, {}),
        (3, 5, 3, {"window": 7}),
        (3, 17, 3, {}),
        (16, 5, 16, {"causal": False}),
        (2, 63, 2, {"window": 7}),
        (3, 64, 1, {}),
    ],
)
def test_groups(device, groups, q_len, packed, rules):
    """Heads that share keys share tiles of scores where there are few queries; tiles end anywhere in a group."""
    cache = cases.PagedCache(1, 2, 16, 64, 64, "int8", HALF).fill([66])
    new = list(map(cases.strided, chunk(cache, groups, q_len)))
    check(cache, device, new, **rules)
    form, sizes = kernel._form(new[0], None, None, None, True, None, cache.layout)
    assert (form.packed, form.block_m) == (packed, sizes.block_m)
    assert sizes.block_m == (16 if q_len * packed <= 16 else 64 if packed > 1 else 128)


@devices
@pytest.mark.parametrize("q_len", [5, 30])
def test_groups_with_every_rule(device, q_len):
    """Sinks differ by head, and rows of a tile by sequence."""
    cache = cases.PagedCache(2, 2, 16, 64, 64, "int8", HALF).fill([130, 0])
    padding = torch.ones(2, 130 + q_len, dtype=torch.bool)
    padding[0, 3:80] = False
    rules = dict(padding=padding, sinks=cases.normal(6), softcap=3.0, window=100)
    check(cache, device, chunk(cache, 3, q_len), **rules)


@devices
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 33, 64, 100])
def test_windows(device, causal, window):
    """float32 has small tiles: many of them are whole, many cut, and some left out."""
    cache = cases.PagedCache(2, 1, 16, 128, 64).fill([150, 31])
    check(cache, device, chunk(cache, 1, 101), causal=causal, window=window)


@devices
@pytest.mark.parametrize("causal, window", [(True, None), (True, 33), (False, 100)])
@pytest.mark.parametrize("new, queries", tiers([(101, 47)], [(70, 1)]))
@pytest.mark.parametrize("masked", [False, True])
def test_queries_of_the_last_tokens_only(device, causal, window, new, queries, masked):
    cache = cases.PagedCache(2, 1, 16, 128, 64).fill([150, 31])
    q, k, v = chunk(cache, 1, new)
    mask = cases.normal(2, 1, queries, 120, seed="mask") if masked else None
    check(cache, device, (q[:, :, -queries:], k, v), causal=causal, window=window, mask=mask)


@devices
@pytest.mark.parametrize("causal, window", [(True, None), (True, 90), (False, 150)])
def test_large_tiles(device, causal, window):
    cache = cases.PagedCache(2, 1, 64, 256, 64, "int8", torch.float16).fill([300, 64])
    check(cache, device, chunk(cache, 1, 200), causal=causal, window=window)


@devices
@pytest.mark.parametrize("group_size, page_size", [(16, 48), (32, 32), (48, 96)])
def test_group_sizes(device, group_size, page_size):
    cache = cases.PagedCache(2, 2, 16, page_size, group_size, "int8", max_pages=6).fill([131, 20])
    check(cache, device, chunk(cache, 1, 20))


@devices
@pytest.mark.parametrize("softcap", [0.5, 50.0])
@pytest.mark.parametrize("dtype", [FULL, HALF], ids=str)
def test_softcap(device, softcap, dtype):
    cache = cases.PagedCache(2, 1, 16, 64, 64, "int8", dtype).fill([150, 0])
    check(cache, device, chunk(cache, 2, 20), softcap=softcap)


@devices
def test_starts(device):
    cache = cases.PagedCache(6, 1, 16, 64, 64).fill([130, 130, 130, 130, 0, 64])
    cache.starts.copy_(torch.tensor([0, 1, 64, 129, 3, 96]))
    check(cache, device, chunk(cache, 1, 35))
    cache.starts.fill_(500)
    out, lse = check(cache, device, chunk(cache, 1, 5))
    assert (out == 0).all() and torch.isneginf(lse).all()


@devices
@pytest.mark.parametrize("side", ["left", "right", "middle", "all"])
def test_padding(device, side):
    cache = cases.PagedCache(3, 1, 16, 64, 64).fill([100, 70, 0])
    place = {"left": slice(0, 66), "right": slice(60, None), "middle": slice(20, 80), "all": slice(0, None)}[side]
    padding = torch.ones(3, 190, dtype=torch.bool)
    padding[:, place] = False
    check(cache, device, chunk(cache, 2, 20), padding=padding)


@devices
@pytest.mark.parametrize("kind", ["bool", "float32", "bfloat16", "lowest"])
@pytest.mark.parametrize("shape, columns", tiers([((1, 2), 85), ((2, 2), 300)], [((1, 1), 1), ((2, 1), 40)]))
def test_masks(device, kind, shape, columns):
    cache = cases.PagedCache(2, 1, 16, 64, 64).fill([70, 0])
    random = cases.generator(kind, shape, columns)
    mask = shown = torch.rand(*shape, 19, columns, generator=random) < 0.5
    if kind == "lowest":  # where nothing else is visible, float32 forgets the scores that it is added to
        own = range(max(0, 19 - columns), 19)
        shown[..., list(own), [columns - 19 + i for i in own]] = True
        mask = torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min)
    elif kind != "bool":
        mask = torch.randn(shown.shape, generator=random).masked_fill(~shown, -math.inf).to(getattr(torch, kind))
    check(cache, device, chunk(cache, 2, 19), mask=mask)


@devices
def test_a_row_of_lowest_numbers_is_attended_to(device):
    cache = cases.PagedCache(1, 1, 16, 64, 64).fill([70])
    q, k, v = chunk(cache, 1, 3)
    mask = torch.full((1, 1, 3, 73), torch.finfo(torch.float32).min)
    out, lse = attend(cache, device, q * 1e-3, k, v, mask=mask)
    everything = torch.cat((cache.dense(0)[1], v[0].double()), 1)
    for row in range(3):
        torch.testing.assert_close(out[0, 0, row].cpu().double(), everything[0, : 71 + row].mean(0), rtol=0, atol=1e-6)
    assert torch.isfinite(lse).all()


@devices
def test_sinks(device):
    cache = cases.PagedCache(2, 1, 16, 64, 64).fill([70, 0])
    sinks = torch.tensor([-2.0, 0.1, 30.0, -math.inf])
    new = chunk(cache, 4, 7)
    check(cache, device, new, sinks=sinks)
    nothing = torch.zeros(2, 80, dtype=torch.bool)
    for mask in (None, torch.zeros(1, 1, 7, 7)):
        out, lse = attend(cache, device, *new, padding=nothing, sinks=sinks, mask=mask)
        assert (out == 0).all()
        assert torch.equal(lse.cpu(), sinks[None, :, None].expand(2, 4, 7))


@devices
@pytest.mark.parametrize("length", [64, 129, 330])
@pytest.mark.parametrize("holes", [(), [(0, 1), (1, 0)]], ids=str)
def test_ring_of_pages(device, length, holes):
    """Older pages have lost their columns, some columns have no page: padding says the same to dense attention."""
    ring = cases.PagedCache(2, 1, 16, 64, 32, max_pages=3, holes=holes).fill([length, length // 2])
    lengths, padding = (length, length // 2), torch.ones(2, length + 40, dtype=torch.bool)
    for row, stored in enumerate(lengths):
        end = stored // 32 * 32
        newest = (end - 1) // 64
        for page in range(newest + 1):
            if page <= newest - 3 or (row, page % 3) in holes:
                padding[row, page * 64 : min(end, page * 64 + 64)] = False
    new = chunk(ring, 1, 37)
    exact, low = (
        cases.dense_attention(ring, *new, scale=0.25, padding=padding, dtype=d) for d in (torch.float64, FULL)
    )
    close_enough(attend(ring, device, *new), exact, low)
    check(ring, device, new, padding=padding, window=100)


@devices
@pytest.mark.parametrize("kv_format", FORMATS)
def test_stored_nans_that_nobody_sees(device, kv_format):
    cache = cases.PagedCache(1, 1, 16, 64, 32, kv_format)
    k, v = (cases.normal(1, 1, 150, 16, seed=i) for i in range(2))
    # Whole groups, so that no visible token shares a scale with a NaN; and rows of the tail, and of the chunk.
    k[:, :, 32:64], v[:, :, 32:64], k[:, :, 130:134], v[:, :, 130:134] = (math.nan,) * 4
    cache.append(k, v)
    q, k, v = chunk(cache, 2, 20)
    k[:, :, 3:5], v[:, :, 3:5] = math.nan, math.nan
    padding = torch.ones(1, 170, dtype=torch.bool)
    padding[:, 32:64] = padding[:, 130:134] = padding[:, 153:155] = False
    results = attend(cache, device, q, k, v, padding=padding)
    mask = padding[:, None, None].expand(1, 1, 20, 170)
    for hidden in (mask, torch.zeros(mask.shape).masked_fill(~mask, -math.inf)):
        results += attend(cache, device, q, k, v, mask=hidden)
    cache.starts.fill_(160)
    results += attend(cache, device, q, k, v)
    assert all(torch.isfinite(x[:, :, 10:]).all() for x in results)
    assert all(torch.isfinite(x).all() for x in results[:-2])


@devices
def test_stored_nans_that_somebody_sees(device):
    cache = cases.PagedCache(1, 1, 16, 64, 32)
    k, v = (cases.normal(1, 1, 80, 16, seed=i) for i in range(2))
    v[0, 0, 40, 3] = math.nan
    cache.append(k, v)
    out, _ = attend(cache, device, *chunk(cache, 2, 5))
    assert torch.isnan(out[..., 3]).all() and torch.isfinite(out[..., :3]).all()


@devices
@pytest.mark.parametrize("kv_format, dtype", [("int8", FULL), ("model", FULL), ("int8", HALF)], ids=str)
def test_every_rule_at_once(device, kv_format, dtype):
    cache = cases.PagedCache(2, 1, 16, 64, 32, kv_format, dtype, shuffle=1).fill([100, 33])
    cache.starts.copy_(torch.tensor([3, 1]))
    random = cases.generator("rules")
    mask = torch.randn(2, 2, 33, 133, generator=random)
    mask[torch.rand(mask.shape, generator=random) < 0.2] = -math.inf
    padding, sinks = torch.rand(2, 136, generator=random) < 0.8, torch.randn(2, generator=random)
    check(cache, device, chunk(cache, 2, 33), mask=mask, padding=padding, sinks=sinks, softcap=2.0, window=70)


@devices
def test_nothing_to_do(device):
    cache = cases.PagedCache(2, 1, 16).fill([3, 70])
    assert attend(cache, device, *chunk(cache, 2, 0))[0].shape == (2, 2, 0, 16)
    check(cases.PagedCache(2, 1, 16, max_pages=0).fill([5, 6]), device, chunk(cache, 2, 3))
    check(cases.PagedCache(2, 1, 16, kv_format="model", max_pages=0), device, chunk(cache, 2, 3))


def test_groups_that_are_no_multiple_of_16():
    cache = cases.PagedCache(1, 1, 16, 8, 8).fill([3])
    with pytest.raises(InvalidOption, match="multiple of 16 on a GPU, got 8"):
        attend(cache, "cpu", *chunk(cache, 1, 3))


@pytest.mark.gpu
def test_a_launch_waits_for_nothing():
    cache = cases.PagedCache(2, 1, 64, 64, 64, "int8", HALF).fill([130, 7])
    state = to_device(cache, "cuda")
    new = [x.cuda() for x in chunk(cache, 2, 40)]
    padding = torch.ones(2, 200, dtype=torch.bool, device="cuda")
    rest = padding, None, None, 0.125, None, True, 64, cache.layout
    attend_chunk_triton(*new, *state, *rest)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend_chunk_triton(*new, *state, *rest)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@devices
def test_codes_of_a_guarded_group_are_not_read(device):
    """The first group comes from the tail, in the model's precision, as far as starts and windows show it."""
    cache = cases.PagedCache(3, 2, 32, 64, 64, "k6v4").fill([200, 64, 40])
    cache.starts.copy_(torch.tensor([10, 0, 3]))
    for row in range(2):
        cache.page(row, 0).fill_(0xFF)
    check(cache, device, chunk(cache, 2, 20))
    check(cache, device, chunk(cache, 2, 20), window=150)
