"""Cases that belong to families: softcaps, unwritten slots of a static cache, windows that nothing reaches."""

import pytest
import torch
from tiny_models import build, generated, prompt

import gemkv_compile


def run(model, ids, steps=20, **options):
    with torch.no_grad():
        return model.generate(ids, max_new_tokens=steps, do_sample=False, **options)


@pytest.mark.parametrize("family, attention, cap", [("gemma2", "eager", 50.0), ("llama", "eager", None)])
def test_softcap_is_what_the_graph_has(family, attention, cap):
    """A1: Gemma 2's cap of 50 is matched; without a tanh in the graph there is none, whatever the config says."""
    model = build(family, attention)
    model.config.attn_logit_softcapping = 50.0
    with torch.no_grad():
        report = gemkv_compile.explain(model, prompt(2, 20))
    assert [(site.status, site.softcap) for site in report.sites] == [("rewritten", cap)] * 2
    assert ("tanh" in report.graphs[0].before) == (cap is not None)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_unwritten_slots_of_a_static_cache_are_not_seen(family):
    """A8: a static cache gives the tokens of one that grows, in which there are no unwritten slots."""
    model = gemkv_compile.compile(build(family), kv_format="model")
    tokens = run(model, prompt(2, 10), cache_implementation="static")
    assert torch.equal(tokens, generated(family, 2, 10, 20))


def test_a_static_buffer_without_a_mask_is_what_it_was():
    """A8: without a mask, an attention over a whole buffer computes what it did, however much of it is written."""

    def step(q, k, v, keys, values, at):
        keys, values = keys.index_copy(2, at, k), values.index_copy(2, at, v)
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True), keys, values

    def arguments():
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, heads, 1, 16) for heads in (4, 2, 2))
        return q, k, v, torch.zeros(2, 2, 12, 16), torch.zeros(2, 2, 12, 16), torch.tensor([3])

    with torch.no_grad():
        ours = gemkv_compile.compile(step, kv_format="model")(*arguments())
    for mine, plain in zip(ours, step(*arguments()), strict=True):
        torch.testing.assert_close(mine, plain)


def test_a_window_that_nothing_reaches():
    """A12: a window of the longest length hides nothing; with one page size all layers share one pool."""
    windowed = build("gemma3", sliding_window=1024)
    model = gemkv_compile.compile(build("gemma3", sliding_window=1024), kv_format="model", page_size=64, strict=True)
    out = run(model, prompt(2, 40), 40, return_dict_in_generate=True)
    assert torch.equal(out.sequences, run(windowed, prompt(2, 40), 40))
    first, second = (layer.keys.table.pool for layer in out.past_key_values.layers)
    assert first is second
