"""The Triton decode attention against dense float64 attention: lengths, rules, holes, and memory nobody has written."""

import math
import types

import paged_cases as cases
import pytest
import torch
from tiers import tiers
from triton_devices import DEVICES, FORMATS, close_enough, to_device

from gemkv_compile.kernels.attend_pages.kernel import attend_pages_triton
from gemkv_compile.kernels.attend_pages.sizes import MAX_SPLITS, num_splits, programs_at_once
from gemkv_compile.kernels.layout import KV_FORMATS

LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 200)
devices = pytest.mark.parametrize("device", DEVICES)
formats = pytest.mark.parametrize("kv_format", FORMATS)
DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def check(cache, q, device, padding=None, mask=None, sinks=None, scale=0.25, softcap=None, window=None):
    """The kernel on `device` against dense attention; what it returns."""
    rules = {"padding": padding, "mask": mask, "sinks": sinks, "softcap": softcap, "window": window, "scale": scale}
    state, (on_q, *masks) = (
        to_device(cache, device),
        (None if x is None else x.to(device) for x in (q, padding, mask, sinks)),
    )
    out, lse = attend_pages_triton(on_q, *state, *masks, scale, softcap, window, cache.layout)
    close_enough((out, lse), *(cases.dense_attention(cache, q, **rules, dtype=d) for d in (torch.float64, q.dtype)))
    return out, lse


def query(cache, groups, seed=0):
    layout = cache.layout
    shape = len(cache.history), layout.num_kv_heads * groups, 1, layout.head_dim
    return cases.normal(*shape, dtype=layout.model_dtype, seed=seed)


@devices
@pytest.mark.parametrize("kv_format", KV_FORMATS)
@dtypes
@pytest.mark.parametrize("groups", [3, 16])
def test_every_length(device, kv_format, dtype, groups):
    cache = cases.PagedCache(len(LENGTHS), 1, 32, 128, 64, kv_format, dtype).fill(LENGTHS)
    out, lse = check(cache, cases.strided(query(cache, groups)), device)
    assert (out[0] == 0).all() and torch.isneginf(lse[0]).all()


@devices
@formats
@pytest.mark.parametrize("head_dim", tiers([80, 256], [(16,), (128,), (512,)]))
def test_head_sizes(device, kv_format, head_dim):
    cache = cases.PagedCache(2, 1, head_dim, 64, 64, kv_format).fill([100, 64])
    check(cache, query(cache, 2), device, scale=head_dim**-0.5)


RULES = ("padding", "mask", "sinks", "softcap", "window")


@devices
@formats
@pytest.mark.parametrize("kind", tiers(["bool mask", "short mask", "all"], [(kind,) for kind in RULES]))
def test_rules(device, kv_format, kind):
    cache = cases.PagedCache(3, 2, 16, 64, 64, kv_format, max_pages=4).fill([200, 70, 130])
    cache.starts = torch.tensor([0, 3, 66], dtype=torch.int32)
    random = cases.generator(kind)
    mask = torch.randn(3, 4, 1, 200, generator=random)
    mask[torch.rand(mask.shape, generator=random) < 0.2] = -math.inf
    rules = {
        "padding": torch.rand(3, 203, generator=random) < 0.7,
        "mask": mask,
        "sinks": torch.randn(4, generator=random),
        "softcap": 2.0,
        "window": 90,
    }
    some = {"bool mask": {"mask": mask[:, :1] > 0}, "short mask": {"mask": mask[:1, :, :, :75]}, "all": rules}
    check(cache, query(cache, 2), device, **some.get(kind) or {kind: rules[kind]})


@devices
@formats
def test_nothing_to_attend_to(device, kv_format):
    """All hidden: zeros, and -inf or the sink as lse, whatever hidden tokens hold."""
    cache = cases.PagedCache(2, 1, 16, 64, 64, kv_format).fill([130, 64])
    cache.memory[cache.memory != 0] = 0xFF  # every scale and number NaN
    hidden = torch.zeros(2, 130, dtype=torch.bool)
    for sinks in (None, torch.tensor([0.5, -1.0])):
        state = to_device(cache, device)
        q = query(cache, 2).to(device)
        on_device = None if sinks is None else sinks.to(device)
        out, lse = attend_pages_triton(q, *state, hidden.to(device), None, on_device, 1.0, None, None, cache.layout)
        assert (out == 0).all()
        expected = torch.full((2, 2), -math.inf) if sinks is None else sinks.expand(2, 2)
        torch.testing.assert_close(lse[..., 0].cpu(), expected)


@devices
@formats
def test_ring_of_pages(device, kv_format):
    """A table with fewer columns than pages keeps the newest; a hole hides its tokens."""
    cache = cases.PagedCache(2, 1, 16, 64, 64, kv_format, max_pages=3, holes=[(1, 1)]).fill([450, 200])
    token = torch.arange(450)
    kept = torch.stack((token >= 4 * 64, (token < 64) | (token >= 128)))  # pages 4 to 6 of 7; all but page 1
    kept[0] |= (token < 64) & cache.layout.is_guarded  # not read from its page
    q = query(cache, 2)
    state = to_device(cache, device)
    out, lse = attend_pages_triton(q.to(device), *state, None, None, None, 0.25, None, None, cache.layout)
    exact, low = (cases.dense_attention(cache, q, padding=kept, scale=0.25, dtype=d) for d in (torch.float64, q.dtype))
    close_enough((out, lse), exact, low)


@devices
def test_many_splits(device):
    """More programs than groups, and groups that do not divide evenly among them."""
    cache = cases.PagedCache(1, 1, 16, 64, 64, max_pages=16).fill([777])
    check(cache, query(cache, 1), device, window=500)


@pytest.mark.parametrize("at_once", [264, 528, 792, 1056])
@pytest.mark.parametrize("rows", [1, 3, 8, 64, 100, 512, 800, 10_000])
def test_programs_fill_their_waves(rows, at_once):
    """No half-empty last wave, unless few rows or groups allow no more programs."""
    splits = num_splits(rows, 1000, at_once)
    assert 1 <= splits <= MAX_SPLITS and rows * splits <= max(rows, 8 * at_once + rows)
    waves = -(-rows * splits // at_once)
    assert rows * splits / (waves * at_once) > 0.85 or rows * MAX_SPLITS < at_once


def test_split_count_is_bounded():
    assert num_splits(1, 1000, 792) == MAX_SPLITS
    assert num_splits(64, 5, 792) == 5
    assert num_splits(10_000, 1000, 792) == 1
    assert num_splits(1, 0, 792) == 1


def test_programs_at_once(monkeypatch):
    """Registers, shared memory or threads are what is short; an H200's numbers."""
    has = {"regs_per_multiprocessor": 65536, "shared_memory_per_multiprocessor": 228 << 10}
    has |= {"max_threads_per_multi_processor": 2048, "multi_processor_count": 132}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(**has))
    programs_at_once.cache_clear()
    device = torch.device("cuda", 7)
    assert programs_at_once(164, 20480, 2, device) == 6 * 132
    assert programs_at_once(144, 20480, 2, device) == 6 * 132  # seven would fit but for the parts
    assert programs_at_once(255, 74752, 2, device) == 3 * 132
    assert programs_at_once(16, 1024, 4, device) == 16 * 132
    assert programs_at_once(255, 228 << 10, 8, device) == 132
    programs_at_once.cache_clear()


@devices
def test_codes_of_a_guarded_group_are_not_read(device):
    """The first group comes from the tail, in the model's precision, as far as starts and windows show it."""
    cache = cases.PagedCache(3, 2, 32, 64, 64, "k6v4").fill([200, 64, 40])
    cache.starts.copy_(torch.tensor([10, 0, 3]))
    for row in range(2):
        cache.page(row, 0).fill_(0xFF)
    check(cache, query(cache, 2), device)
    check(cache, query(cache, 2), device, window=150)
    check(cache, query(cache, 2), device, window=100)
