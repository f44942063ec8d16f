"""The option `prefill`: what engines do exactly, how they are called, which one is taken, and what the report says.

No engine runs here: libraries are replaced by the same attention in plain torch, and a fake engine runs on the CPU.
"""

import contextlib
import json
import logging
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import interpreted
import paged_cases as cases
import pytest
import torch
import torch.nn.functional as F
from attention_cases import causal, grown, inputs
from fake_engine import fake_engine
from tiers import tiers
from tiny_models import build, prompt, tuple_model

import gemkv_compile
from gemkv_compile import prefill
from gemkv_compile.errors import GemkvError, InvalidOption
from gemkv_compile.kernels import ops, ops_prompt
from gemkv_compile.kernels.engines import calling, cudnn, fa2, fa3, int8, registry, times
from gemkv_compile.kernels.engines.choice import choose, forget_choices
from gemkv_compile.kernels.engines.engine import OWN, Place, Prompt, token_rows
from gemkv_compile.kernels.engines.measure import measure
from gemkv_compile.kernels.engines.padding import hides_nothing

one_thread = cases.one_thread
CPU = torch.device("cpu")
ROOT = Path(__file__).parent.parent
H200, A100, L4 = (Place("cuda", name, cap) for name, cap in (("NVIDIA H200", (9, 0)), ("A100", (8, 0)), ("T4", (7, 5))))


def of(dtype=torch.bfloat16, head_dim=128, groups=4, causal=True, window=None, softcap=None):
    return Prompt(dtype, head_dim, groups, causal, window, softcap)


@pytest.fixture
def fake(monkeypatch, tmp_path):
    with fake_engine(monkeypatch, tmp_path) as engine:
        yield engine


@pytest.mark.parametrize(
    "engine, which, place, reason",
    [
        (fa3, of(), H200, None),
        (fa3, of(window=5, softcap=3.0, causal=False), H200, None),
        (fa3, of(), A100, "compute capability 9.0"),
        (fa3, of(head_dim=512), H200, "head sizes up to 256, not 512"),
        (fa3, of(torch.float32), H200, "this model is in float32"),
        (fa2, of(torch.float16, 256, window=5, softcap=3.0), A100, None),
        (fa2, of(), L4, "compute capability 8.0 or more"),
        (fa2, of(head_dim=272), A100, "head sizes up to 256, not 272"),
        (fa2, of(torch.float32), A100, "this model is in float32"),
        (cudnn, of(causal=False), A100, None),
        (cudnn, of(), L4, "compute capability 8.0 or more"),
        (cudnn, of(window=5), H200, "no window"),
        (cudnn, of(softcap=3.0), H200, "no softcap"),
        (cudnn, of(head_dim=256), A100, "head sizes up to 128 on A100, not 256"),
        (cudnn, of(torch.float32), H200, "this model is in float32"),
        (int8, of(torch.float16, 256, window=5, softcap=3.0, causal=False), A100, None),
        (int8, of(), L4, "compute capability 8.0 or more"),
        (int8, of(head_dim=512), H200, "head sizes of 64, 128, 256, not 512"),
        (int8, of(torch.float32), H200, "this model is in float32"),
    ],
)
def test_what_engines_refuse(engine, which, place, reason):
    refused = engine.refuses(which, place)
    assert refused is None if reason is None else reason in refused


@pytest.mark.parametrize("version, refused", [(90900, True), (91000, False)])
def test_cudnn_has_wide_heads_from_a_version_on(monkeypatch, version, refused):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    assert (cudnn.refuses(of(head_dim=256), H200) is not None) == refused


def flash(q, k, v, softmax_scale, causal, window_size, softcap=0.0):
    """flash_attn_func in float64: rows first; sizes of a window count the tokens before and after a query's own."""
    groups, (left, right) = q.shape[2] // k.shape[2], window_size
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = softmax_scale * (q @ k.repeat_interleave(groups, 1).mT)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    ahead = torch.arange(k.shape[2])[None] - torch.arange(q.shape[2])[:, None]
    hidden = ((ahead > 0) & causal) | ((ahead < -left) & (left >= 0)) | ((ahead > right) & (right >= 0))
    out = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v.repeat_interleave(groups, 1)
    return out.transpose(1, 2).to(torch.bfloat16)


RULES = [dict(), dict(causal=False), dict(window=40), dict(window=40, causal=False), dict(softcap=2.0)]


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("module", [fa3, fa2], ids=["fa3", "fa2"])
def test_how_flash_attention_is_called(monkeypatch, module, rules):
    """Against the exact attention of a trial, with the library's meaning of its arguments."""
    answer = (lambda *a, **k: (flash(*a, **k), None)) if module is fa3 else flash
    monkeypatch.setattr(module, "_function", lambda: answer)
    assert calling.trial(module.ENGINE, of(head_dim=32, groups=2, **rules), CPU) is None
    monkeypatch.setattr(module, "_function", lambda: lambda q, *rest, **options: answer(1.1 * q, *rest, **options))
    forget_choices()
    assert "a trial was wrong by" in calling.trial(module.ENGINE, of(head_dim=32, groups=2, **rules), CPU)
    forget_choices()


@pytest.mark.parametrize("rules", RULES[:2], ids=str)
def test_how_cudnn_is_called(monkeypatch, rules):
    """Through torch, whose CPU kernel stands for cuDNN's."""
    asked = []
    monkeypatch.setattr(cudnn, "sdpa_kernel", lambda backend: asked.append(backend) or contextlib.nullcontext())
    assert calling.trial(cudnn.ENGINE, of(head_dim=32, groups=2, **rules), CPU) is None
    assert asked == [torch.nn.attention.SDPBackend.CUDNN_ATTENTION]
    forget_choices()


@pytest.mark.skipif(not interpreted.ON, reason="runs on a CPU under Triton's interpreter")
@pytest.mark.parametrize("rules", tiers([RULES[2]], [(rules,) for rules in RULES]), ids=str)
def test_the_int8_kernel_is_called_right_and_allowed_its_error_alone(monkeypatch, rules):
    which = of(head_dim=64, groups=2, **rules)
    assert calling.trial(int8.ENGINE, which, CPU) is None
    forget_choices()
    monkeypatch.setitem(registry.ENGINES, "int8", replace(int8.ENGINE, attend=lambda *a: 1.1 * int8.attend(*a)))
    assert "a trial was wrong by" in calling.trial(int8.ENGINE, which, CPU)
    forget_choices()


def test_an_approximation_is_only_taken_by_name(fake, monkeypatch):
    """Never by "auto", which does not time it either; padding goes to an engine that takes it."""
    masks = []

    def attend(q, k, v, scale, prompt, padding=None):
        masks.append(padding)
        return 1.01 * fake.attend(q, k, v, scale, prompt)

    rough = replace(fake.engine("rough"), attend=attend, error=0.05, takes_padding=True)
    monkeypatch.setitem(registry.ENGINES, "rough", rough)
    forget_choices()
    assert choose("rough", SMALL, 20, CPU).engine == "rough"
    assert "rough" not in measure(SMALL, 20, CPU, 2, lambda run, device: run() is None or 1.0)
    assert choose("auto", SMALL, 20, CPU).engine != "rough" and "rough" not in times.versions()
    for name, engine in list(registry.ENGINES.items()):
        if name != "rough":
            monkeypatch.setitem(registry.ENGINES, name, replace(engine, missing=lambda: "gone"))
    assert not registry.device_kinds("auto") and registry.device_kinds("rough") == {"cpu"}
    masks.clear()
    cache = cases.PagedCache(2, 2, 16, 64, 32, "model")
    q, k, v = (cases.normal(2, heads, 9, 16, seed=i) for i, heads in enumerate((4, 2, 2)))
    for hidden in (0, 3):
        padding = torch.arange(9).expand(2, 9) >= hidden
        ops_prompt.attend_prompt(*prompt_args(cache, q, k, v, "rough", padding=padding))
        assert (masks[-1] is None) if hidden == 0 else torch.equal(masks[-1], padding)
    compiled = gemkv_compile.compile(padded, kv_format="model", strict=True, prefill="rough")
    with torch.no_grad():
        compiled(*inputs()[:3], torch.tensor([[True, True, True], [False, True, True]]))
    (choice,) = gemkv_compile.report_of(compiled).graphs[0].engines
    assert (choice.engine, choice.why) == ("rough", "asked for") and masks[-1] is not None


def test_rows_are_copied_only_where_a_library_needs_it():
    x = torch.randn(2, 12, 4, 16, dtype=torch.bfloat16).transpose(1, 2)
    assert token_rows(x).data_ptr() == x.data_ptr()
    for odd in (x.mT.contiguous().mT, torch.randn(2, 4, 12, 19, dtype=torch.bfloat16)[..., 3:]):
        assert torch.equal(token_rows(odd), odd.transpose(1, 2)) and token_rows(odd).is_contiguous()


@pytest.mark.parametrize(
    "name, module, advice",
    [
        ("fa3", fa3, "pip install fa3-fwd"),
        ("fa2", fa2, "pip install flash-attn"),
        ("cudnn", cudnn, "a build with CUDA"),
        ("int8", int8, "pip install triton"),
    ],
)
def test_an_engine_that_is_not_there_is_an_error_at_once(monkeypatch, name, module, advice):
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    with pytest.raises(InvalidOption, match=f"prefill='{name}': .*{advice}.*prefill='auto'"):
        gemkv_compile.compile(tuple_model(), prefill=name)


def test_an_old_flash_attention_is_not_used(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: object())
    monkeypatch.setattr(fa2, "version", lambda: "2.5.9")
    assert "older than 2.6" in fa2.missing()
    monkeypatch.setattr(fa2, "version", lambda: "2.8.0.post2")
    assert fa2.missing() is None


def prompt_args(cache, q, k, v, engine, softcap=None, causal=True, window=None, padding=None):
    state = cache.seq_lens.max().long(), cache.page_table, cache.seq_lens, cache.starts, cache.tail
    return q, k, v, *state, padding, 0.25, softcap, causal, window, engine, *cache.format_args


@pytest.mark.parametrize("engine, lengths", [("fake", ()), (OWN, ()), ("fake", (70, 3))])
@pytest.mark.parametrize("hidden", [None, 0, 2])
@pytest.mark.parametrize("rules", [dict(), dict(window=5), dict(causal=False), dict(window=50)], ids=str)
def test_the_operator(fake, engine, lengths, rules, hidden):
    """Like dense attention in float64, whoever computes; where tokens are stored our kernel does. opcheck."""
    cache = cases.PagedCache(2, 2, 16, 64, 32, "model").fill(lengths)
    cache.tail.nan_to_num_(0.0)
    q, k, v = (cases.strided(cases.normal(2, heads, 9, 16, seed=i)) for i, heads in enumerate((4, 2, 2)))
    if hidden is not None:
        stored = torch.zeros(2, 1) + cache.seq_lens[:, None]
        column = torch.arange(int(cache.seq_lens.max()) + 9)
        rules = rules | {"padding": (column < stored) | (column >= stored + hidden)}
    args = prompt_args(cache, q, k, v, engine, **rules)
    out = ops_prompt.attend_prompt(*args)
    expected, _ = cases.dense_attention(cache, q, k, v, scale=0.25, **rules)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert out.transpose(1, 2).is_contiguous() and len(fake.prompts) == (
        engine == "fake" and not lengths and not hidden
    )
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(ops_prompt.attend_prompt, args, test_utils=checks)
    schema = str(torch.ops.gemkv.attend_prompt.default._schema)
    assert schema.endswith("SymInt? window, str engine, SymInt page_size, str kv_format, str version) -> Tensor")
    assert "!" not in schema


def test_the_operator_does_not_wait_for_a_length():
    cache = cases.PagedCache(1, 2, 16, 64, 32)
    q, k, v = (cases.normal(1, 2, 9, 16, seed=i) for i in range(3))
    args = list(prompt_args(cache, q, k, v, OWN))
    args[3] = torch.empty((), dtype=torch.int64, device="meta")
    with pytest.raises(Exception, match=r"stored must be on the host, got a tensor on meta"):
        ops_prompt.attend_prompt._init_fn(*args)


def test_the_operator_has_no_gradient(fake):
    cache = cases.PagedCache(1, 2, 16, 64, 32)
    q, k, v = (cases.normal(1, 2, 9, 16, seed=i).requires_grad_() for i in range(3))
    with pytest.raises(NotImplementedError, match=r"attend_prompt has no gradient.*use gemkv::attend_chunk"):
        ops_prompt.attend_prompt(*prompt_args(cache, q, k, v, "fake")).sum().backward()


def test_a_cap_that_the_engine_has_not_is_our_kernels(fake):
    cache = cases.PagedCache(1, 2, 16, 64, 32)
    q, k, v = (cases.normal(1, 2, 9, 16, seed=i) for i in range(3))
    out = ops_prompt.attend_prompt(*prompt_args(cache, q, k, v, "fake", softcap=1.5))
    state = cache.page_table, cache.seq_lens, cache.starts, cache.tail
    whole = ops.attend_chunk(q, k, v, *state, None, None, None, 0.25, 1.5, True, None, *cache.format_args)[0]
    assert torch.equal(out, whole) and fake.calls == []
    assert choose("fake", of(softcap=1.5), 9, CPU).why == "fake was asked for: it has no softcap"


def generate(model, ids, steps=6, **kwargs):
    with torch.no_grad():
        return model.generate(ids, max_new_tokens=steps, do_sample=False, **kwargs)


def test_generate_with_an_engine(fake):
    """A prompt above the window, in both kinds of layers; decode steps are our kernel's."""
    plain, model = build("gemma3"), gemkv_compile.compile(build("gemma3"), kv_format="model", prefill="fake")
    assert torch.equal(generate(model, prompt(2, 40)), generate(plain, prompt(2, 40)))
    assert fake.prompts == [40] * 2 and {which.window for tokens, which in fake.calls if tokens == 40} == {16, None}
    assert str(gemkv_compile.report_of(model).graphs[0].engines[0]) == "layer 0, 1: fake (asked for)"


def test_only_the_first_chunk_is_the_engines(fake):
    plain, model = tuple_model(), gemkv_compile.compile(tuple_model(), kv_format="model", strict=True, prefill="fake")
    pasts = dense = None
    with torch.no_grad():
        for tokens in (30, 12, 1, 70):
            ids = prompt(2, tokens, tokens)
            logits, pasts = model(ids, pasts)
            expected, dense = plain(ids, dense)
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert fake.prompts == [30, 30]
    assert "triton (tokens may be stored before its own)" in str(gemkv_compile.report_of(model))


def whole(q, k, v, past):
    k, v = k * 1, v * 1
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), (k, v)


def full(q, k, v, past):
    k, v = k * 1, v * 1
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True), (k, v)


def continued(q, k, v, past):
    k, v = grown(k, v, past)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal(q, k), enable_gqa=True), (k, v)


def biased(q, k, v, past):
    k, v = k * 1, v * 1
    bias = torch.sin(torch.arange(float(k.shape[2])))[None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True), (k, v)


def padded(q, k, v, mask):
    k, v = k * 1, v * 1
    seen = causal(q, k) & mask[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True), (k, v)


def last_queries(q, k, v, past):
    k, v = k * 1, v * 1
    return F.scaled_dot_product_attention(q[:, :, -2:], k, v, enable_gqa=True), (k, v)


def split(x):
    """Queries, keys and values of [batch, tokens, 128]."""
    return [part.unflatten(2, (-1, 16)).transpose(1, 2) for part in x.split((64, 32, 32), 2)]


def placed(x, cache, places):
    """Rows go to the start of a static cache, and attention sees as many first ones as there are new ones."""
    q, *new = split(x)
    for memory, rows in zip(cache, new, strict=True):
        memory.index_copy_(2, places, rows)
    own = (memory[:, :, : x.shape[1]] for memory in cache)
    return F.scaled_dot_product_attention(q, *own, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize(
    "function, reason",
    [
        (whole, ""),
        (full, ""),
        (continued, "tokens may be stored before its own"),
        (biased, "its mask is used densely"),
        (last_queries, "only its last tokens have queries"),
    ],
)
def test_which_attentions_are_prompts(fake, function, reason):
    expected = function(*inputs(past=5))[0]
    compiled = gemkv_compile.compile(function, kv_format="model", strict=True, prefill="fake")
    with torch.no_grad():
        out = compiled(*inputs(past=5))[0]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    (choice,) = gemkv_compile.report_of(compiled).graphs[0].engines
    assert (choice.engine, choice.why) == ((OWN, reason) if reason else ("fake", "asked for"))
    assert fake.prompts == ([] if reason else [3])
    (site,) = gemkv_compile.report_of(compiled).sites
    assert site.operator == ("attend_chunk" if reason and function is not continued else "attend_prompt")


@pytest.mark.parametrize("hidden", [True, False])
def test_where_padding_hides_tokens_it_is_our_kernel(fake, hidden):
    mask = torch.tensor([[True, True, True], [not hidden, True, True]])
    compiled = gemkv_compile.compile(padded, kv_format="model", strict=True, prefill="fake")
    with torch.no_grad():
        out = compiled(*inputs()[:3], mask)[0]
    expected = padded(*inputs()[:3], mask)[0]
    torch.testing.assert_close(out[:, :, 1:], expected[:, :, 1:], rtol=1e-5, atol=1e-5)
    (choice,) = gemkv_compile.report_of(compiled).graphs[0].engines
    assert (choice.engine, choice.why) == ("fake", "asked for; triton where the padding mask hides a token")
    assert fake.prompts == ([] if hidden else [3])


@pytest.mark.parametrize("stored", [(), (70, 3)])
@pytest.mark.parametrize("hidden", [0, 2])
def test_a_kernel_without_masks_may_run_where_padding_hides_nothing(stored, hidden, monkeypatch):
    """Where the Hopper kernel would attend: our kernel gets no padding, unless some is hidden."""
    given, real = [], ops_prompt.implementation

    def spied(name, device):
        return lambda *args: given.append(args[7]) or real(name, device)(*args)

    monkeypatch.setattr(ops_prompt, "implementation", spied)
    monkeypatch.setattr("gemkv_compile.kernels.attend_chunk.variants.takes_hopper", lambda *_: True)
    cache = cases.PagedCache(2, 2, 16, 64, 32, "model").fill(stored)
    cache.tail.nan_to_num_(0.0)
    q, k, v = (cases.normal(2, heads, 9, 16, seed=i) for i, heads in enumerate((4, 2, 2)))
    padding = torch.ones(2, int(cache.seq_lens.max()) + 9, dtype=torch.bool)
    padding[1, :hidden] = False
    out = ops_prompt.attend_prompt(*prompt_args(cache, q, k, v, OWN, padding=padding))
    expected, _ = cases.dense_attention(cache, q, k, v, scale=0.25, padding=padding)
    seen = padding[:, -9:, None].expand(2, 9, 16).unsqueeze(1)
    torch.testing.assert_close(out.double() * seen, expected * seen, rtol=1e-5, atol=1e-5)
    assert [x is None for x in given] == [not hidden]


def test_what_padding_hides_is_asked_once_a_mask():
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, 7:] = False
    assert hides_nothing(None, 9) and hides_nothing(mask, 7) and not hides_nothing(mask, 8)
    assert not hides_nothing(mask, 10)  # shorter than the prompt
    assert hides_nothing(mask, 7)
    mask[1, 0] = False  # seen, because a tensor counts its changes
    assert not hides_nothing(mask, 7)
    with torch.inference_mode():
        assert hides_nothing(torch.ones(1, 4, dtype=torch.bool), 4)


@pytest.mark.parametrize("inner", tiers(["eager"], [("inductor",)]))
def test_a_mask_of_ones_is_asked_about_by_the_first_layer(fake, inner, monkeypatch):
    """`generate` gives a mask with every prompt: one question for all layers, and the engine does the prompt."""
    asked, real = [], torch.Tensor.all
    monkeypatch.setattr(torch.Tensor, "all", lambda x, *rest: asked.append(x.shape) or real(x, *rest))
    model, ids = build("llama"), prompt(2, 20)
    options = {"max_new_tokens": 3, "do_sample": False}
    with torch.no_grad():
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        gemkv_compile.compile(model, kv_format="model", strict=True, prefill="fake", inner=inner)
        asked.clear()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        padded_mask = torch.ones_like(ids)
        padded_mask[0, :3] = 0
        layers = len(fake.prompts)
        assert layers == model.config.num_hidden_layers and len([shape for shape in asked if shape == (2, 20)]) == 1
        model.generate(ids, attention_mask=padded_mask, **options)
    assert torch.equal(out, expected) and len(fake.prompts) == layers


def test_a_past_of_no_rows_is_none(fake):
    q, k, v, past = inputs(past=0)
    compiled = gemkv_compile.compile(continued, kv_format="model", strict=True, prefill="fake")
    with torch.no_grad():
        out, new = compiled(q, k, v, past)
        assert fake.prompts == [3]
        again, _ = compiled(q, k, v, new)
    torch.testing.assert_close(out, continued(q, k, v, past)[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(again, continued(q, k, v, (k, v))[0], rtol=1e-5, atol=1e-5)
    assert fake.prompts == [3]


def test_the_start_of_a_static_cache(fake):
    """Also over what a longer text left there."""
    caches = [tuple(torch.zeros(2, 2, 32, 16) for _ in range(2)) for _ in range(2)]
    compiled = gemkv_compile.compile(placed, kv_format="model", strict=True, prefill="fake")
    for tokens in (20, 6):
        x = torch.randn(2, tokens, 128)
        with torch.no_grad():
            outs = [
                each(x, cache, torch.arange(tokens)) for each, cache in zip((compiled, placed), caches, strict=True)
            ]
        torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)
        assert fake.prompts[-1] == tokens
        torch.testing.assert_close(caches[0][0].materialise()[:, :, :tokens], caches[1][0][:, :, :tokens])


def test_gradients_are_our_kernels(fake):
    model, plain = (gemkv_compile.compile(tuple_model(), prefill="fake", kv_format="model"), tuple_model())
    with torch.no_grad():
        _, pasts = model(prompt(2, 40))
        _, dense = plain(prompt(2, 40))
    assert fake.prompts == [40, 40]
    fake.calls.clear()
    losses = [some(prompt(2, 9, 1), past)[0].square().mean() for some, past in ((model, pasts), (plain, dense))]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(model.head.weight.grad, plain.head.weight.grad, rtol=1e-4, atol=1e-6)
    assert fake.prompts == []


def test_a_wrong_engine_is_found_out(monkeypatch, tmp_path):
    """Its answer to a small prompt is compared before it is given a user's."""
    with fake_engine(monkeypatch, tmp_path, wrong=0.01) as wrong:
        compiled = gemkv_compile.compile(whole, kv_format="model", prefill="fake")
        with torch.no_grad():
            out = compiled(*inputs())[0]
        torch.testing.assert_close(out, whole(*inputs())[0], rtol=1e-5, atol=1e-5)
        (choice,) = gemkv_compile.report_of(compiled).graphs[0].engines
        assert choice.engine == OWN and "fake was asked for: a trial was wrong by 1.0e-02" in choice.why
        assert wrong.prompts == []
        forget_choices()
        wrong.broken = True
        assert choose("fake", of(torch.float32, 16), 9, CPU).why == (
            "fake was asked for: a trial failed: RuntimeError: out of order"
        )


def test_an_engine_that_fails_later_is_an_error_and_the_cache_stays(fake):
    """No silent change of the engine within a run; what was cached is as it was."""
    model = gemkv_compile.compile(tuple_model(), kv_format="model", strict=True, prefill="fake")
    with torch.no_grad():
        _, pasts = model(prompt(1, 30))
        before = pasts[0][0].materialise()
        fake.broken = True
        with pytest.raises(GemkvError, match=r"engine fake failed on queries .*out of order.*prefill='triton'"):
            model(prompt(1, 30))
        logits, _ = model(prompt(1, 4, 1), pasts)
        assert torch.equal(pasts[0][0].materialise(), before)
        dense = [tuple(part.materialise() for part in pair) for pair in pasts]
        torch.testing.assert_close(logits, tuple_model()(prompt(1, 4, 1), dense)[0], rtol=1e-4, atol=1e-4)


def test_a_trial_draws_no_random_number_of_the_users(fake):
    state = torch.get_rng_state()
    choose("fake", of(torch.float32, 16), 9, CPU)
    measure(of(torch.float32, 16), 20, CPU, 1, timer=lambda run, device: 1.0)
    assert torch.equal(torch.get_rng_state(), state)


SMALL = of(torch.float32, 16, 2)


def test_auto_takes_the_fastest(fake):
    """What is known of a class and a length decides; what is not known is our kernel's."""
    place = Place.of(CPU)
    assert choose("auto", SMALL, 4096, CPU).why.startswith("no times are known for this length; gemkv tune")
    times.save_times(SMALL, 4096, {"triton": 20.0, "fake": 10.0, "gone": 1.0}, place)
    times.save_times(SMALL, 64, {"triton": 5.0, "fake": 9.0}, place)
    forget_choices()
    engines = {tokens: choose("auto", SMALL, tokens, CPU).engine for tokens in (31, 32, 64, 127, 2048, 5000, 1 << 19)}
    assert engines == {31: OWN, 32: OWN, 64: OWN, 127: OWN, 2048: "fake", 5000: "fake", 1 << 19: "fake"}
    assert choose("auto", SMALL, 31, CPU).why.startswith("no times are known")
    assert choose("auto", SMALL, 5000, CPU).why == (
        "fake 10, triton 20 us at 4096 tokens, 2 query heads a K/V head; measured here"
    )
    near, far = of(torch.float32, 16, 8), of(torch.float32, 32, 2)
    assert choose("auto", near, 5000, CPU).engine == "fake" and choose("auto", far, 5000, CPU).engine == OWN
    assert choose("auto", of(torch.float32, 16, 2, window=99), 5000, CPU).engine == OWN  # no window was timed
    assert choose("auto", of(torch.float32, 16, 2, window=9999), 5000, CPU).engine == "fake"  # it hides nothing
    assert choose("auto", of(torch.float32, 16, 2, softcap=9.0), 5000, CPU).why.startswith("no other engine")


def test_the_nearest_class_counts(monkeypatch, tmp_path):
    monkeypatch.setenv("GEMKV_CACHE_DIR", str(tmp_path))
    for groups, tokens, us in ((1, 1024, 1.0), (8, 1024, 2.0), (8, 8192, 3.0)):
        times.save_times(of(groups=groups), tokens, {"triton": us}, A100)
    known = [times.known_times(of(groups=g), n, A100).us["triton"] for g, n in ((2, 8192), (4, 1024), (4, 8192))]
    assert known == [1.0, 2.0, 3.0]
    assert times.known_times(of(torch.float16, groups=8), 8192, A100).us == {"triton": 3.0}
    assert times.known_times(of(head_dim=64), 8192, A100) is None is times.known_times(of(), 256, A100)
    assert times.known_times(of(), 1024, L4) is None  # another GPU's file


def test_times_are_replaced_and_written_whole(monkeypatch, tmp_path):
    monkeypatch.setenv("GEMKV_CACHE_DIR", str(tmp_path / "new"))
    for us in (1.0, 2.0):
        path = times.save_times(of(), 64, {"triton": us}, A100)
    assert [row["us"] for row in json.loads(path.read_text())["rows"]] == [{"triton": 2.0}]
    monkeypatch.setattr(times.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        times.save_times(of(), 64, {"triton": 3.0}, A100)
    assert times.known_times(of(), 64, A100).us == {"triton": 2.0}
    assert [each.name for each in path.parent.iterdir()] == [path.name]


BROKEN = ["{", "[]", "{}", '{"rows": [{}]}', '{"rows": [{"us": 3}]}', '{"rows": 7}', b"\xff\xfe\x00"]


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_file_is_ignored_and_said(monkeypatch, tmp_path, caplog, content):
    monkeypatch.setenv("GEMKV_CACHE_DIR", str(tmp_path))
    path = times.save_times(of(), 64, {"triton": 1.0}, A100)
    assert times.known_times(of(), 64, A100) is not None
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with caplog.at_level(logging.WARNING):
        assert times.known_times(of(), 64, A100) is None
    assert str(path) in caplog.text and "is ignored" in caplog.text
    times.save_times(of(), 64, {"triton": 1.0}, A100)
    assert times.known_times(of(), 64, A100) is not None


def test_times_are_for_one_set_of_versions(monkeypatch, tmp_path):
    monkeypatch.setenv("GEMKV_CACHE_DIR", str(tmp_path))
    times.save_times(of(), 64, {"triton": 1.0}, A100)
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert times.known_times(of(), 64, A100) is None
    monkeypatch.undo()
    monkeypatch.setenv("GEMKV_CACHE_DIR", str(tmp_path))
    assert times.known_times(of(), 64, A100) is not None
    with fake_engine(monkeypatch, tmp_path):
        assert times.known_times(of(), 64, A100) is None


def test_where_times_are_kept(monkeypatch, tmp_path):
    for name in ("GEMKV_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert times.cache_folder() == Path.home() / ".cache" / "gemkv_compile"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert times.cache_folder() == tmp_path / "gemkv_compile"


def test_measuring(fake, monkeypatch):
    """Each engine that does the class, once, at the bucket's length; an engine that fails is left out."""
    timed = []

    def timer(run, device):
        timed.append(run().shape)
        return 10.0 + len(timed)

    assert measure(SMALL, 50, CPU, 3, timer) == {"triton": 11.0, "fake": 12.0}
    assert timed == [torch.Size((1, 6, 32, 16))] * 2
    known = times.known_times(SMALL, 32, Place.of(CPU))
    assert known.us == {"triton": 11.0, "fake": 12.0} and known.source == "measured here"
    assert measure(of(torch.float32, 16, 2, softcap=1.0), 50, CPU, 3, timer) == {"triton": 13.0}
    fake.broken = False
    choose("fake", SMALL, 32, CPU)
    monkeypatch.setattr(fake, "wrong", 0.0)

    def failing(run, device):
        if len(fake.prompts) < 3:
            return run() is not None
        raise RuntimeError("later")

    assert "triton" in measure(SMALL, 50, CPU, 3, failing)


def test_the_clock():
    from gemkv_compile.kernels.engines.measure import median_us

    assert 2e4 <= median_us(lambda: time.sleep(0.02), CPU) < 2e6  # the unit


def packed(x):
    return whole(*split(x), None)


def compiled_auto(tokens, **options):
    """The report of a compile with a prompt of that length."""
    options = {"kv_format": "model", "strict": True, "prefill": "auto"} | options
    function, x = gemkv_compile.compile(packed, **options), torch.randn(1, tokens, 128)
    with torch.no_grad():
        out = function(x)[0]
    torch.testing.assert_close(out, packed(x)[0], rtol=1e-4, atol=1e-5)
    return gemkv_compile.report_of(function).graphs[0].engines


def test_auto_times_once_what_is_not_known(fake, monkeypatch):
    """At the first compile of a class, for long prompts; later compiles and processes read the file."""
    asked = []

    def timed(prompt, tokens, device, kv_heads):
        asked.append((prompt, tokens, kv_heads))
        return measure(prompt, tokens, device, kv_heads, lambda run, device: float(9 - len(fake.prompts)))

    monkeypatch.setattr(prefill, "measure", timed)
    monkeypatch.setattr(prefill, "WORTH_TIMING", 100)
    monkeypatch.setattr(prefill, "MOST_TIMED", 128)
    (short,) = compiled_auto(99)
    assert asked == [] and (short.engine, short.shortest) == (OWN, None)
    first = compiled_auto(300)
    assert asked == [(SMALL, 128, 2)] and len(first) > 1
    forget_choices()
    assert compiled_auto(301) == first and len(asked) == 1
    assert compiled_auto(301, prefill="triton") == () and len(asked) == 1


def test_auto_goes_on_where_timing_fails(fake, monkeypatch, caplog):
    monkeypatch.setattr(prefill, "WORTH_TIMING", 2)
    monkeypatch.setattr(prefill, "measure", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no room")))
    with caplog.at_level(logging.WARNING):
        (choice,) = compiled_auto(70)
    assert choice.engine == OWN and "engines were not timed (OutOfMemoryError: no room)" in caplog.text


def test_the_report_says_from_which_length_on(fake):
    times.save_times(SMALL, 64, {"triton": 5.0, "fake": 9.0}, Place.of(CPU))
    times.save_times(SMALL, 128, {"triton": 9.0, "fake": 5.0}, Place.of(CPU))
    unknown, below, above = compiled_auto(70)
    assert (unknown.engine, unknown.shortest, unknown.longest) == (OWN, None, 31)
    assert (below.engine, below.shortest, below.longest) == (OWN, 32, 127)
    assert (above.engine, above.shortest, above.longest) == ("fake", 128, None)
    assert str(above) == (
        "layer 0: fake from 128 tokens (fake 5, triton 9 us at 128 tokens, 2 query heads a K/V head; measured here)"
    )
    assert fake.prompts == []
    compiled_auto(130)
    assert fake.prompts == [130]


def test_shipped_times_are_the_results_and_decide_on_an_h200(monkeypatch, tmp_path):
    """FA3 where it is installed and faster, else our Hopper kernel; nothing below half of what was timed."""
    monkeypatch.setenv("GEMKV_CACHE_DIR", str(tmp_path))
    script = ROOT / "examples" / "benchmarks" / "prefill_engines.py"
    run = [sys.executable, str(script), "--check"]
    assert subprocess.run(run, check=False, env={"PYTHONPATH": str(script.parent), "PATH": ""}).returncode == 0
    for which in (of(), of(head_dim=256, groups=2), of(torch.float16, 256, 1)):
        us = times.known_times(which, 8192, H200).us
        assert set(us) == {"fa3", "cudnn", "triton"} and us["triton"] < us["cudnn"]
    assert set(times.known_times(of(head_dim=512), 65536, H200).us) == {"triton"}
    assert times.known_times(of(), 2048, H200) is None and times.known_times(of(), 8192, A100) is None


def test_engine_names_are_those_of_the_documents():
    for document in ("README.md", "DESIGN.md"):
        text = (ROOT / document).read_text()
        assert [name for name in registry.ENGINES if f'"{name}"' not in text and f"`{name}`" not in text] == []


def test_the_command_tune(fake, capsys, tmp_path, monkeypatch):
    from gemkv_compile.cli.main import main
    from gemkv_compile.kernels.engines import measure as measuring

    seconds = iter([30e-6, 20e-6] * 2)
    clock = SimpleNamespace(blocked_autorange=lambda min_run_time: SimpleNamespace(median=next(seconds)))
    monkeypatch.setattr(measuring, "Clock", lambda *args, **options: clock)
    shape = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--dtype", "float32", "--device", "cpu"]
    assert main(["tune", *shape, "--tokens", "20,33,40"]) == 0
    out = capsys.readouterr().out
    assert out.count("│ fake") >= 2 and f"kept in {tmp_path}" in out.replace("\n", "")
    assert "fa3, 2 x 16, float32: it does not run on a cpu device" in out
    assert choose("auto", SMALL, 20, CPU).why.startswith("fake 20, triton 30 us at 16 tokens")
    for mistake, message in (
        (["tune"], "needs a model, or --heads"),
        (["tune", *shape, "--tokens", "1k"], "got '1k'"),
        (["tune", *shape[:-2]], "on a CUDA GPU, and there is none"),
    ):
        if "CUDA" not in message or not torch.cuda.is_available():
            assert main([*mistake, *(["--device", "cpu"] if len(mistake) == 1 else [])]) == 1
            assert message in " ".join(capsys.readouterr().err.split())


def test_shapes_of_a_model(tmp_path):
    import argparse

    from gemkv_compile.cli.tune import shapes

    for family, expected in (
        ("gemma3", [(2, 16, 2, None), (2, 16, 2, 16)]),
        ("gemma2", [(2, 16, 2, None), (2, 16, 2, 16)]),
        ("llama", [(2, 16, 2, None)]),
        ("mistral", [(2, 16, 2, 16)]),
    ):
        path = tmp_path / family
        build(family, "eager").config.save_pretrained(path)
        found = list(shapes(argparse.Namespace(model=str(path), dtype="float16")))
        assert [(heads, p.head_dim, p.groups, p.window) for heads, p in found] == expected
        assert {p.softcap for _, p in found} == {50.0 if family == "gemma2" else None}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"split_layers": False}], ids=str)
def test_under_inductor(fake, options):
    """The number of stored tokens is an input on the host; lengths are symbols."""
    plain, model = tuple_model(), tuple_model()
    gemkv_compile.compile(model, kv_format="model", strict=True, inner="inductor", prefill="fake", **options)
    with torch.no_grad():
        for tokens in (30, 41, 52):
            pasts = dense = None
            for count in (tokens, 12):
                ids = prompt(2, count, count)
                logits, pasts = model(ids, pasts)
                expected, dense = plain(ids, dense)
                torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    assert fake.prompts == [30, 30, 41, 41, 52, 52]
