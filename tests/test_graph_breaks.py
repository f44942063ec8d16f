"""Dynamo's graph breaks around an attention: results equal eager's, and what is kept names the break (D15)."""

import attention_cases as cases
import pytest
import torch
from attention_cases import causal, grown
from opaque_attention import opaque_attention
from tiny_models import build, prompt, tuple_model

import gemkv_compile

sdpa = torch.nn.functional.scaled_dot_product_attention


def sites_of(function, *arguments):
    """Report of a compiled call, which is compared with eager."""
    compiled = gemkv_compile.compile(function, kv_format="model")
    with torch.no_grad():
        cases.tree_close(compiled(*arguments), function(*arguments), rtol=1e-5, atol=1e-5)
    report = gemkv_compile.report_of(compiled)
    return report.sites, report


def between_cat_and_attention(q, k, v, past):
    keys, values = grown(k, v, past)
    torch._dynamo.graph_break()
    return sdpa(q, keys, values, causal(q, keys), enable_gqa=True), (keys, values)


def between_scores_and_softmax(q, k, v, past):
    keys, values = grown(k, v, past)
    scores = q @ keys.repeat_interleave(2, 1).mT
    torch._dynamo.graph_break()
    return scores.softmax(-1) @ values.repeat_interleave(2, 1), (keys, values)


def test_between_the_update_and_the_attention():
    (update, attention), report = sites_of(between_cat_and_attention, *cases.inputs())
    assert (update.reason, attention.reason) == ("attention_not_recognised", "no_cache")
    place = f"at {__file__}:"
    assert "This graph ends at a graph break: Call to `torch._dynamo.graph_break()`" in update.sentence
    assert "This graph begins after a graph break: Call to" in attention.sentence
    assert place in update.sentence and place in attention.sentence and "in between_cat" in attention.sentence
    assert len(report.graph_breaks) == 1 and f"At {__file__}:" in report.graph_breaks[0]
    assert "graph break: Call to" in str(report) and "begins after a graph break" in report.to_json()


def test_in_the_middle_of_an_attention():
    sites, _ = sites_of(between_scores_and_softmax, *cases.inputs())
    assert sites[0].reason == "attention_not_recognised" and "ends at a graph break" in sites[0].sentence


def test_rows_that_leave_for_the_next_graph():
    def function(q, k, v, past):
        keys, values = grown(k, v, past)
        wide = keys.repeat_interleave(2, 1)
        out = sdpa(q, wide, values.repeat_interleave(2, 1), causal(q, keys))
        torch._dynamo.graph_break()
        return out * wide.amax(), (keys, values)

    (site,), _ = sites_of(function, *cases.inputs())
    assert site.reason == "cache_used_elsewhere" and "This graph ends at a graph break: Call" in site.sentence


def test_a_mask_from_before_the_break():
    def attend(q, k, v, past, mask):
        keys, values = grown(k, v, past)
        return sdpa(q, keys, values, mask, enable_gqa=True), (keys, values)

    def function(q, k, v, past):
        mask = causal(q, grown(k, v, past)[0])
        torch._dynamo.graph_break()
        return attend(q, k, v, past, mask)

    (site,), _ = sites_of(function, *cases.inputs())
    assert (site.status, site.reason) == ("rewritten", "mask_outside_graph")
    assert "This graph begins after a graph break" in site.sentence
    torch._dynamo.reset()
    mask = causal(torch.empty(1, 1, 3, 1), torch.empty(1, 1, 8, 1))
    (site,), _ = sites_of(attend, *cases.inputs(), mask)
    assert site.reason == "mask_outside_graph" and "graph break" not in site.sentence


def test_a_break_that_is_not_the_cause_is_not_named():
    def function(q, k, v, past):
        keys, values = grown(k, v, past)
        out = sdpa(q, keys, values, causal(q, keys), enable_gqa=True) + keys.mean()
        torch._dynamo.graph_break()
        return out * 2, (keys, values)

    (site,), report = sites_of(function, *cases.inputs())
    assert site.reason == "cache_used_elsewhere" and "graph break" not in site.sentence
    assert len(report.graph_breaks) == 1


def test_a_hook_that_prints_in_every_layer(capsys):
    """A break in the loop over layers: each is a graph of its own and paged, and the report names the break."""
    model, plain = tuple_model(), tuple_model()
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, output: print("layer"))
    compiled = gemkv_compile.compile(model, kv_format="model")
    with torch.no_grad():
        ours, pasts = compiled(prompt(1, 9))
        theirs, dense = plain(prompt(1, 9))
        step, _ = compiled(prompt(1, 1), pasts)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(step, plain(prompt(1, 1), dense)[0], rtol=1e-4, atol=1e-5)
    report = gemkv_compile.report_of(compiled)
    assert capsys.readouterr().out.count("layer") == 4 and len(report.sites) >= 2
    assert {site.status for site in report.sites} == {"rewritten"}
    assert any("`print`" in text for text in report.graph_breaks)


def test_an_unknown_kernel_before_a_break_says_to_set_sdpa():
    """A stand-in for flash-attn's operator: the kernel is the cause, whatever ends the graph after it."""

    def function(q, k, v, past):
        keys, values = grown(k, v, past)
        out = opaque_attention(q, keys, values, 0.25)
        torch._dynamo.graph_break()
        return out * 2, (keys, values)

    (site,), _ = sites_of(function, *cases.inputs())
    assert site.reason == "attention_not_recognised"
    assert "attn_implementation='sdpa'" in site.sentence and "graph break" not in site.sentence


def test_flash_attention_2_that_is_not_installed_is_refused_by_transformers():
    from transformers.utils import is_flash_attn_2_available

    if is_flash_attn_2_available():
        pytest.skip("flash-attn is installed")
    with pytest.raises(ImportError, match="FlashAttention2"):
        build("llama", "flash_attention_2")
    model = gemkv_compile.compile(build("llama"))
    with pytest.raises((ImportError, ValueError), match="(?i)flash"):
        model.set_attn_implementation("flash_attention_2")
