"""Caches of a fixed number of places, written in place: they become pages, and stay truthful tensors."""

import pytest
import torch
from static_models import BY_INT, BY_TENSOR, index_copy, setitem, static_greedy, static_model
from tiers import tiers
from tiny_models import build, prompt

import gemkv_compile
from gemkv_compile import PagedKVTensor


def sites(model):
    return [site for graph in gemkv_compile.report_of(model).graphs for site in graph.sites]


def caches(model):
    return [part for layer in model.layers for part in (layer.k_cache, layer.v_cache)]


def compiled(write, **options):
    return gemkv_compile.compile(static_model(write), **{"kv_format": "model", "strict": True} | options)


@pytest.mark.parametrize("write", BY_TENSOR + BY_INT, ids=lambda f: f.__name__)
def test_buffers_of_a_module_become_pages(write):
    """A gpt-fast-like module, in every spelling of the write: whole, and its buffers hold nothing but pages."""
    model, plain, by_int = compiled(write), static_model(write), write in BY_INT
    expected = static_greedy(plain, prompt(2, 10), 20, by_int=by_int)
    assert torch.equal(static_greedy(model, prompt(2, 10), 20, by_int=by_int), expected)
    assert {site.status for site in sites(model)} == {"rewritten"}
    for ours, theirs in zip(caches(model), caches(plain), strict=True):
        assert isinstance(ours, PagedKVTensor) and ours.untyped_storage().nbytes() == 0
        torch.testing.assert_close(ours.materialise(), theirs, rtol=1e-4, atol=1e-5)


CELLS = tiers(
    [("llama", "sdpa", 10), ("gemma3", "eager", 40)], [("gemma1", "eager", 10), ("gemma3", "flex_attention", 10)]
)


@pytest.mark.parametrize("family, attention, tokens", CELLS)
def test_generate_with_a_static_cache(family, attention, tokens):
    """Full and sliding layers, from a prompt below the window of 16 and one beyond it."""
    model = gemkv_compile.compile(build(family, attention), kv_format="model", strict=True)
    options = dict(max_new_tokens=24, do_sample=False, cache_implementation="static", return_dict_in_generate=True)
    with torch.no_grad():
        with torch.compiler.set_stance("force_eager"):
            expected = build(family, attention).generate(prompt(2, tokens), **options)
        out = model.generate(prompt(2, tokens), **options)
    assert torch.equal(out.sequences, expected.sequences)
    for ours, theirs in zip(out.past_key_values.layers, expected.past_key_values.layers, strict=True):
        assert isinstance(ours.keys, PagedKVTensor) and len(ours.keys.table.pages) <= 1
        torch.testing.assert_close(ours.keys.materialise(), theirs.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.values.materialise(), theirs.values, rtol=1e-4, atol=1e-5)


def test_it_pays_for_what_is_used():
    """D10: memory follows the used length, not the places."""
    from gemkv_compile.runtime.ledger import kv_memory

    model = gemkv_compile.compile(static_model(setitem, places=4096), strict=True)
    static_greedy(model, prompt(2, 100), 3)
    layout = model.layers[0].k_cache.table.pool.layout
    assert [len(layer.k_cache.table.pages) for layer in model.layers] == [1, 1]
    assert kv_memory(caches(model)).total < 3 * 2 * layout.page_bytes * 2


def test_places_without_rows_do_not_take_part():
    """A8: a decode step without a mask sees the rows that were written, where eager sees zeros too."""

    def step(q, k, v, keys, values, place):
        index_copy(keys, place, k)
        index_copy(values, place, v)
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values)

    q, k, v = (torch.randn(1, 2, 1, 16) for _ in range(3))
    keys, values = (torch.zeros(1, 2, 32, 16) for _ in range(2))
    keys[:, :, :7], values[:, :, :7] = torch.randn(1, 2, 7, 16), torch.randn(1, 2, 7, 16)
    past = torch.cat([keys[:, :, :7], k], 2), torch.cat([values[:, :, :7], v], 2)
    expected = torch.nn.functional.scaled_dot_product_attention(q, *past)
    function = gemkv_compile.compile(step, kv_format="model", strict=True)
    with torch.no_grad():
        out = function(q, k, v, keys, values, torch.tensor([7]))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(keys.materialise()[:, :, :8], past[0])


def test_a_second_prompt_over_the_first():
    """Rows that stay from a longer text are dropped where the mask hides them."""
    model, plain = compiled(setitem), static_model(setitem)
    for seed, tokens in ((0, 20), (1, 6)):
        expected = static_greedy(plain, prompt(2, tokens, seed), 8)
        assert torch.equal(static_greedy(model, prompt(2, tokens, seed), 8), expected)
    assert model.layers[0].k_cache.length == 13


@pytest.mark.parametrize("write", BY_TENSOR, ids=lambda f: f.__name__)
def test_places_that_do_not_follow_run_as_they_were(write, caplog):
    """A gap, and rows that go back to front: right, and said once."""
    model, plain = compiled(write), static_model(write)
    with torch.no_grad():
        for places in ([0, 1, 2], [7, 8], [5, 4], [9]):
            ids, places = prompt(2, len(places)), torch.tensor(places)
            torch.testing.assert_close(model(ids, places), plain(ids, places), rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(caches(model), caches(plain), strict=True):
        torch.testing.assert_close(ours.materialise(), theirs, rtol=1e-4, atol=1e-5)
    assert len([r for r in caplog.records if "static cache" in r.message]) >= 1


def test_edits_between_calls_count():
    model, plain = compiled(setitem), static_model(setitem)
    for each in (model, plain):
        static_greedy(each, prompt(2, 10), 3)
        for part in caches(each):
            part[:, :, 4] = 0.5
            part[:, :, 2:4].mul_(1)
    expected = static_greedy(plain, prompt(2, 1), 5, start=12)
    assert torch.equal(static_greedy(model, prompt(2, 1), 5, start=12), expected)
    for each in (model, plain):
        for part in caches(each):
            part.zero_()
    assert torch.equal(static_greedy(model, prompt(2, 9), 4), static_greedy(plain, prompt(2, 9), 4))
    assert model.layers[0].k_cache.length == 12


def test_buffers_that_are_views_of_one_tensor_stay():
    model, plain = compiled(setitem), static_model(setitem)
    for each in (model, plain):
        for layer in each.layers:
            both = torch.zeros(2, *layer.k_cache.shape)
            layer.k_cache, layer.v_cache = both[0], both[1]
    assert torch.equal(static_greedy(model, prompt(2, 10), 5), static_greedy(plain, prompt(2, 10), 5))
    assert not any(isinstance(part, PagedKVTensor) for part in caches(model))


def test_a_static_handle_is_a_truthful_tensor():
    import copy

    model, plain = compiled(setitem), static_model(setitem)
    for each in (model, plain):
        static_greedy(each, prompt(2, 10), 3)
    ours, theirs = model.layers[0].k_cache, plain.layers[0].k_cache
    torch.testing.assert_close(ours + 0, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[:, :, 3:20] + 0, theirs[:, :, 3:20], rtol=1e-4, atol=1e-5)
    twin = copy.deepcopy(ours)
    static_greedy(model, prompt(2, 1), 2, start=12)
    torch.testing.assert_close(twin + 0, theirs, rtol=1e-4, atol=1e-5)
    assert twin.shape == theirs.shape and twin.length == 12


@torch.no_grad()
def test_a_call_that_fails_leaves_the_cache_as_it_was():
    model = compiled(setitem)
    static_greedy(model, prompt(2, 10), 3)
    before = model.layers[0].k_cache + 0
    with pytest.raises(Exception, match="out of|index|range"):
        model(prompt(2, 1), torch.tensor([48]))
    assert torch.equal(model.layers[0].k_cache + 0, before)


def test_the_shadow_says_that_it_does_not_cover_them():
    model = compiled(setitem, shadow=3)
    static_greedy(model, prompt(2, 10), 2)
    report = gemkv_compile.report_of(model)
    assert all("the shadow does not cover" in call.failure for graph in report.graphs for call in graph.shadow)
    assert "the shadow does not cover" in str(report)


@torch.no_grad()
@pytest.mark.parametrize("by_slice", [True, False])
def test_a_new_tensor_with_the_rows_in_it(by_slice):
    """slice_scatter and index_copy: the past stays what it was, and can be continued twice."""

    def step(q, k, v, past, first):
        size = k.shape[2]
        if by_slice:
            keys, values = (
                torch.slice_scatter(old, new, 2, first, first + size) for old, new in zip(past, (k, v), strict=True)
            )
        else:
            at = torch.arange(size) + first
            keys, values = (torch.index_copy(old, 2, at, new) for old, new in zip(past, (k, v), strict=True))
        shown = torch.arange(keys.shape[2])[None] <= torch.arange(size)[:, None] + first
        out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=shown, enable_gqa=True)
        return out, (keys, values)

    function = gemkv_compile.compile(step, kv_format="model", strict=True)
    place = int if by_slice else torch.tensor
    past = theirs = tuple(torch.zeros(2, 2, 32, 16) for _ in range(2))
    kept = []
    for first, size in ((0, 5), (5, 1), (6, 1), (5, 1)):  # the last one continues an older past
        q, k, v = torch.randn(2, 4, size, 16), torch.randn(2, 2, size, 16), torch.randn(2, 2, size, 16)
        if len(kept) == 3:
            past, theirs = kept[0]
        out, past = function(q, k, v, past, place(first))
        expected, theirs = step(q, k, v, theirs, place(first))
        torch.testing.assert_close(out, expected)
        assert all(isinstance(part, PagedKVTensor) and part.shape[2] == 32 for part in past)
        for ours, dense in zip(past, theirs, strict=True):
            torch.testing.assert_close(ours + 0, dense)
        kept.append((past, theirs))
    for ours, dense in kept:
        torch.testing.assert_close(ours[0] + 0, dense[0])
