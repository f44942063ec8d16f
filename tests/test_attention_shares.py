"""Attention shares, kernel and reference, against weights that dense float64 attention has."""

import math

import paged_cases as cases
import pytest
import torch
from tiers import tiers
from triton_devices import DEVICES, to_device

from gemkv_compile.errors import InvalidOption, ShapeMismatch
from gemkv_compile.kernels.attention_shares import kernel
from gemkv_compile.kernels.attention_shares.kernel import attention_shares_triton
from gemkv_compile.kernels.attention_shares.reference import attention_shares_reference
from gemkv_compile.kernels.layout import KV_FORMATS

devices = pytest.mark.parametrize("device", DEVICES)
HALF, FULL, BFLOAT = torch.float16, torch.float32, torch.bfloat16


def dense_shares(cache, q, positions, tokens, padding=None, holes=(), scale=1.0, softcap=None, window=None):
    """Mean weights [B, Hq, tokens of complete pages] in float64, one query after the other."""
    layout, complete = cache.layout, tokens // cache.layout.page_size * cache.layout.page_size
    out = torch.zeros(*q.shape[:2], complete, dtype=torch.float64)
    for row in range(q.shape[0]):
        keys = cache.dense(row)[0].repeat_interleave(q.shape[1] // layout.num_kv_heads, 0)
        token, counted = torch.arange(tokens), 0
        there = token >= cache.starts[row]
        for hole_row, page in holes:
            in_page = (token // layout.page_size == page) & (token < tokens - tokens % layout.group_size)
            there &= ~in_page | (hole_row != row)
        if padding is not None:
            there &= padding[row, :tokens]
        for i, position in enumerate(positions.tolist()):
            if padding is not None and not padding[row, position]:
                continue
            counted += 1
            seen = there & (token <= position) & (token > position - (window or tokens))
            scores = (keys[:, seen] @ q[row, :, i].double()[..., None])[..., 0] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = torch.zeros(q.shape[1], tokens, dtype=torch.float64)
            weights[:, seen] = scores.softmax(-1)
            out[row] += weights[:, :complete]
        out[row] /= max(1, counted)
    return out


def check(cache, q, positions, tokens, device, padding=None, holes=(), **rules):
    """Both implementations against dense weights; the kernel's result, which is the same twice, bit by bit."""
    expected = dense_shares(cache, q, positions, tokens, padding, holes, **rules)
    numbers = rules["scale"], rules.get("softcap"), rules.get("window"), tokens, cache.layout
    state = cache.page_table, cache.starts, cache.tail
    plain = attention_shares_reference(q, positions, *state, padding, *numbers)
    torch.testing.assert_close(plain.double(), expected, rtol=1e-4, atol=1e-8)
    table, _, starts, tail = to_device(cache, device)
    on = [None if x is None else x.to(device) for x in (q, positions, table, starts, tail, padding)]
    got = attention_shares_triton(*on, *numbers)
    assert got.shape == expected.shape and got.dtype == torch.float32
    # Keys that pages hold as codes are rounded to the model's dtype, as in a chunk's attention.
    coded = cache.layout.is_quantised and q.dtype != FULL
    torch.testing.assert_close(
        got.double().cpu(), expected, rtol={HALF: 2e-2, BFLOAT: 0.15}[q.dtype] if coded else 2e-4, atol=1e-7
    )
    if device == "cuda":
        assert torch.equal(got, attention_shares_triton(*on, *numbers))
    return got


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that nobody has written holds NaN."""
    empty = torch.empty

    def filled(*args, **options):
        made = empty(*args, **options)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", filled)


# Format, head size, K/V heads, query heads of each, queries, dtype, page size, rules.
SOME = [
    ("int8", 64, 1, 2, 5, FULL, 128, {"window": 150, "softcap": 4.0}),
    ("k8v4", 128, 1, 4, 10, HALF, 64, {"padding": 0.7}),
    ("k6v4", 64, 2, 1, 3, HALF, 128, {"holes": [(0, 1), (1, 0)], "padding": 0.9}),
    ("int4", 256, 1, 8, 9, HALF, 64, {"holes": [(0, 1), (1, 0), (1, 2)]}),
    ("model", 128, 1, 2, 33, HALF, 64, {"holes": [(0, 0), (0, 2)], "starts": [0, 221]}),
]
MORE = [
    ("k6v4", 80, 1, 3, 16, FULL, 64, {"padding": 0.5}),
    ("int8", 32, 1, 1, 70, HALF, 64, {"window": 40}),
    ("int4", 64, 1, 2, 6, FULL, 128, {"starts": [100, 50], "softcap": 2.0}),
    ("model", 16, 2, 2, 4, FULL, 64, {"padding": 0.0}),
]


@devices
@pytest.mark.parametrize("kv_format, head_dim, heads, groups, count, dtype, page_size, rules", tiers(SOME, MORE))
def test_shares(device, kv_format, head_dim, heads, groups, count, dtype, page_size, rules):
    """Tokens in pages, in the tail and in the first group; queries that see nothing, or are padding."""
    tokens, rules = 230, dict(rules)
    holes, seed = rules.pop("holes", []), (kv_format, head_dim)
    cache = cases.PagedCache(2, heads, head_dim, page_size, 64, kv_format, dtype, 4, holes=holes)
    cache.fill([tokens, tokens], seed=seed)
    cache.starts.copy_(torch.tensor(rules.pop("starts", [0, 0])))
    q = cases.strided(cases.normal(2, heads * groups, count, head_dim, dtype=dtype, seed=seed))
    positions = torch.arange(tokens - count, tokens)
    positions[: count // 2] -= 7  # as where steps in between were not observed
    share = rules.pop("padding", None)
    padding = None if share is None else torch.rand(2, tokens + 3, generator=cases.generator(seed)) < share
    got = check(cache, q, positions, tokens, device, padding, holes, scale=head_dim**-0.5, **rules)
    assert share == 0.0 or got.max() > 1e-3


@devices
def test_many_shares_of_few_keys(device, monkeypatch):
    """More programs than tiles: some have none, or none that the window shows. A ring has lost the first pages."""
    monkeypatch.setattr(kernel, "device_limits", lambda device: (8, 100 << 10))
    cache = cases.PagedCache(1, 1, 16, 32, 16, "int8", FULL, 4).fill([180])  # pages 2 to 5, of 6
    positions = torch.arange(176, 180)
    q, gone = cases.normal(1, 1, 4, 16), [(0, 0), (0, 1)]
    for window in (None, 70):
        got = check(cache, q, positions, 180, device, holes=gone, scale=0.3, window=window)
        assert (got[..., :64] == 0).all() and (got[..., 115:160] > 0).all()


@devices
def test_scores_that_are_not_finite(device):
    """A query with such a score has weights of 0 everywhere, and the others are what they are."""
    cache = cases.PagedCache(1, 1, 16, 64, 64, "model", FULL, 2).fill([100])
    cache.page(0, 0).view(FULL)[0, 0, 16 * 20 + 3] = math.inf  # channel 3 of token 20
    q = cases.normal(1, 1, 3, 16)
    q[0, 0, :, 3] = torch.tensor([1.0, 0.0, -1.0])  # scores of inf, NaN and -inf
    table, _, starts, tail = to_device(cache, device)
    args = torch.arange(97, 100), cache.page_table, cache.starts, cache.tail, None, 0.25, None, None, 100, cache.layout
    expected = attention_shares_reference(q, *args)
    args = args[0].to(device), table, starts, tail, *args[4:]
    got = attention_shares_triton(q.to(device), *args).cpu()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-8)
    assert 0 < got.sum() < 0.34 and got[..., 20] == 0


@devices
def test_no_complete_page_no_shares(device):
    cache = cases.PagedCache(2, 1, 16, 128, 64, "k6v4", FULL, 2).fill([100, 100])
    table, _, starts, tail = to_device(cache, device)
    rules = None, 1.0, None, None, 100, cache.layout
    got = attention_shares_triton(
        cases.normal(2, 3, 4, 16).to(device), torch.arange(96, 100).to(device), table, starts, tail, *rules
    )
    assert got.shape == (2, 3, 0)


def test_mistakes():
    cache = cases.PagedCache(1, 1, 16, 64, 64, "model", FULL, 2).fill([100])
    state, few = (cache.page_table, cache.starts, cache.tail), torch.ones(1, 99, dtype=torch.bool)
    args = cases.normal(1, 1, 2, 16), torch.arange(98, 100), *state
    with pytest.raises(ShapeMismatch, match="padding must have a column for each of the 100 tokens"):
        attention_shares_reference(*args, few, 1.0, None, None, 100, cache.layout)
    odd = cases.PagedCache(1, 1, 16, 24, 24, "model", FULL, 5).fill([100])
    with pytest.raises(InvalidOption, match="group_size must be a multiple of 16 on a GPU, got 24"):
        attention_shares_triton(*args, None, 1.0, None, None, 100, odd.layout)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("head_dim, groups", [(64, 8), (128, 4), (256, 2), (512, 1)])
def test_long_sequences(kv_format, head_dim, groups):
    """Many programs, in the model's usual dtype; nothing waits for the device."""
    tokens, count, holes = 3000, 32, [(0, 3), (1, 0), (1, 46)]
    cache = cases.PagedCache(2, 2, head_dim, 64, 64, kv_format, BFLOAT, 64, holes=holes).fill([tokens, tokens])
    q = cases.normal(2, 2 * groups, count, head_dim, dtype=BFLOAT)
    padding = torch.rand(2, tokens, generator=cases.generator(head_dim)) < 0.95
    positions, rules = torch.arange(tokens - count, tokens), {"scale": head_dim**-0.5, "softcap": 50.0}
    check(cache, q, positions, tokens, "cuda", padding, holes, **rules)
    table, _, starts, tail = to_device(cache, "cuda")
    on = [x.cuda() for x in (q, positions, table, starts, tail, padding)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention_shares_triton(*on, rules["scale"], rules["softcap"], None, tokens, cache.layout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
