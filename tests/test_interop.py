"""Around the main road: other caches, hooks, graph breaks, other attention implementations."""

import warnings

import pytest
import torch
import transformers
from opaque_attention import opaque_attention
from tiny_models import build, generated, prompt

import gemkv_compile
from gemkv_compile import Options, PagedKVTensor
from gemkv_compile.backend import Backend
from gemkv_compile.errors import UncompiledGenerate


def run(model, ids, steps=24, **kwargs):
    with torch.no_grad():
        return model.generate(ids, max_new_tokens=steps, do_sample=False, **kwargs)


def test_generate_of_torch_compile_says_that_it_is_eager():
    """C9: torch.compile forwards `generate` to the eager module; the warning holds the line that works."""
    model = build("llama")
    wrapped = torch.compile(model, backend="gemkv")
    with pytest.warns(UncompiledGenerate, match=r'Write model.compile\(backend="gemkv"\); model.generate') as caught:
        out = run(wrapped, prompt(1, 8), return_dict_in_generate=True)
    assert caught[0].filename == __file__
    assert not isinstance(out.past_key_values.layers[0].keys, PagedKVTensor)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncompiledGenerate)
        torch.compile(build("llama"), backend="eager").generate  # noqa: B018
        model.compile(backend="gemkv")
        out = run(wrapped, prompt(1, 8), return_dict_in_generate=True)
    assert isinstance(out.past_key_values.layers[0].keys, PagedKVTensor)


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_static_cache_without_a_mask(family):
    """Slots that were never written do not contribute (huggingface/transformers#30437)."""
    model = gemkv_compile.compile(build(family), kv_format="model")
    out = run(model, prompt(1, 10), cache_implementation="static")
    assert torch.equal(out, generated(family, 1, 10, 24))


@pytest.mark.slow
def test_hook_in_every_layer():
    """D15: hooks that Dynamo cannot trace break the graph at each layer; the caches are paged all the same."""
    model, seen = build("gemma3"), []

    @torch._dynamo.disable
    def hook(module, args, output):
        seen.append(type(module).__name__)

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(hook)
    backend = Backend(Options(kv_format="model"))
    model.compile(backend=backend)
    out = run(model, prompt(1, 10), 14, return_dict_in_generate=True)
    assert torch.equal(out.sequences, generated("gemma3", 1, 10, 14))
    assert seen and all(isinstance(layer.keys, PagedKVTensor) for layer in out.past_key_values.layers)
    report = gemkv_compile.explain(model, prompt(1, 10))
    assert len(report.graphs) > 1 and any("disable" in reason for reason in report.graph_breaks)
    assert "graph break: " in str(report)


def test_mask_from_outside_the_graph_is_used_exactly():
    """After a graph break the mask is an input: dense, with the reason, and right past the window."""
    model = build("gemma3")
    for layer in model.model.layers:
        layer.register_forward_pre_hook(torch._dynamo.disable(lambda module, args: None))
    backend = Backend(Options(kv_format="model"))
    model.compile(backend=backend)
    assert torch.equal(run(model, prompt(2, 30), 40), run(build("gemma3"), prompt(2, 30), 40))
    reasons = {(site.status, site.reason) for graph in backend.graphs for site in graph.sites}
    assert ("rewritten", "mask_outside_graph") in reasons and all(status == "rewritten" for status, _ in reasons)


def test_unknown_attention_kernel_says_to_set_sdpa():
    """D15: as attn_implementation="flash_attention_2" is one."""
    from transformers import AttentionInterface

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        return opaque_attention(query, key, value, scaling).transpose(1, 2).contiguous(), None

    AttentionInterface.register("opaque", attention)
    model = build("llama")
    model.set_attn_implementation("opaque")
    backend = Backend(Options(kv_format="model"))
    model.compile(backend=backend)
    assert torch.equal(run(model, prompt(1, 10)), generated("llama", 1, 10, 24))
    kept = [site for graph in backend.graphs for site in graph.kept if site.reason == "attention_not_recognised"]
    assert kept and all("attn_implementation='sdpa'" in site.sentence for site in kept)


NEWER = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 24)
newer = pytest.mark.skipif(not NEWER, reason="eager itself fails here before Transformers 5.24")


@newer
def test_crop_then_call_then_prompt_lookup():
    """D14: equal to eager, and no guard fails on a cropped cache."""
    from transformers import DynamicCache

    outs = []
    for model in (build("gemma3"), gemkv_compile.compile(build("gemma3"), kv_format="model", strict=True)):
        cache = DynamicCache(config=model.config)
        for layer in cache.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        logits = []
        with torch.no_grad():
            model(prompt(1, 40), past_key_values=cache)
            for cut in (3, 4, 1):
                cache.crop(-cut)
                logits.append(model(prompt(1, 4, cut), past_key_values=cache).logits)
                logits.append(model(prompt(1, 1, cut), past_key_values=cache).logits)
        outs.append(torch.cat(logits, 1))
        outs.append(run(model, prompt(1, 12).repeat(1, 3), prompt_lookup_num_tokens=3))
    torch.testing.assert_close(outs[2], outs[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(outs[3], outs[1])


@newer
def test_cache_edited_between_calls():
    """A user who edits cached values in place gets what eager gives; also after reset and batch selection."""
    from transformers import DynamicCache

    outs = []
    for model in (build("llama"), gemkv_compile.compile(build("llama"), kv_format="model", strict=True)):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(prompt(3, 70), past_key_values=cache)
            cache.layers[0].keys[:, :, 2:5] *= 0.5
            cache.layers[1].values.mul_(0.9)
            first = model(prompt(3, 2, 1), past_key_values=cache).logits
            cache.batch_select_indices(torch.tensor([2, 0]))
            second = model(prompt(2, 2, 2), past_key_values=cache).logits
            cache.batch_repeat_interleave(2)
            third = model(prompt(4, 1, 3), past_key_values=cache).logits
            cache.reset()
            fourth = model(prompt(2, 3, 4), past_key_values=cache).logits
        outs.append([first, second, third, fourth])
    for ours, theirs in zip(outs[1], outs[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_write_survives_dead_code_elimination_and_a_user_s_pass():
    """B2 (vllm-project/vllm#33945): nothing reads the cache in this graph, and a pass removes what has no users."""
    from torch._inductor import config

    def user_pass(graph):
        graph.eliminate_dead_code()

    def first_call(k, v):
        k, v = k * 1.0, v * 1.0
        return k.sum(), (k, v), torch.nn.functional.scaled_dot_product_attention(k, k, v, is_causal=True)

    k, v = torch.randn(1, 2, 70, 16), torch.randn(1, 2, 70, 16)
    for inner in ("inductor", "eager"):
        torch._dynamo.reset()
        with torch.no_grad(), config.patch(post_grad_custom_post_pass=user_pass, force_disable_caches=True):
            _, (keys, values), _ = gemkv_compile.compile(first_call, kv_format="model", inner=inner)(k, v)
        assert isinstance(keys, PagedKVTensor)
        torch.testing.assert_close(keys.materialise(), k, rtol=0, atol=0)
        torch.testing.assert_close(values.materialise(), v, rtol=0, atol=0)
