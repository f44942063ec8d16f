"""attend_pages and attend_chunk against dense float64 attention, and the gradients of attend_chunk against autograd."""

import math

import paged_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gemkv_compile.errors import InvalidOption, ShapeMismatch, UnsupportedDtype, UnsupportedGroups
from gemkv_compile.kernels import ops, past
from gemkv_compile.kernels.attend_chunk.reference import attend_chunk_reference
from gemkv_compile.kernels.attend_chunk.tiles import TILE
from gemkv_compile.kernels.attend_pages.reference import STEP_TOKENS, attend_pages_reference
from gemkv_compile.kernels.layout import KV_FORMATS

one_thread = cases.one_thread

LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 200)
FORMATS = [
    ("int8", torch.float32),
    ("k8v4", torch.float32),
    ("int4", torch.float32),
    ("model", torch.float32),
    ("int8", torch.bfloat16),
    ("int4", torch.bfloat16),
    ("model", torch.float16),
]
formats = pytest.mark.parametrize("kv_format, dtype", FORMATS)


def heads_are_adjacent(result):
    """Whether out [B, Hq, Q, D] or lse [B, Hq, Q] is laid out as the operators promise."""
    return (result.transpose(1, 2) if result.dim() == 4 else result).is_contiguous()


def attend_pages(cache, q, padding=None, mask=None, sinks=None, scale=0.25, softcap=None, window=None):
    return ops.attend_pages(
        q, cache.page_table, cache.seq_lens, cache.starts, cache.tail, padding, mask, sinks, scale, softcap, window,
        *cache.format_args,
    )  # fmt: skip


def attend_chunk(
    cache, q, k, v, padding=None, mask=None, sinks=None, scale=0.25, softcap=None, causal=True, window=None
):
    return ops.attend_chunk(
        q, k, v, cache.page_table, cache.seq_lens, cache.starts, cache.tail, padding, mask, sinks, scale, softcap,
        causal, window, *cache.format_args,
    )  # fmt: skip


def check_pages(cache, q, **rules):
    """Compare attend_pages with dense attention; the results."""
    got = attend_pages(cache, q, **rules)
    reference, low = (
        cases.dense_attention(cache, q, **{"scale": 0.25} | rules, dtype=dtype)
        for dtype in (torch.float64, torch.float32)
    )
    for ours, exact, single in zip(got, reference, low, strict=True):
        assert heads_are_adjacent(ours)
        cases.assert_accurate(ours, exact, single)
    assert (got[0].dtype, got[1].dtype) == (q.dtype, torch.float32)
    return got


def check_chunk(cache, q, k, v, **rules):
    """Compare attend_chunk with dense attention; the results."""
    got = attend_chunk(cache, q, k, v, **rules)
    reference, low = (
        cases.dense_attention(cache, q, k, v, **{"scale": 0.25} | rules, dtype=dtype)
        for dtype in (torch.float64, torch.float32)
    )
    for ours, exact, single in zip(got, reference, low, strict=True):
        assert heads_are_adjacent(ours)
        cases.assert_accurate(ours, exact, single)
    assert (got[0].dtype, got[1].dtype) == (q.dtype, torch.float32)
    return got


def chunk(cache, groups, q_len, seed=0):
    """q, k and v of a chunk."""
    layout, batch = cache.layout, len(cache.history)
    heads = (layout.num_kv_heads * groups, layout.num_kv_heads, layout.num_kv_heads)
    return [
        cases.normal(batch, h, q_len, layout.head_dim, dtype=layout.model_dtype, seed=(seed, i))
        for i, h in enumerate(heads)
    ]


def every_rule(cache, num_q_heads, q_len, new):
    """Padding, a mask, sinks, a softcap and a window, all at once."""
    batch, total = len(cache.history), max(1, *(len(h[0, 0]) for h in cache.history)) + new
    random = cases.generator("rules", batch, num_q_heads, q_len, total)
    mask = torch.randn(batch, num_q_heads, q_len, total, generator=random)
    mask[torch.rand(mask.shape, generator=random) < 0.2] = -math.inf
    return {
        "padding": torch.rand(batch, total + 3, generator=random) < 0.8,
        "mask": mask,
        "sinks": torch.randn(num_q_heads, generator=random),
        "softcap": 2.0,
        "window": 90,
    }


@formats
@pytest.mark.parametrize("groups", [1, 2, 4, 8, 16])
def test_pages_of_every_length(kv_format, dtype, groups):
    cache = cases.PagedCache(len(LENGTHS), 2, 32, 128, 64, kv_format, dtype).fill(LENGTHS)
    q = cases.normal(len(LENGTHS), 2 * groups, 1, 32, dtype=dtype)
    out, lse = check_pages(cache, q)
    assert (out[0] == 0).all()
    assert torch.isneginf(lse[0]).all()


@formats
@pytest.mark.parametrize("length", LENGTHS)
def test_pages_of_equal_lengths(kv_format, dtype, length):
    cache = cases.PagedCache(2, 2, 16, 64, 32, kv_format, dtype).fill([length] * 2)
    check_pages(cache, cases.strided(cases.normal(2, 4, 1, 16, dtype=dtype)))


@formats
@pytest.mark.parametrize("groups, q_len", [(1, 1), (2, 63), (4, 64), (8, 65), (16, 3)])
def test_chunk_after_every_length(kv_format, dtype, groups, q_len):
    cache = cases.PagedCache(len(LENGTHS), 2, 32, 128, 64, kv_format, dtype).fill(LENGTHS)
    check_chunk(cache, *chunk(cache, groups, q_len))


@formats
@pytest.mark.parametrize("length", LENGTHS)
def test_chunk_after_equal_lengths(kv_format, dtype, length):
    cache = cases.PagedCache(2, 2, 16, 64, 32, kv_format, dtype).fill([length] * 2)
    check_chunk(cache, *map(cases.strided, chunk(cache, 2, 10)))


@pytest.mark.parametrize("head_dim", [16, 48, 80, 256, 512])
def test_head_sizes(head_dim):
    cache = cases.PagedCache(1, 1, head_dim, 64, 64).fill([100])
    check_pages(cache, cases.normal(1, 2, 1, head_dim), scale=head_dim**-0.5)
    check_chunk(cache, *chunk(cache, 2, 5), scale=head_dim**-0.5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 64, 600])
def test_chunk_of_several_tiles(causal, window):
    cache = cases.PagedCache(2, 1, 16, 64, 64, max_pages=24).fill([1300, 700])
    check_chunk(cache, *chunk(cache, 2, 1100), causal=causal, window=window)


def test_pages_of_several_steps():
    cache = cases.PagedCache(2, 2, 16, 64, 64, max_pages=48).fill([3000, 1500])
    check_pages(cache, cases.normal(2, 4, 1, 16))
    check_pages(cache, cases.normal(2, 4, 1, 16), **every_rule(cache, 4, 1, 0) | {"window": 2000})


def test_every_rule_over_several_tiles():
    cache = cases.PagedCache(2, 1, 16, 64, 64, max_pages=12).fill([700, 100])
    check_chunk(cache, *chunk(cache, 2, 600), **every_rule(cache, 2, 600, 600) | {"window": 800})


def test_a_page_larger_than_a_step():
    cache = cases.PagedCache(1, 1, 16, 2048, 64, max_pages=2).fill([2200])
    check_pages(cache, cases.normal(1, 1, 1, 16))
    check_chunk(cache, *chunk(cache, 1, 3))


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 1000])
def test_windows(window):
    cache = cases.PagedCache(len(LENGTHS), 1, 16, 64, 64).fill(LENGTHS)
    check_pages(cache, cases.normal(len(LENGTHS), 2, 1, 16), window=window)
    check_chunk(cache, *chunk(cache, 2, 70), window=window)


def test_starts():
    cache = cases.PagedCache(5, 1, 16, 64, 64).fill([130, 130, 130, 130, 0])
    cache.starts.copy_(torch.tensor([0, 1, 64, 129, 3]))
    check_pages(cache, cases.normal(5, 2, 1, 16))
    check_chunk(cache, *chunk(cache, 2, 7))
    cache.starts.fill_(130)
    out, lse = check_pages(cache, cases.normal(5, 2, 1, 16))
    assert (out == 0).all() and torch.isneginf(lse).all()
    check_chunk(cache, *chunk(cache, 2, 7))


@pytest.mark.parametrize("side", ["left", "right", "middle", "all"])
def test_padding(side):
    cache = cases.PagedCache(3, 1, 16, 64, 64).fill([150, 70, 0])
    place = {"left": slice(0, 66), "right": slice(60, None), "middle": slice(20, 80), "all": slice(0, None)}[side]
    padding = torch.ones(3, 160, dtype=torch.bool)
    padding[:, place] = False
    check_pages(cache, cases.normal(3, 2, 1, 16), padding=padding)
    check_chunk(cache, *chunk(cache, 2, 7), padding=padding)


@pytest.mark.parametrize("kind", ["bool", "float32", "bfloat16", "lowest"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 4), (3, 4)])
@pytest.mark.parametrize("columns", [1, 40, 155, 300])
def test_masks(kind, shape, columns):
    cache = cases.PagedCache(3, 2, 16, 64, 64).fill([150, 70, 0])
    for q_len in (1, 5):
        random = cases.generator(kind, shape, columns, q_len)
        shown = torch.rand(*shape, q_len, columns, generator=random) < 0.5
        mask = shown
        if kind == "lowest":
            # Where nothing but the lowest number is visible, float32 forgets the scores that it is added to.
            own = range(max(0, q_len - columns), q_len)
            shown[..., list(own), [columns - q_len + i for i in own]] = True
            mask = torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min)
        elif kind != "bool":
            mask = torch.randn(shown.shape, generator=random).masked_fill(~shown, -math.inf)
            mask = mask.to(getattr(torch, kind))
        if q_len == 1:
            check_pages(cache, cases.normal(3, 4, 1, 16), mask=mask)
        check_chunk(cache, *chunk(cache, 2, q_len), mask=mask)


@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_softcap(softcap):
    cache = cases.PagedCache(3, 1, 16, 64, 64).fill([150, 70, 0])
    check_pages(cache, cases.normal(3, 2, 1, 16), softcap=softcap)
    check_chunk(cache, *chunk(cache, 2, 7), softcap=softcap)


def test_sinks():
    cache = cases.PagedCache(3, 2, 16, 64, 64).fill([150, 70, 0])
    sinks = torch.tensor([-2.0, 0.0, 3.0, 30.0])
    out, lse = check_pages(cache, cases.normal(3, 4, 1, 16), sinks=sinks)
    assert (out[2] == 0).all()
    assert torch.equal(lse[2, :, 0], sinks)
    check_chunk(cache, *chunk(cache, 2, 7), sinks=sinks)


@formats
@pytest.mark.parametrize("lengths", [(130, 130), (0, 65), (1, 190)])
def test_every_rule_at_once(kv_format, dtype, lengths):
    cache = cases.PagedCache(2, 2, 16, 64, 32, kv_format, dtype).fill(lengths)
    cache.starts.copy_(torch.tensor([3, 1]))
    check_pages(cache, cases.normal(2, 8, 1, 16, dtype=dtype), **every_rule(cache, 8, 1, 0))
    check_chunk(cache, *chunk(cache, 4, 9), **every_rule(cache, 8, 9, 9))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_case(data):
    draw = data.draw
    batch, heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.sampled_from([1, 3, 16]))
    kv_format, dtype = draw(st.sampled_from(FORMATS))
    group_size = draw(st.sampled_from([8, 16]))
    cache = cases.PagedCache(batch, heads, 16, group_size * draw(st.integers(1, 3)), group_size, kv_format, dtype, 9)
    cache.fill(draw(st.lists(st.integers(0, 70), min_size=batch, max_size=batch)), seed=draw(st.integers(0, 3)))
    cache.starts.copy_(torch.tensor(draw(st.lists(st.integers(0, 20), min_size=batch, max_size=batch))))
    q_len = draw(st.integers(1, 20))
    for new, count in ((0, 1), (q_len, draw(st.integers(1, q_len)))):
        rules = every_rule(cache, heads * groups, count, new)
        rules["window"] = draw(st.integers(1, 80))
        rules = {name: rule for name, rule in rules.items() if draw(st.booleans())}
        if new:
            q, k, v = chunk(cache, groups, q_len)
            check_chunk(cache, q[:, :, -count:], k, v, causal=draw(st.booleans()), **rules)
        else:
            check_pages(cache, cases.normal(batch, heads * groups, 1, 16, dtype=dtype), **rules)


@formats
@pytest.mark.parametrize("length", [64, 100, 129, 330])
def test_ring_of_pages(kv_format, dtype, length):
    ring = cases.PagedCache(2, 1, 16, 64, 32, kv_format, dtype, max_pages=3).fill([length, length // 2])
    check_pages(ring, cases.normal(2, 2, 1, 16, dtype=dtype), window=100)
    check_chunk(ring, *chunk(ring, 2, 5), window=100)


def test_ring_with_dropped_groups():
    ring = cases.PagedCache(1, 1, 16, 64, 32, max_pages=8, holes=[(0, c) for c in range(3)]).fill([330])
    check_pages(ring, cases.normal(1, 2, 1, 16), window=100)
    check_chunk(ring, *chunk(ring, 2, 5), window=100)


def test_a_token_without_a_page_is_not_attended_to():
    full, holey = (cases.PagedCache(1, 1, 16, 64, 64, holes=holes).fill([200]) for holes in ((), [(0, 1)]))
    padding = torch.ones(1, 205, dtype=torch.bool)
    padding[:, 64:128] = False
    q, (cq, k, v) = cases.normal(1, 2, 1, 16), chunk(full, 2, 5)
    assert torch.equal(attend_pages(full, q, padding=padding)[0], attend_pages(holey, q)[0])
    assert torch.equal(attend_chunk(full, cq, k, v, padding=padding)[0], attend_chunk(holey, cq, k, v)[0])


def test_a_table_without_pages():
    cache = cases.PagedCache(2, 1, 16, max_pages=0).fill([5, 70])
    for results in (attend_pages(cache, cases.normal(2, 2, 1, 16)), attend_chunk(cache, *chunk(cache, 2, 3))):
        assert not any(torch.isnan(x).any() for x in results)


@formats
def test_order_of_pages_does_not_matter(kv_format, dtype):
    a, b = (cases.PagedCache(2, 2, 16, 64, 32, kv_format, dtype, 6, i).fill([330, 170]) for i in range(2))
    assert not torch.equal(a.page_table - a.memory.data_ptr(), b.page_table - b.memory.data_ptr())
    q, new = cases.normal(2, 4, 1, 16, dtype=dtype), chunk(a, 2, 40)
    results = [attend_pages(cache, q) + attend_chunk(cache, *new) for cache in (a, b)]
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_decode_continues_a_chunk():
    cache = cases.PagedCache(2, 1, 16, 64, 64, "model").fill([60, 130])
    q, k, v = chunk(cache, 2, 9)
    whole, _ = attend_chunk(cache, q, k, v)
    for t in range(9):
        cache.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        one, _ = attend_pages(cache, q[:, :, t : t + 1])
        torch.testing.assert_close(one, whole[:, :, t : t + 1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_stored_nans_that_nobody_sees(kv_format):
    cache = cases.PagedCache(1, 1, 16, 64, 32, kv_format)
    k, v = (cases.normal(1, 1, 150, 16, seed=i) for i in range(2))
    # Whole groups, so that no visible token shares a scale with a NaN; and rows of the tail.
    k[:, :, 32:64], v[:, :, 32:64], k[:, :, 130:134], v[:, :, 130:134] = (math.nan,) * 4
    cache.append(k, v)
    padding = torch.ones(1, 155, dtype=torch.bool)
    padding[:, 32:64] = padding[:, 130:134] = False
    results = attend_pages(cache, cases.normal(1, 2, 1, 16), padding=padding)
    results += attend_chunk(cache, *chunk(cache, 2, 5), padding=padding)
    mask = padding[:, None, None, :150]
    for hidden in (mask, torch.zeros(mask.shape).masked_fill(~mask, -math.inf)):
        results += attend_pages(cache, cases.normal(1, 2, 1, 16), mask=hidden)
        hidden = torch.nn.functional.pad(hidden, (0, 5), value=1).expand(1, 1, 5, 155)
        results += attend_chunk(cache, *chunk(cache, 2, 5), mask=hidden)
    assert all(torch.isfinite(x).all() for x in results)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_stored_nans_that_somebody_sees(kv_format):
    cache = cases.PagedCache(1, 1, 16, 64, 32, kv_format)
    k, v = (cases.normal(1, 1, 80, 16, seed=i) for i in range(2))
    v[0, 0, 40, 3] = math.nan
    cache.append(k, v)
    for out in (attend_pages(cache, cases.normal(1, 2, 1, 16))[0], attend_chunk(cache, *chunk(cache, 2, 5))[0]):
        assert torch.isnan(out[..., 3]).all()
        assert torch.isfinite(out[..., :3]).all()


def test_an_empty_batch_and_an_empty_chunk():
    cache = cases.PagedCache(0, 1, 16)
    assert attend_pages(cache, torch.zeros(0, 2, 1, 16))[0].shape == (0, 2, 1, 16)
    assert attend_chunk(cache, *chunk(cache, 2, 3))[1].shape == (0, 2, 3)
    cache = cases.PagedCache(2, 1, 16).fill([3, 70])
    assert attend_chunk(cache, *chunk(cache, 2, 0))[0].shape == (2, 2, 0, 16)


def pages_read(monkeypatch, cache, run):
    """The pages, by sequence, that a call reads."""
    seen = set()

    def gather(addresses, layout, device):
        seen.update(address for row in addresses for address in row)
        return original(addresses, layout, device)

    original = past.gather_pages
    with monkeypatch.context() as patch:
        patch.setattr(past, "gather_pages", gather)
        run()
    return [[column for column, address in enumerate(row) if address in seen] for row in cache.page_table.tolist()]


def test_only_pages_with_visible_tokens_are_read(monkeypatch):
    cache = cases.PagedCache(3, 1, 16, 64, 32, max_pages=10).fill([630, 330, 20])
    q, new = cases.normal(3, 2, 1, 16), chunk(cache, 2, 5)

    def read(run):
        return pages_read(monkeypatch, cache, run)

    assert read(lambda: attend_pages(cache, q)) == [[*range(10)], [*range(5)], []]
    assert read(lambda: attend_pages(cache, q, window=100)) == [[8, 9], [3, 4], []]
    assert read(lambda: attend_chunk(cache, *new, window=100)) == [[8, 9], [3, 4], []]
    mask = torch.zeros(1, 1, 5, 40)
    assert read(lambda: attend_pages(cache, q, mask=mask[:, :, :1])) == [[9], [4], []]
    assert read(lambda: attend_chunk(cache, *new, mask=mask)) == [[9], [4], []]
    cache.starts.copy_(torch.tensor([128, 320, 0]))
    assert read(lambda: attend_pages(cache, q)) == [[*range(2, 10)], [], []]
    assert read(lambda: attend_chunk(cache, *new)) == [[*range(2, 10)], [], []]


class LargestFloat(TorchDispatchMode):
    """Keeps the number of elements of the largest float32 tensor that an operator returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.dtype == torch.float32]
        self.numel = max([self.numel, *sizes])
        return result


def test_memory_is_bounded_by_tiles():
    cache = cases.PagedCache(1, 1, 16, 64, 64, max_pages=64).fill([4000])
    state = cache.page_table, cache.seq_lens, cache.starts, cache.tail, None, None, None, 0.25, None
    with LargestFloat() as largest:
        attend_pages_reference(cases.normal(1, 2, 1, 16), *state, None, cache.layout)
    assert largest.numel <= STEP_TOKENS * 16
    with LargestFloat() as largest:
        attend_chunk_reference(*chunk(cache, 2, 2000), *state, True, None, cache.layout)
    assert largest.numel <= 2 * TILE * TILE


def gradients(results, weights, inputs):
    """Gradients of a weighted sum of out and lse, where lse is finite."""
    (out, lse), (out_weights, lse_weights) = results, weights
    finite = torch.where(torch.isneginf(lse), 0, lse * lse_weights.to(lse.dtype))
    return torch.autograd.grad((out * out_weights.to(out.dtype)).sum() + finite.sum(), inputs)


def check_gradients(cache, new, **rules):
    """Compare the gradients of attend_chunk with autograd through dense attention."""
    weights = cases.normal(*new[0].shape, seed="grad"), cases.normal(*new[0].shape[:3], seed="grad")
    inputs = [x.requires_grad_() for x in new]
    got = gradients(attend_chunk(cache, *inputs, **rules), weights, inputs)
    exact, single = (
        gradients(cases.dense_attention(cache, *x, **{"scale": 0.25} | rules, dtype=x[0].dtype), weights, x)
        for x in ([x.detach().to(dtype).requires_grad_() for x in new] for dtype in (torch.float64, torch.float32))
    )
    for x, ours, reference, low in zip(new, got, exact, single, strict=True):
        assert ours.dtype == x.dtype
        cases.assert_accurate(ours, reference, low)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("lengths", [(0, 0), (0, 65), (130, 130), (63, 200)])
@pytest.mark.parametrize("causal", [True, False])
def test_gradients(kv_format, lengths, causal):
    cache = cases.PagedCache(2, 2, 16, 64, 32, kv_format).fill(lengths)
    check_gradients(cache, chunk(cache, 2, 9), causal=causal)


@pytest.mark.parametrize("causal, window", [(True, None), (True, 12), (False, None), (False, 40), (True, 700)])
@pytest.mark.parametrize("new, queries", [(9, 1), (70, 33), (600, 530), (600, 1)])
def test_queries_of_the_last_tokens_only(new, queries, causal, window):
    """Every key of a chunk is new, and only its last tokens ask (Gemma 4's sharing layers before the last logits)."""
    cache = cases.PagedCache(2, 2, 16, 64, 32, max_pages=8).fill([100, 31])
    q, k, v = chunk(cache, 2, new)
    check_gradients(cache, [q[:, :, -queries:], k, v], causal=causal, window=window)
    check_chunk(cache, q[:, :, -queries:].detach(), k.detach(), v.detach(), causal=causal, window=window)
    rules = every_rule(cache, 4, queries, new) | {"causal": causal, "window": window}
    check_chunk(cache, q[:, :, -queries:].detach(), k.detach(), v.detach(), **rules)


@pytest.mark.parametrize("rule", ["padding", "mask", "sinks", "softcap", "window", "all"])
def test_gradients_under_rules(rule):
    cache = cases.PagedCache(2, 2, 16, 64, 32).fill([100, 40])
    rules = every_rule(cache, 4, 9, 9)
    check_gradients(cache, chunk(cache, 2, 9), **(rules if rule == "all" else {rule: rules[rule]}))


def test_gradients_of_several_tiles():
    cache = cases.PagedCache(1, 1, 16, 64, 32, max_pages=16).fill([700])
    check_gradients(cache, chunk(cache, 2, 600), window=550)


def test_gradients_in_bfloat16():
    cache = cases.PagedCache(1, 1, 16, 64, 32, "int8", torch.bfloat16).fill([70])
    new = chunk(cache, 2, 9)
    weights = cases.normal(1, 2, 9, 16), torch.zeros(1, 2, 9)
    inputs = [x.requires_grad_() for x in new]
    got = gradients(attend_chunk(cache, *inputs), weights, inputs)
    dense = [x.detach().double().requires_grad_() for x in new]
    exact = gradients(cases.dense_attention(cache, *dense, scale=0.25), weights, dense)
    # The independent computation is autograd through dense attention in bfloat16.
    rough = [x.detach().clone().requires_grad_() for x in new]
    low = gradients(cases.dense_attention(cache, *rough, scale=0.25, dtype=torch.bfloat16), weights, rough)
    for ours, reference, bound in zip(got, exact, low, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - reference).abs().max() <= (bound.double() - reference).abs().max()


def test_backward_after_the_cache_has_moved_on():
    moved, still = (cases.PagedCache(2, 1, 16, 64, 32).fill([70, 20]) for _ in range(2))
    new = chunk(moved, 2, 50)
    results = []
    for cache in (moved, still):
        inputs = [x.detach().clone().requires_grad_() for x in new]
        out, _ = attend_chunk(cache, *inputs)
        if cache is moved:
            cache.append(new[1].detach(), new[2].detach())
            cache.starts.fill_(60)
        results.append(torch.autograd.grad(out.square().sum(), inputs))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gradients_of_rows_that_see_nothing():
    whole, rest = cases.PagedCache(1, 1, 16), cases.PagedCache(1, 1, 16)
    whole.starts.fill_(3)
    inputs = [x.requires_grad_() for x in chunk(whole, 2, 9)]
    later = [x[:, :, 3:] for x in inputs]
    weights = cases.normal(1, 2, 9, 16)
    got = torch.autograd.grad((attend_chunk(whole, *inputs)[0] * weights).sum(), inputs)
    expected = torch.autograd.grad((attend_chunk(rest, *later)[0] * weights[:, :, 3:]).sum(), inputs)
    for ours, same in zip(got, expected, strict=True):
        assert (ours[:, :, :3] == 0).all()
        torch.testing.assert_close(ours, same, rtol=1e-5, atol=1e-6)


def test_gradients_ignore_poisoned_memory():
    cache = cases.PagedCache(1, 1, 16, 64, 32).fill([33])
    inputs = [x.requires_grad_() for x in chunk(cache, 1, 3)]
    for softcap in (None, 2.0):
        out, _ = attend_chunk(cache, *inputs, softcap=softcap)
        assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(out.sum(), inputs))


PAGES_ERRORS = [
    (lambda c, a: {"q": a["q"].double()}, UnsupportedDtype, "queries must be float16, .* got torch.float64"),
    (lambda c, a: {"q": a["q"].half()}, ShapeMismatch, "queries must be torch.float32 .*, got torch.float16"),
    (lambda c, a: {"q": a["q"].repeat(1, 1, 2, 1)}, ShapeMismatch, r"queries must be torch.float32 \[2, any, 1, 16\]"),
    (lambda c, a: {"q": a["q"][:, :3]}, UnsupportedGroups, "1 to 16 times num_kv_heads, got 3 and 2"),
    (lambda c, a: {"q": a["q"].repeat(1, 9, 1, 1)}, UnsupportedGroups, "got 36 and 2"),
    (lambda c, a: {"starts": c.starts.long()}, ShapeMismatch, r"starts must be torch.int32 \[2\]"),
    (lambda c, a: {"sinks": torch.zeros(3)}, ShapeMismatch, r"sinks must be torch.float32 \[4\]"),
    (lambda c, a: {"sinks": torch.zeros(4, dtype=torch.int64)}, ShapeMismatch, "sinks must be .* got torch.int64"),
    (lambda c, a: {"padding": torch.ones(2, 80)}, ShapeMismatch, r"padding must be torch.bool \[2, any\]"),
    (lambda c, a: {"padding": torch.ones(2, 3, dtype=torch.bool)}, ShapeMismatch, "padding must have a column for"),
    (lambda c, a: {"mask": torch.ones(2, 3, 1, 9)}, ShapeMismatch, r"mask must be torch.float32 \[2, 4, 1, any\]"),
    (lambda c, a: {"mask": torch.ones(1, 9)}, ShapeMismatch, "mask must be"),
    (lambda c, a: {"mask": torch.ones(1, 1, 1, 0)}, ShapeMismatch, r"mask must be torch.float32 \[1, 1, 1, 1\]"),
    (lambda c, a: {"mask": torch.ones(1, 1, 1, 9).int()}, ShapeMismatch, "mask must be .* got torch.int32"),
    (lambda c, a: {"softcap": 0.0}, InvalidOption, "softcap must be positive, got 0.0"),
    (lambda c, a: {"window": 0}, InvalidOption, "window must be at least 1 token, got 0"),
]
CHUNK_ERRORS = [
    *PAGES_ERRORS[:2],
    (lambda c, a: {"q": a["q"].repeat(1, 1, 2, 1)}, ShapeMismatch, r"queries must be torch.float32 \[2, any, 1, 16\]"),
    *PAGES_ERRORS[3:],
    (lambda c, a: {"k": a["k"].repeat(1, 1, 2, 1)}, ShapeMismatch, r"values must be torch.float32 \[2, 2, 2, 16\]"),
    (lambda c, a: {"k": a["k"][:, :1]}, ShapeMismatch, r"keys must be torch.float32 \[2, 2, any, 16\]"),
    (lambda c, a: {"mask": torch.ones(1, 1, 2, 9)}, ShapeMismatch, r"mask must be torch.float32 \[1, 1, 1, any\]"),
]


@pytest.mark.parametrize(
    "function, changes, error, message",
    [(attend_pages, *row) for row in PAGES_ERRORS] + [(attend_chunk, *row) for row in CHUNK_ERRORS],
)
def test_errors(function, changes, error, message):
    cache = cases.PagedCache(2, 2, 16).fill([70, 5])
    args = dict(zip("qkv", chunk(cache, 2, 1), strict=True))
    change = changes(cache, args)
    if "starts" in change:
        cache.starts = change.pop("starts")
    args = {name: x for name, x in args.items() if function is attend_chunk or name == "q"}
    with pytest.raises(error, match=message):
        function(cache, **args | change)
