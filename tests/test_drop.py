"""Early drop: what policies choose, that later attention does not see it, and that caches stay right around holes."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import paged_cases as cases
import pytest
import torch
from paged_tables import CPU, dense_rows, layout_of, table_of
from replayed import replayed_on_cpu
from static_models import setitem, static_greedy, static_model
from tiny_models import build, greedy, prompt, tuple_model
from triton_devices import DEVICES, to_device

import gemkv_compile
from gemkv_compile.drop import AttentionMass, Pages, SinkAndRecent, SnapKV
from gemkv_compile.errors import DroppedRows, GemkvError, InvalidOption
from gemkv_compile.kernels import ops
from gemkv_compile.kernels.layout import KV_FORMATS
from gemkv_compile.options import Options
from gemkv_compile.plan import ObservedPlan
from gemkv_compile.runtime.handle import KEYS, VALUES, make_handle
from gemkv_compile.runtime.importing import continue_past, import_dense
from gemkv_compile.runtime.observed import Observed, attention_of_pages
from gemkv_compile.runtime.page_table import PageTable
from gemkv_compile.runtime.pool import PagePool


@dataclass(frozen=True)
class Listed:
    """Drops the same pages of each sequence, given as (sequence, page), as soon as they are there."""

    pairs: tuple
    observes: int = 0
    decodes: bool = True
    windowed: bool = False
    asked: ClassVar[list] = []

    def choose(self, pages):
        self.asked.append(pages)
        answer = torch.zeros_like(pages.exists)
        for row, page in self.pairs:
            if row < answer.shape[0] and page < answer.shape[1]:
                answer[row, page] = True
        return answer


@pytest.fixture(autouse=True)
def forget():
    Listed.asked.clear()


def hidden(policy, batch, tokens, length, new):
    """Tokens that queries after `length` tokens do not see, bool [batch, tokens]; `new` completed the last pages."""
    out = torch.zeros(batch, tokens, dtype=torch.bool)
    for row, page in policy.pairs:
        if (page + 1) * 64 <= length and row < batch:
            out[row, page * 64 : (page + 1) * 64] = True
    return out


@pytest.fixture
def eagerly(monkeypatch):
    """Run a function with an eager attention that hides what a policy has dropped before each call."""
    fused = torch.nn.functional.scaled_dot_product_attention

    def run(policy, function):
        def attend(query, key, value, attn_mask=None, is_causal=False, **options):
            batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
            seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries) if attn_mask is None else attn_mask
            lost = hidden(policy, batch, keys, keys - queries, queries)[:, None, None]
            return fused(query, key, value, attn_mask=seen & ~lost, **options)

        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
            return function()

    return run


HOLES = Listed(((0, 1), (1, 0), (1, 2), (0, 3)))


@pytest.mark.parametrize("observes", [0, 8])
def test_later_attention_does_not_see_dropped_pages(eagerly, observes):
    """A prompt, steps over a page boundary, another chunk, and sequences picked as beams are, beside a mask."""
    policy = dataclasses.replace(HOLES, observes=observes)

    def run(model):
        first, logits, pasts = greedy(model, prompt(2, 250), 8)
        with torch.no_grad():
            more, pasts = model(prompt(2, 90, seed=1), pasts)
            picked = [[part.index_select(0, torch.tensor([0, 1])) for part in pair] for pair in pasts]
            last, _ = model(first[:, :1], picked)
        return torch.cat([logits, more, last], 1), pasts

    layers = 1 + bool(observes)
    expected, _ = eagerly(policy, lambda: run(tuple_model(layers=layers)))
    unhidden, _ = run(tuple_model(layers=layers))
    model = gemkv_compile.compile(tuple_model(layers=layers), kv_format="model", drop=policy, strict=True)
    got, pasts = run(model)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert (expected - unhidden).abs().max() > 1e-3
    table = pasts[0][0].table
    gone = {(row, page) for page, addresses in table.pages.items() for row, a in enumerate(addresses) if not a}
    assert gone == set(policy.pairs) and table.length == 347 and table.seq_lens.tolist() == [347, 347]
    assert all(handle.table.pool.layout.page_size == 64 for pair in pasts for handle in pair)


@pytest.mark.slow
def test_it_works_with_beams(eagerly):
    """Beams share and reorder pages at every step; dropped ones stay dropped."""
    policy = Listed(tuple((row, page) for row in range(3) for page in range(2)))
    model, ids = build("llama"), prompt(1, 150)

    def run():
        with torch.no_grad():
            return model.generate(ids, max_new_tokens=8, num_beams=3, do_sample=False)

    expected, plain = eagerly(policy, run), run()
    gemkv_compile.compile(model, kv_format="model", drop=policy, strict=True)
    assert torch.equal(run(), expected) and not torch.equal(expected, plain)


def test_steps_replayed_as_cuda_graphs_see_the_holes(monkeypatch):
    """The choice is made between replays, so a policy that reads numbers is no matter."""
    ids = prompt(2, 190)

    def run(**options):
        model = gemkv_compile.compile(
            tuple_model(layers=1), kv_format="model", drop=AttentionMass(share=0.5, recent=0, observes=4), **options
        )
        _, logits, pasts = greedy(model, ids, 9)
        return logits, pasts[0][0].table

    expected, table = run()
    with replayed_on_cpu(monkeypatch) as made:
        got, replayed = run(cuda_graphs=True)
        assert sum(each.replays for each in made) > 4
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert [list(map(bool, row)) for row in replayed.pages.values()] == [
        list(map(bool, row)) for row in table.pages.values()
    ]
    assert sum(not address for row in table.pages.values() for address in row) == 2 * 2  # of 3 pages, 1.5 rounded up


def test_dropped_pages_of_a_prompt_are_never_allocated():
    """With room for what stays only: a policy that observes nothing decides before pages are found."""
    layout_bytes = 2 * 2 * 64 * 16 * 4  # keys and values of two heads in float32
    options = {"kv_format": "model", "pool_bytes": 2 * 6 * layout_bytes, "drop": SinkAndRecent(sinks=4, recent=128)}
    model = gemkv_compile.compile(tuple_model(), strict=True, **options)
    with gemkv_compile.memory.track() as tracker, torch.no_grad():
        _, pasts = model(prompt(1, 640))
    assert [sorted(i for i, (a,) in pair[0].table.pages.items() if a) for pair in pasts] == [[0, 8, 9]] * 2
    assert len(tracker.pages()) == 2 * 3
    report = gemkv_compile.report_of(model)
    assert report.graphs[0].dropped == {0: 7, 1: 7}
    text = str(report)
    assert "layer 0, 1 drop: SinkAndRecent(sinks=4, recent=128" in text and "pages dropped so far: 14" in text
    assert report.sites[0].drop.startswith("SinkAndRecent")
    assert gemkv_compile.kv_memory(pasts).layers[0].pages == 3 * layout_bytes


def test_the_first_group_of_a_guarded_format_stays():
    """It is read from the tail whatever happens to its page, so a policy does not get to choose it."""
    policy = Listed(((0, 0), (0, 1)))
    gone = {}
    for kv_format in ("int8", "int4"):
        model = gemkv_compile.compile(tuple_model(), kv_format=kv_format, drop=policy, strict=True)
        with torch.no_grad():
            _, pasts = model(prompt(1, 200))
        gone[kv_format] = [index for index, (page,) in pasts[0][0].table.pages.items() if not page]
    assert gone == {"int8": [0, 1], "int4": [1]}


def test_a_policy_is_asked_when_a_page_is_complete_and_only_then():
    policy = dataclasses.replace(HOLES, observes=5)
    model = gemkv_compile.compile(tuple_model(layers=1), drop=policy)
    _, _, pasts = greedy(model, prompt(2, 62), 5)
    with torch.no_grad():
        _, pasts = model(prompt(2, 60, seed=1), pasts)
    greedy(model, prompt(2, 1), 4, pasts)
    assert [(pages.tokens, pages.new_tokens, pages.exists.tolist()) for pages in policy.asked] == [
        (64, 1, [[True], [True]]),
        (128, 1, [[True, True], [False, True]]),
    ]
    assert policy.asked[1].attention.shape == (2, 4, 2, 64)
    policy.asked.clear()
    model = gemkv_compile.compile(tuple_model(layers=1), drop=dataclasses.replace(policy, decodes=False))
    _, _, pasts = greedy(model, prompt(2, 150), 2)
    assert [(pages.tokens, pages.new_tokens) for pages in policy.asked] == [(150, 150)]


def test_what_is_observed_is_the_attention_of_the_newest_queries(monkeypatch):
    """Against weights computed in float64 from the queries and keys of an eager run, in both kinds of calls."""
    calls = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def attend(query, key, value, **options):
        calls.append((query.double(), key.double()))
        return fused(query, key, value, **options)

    ids = prompt(2, 120)
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
        greedy(tuple_model(layers=1), ids, 10)
    policy = Listed((), observes=8)
    compiled = gemkv_compile.compile(tuple_model(layers=1), kv_format="model", drop=policy)
    greedy(compiled, ids, 10)
    queries = torch.cat([query for query, _ in calls], 2)
    for pages in policy.asked:
        keys, last = calls[pages.tokens - 120][1], queries[:, :, pages.tokens - 8 : pages.tokens]
        scores = last @ keys.mT / 16**0.5
        seen = torch.ones(8, pages.tokens, dtype=torch.bool).tril(pages.tokens - 8)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).mean(2)
        complete = pages.tokens // 64 * 64
        expected = weights[:, :, :complete].unflatten(2, (-1, 64))
        torch.testing.assert_close(pages.attention.double(), expected, rtol=0, atol=1e-6)
    assert [pages.tokens for pages in policy.asked] == [120, 128]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_observed_weights_by_hand(kv_format, device):
    """Padding, a softcap, a window, a hole, tokens before the cache's start; a prompt of fewer tokens than observed."""
    keys, values = (rows.to(device) for rows in dense_rows(2, 300))
    table = import_dense(PagePool(layout_of(kv_format), keys.device), keys, values)  # two groups a page
    keys = table.read(0, 300)[0].cpu()
    table.begin(1, None)
    table.drop({1: [False, True]})
    table.commit(0)
    table.expose_from(40)
    query = torch.randn(2, 4, 10, 16)
    padding = torch.rand(2, 310) < 0.8
    observed = Observed(10).after(290, query.to(device))
    plan = ObservedPlan(0, 0.3, 4.0, 255)
    got = attention_of_pages(table, 300, observed, plan, padding.to(device)).cpu()
    token, position = torch.arange(300), torch.arange(290, 300)[:, None]
    seen = (token >= 40) & (token <= position) & (token > position - 255) & padding[:, None, :300]
    seen[1, :, 128:256] = False
    scores = 4 * torch.tanh(query.double() @ keys.double().repeat_interleave(2, 1).mT * 0.3 / 4)
    weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    real = padding[:, 290:300].double()
    expected = (weights * real[:, None, :, None]).sum(2) / real.sum(1)[:, None, None]
    torch.testing.assert_close(got.double(), expected[:, :, :256].unflatten(2, (-1, 128)), rtol=0, atol=1e-6)
    short = Observed(32).after(0, query[:, :, :3])
    assert short.newest(3)[0].tolist() == [0, 1, 2] and short.newest(2)[1].shape[2] == 2
    assert short.after(3, query[:, :2]).newest(13)[0].tolist() == list(range(3, 13))  # another model's
    apart = short.after(3, query[:, :, :1]).after(9, query[:, :, :2])  # steps between them were not observed
    assert apart.newest(11)[0].tolist() == [0, 1, 2, 3, 9, 10]
    moved = short.after(3, query[:, :, :1]).selected(torch.tensor([1, 1, 0]), 4)
    assert torch.equal(moved.newest(4)[1][0], query[1][:, [0, 1, 2, 0]])


def pages_of(attention, tokens, exists=None, new_tokens=2):
    batch, _, count, size = attention.shape
    exists = torch.ones(batch, count, dtype=torch.bool) if exists is None else exists
    return Pages(0, tokens, new_tokens, size, None, exists, attention)


def test_what_policies_choose():
    """Ten pages of four tokens and two more tokens, two heads; page 4 holds the mass, page 7 one token of note."""
    attention = torch.full((1, 2, 10, 4), 0.01)
    attention[:, :, 4] = 0.03
    attention[:, :, 7, 2] = 0.05
    attention[:, :, [1, 5]] = 0.001
    about = pages_of(attention, 42)

    def kept(policy, about=about):
        return (about.exists & ~policy.choose(about))[0].nonzero().flatten().tolist()

    assert kept(SinkAndRecent(sinks=5, recent=9)) == [0, 1, 8, 9]
    assert kept(SinkAndRecent(sinks=0, recent=0)) == []
    assert kept(SinkAndRecent(sinks=5, share=0.4)) == [0, 1, 8, 9]
    assert kept(AttentionMass(share=0.8, recent=2)) == [0, 2, 3, 4, 6, 7, 8, 9]
    assert kept(AttentionMass(budget=14, recent=2)) == [4, 7, 9]
    assert kept(AttentionMass(budget=13, recent=3)) == [4, 9]
    assert kept(AttentionMass(threshold=0.03, recent=0)) == [0, 2, 3, 4, 6, 7, 8, 9]
    assert kept(AttentionMass(threshold=0.07, recent=7)) == [4, 7, 8, 9]
    assert kept(SnapKV(share=0.2, pool=1, recent=2)) == [4, 7]
    assert kept(SnapKV(share=0.2, pool=7, recent=2)) == [3, 4]  # its last token, by its neighbours
    fewer = dataclasses.replace(about, exists=torch.ones(1, 10, dtype=torch.bool))
    fewer.exists[0, [0, 2]] = False
    assert kept(AttentionMass(share=0.6, recent=2), fewer) == [3, 4, 6, 7, 8, 9]
    assert kept(AttentionMass(share=0.8, recent=2), fewer) == [1, 3, 4, 5, 6, 7, 8, 9]


def test_padded_rows_weigh_nothing():
    """A left-padded prompt in a batch chooses what it chooses alone, shifted by the padding."""
    model, ids = build("llama"), prompt(1, 200)
    gemkv_compile.compile(model, kv_format="model", drop=Listed((), observes=16), strict=True)
    batch = torch.cat([torch.cat([torch.zeros(1, 64, dtype=torch.int64), ids], 1), prompt(1, 264, seed=1)])
    mask = torch.ones_like(batch)
    mask[0, :64] = 0
    with torch.no_grad():
        model(ids)
        alone = [pages.attention for pages in Listed.asked]
        Listed.asked.clear()
        model(batch, attention_mask=mask)
    for one, pages in zip(alone, Listed.asked, strict=True):
        assert (pages.attention[0, :, 0] == 0).all() and (pages.attention[1, :, 0] > 0).all()
        torch.testing.assert_close(pages.attention[0, :, 1:], one[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("windowed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_with_a_window_are_left_alone_unless_asked_for(windowed):
    model = build("gemma3", sliding_window=200)
    policy = Listed(((0, 1),), windowed=windowed)
    gemkv_compile.compile(model, kv_format="model", drop=policy, strict=True)
    with torch.no_grad():
        cache = model(prompt(1, 260)).past_key_values
        for t in range(2 * windowed):
            model(prompt(1, 1, seed=t), past_key_values=cache)
    sliding, full = ([a for (a,) in layer.keys.table.pages.values()] for layer in cache.layers)
    assert full.count(0) == 1 and sliding.count(0) == windowed
    sites = gemkv_compile.report_of(model).graphs[0].sites
    assert (sites[0].drop == "kept whole: it has a window") != windowed and "Listed" in sites[1].drop
    assert {pages.window for pages in policy.asked} == ({200, None} if windowed else {None})


def test_static_caches_are_kept_whole_and_say_so():
    model = gemkv_compile.compile(static_model(setitem, places=200, layers=1), drop=HOLES, strict=True)
    static_greedy(model, prompt(2, 150), 2)
    sites = gemkv_compile.report_of(model).sites
    assert sites and {site.drop for site in sites} == {"kept whole: a static cache is read and reset as a tensor"}
    assert not HOLES.asked


def dropped_table(chosen, tokens=300, page_size=64, kv_format="model"):
    """A table of `dense_rows` that has dropped pages with its last append."""
    keys, values = dense_rows(2, tokens)
    table = PageTable(PagePool(layout_of(kv_format, page_size=page_size), CPU), 2)
    table.begin(tokens, None)
    state = table.page_table, table.seq_lens, table.tail
    ops.append_kv(keys, values, *state, page_size, kv_format, "test")
    table.drop(chosen)
    table.commit(tokens)
    return table, keys, values


def test_handles_tell_the_truth_about_holes():
    table, keys, values = dropped_table({1: [True, False]})
    pair = [make_handle(table, role, 0, 300) for role in (KEYS, VALUES)]
    older = make_handle(table, KEYS, 0, 100)
    for read in (pair[0].materialise, lambda: pair[1] + 1, lambda: older[:, :, 60:70].sum(), lambda: pair[0][1].sum()):
        with pytest.raises(DroppedRows, match="rows 64 to .* were dropped by the policy in the option drop"):
            read()
    assert torch.equal(pair[0][:, :, 128:].materialise(), keys[:, :, 128:])
    assert torch.equal(older[:, :, :64].materialise(), keys[:, :, :64]) and pair[0].shape[2] == 300
    whole = pair[1].index_select(0, torch.tensor([1, 1]))  # the other sequence has no hole
    assert torch.equal(whole.materialise(), values[[1, 1]])
    assert table.pool.stats().pages == 2 * 4 - 1


@pytest.mark.parametrize("page_size, length", [(64, 100), (128, 64), (128, 200)])
def test_a_cut_inside_a_hole_is_an_error(page_size, length):
    """Its rows would be needed beside the new ones; elsewhere an older handle goes on around the hole."""
    page = length // page_size
    table, *_ = dropped_table({page: [False, True]}, page_size=page_size)
    pair = [make_handle(table, role, 0, length) for role in (KEYS, VALUES)]
    pages = table.pool.stats().pages
    with pytest.raises(DroppedRows):
        continue_past(table.pool, 2, *pair, 2)
    assert table.pool.stats().pages == pages
    beyond = [make_handle(table, role, 0, (page + 1) * page_size) for role in (KEYS, VALUES)]
    fork, _ = continue_past(table.pool, 2, *beyond, 2)
    assert fork is not table and fork.pages[page][1] == 0 and fork.pages[page][0] == table.pages[page][0]
    assert torch.equal(fork.page_table[:, page] == 0, torch.tensor([False, True]))


def test_an_append_that_fails_has_dropped_nothing():
    table, _, _ = table_of(2, 200, page_size=64), None, None
    pages, entries, count = dict(table.pages), table.page_table.clone(), table.pool.stats().pages
    table.begin(100, None, without={3: [True, False]})
    table.drop({0: [True, True], 3: [True, False], 2: [False, True]})
    assert table.page_table[:, 0].tolist() == [0, 0]
    table.abort()
    assert table.pages == pages and torch.equal(table.page_table, entries) and table.pool.stats().pages == count
    torch.testing.assert_close(table.read(0, 200)[0], dense_rows(2, 200)[0], rtol=0, atol=0)


@dataclass(frozen=True)
class Broken:
    answer: object
    observes: int = 0
    decodes: bool = True
    windowed: bool = False

    def choose(self, pages):
        if isinstance(self.answer, Exception):  # a new one: its traceback would keep the caches alive
            raise type(self.answer)(*self.answer.args)
        return self.answer


@pytest.mark.parametrize("observes", [0, 4])
@pytest.mark.parametrize(
    "answer, message",
    [
        (ValueError("mine"), "mine"),
        (torch.zeros(1, 1), r"must return a bool tensor \[batch, pages\], here \[1, 2\], got torch.float32 \[1, 1\]"),
        ([True], r"got \[True\]"),
    ],
)
def test_a_policy_that_fails_leaves_the_caches_as_they_were(observes, answer, message):
    good = gemkv_compile.compile(tuple_model(), kv_format="model", drop=Listed(()))
    with torch.no_grad():
        _, pasts = good(prompt(1, 100))
        bad = gemkv_compile.compile(tuple_model(), kv_format="model", drop=Broken(answer, observes))
        before = [pair[0].materialise() for pair in pasts]
        with pytest.raises((GemkvError, ValueError), match=message):
            bad(prompt(1, 50, seed=1), pasts)
        for (keys, _), rows in zip(pasts, before, strict=True):
            assert keys.table.length == 100 and keys.table.seq_lens.tolist() == [100] and not keys.table.is_appending
            assert torch.equal(keys.materialise(), rows)


MISTAKES = [
    (lambda: Options(drop="snapkv"), "drop must be None or a policy with a method choose, got 'snapkv'"),
    (lambda: Options(drop=SnapKV), "drop must be None or a policy.*Give SinkAndRecent"),
    (lambda: Options(drop=Broken(0, observes=-1)), "observes of .* must be a number of queries, 0 to 256, got -1"),
    (lambda: Options(drop=Broken(0, decodes=None)), "decodes of .* must be True or False, got None"),
    (lambda: Options(drop=HOLES, shadow=3), "shadow and drop exclude each other"),
    (lambda: SnapKV(), "SnapKV takes exactly one of share, budget, got none"),
    (lambda: SnapKV(share=0.5, budget=9), "exactly one of share, budget"),
    (lambda: SnapKV(share=0.5, pool=4), "pool must be odd"),
    (lambda: AttentionMass(share=0.0), r"share must be in \(0, 1\], got 0.0"),
    (lambda: AttentionMass(threshold=2), r"threshold must be in \(0, 1\], got 2"),
    (lambda: AttentionMass(budget=0), "budget must be an int of at least 1, got 0"),
    (lambda: AttentionMass(share=0.5, observes=0), "observes must be an int of at least 1, got 0"),
    (lambda: SinkAndRecent(), "SinkAndRecent takes exactly one of recent, share, got none"),
    (lambda: SinkAndRecent(recent=-1), "recent must be an int of at least 0, got -1"),
]


@pytest.mark.parametrize("make, message", MISTAKES)
def test_mistakes(make, message):
    with pytest.raises(InvalidOption, match=message):
        make()


def test_options_with_equal_policies_are_equal():
    assert Options(drop=SnapKV(share=0.5)) == Options(drop=SnapKV(share=0.5)) != Options(drop=SnapKV(share=0.6))
    assert hash(Options(drop=SnapKV(share=0.5))) == hash(Options(drop=SnapKV(share=0.5)))


@pytest.mark.parametrize("tokens", [1, 5, 12])
def test_newest_queries_operator(tokens):
    q = torch.randn(2, 3, tokens, 16)
    got = torch.ops.gemkv.newest_queries(q, 5, "test")
    rows = min(tokens, 5)
    assert torch.equal(got[:, :, 5 - rows :], q[:, :, -rows:]) and (got[:, :, : 5 - rows] == 0).all()
    assert got.data_ptr() != q.data_ptr()
    for given in (q, cases.strided(q)):  # Inductor believes the strides that the shape function says
        torch.library.opcheck(torch.ops.gemkv.newest_queries.default, (given, 5, "test"))
        assert torch.ops.gemkv.newest_queries(given, 5, "test").is_contiguous()


@pytest.mark.parametrize("kv_format", ["int8", "k8v4"])
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("device", [None, *DEVICES])
def test_holes_anywhere_in_a_table(kv_format, new, device):
    """References (no device) and kernels; the first and last page, neighbours, all pages; holes hold garbage.

    A guarded format reads the first group from the tail, whatever its page.
    """
    holes = [(0, 0), (0, 3), (0, 4), (1, 1), *((2, page) for page in range(5))]
    cache = cases.PagedCache(3, 1, 16, 64, 64, kv_format, max_pages=8, holes=holes).fill([340, 200, 320])
    there = torch.ones(3, 340 + new, dtype=torch.bool)
    for row, page in holes:
        there[row, page * 64 : (page + 1) * 64] = page == 0 and cache.layout.is_guarded
    if new == 1:
        k, v = (cases.normal(3, 1, 1, 16, seed=i) for i in range(2))
        cache.append(k, v)
    q, own = cases.normal(3, 2, new, 16, seed=3), [cases.normal(3, 1, new, 16, seed=4 + i) for i in range(2)]
    place, triton = device or "cpu", device is not None
    state = *to_device(cache, place), None, None, None, 0.25, None
    on = [x.to(place) for x in (q, *own)]
    if new == 1:
        from gemkv_compile.kernels.attend_pages.kernel import attend_pages_triton
        from gemkv_compile.kernels.attend_pages.reference import attend_pages_reference

        got = (attend_pages_triton if triton else attend_pages_reference)(on[0], *state, None, cache.layout)
        given = ()
    else:
        from gemkv_compile.kernels.attend_chunk.kernel import attend_chunk_triton
        from gemkv_compile.kernels.attend_chunk.reference import attend_chunk_reference

        got = (attend_chunk_triton if triton else attend_chunk_reference)(*on, *state, True, None, cache.layout)
        given = own
    exact = cases.dense_attention(cache, q, *given, padding=there, scale=0.25)
    for part, expected in zip(got, exact, strict=True):
        torch.testing.assert_close(part.double().cpu(), expected, rtol=0, atol=2e-5)
