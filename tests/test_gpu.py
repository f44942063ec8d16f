"""On a GPU: the same graphs with Inductor around the operators. Run with `make test-gpu`."""

import pytest
import torch
import torch.nn.functional as F
from attention_cases import grown, inputs
from static_models import setitem, static_greedy, static_model
from tiny_models import FAMILIES, LATER_CELLS, build, greedy, prompt, tuple_model

import gemkv_compile
from gemkv_compile import PagedKVTensor
from gemkv_compile.runtime.ledger import kv_memory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def run(model, ids, steps, **kwargs):
    with torch.no_grad():
        return model.generate(ids.cuda(), max_new_tokens=steps, do_sample=False, **kwargs)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_equal_eager_past_the_window(family, inner):
    attention = "eager" if family == "gemma2" else "sdpa"
    plain = build(family, attention).cuda()
    model = gemkv_compile.compile(build(family, attention).cuda(), kv_format="model", inner=inner, strict=True)
    expected = run(plain, prompt(2, 10), 64)
    out = run(model, prompt(2, 10), 64, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected)
    assert all(isinstance(layer.keys, PagedKVTensor) for layer in out.past_key_values.layers)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("family, attention", LATER_CELLS)
def test_later_families_equal_eager_past_the_window(family, attention, inner):
    """Shared keys and values, two head sizes in one model, sinks."""
    pytest.importorskip(f"transformers.models.{family}")
    plain = build(family, attention).cuda()
    model = gemkv_compile.compile(build(family, attention).cuda(), kv_format="model", inner=inner, strict=True)
    expected = run(plain, prompt(2, 10), 40)
    out = run(model, prompt(2, 10), 40, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected)
    layers = [layer for layer in out.past_key_values.layers if layer.keys is not None]
    assert all(isinstance(layer.keys, PagedKVTensor) for layer in layers)


def test_auto_is_inductor_on_a_gpu():
    report = gemkv_compile.explain(build("llama").cuda(), prompt(1, 8).cuda())
    assert report.graphs[0].inner == "inductor"  # whole: gradients may be asked for


@pytest.mark.parametrize("kwargs", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_beams_and_crops(kwargs):
    ids = prompt(1, 12).repeat(1, 3)
    model = gemkv_compile.compile(build("gemma3").cuda(), kv_format="model", inner="eager", strict=True)
    assert torch.equal(run(model, ids, 40, **kwargs), run(build("gemma3").cuda(), ids, 40, **kwargs))


def test_int8_pages_hold_the_same_bytes_as_on_a_cpu():
    pages = []
    for device in ("cpu", "cuda"):
        model = gemkv_compile.compile(tuple_model().to(device), inner="eager", strict=True)
        with torch.no_grad():
            _, pasts = model(prompt(2, 200).to(device))
        rows = pasts[0][0].materialise().cpu()
        pages.append(rows)
        assert kv_memory(pasts).total == kv_memory(pasts).total
    torch.testing.assert_close(pages[1], pages[0], rtol=0.02, atol=0.02)


def test_memory_returns():
    model = gemkv_compile.compile(tuple_model().cuda(), inner="eager", strict=True)
    greedy(model, prompt(2, 3000 // 4).cuda(), 4)  # cuBLAS keeps what it allocates at its first product of a size
    gemkv_compile.trim()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        greedy(model, prompt(2, 3000 // 4).cuda(), 4)
        gemkv_compile.trim()
    assert torch.cuda.memory_allocated() <= before + (2 << 20)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_shadow_explains_the_drift(inner):
    model = gemkv_compile.compile(tuple_model().cuda(), inner=inner, shadow=100)
    greedy(model, prompt(2, 70).cuda(), 10)
    calls = [call for graph in gemkv_compile.report_of(model).graphs for call in graph.shadow]
    assert len(calls) == 10 and not any(call.failure for call in calls)
    assert all(call.rewrite_error.relative < 1e-3 for call in calls if call.rewrite_error is not None)
    assert any(call.format_error is not None and call.format_error.relative > 1e-4 for call in calls)


def dropped(q, k, v, past):
    """Attention with dropout before and after it; a mask is made where the queries are."""
    k, v = grown(k, v, past)
    first = k.shape[2] - q.shape[2]
    queries, keys = (torch.arange(n, device=q.device) for n in (q.shape[2], k.shape[2]))
    mask = keys[None] <= queries[:, None] + first
    out = F.scaled_dot_product_attention(F.dropout(q, 0.5), k, v, attn_mask=mask, enable_gqa=True)
    return F.dropout(out, 0.5), (k, v)


@torch.no_grad()
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_shadow_leaves_the_devices_random_numbers(inner):
    outs = []
    arguments = [tuple(x.cuda() for x in arg) if isinstance(arg, tuple) else arg.cuda() for arg in inputs()]
    for shadow in (0, 5):
        torch._dynamo.reset()
        torch.manual_seed(3)
        function = gemkv_compile.compile(dropped, kv_format="model", inner=inner, shadow=shadow)
        results = [function(*arguments)[0] for _ in range(3)]
        outs.append((*results, torch.cuda.get_rng_state()))
    assert all(map(torch.equal, *outs))
    calls = [call for graph in gemkv_compile.report_of(function).graphs for call in graph.shadow]
    assert len(calls) == 3 and not any(call.failure for call in calls)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("family, tokens", [("llama", 10), ("gemma3", 10), ("gemma3", 40)])
def test_static_caches_equal_eager(family, tokens, inner):
    """Full and sliding layers, from a prompt below the window and one beyond it."""
    options = dict(cache_implementation="static", return_dict_in_generate=True)
    with torch.compiler.set_stance("force_eager"):
        expected = run(build(family).cuda(), prompt(2, tokens), 30, **options)
    model = gemkv_compile.compile(build(family).cuda(), kv_format="model", inner=inner, strict=True)
    out = run(model, prompt(2, tokens), 30, **options)
    assert torch.equal(out.sequences, expected.sequences)
    for ours, theirs in zip(out.past_key_values.layers, expected.past_key_values.layers, strict=True):
        assert isinstance(ours.keys, PagedKVTensor)
        torch.testing.assert_close(ours.keys.materialise(), theirs.keys, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_buffers_of_a_module_become_pages(inner):
    """The caller's own tensors on the device become handles, and their storage is given up."""
    ids = prompt(2, 10).cuda()
    model, plain = (static_model(setitem).cuda() for _ in range(2))
    gemkv_compile.compile(model, kv_format="model", inner=inner, strict=True)
    with torch.device("cuda"):
        assert torch.equal(static_greedy(model, ids, 20), static_greedy(plain, ids, 20))
    assert isinstance(model.layers[0].k_cache, PagedKVTensor)
    torch.testing.assert_close(model.layers[0].k_cache + 0, plain.layers[0].k_cache, rtol=1e-3, atol=1e-4)
