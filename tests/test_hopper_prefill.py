"""The Hopper prefill kernel, its very source, on a stand-in for the GPU: right results, no deadlock, no wrong phase."""

import math

import gluon_standin as standin
import interpreted
import paged_cases as cases
import pytest
import torch
from tiers import tiers
from triton_devices import close_enough

from gemkv_compile.errors import InvalidOption
from gemkv_compile.kernels.attend_chunk import kernel, kernel_hopper, variants

HALF = torch.bfloat16


@pytest.fixture(scope="module")
def hopper():
    return standin.hopper_kernel()


def poisoned(q):
    out = torch.full((q.shape[0], q.shape[2], q.shape[1], q.shape[3]), math.nan, dtype=q.dtype).transpose(1, 2)
    return out, torch.full(q.shape[:3], math.nan)


def dense(q, k, v, lengths, starts, scale, softcap, causal, window, dtype=torch.float64):
    """Attention of the last queries of a chunk to the chunk, in a dtype, and lse."""
    groups, q_len, new_len = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    keys, values = (x.to(dtype).repeat_interleave(groups, 1) for x in (k, v))
    scores = q.to(dtype) @ keys.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    token, key = torch.arange(new_len - q_len, new_len)[:, None], torch.arange(new_len)[None]
    seen = (key >= (starts - lengths)[:, None, None, None]) & ((key <= token) if causal else (key >= 0))
    if window is not None:
        seen = seen & (key > token - window)
    scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0)[..., None]) @ values, lse


def check(hopper, monkeypatch, shape, seed, tiles, programs=3, pack=None, dtype=HALF, starts=None, **rules):
    """Compare with float64 under what the same weights in the model's dtype cost."""
    monkeypatch.setattr(hopper, "empty_results", poisoned)
    monkeypatch.setattr(standin, "SEEDS", iter(range(seed * 1000, seed * 1000 + 1000)))
    batch, heads, kv_heads, q_len, new_len, head_dim = shape
    q, k, v = (
        cases.normal(batch, n, count, head_dim, dtype=dtype, seed=(seed, i)).transpose(1, 2)
        for i, (n, count) in enumerate(((q_len, heads), (new_len, kv_heads), (new_len, kv_heads)))
    )
    lengths = torch.randint(0, 50, (batch,), generator=cases.generator(seed)).to(torch.int32)
    starts = lengths + (0 if starts is None else torch.tensor(starts, dtype=torch.int32))
    rules = dict(scale=head_dim**-0.5, softcap=None, causal=True, window=None) | rules
    assert hopper.eligible(q, k, v, rules["scale"], (9, 0)) == "" or q_len < 64
    out, lse = hopper.attend_chunk_hopper(
        q, k, v, lengths, starts, *rules.values(), tiles=hopper.HopperTiles(*tiles), pack=pack, programs=programs
    )
    exact, exact_lse = dense(q, k, v, lengths, starts, **rules)
    assert torch.equal(torch.isneginf(lse), torch.isneginf(exact_lse))
    there = ~torch.isneginf(exact_lse)
    torch.testing.assert_close(lse[there].double(), exact_lse[there], rtol=1e-5, atol=1e-5)
    error, unit = (out.double() - exact).abs(), torch.finfo(dtype).eps
    assert not torch.isnan(error).any()
    assert error.max() <= 2 * unit * exact.abs().max() + 1e-6, error.max()
    return out, lse


@pytest.mark.parametrize("consumers, stages", tiers([(2, 3), (3, 5)], [(2, 2), (2, 7)]))
@pytest.mark.parametrize("pingpong", [False, True])
def test_causal(hopper, monkeypatch, pingpong, consumers, stages):
    """Rings as short as they may be and longer than a tile's keys; programs with several tiles, in every order."""
    for seed in range(2):
        check(hopper, monkeypatch, (2, 4, 2, 301, 301, 64), seed, (32, stages, consumers, pingpong))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", tiers([None, 33, 100], [(1,), (1000,)]))
@pytest.mark.parametrize("q_len, new_len", tiers([(97, 203)], [(150, 150), (1, 130)]))
@pytest.mark.slow
def test_windows(hopper, monkeypatch, causal, window, q_len, new_len):
    shape = 1, 2, 1, q_len, new_len, 64
    check(hopper, monkeypatch, shape, 5, (32, 3, 2, True), causal=causal, window=window)


@pytest.mark.parametrize("pack", tiers([8, None], [(1,), (2,)]))
@pytest.mark.parametrize("head_dim, block_n", [(64, 128), (128, 64), (256, 32)])
@pytest.mark.slow
def test_heads(hopper, monkeypatch, head_dim, block_n, pack):
    """Groups of 8 and 24 heads, packed and not."""
    for heads in (8, 24):
        check(hopper, monkeypatch, (1, heads, 1, 45, 45, head_dim), 6, (block_n, 4, 2, False), pack=pack)


@pytest.mark.parametrize("softcap", [0.5, 50.0])
@pytest.mark.parametrize("dtype", [HALF, torch.float16], ids=str)
@pytest.mark.slow
def test_softcap_and_dtypes(hopper, monkeypatch, dtype, softcap):
    shape = 1, 2, 1, 70, 70, 64
    check(hopper, monkeypatch, shape, 7, (32, 3, 2, True), dtype=dtype, softcap=softcap, scale=0.7, window=30)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 40])
def test_starts_inside_the_chunk(hopper, monkeypatch, causal, window):
    """Padding on the left: rows that see nothing are zeros, and their lse is -inf."""
    starts = [0, 1, 64, 131, 500]
    rules = dict(causal=causal, window=window)
    out, lse = check(hopper, monkeypatch, (5, 2, 2, 132, 132, 64), 8, (32, 3, 2, True), starts=starts, **rules)
    assert (out[4] == 0).all() and torch.isneginf(lse[4]).all() and torch.isfinite(lse[0]).all()


@pytest.mark.parametrize("programs", [1, 2, 5, 1000])
def test_programs_share_the_tiles(hopper, monkeypatch, programs):
    """Every row is written once: the stand-in refuses a second time, and what is left out stays NaN."""
    check(hopper, monkeypatch, (2, 3, 1, 200, 200, 64), 9, (64, 3, 2, True), programs=programs)


def test_the_last_sizes_that_are_used(hopper, monkeypatch):
    for head_dim, candidates in hopper.CANDIDATES.items():
        for tiles in candidates:
            assert hopper.shared_bytes(head_dim, tiles) <= hopper.SHARED_BYTES
            check(hopper, monkeypatch, (1, 2, 1, 260, 260, head_dim), 10, tiles)


@pytest.mark.parametrize(
    "old, new",
    [
        ("(empty.index(slot), phase ^ 1)", "(empty.index(slot), phase)"),
        ("mbarrier.wait(empty.index(slot), phase ^ 1)", "pass"),
        ("mbarrier.wait(full.index(value_slot), value_phase)", "pass"),
        ("    pass_turn(turns, group, F)\n    scores = warpgroup_mma_wait(1", "    scores = warpgroup_mma_wait(1"),
        ("scores = warpgroup_mma_wait(1, deps=(scores,))\n    mbarrier.arrive(empty.index(slot))",
         "mbarrier.arrive(empty.index(slot))\n    scores = warpgroup_mma_wait(1, deps=(scores,))"),
        ("acc, weights, following = warpgroup_mma_wait(0, deps=(acc, weights, following))",
         "acc, following = warpgroup_mma_wait(0, deps=(acc, following))"),
        ("scores = warpgroup_mma_wait(1, deps=(scores,))", "scores, acc = warpgroup_mma_wait(1, deps=(scores, acc))"),
        ("acc, weights, following = warpgroup_mma_wait(0, deps=(acc, weights, following))\n"
         "    mbarrier.arrive(empty.index(value_slot))",
         "mbarrier.arrive(empty.index(value_slot))\n"
         "    acc, weights, following = warpgroup_mma_wait(0, deps=(acc, weights, following))"),
        ("    mbarrier.wait(full.index(slot), phase)\n    acc, weights, following", "    acc, weights, following"),
        ("    mbarrier.wait(full.index(slot), phase)\n    state = acc", "    state = acc"),
        ("mbarrier.wait(q_full.index(group), turn & 1)", "pass"),
        ("mbarrier.wait(q_empty.index(group), turn & 1 ^ 1)", "pass"),
        ("    mbarrier.arrive(q_empty.index(group))\n", ""),
        ("acc = acc * gl.convert_layout(decay", "acc = acc * gl.convert_layout(decay * 0 + 1"),
        ("(full_end - at) // BLOCK_N", "(full_end - at) // BLOCK_N + 1"),
        ("gl.cdiv(full_begin - at, BLOCK_N)", "gl.cdiv(full_begin - at, BLOCK_N) - 1"),
        ("mbarrier.init(empty.index(slot), count=CONSUMERS)", "mbarrier.init(empty.index(slot), count=1)"),
        ("sizes[3]\n        place = gl.cast(row, gl", "sizes[3] - 1\n        place = gl.cast(row, gl"),
        ("programs - 1 - program)\n    return rounds", "program)\n    return rounds"),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_fault_in_the_kernel_is_found(monkeypatch, old, new):
    """What the stand-in is for: each of these changes is a race, a deadlock, or a wrong number."""
    with pytest.raises((AssertionError, ValueError)):
        check_in_several_orders(standin.hopper_kernel([(old, new)]), monkeypatch)


def test_the_kernel_without_a_fault(hopper, monkeypatch):
    check_in_several_orders(hopper, monkeypatch)


def check_in_several_orders(module, monkeypatch):
    for seed in range(6):
        check(module, monkeypatch, (1, 2, 1, 333, 333, 64), seed, (32, 5, 2, True), programs=4, window=150)


def test_what_is_not_eligible(hopper):
    def reason(x=None, q=None, scale=0.1, capability=(9, 0)):
        x = good if x is None else x
        return hopper.eligible(x if q is None else q, x, x, scale, capability)

    good = torch.zeros(1, 2, 80, 64, dtype=HALF)
    assert reason() == ""
    assert reason(torch.zeros(2, 80, 4, 64, dtype=HALF).transpose(1, 2)) == ""
    assert "16 bytes" in reason(torch.zeros(80, 2, 68, dtype=HALF)[None, ..., :64].transpose(1, 2))
    assert reason(torch.zeros(80, 2, 72, dtype=HALF)[None, ..., :64].transpose(1, 2)) == ""
    assert "too few" in reason(q=good[:, :, :63]) and reason(q=good.repeat(1, 2, 1, 1)[:, :, :32]) == ""
    assert "10, 0" in reason(capability=(10, 0))
    assert "float32" in reason(good.float())
    assert "head size 96" in reason(torch.zeros(1, 2, 80, 96, dtype=HALF))
    assert "between channels" in reason(q=torch.zeros(1, 2, 64, 80, dtype=HALF).mT)
    assert "16 bytes" in reason(torch.zeros(1 + 2 * 80 * 64, dtype=HALF)[1:].view(1, 2, 80, 64))
    assert "overlap" in reason(torch.zeros(1, 1, 80, 64, dtype=HALF).expand(1, 2, -1, -1))
    assert "scale" in reason(scale=0.0)


def test_options_for_measuring(hopper):
    x = torch.zeros(1, 2, 8, 64, dtype=HALF)
    lengths = torch.zeros(1, dtype=torch.int32)
    rules = x, x, x, lengths, lengths, 0.1, None, True, None
    with pytest.raises(InvalidOption, match="fewer stages"):
        hopper.attend_chunk_hopper(*rules, tiles=hopper.HopperTiles(128, 20, 2, True))
    with pytest.raises(InvalidOption, match="pack must divide 64 and the 1 heads"):
        hopper.attend_chunk_hopper(*rules, pack=2)


@pytest.fixture
def plugged(hopper, monkeypatch):
    """`attend_chunk_triton` as on a Hopper GPU: the stand-in runs one kernel, Triton's interpreter the other."""

    def run(*arguments):
        runs.append(arguments)
        return hopper.attend_chunk_hopper(*arguments, tiles=hopper.HopperTiles(32, 3, 2, True), programs=2)

    runs = []
    monkeypatch.setattr(hopper, "empty_results", poisoned)
    monkeypatch.setattr(kernel_hopper, "attend_chunk_hopper", run)
    monkeypatch.setattr(variants, "capability", lambda device: (9, 0))
    return runs


def attend(cache, new, padding=None, mask=None, sinks=None, scale=0.125, softcap=None, causal=True, window=None, variant="hopper"):  # fmt: skip  # noqa: E501
    rules = padding, mask, sinks, scale, softcap, causal, window
    state = cache.page_table, cache.seq_lens, cache.starts, cache.tail
    return kernel.attend_chunk_triton(*new, *state, *rules, cache.layout, variant=variant)


def chunk(cache, groups, q_len, new_len):
    heads, dtype = cache.layout.num_kv_heads, cache.layout.model_dtype
    shapes = (heads * groups, q_len), (heads, new_len), (heads, new_len)
    batch = len(cache.history)
    return [cases.normal(batch, n, count, 64, dtype=dtype, seed=i) for i, (n, count) in enumerate(shapes)]


@pytest.mark.skipif(not interpreted.ON, reason="kernels are not interpreted here")
@pytest.mark.parametrize(
    "rules", [{}, {"window": 60}, {"softcap": 2.0, "causal": False}, {"sinks": torch.tensor([0.5, -1.0])}], ids=str
)
@pytest.mark.parametrize("new_len", [80, 100])
@pytest.mark.slow
def test_with_a_past(plugged, rules, new_len):
    """The plain kernel adds pages and tail to what the Hopper kernel has found; sequences without a past are left."""
    cache = cases.PagedCache(3, 1, 64, 64, 64, "int8", HALF).fill([0, 71, 130])
    cache.starts.copy_(torch.tensor([5, 3, 140]))  # the last one sees none of its past
    new = chunk(cache, 2, 80, new_len)
    got = attend(cache, new, **rules)
    rules = {"scale": 0.125} | rules
    close_enough(got, *(cases.dense_attention(cache, *new, **rules, dtype=dtype) for dtype in (torch.float64, HALF)))
    assert len(plugged) == 1


@pytest.mark.skipif(not interpreted.ON, reason="kernels are not interpreted here")
@pytest.mark.parametrize("q_len, new_len, window, blocks", [(300, 300, 150, 2), (300, 301, 130, 1), (80, 100, 21, 0)])
def test_only_queries_that_see_the_past_are_done_again(plugged, monkeypatch, q_len, new_len, window, blocks):
    grids, original = [], kernel.attend_chunk_kernel

    class Counted:
        def __getitem__(self, grid):
            grids.append(grid)
            return original[grid]

    monkeypatch.setattr(kernel, "attend_chunk_kernel", Counted())
    cache = cases.PagedCache(2, 1, 64, 64, 64, "int8", HALF).fill([200, 5])
    new, rules = chunk(cache, 1, q_len, new_len), dict(scale=0.125, window=window)
    got = attend(cache, new, **rules)
    close_enough(got, *(cases.dense_attention(cache, *new, **rules, dtype=dtype) for dtype in (torch.float64, HALF)))
    assert grids == [(blocks, 1, 2)] * (blocks > 0)


def test_which_variant_runs(plugged, monkeypatch):
    """By default where it can; never with the switch; by name, or an error that says why not."""
    cache = cases.PagedCache(1, 1, 64, 64, 64, "int8", HALF)
    new = chunk(cache, 1, 70, 70)
    padding = torch.ones(1, 70, dtype=torch.bool)
    choose = lambda variant, padding=None: variants.takes_hopper(variant, *new, padding, None, 0.1)  # noqa: E731
    assert choose("auto") and not choose("plain") and not choose("auto", padding) and choose("hopper")
    monkeypatch.setenv("GEMKV_HOPPER_PREFILL", "0")
    assert not choose("auto") and choose("hopper")
    monkeypatch.delenv("GEMKV_HOPPER_PREFILL")
    with pytest.raises(InvalidOption, match="no padding and no mask"):
        choose("hopper", padding)
    with pytest.raises(InvalidOption, match="auto, plain, hopper, got 'fast'"):
        choose("fast")
    monkeypatch.setattr(variants, "capability", lambda device: (8, 0))
    with pytest.raises(InvalidOption, match="8, 0"):
        choose("hopper")
    assert not choose("auto")


@pytest.mark.parametrize(
    "head_dim, q_len, window, softcap, place, pack",
    [
        (64, 128, None, None, 0, 1),
        (128, 8192, None, None, 0, 1),
        (128, 8192, 99, 30.0, 0, 1),
        (128, 127, None, None, 1, 4),
        (256, 8192, None, None, 0, 1),
        (256, 8192, 1024, None, 1, 4),
        (256, 8192, None, 50.0, 1, 4),
        (256, 64, None, None, 1, 4),
    ],
)
def test_which_tiles_are_used(head_dim, q_len, window, softcap, place, pack):
    tiles = kernel_hopper.tiles_and_pack(head_dim, 8, 2, q_len, window, softcap)
    assert tiles == (kernel_hopper.CANDIDATES[head_dim][place], pack)


def test_capability_of_a_cpu():
    assert variants.capability(torch.device("cpu")) == (0, 0)
