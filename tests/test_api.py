"""The ways to compile, the options, and what is said about mistakes."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from attention_cases import inputs, sdpa, tree_close
from tiny_models import TupleModel, build, generated, prompt, tuple_model

import gemkv_compile
from gemkv_compile import Options, PagedKVTensor
from gemkv_compile.errors import GemkvError, InvalidOption


def is_paged(result):
    return isinstance(result[1][0], PagedKVTensor)


@torch.no_grad()
def test_function():
    out = gemkv_compile.compile(sdpa, kv_format="model")(*inputs())
    assert is_paged(out)
    tree_close(out, sdpa(*inputs()), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_decorators_bare_and_with_options():
    @gemkv_compile.compile
    def bare(q, k, v, past):
        return sdpa(q, k, v, past)

    @gemkv_compile.compile(kv_format="model", strict=True)
    def with_options(q, k, v, past):
        return sdpa(q, k, v, past)

    for function, kv_format in ((bare, "int8"), (with_options, "model")):
        out = function(*inputs())
        assert is_paged(out) and out[1][0].table.pool.layout.kv_format == kv_format


@torch.no_grad()
def test_decorator_on_a_forward_method():
    class Decorated(TupleModel):
        @gemkv_compile.compile(kv_format="model")
        def forward(self, ids, pasts=None):
            return super().forward(ids, pasts)

    torch.manual_seed(0)
    _, pasts = Decorated().eval()(prompt(1, 5))
    assert isinstance(pasts[0][0], PagedKVTensor)


@torch.no_grad()
@pytest.mark.parametrize("how", ["module", "function", "decorator"])
def test_guard_filter(how):
    """torch.compile's option: guards on modules are left out, others are not: another length is still traced anew."""
    seen = []

    def no_modules(entries):
        kept = torch.compiler.skip_guard_on_all_nn_modules_unsafe(entries)
        seen.append((len(kept), sum(kept)))
        return kept

    model, plain, options = tuple_model(), tuple_model(), dict(kv_format="model", guard_filter_fn=no_modules)
    call = model
    if how == "module":
        gemkv_compile.compile(model, **options)
    elif how == "function":
        call = gemkv_compile.compile(model.forward, **options)
    else:
        call = gemkv_compile.compile(**options)(model.forward)
    for tokens in (5, 9):
        ids = prompt(1, tokens)
        torch.testing.assert_close(call(ids)[0], plain(ids)[0], rtol=1e-4, atol=1e-4)
    assert seen and all(0 < kept < total for total, kept in seen)


@torch.no_grad()
def test_module_is_compiled_in_place_and_returned():
    model = build("llama")
    assert gemkv_compile.compile(model) is model
    out = model.generate(prompt(1, 10), max_new_tokens=24, do_sample=False, return_dict_in_generate=True)
    assert isinstance(out.past_key_values.layers[0].keys, PagedKVTensor)


@torch.no_grad()
@pytest.mark.parametrize("way", ["model.compile", "torch.compile"])
def test_by_name(way):
    model = TupleModel().eval()
    options = {"kv_format": "model"}
    if way == "model.compile":
        model.compile(backend="gemkv", options=options)
        compiled = model
    else:
        compiled = torch.compile(model, backend="gemkv", options=options)
    _, pasts = compiled(prompt(1, 5))
    assert pasts[0][0].table.pool.layout.kv_format == "model"


def test_backend_registers_itself_without_an_import(tmp_path):
    code = (
        "import torch\n"
        "f = torch.compile(lambda x: x + 1, backend='gemkv')\n"
        "assert f(torch.ones(2)).tolist() == [2.0, 2.0]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_import_is_lazy(tmp_path):
    code = "import gemkv_compile, sys; assert 'torch' not in sys.modules; assert 'compile' in dir(gemkv_compile)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_without_attention_it_is_the_inner_compiler():
    seen = []

    def inner(module, example_inputs):
        seen.append(module)
        return module.forward

    recorded = []

    def record(module, example_inputs):
        recorded.append(module)
        return gemkv_compile.backend.gemkv(module, example_inputs, options={"inner": inner})

    import gemkv_compile.backend

    torch.compile(lambda x: x.sin() + 1, backend=record)(torch.ones(3))
    assert seen == recorded  # the very graph, untouched


@torch.no_grad()
@pytest.mark.parametrize("inner", ["inductor", "eager", "aot_eager"])
def test_inner_compilers(inner):
    out = gemkv_compile.compile(sdpa, kv_format="model", inner=inner)(*inputs())
    tree_close(out, sdpa(*inputs()), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("relation", [lambda n, rows: n == rows, lambda n, rows: 3 * rows == n], ids=["same", "triple"])
@pytest.mark.parametrize("inner", ["inductor", "eager"])
def test_a_length_beside_the_cache(inner, relation):
    """A guard ties an int to the past's length, and the past is no input of the rewritten graph any more."""
    factor = 1 if relation(1, 1) else 3

    def attend(q, k, v, past, length):
        if not relation(length, past[0].shape[2]):
            raise AssertionError
        keys, values = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        shifted = q + (torch.arange(q.shape[2]) + length)[:, None]
        out = F.scaled_dot_product_attention(shifted, keys, values, scale=0.1)
        return out * length, (keys, values)

    def row():
        return torch.randn(1, 2, 1, 16)

    compiled = gemkv_compile.compile(attend, kv_format="model", inner=inner, strict=True)
    past = torch.randn(2, 1, 2, 9, 16).unbind()
    seen = past
    for length in range(9 * factor, 14 * factor, factor):
        arguments = row(), row(), row()
        expected, past = attend(*arguments, past, length)
        out, seen = compiled(*arguments, seen, length)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert is_paged((out, seen))


@torch.no_grad()
def test_mode_goes_to_inductor():
    compiled = torch.compile(sdpa, backend="gemkv", mode="max-autotune-no-cudagraphs")
    assert is_paged(compiled(*inputs()))
    with pytest.raises(Exception, match="needs inner='inductor'"):
        gemkv_compile.compile(sdpa, mode="max-autotune", inner="eager")(*inputs())


MISTAKES = [
    ({"kv_formt": "int8"}, "gemkv has no option 'kv_formt'. Did you mean 'kv_format'?"),
    ({"zzz": 1}, "gemkv has no option 'zzz'. Options are: kv_format, page_size"),
    (
        {"kv_format": "int9"},
        "kv_format must be one of 'int8', 'k8v4', 'k6v4', 'int4', 'model', got 'int9'. Did you mean 'int8'?",
    ),
    ({"page_size": 100}, r"page_size must be a multiple of group_size \(64\), got 100"),
    ({"page_size": 0}, "page_size must be a positive int, got 0"),
    ({"page_size": True}, "page_size must be a positive int, got True"),
    ({"group_size": 40}, "group_size must be a multiple of 16, got 40"),
    ({"pool_bytes": -5}, "pool_bytes must be a positive int, got -5"),
    ({"strict": "yes"}, "strict must be True or False, got 'yes'"),
    ({"cuda_graphs": "yes"}, "cuda_graphs must be True or False, got 'yes'"),
    (
        {"prefill": "fa4"},
        "prefill must be one of 'auto', 'triton', 'fa3', 'fa2', 'cudnn', 'int8', got 'fa4'. Did you mean 'fa3'?",
    ),
    ({"drop": "attention_mass"}, "drop must be None or a policy with a method choose, got 'attention_mass'"),
    ({"shadow": -1}, "shadow must be an int of at least 0, a number of calls, got -1"),
    ({"shadow": True}, "shadow must be an int of at least 0, a number of calls, got True"),
    ({"shadow": "3"}, "shadow must be an int of at least 0, a number of calls, got '3'"),
    ({"inner": 7}, "inner must be one of .* got 7"),
    ({"inner": ""}, "inner must be one of .* got ''"),
]


@pytest.mark.parametrize("options, message", MISTAKES)
def test_mistakes_in_options(options, message):
    """Nothing is accepted and ignored (vllm-project/vllm#14221)."""
    with pytest.raises(InvalidOption, match=message):
        gemkv_compile.compile(sdpa, **options)
    with pytest.raises(Exception, match=message):
        torch.compile(sdpa, backend="gemkv", options=options)(*inputs())


@pytest.mark.parametrize(
    "options, message",
    [
        ({1: 2}, "gemkv has no option 1. Options are: kv_format"),
        (["strict"], r"options must be a dict .* \['strict'\]"),
    ],
)
def test_options_that_are_no_mapping_of_names(options, message):
    with pytest.raises(InvalidOption, match=message):
        Options.from_mapping(options)


def test_unknown_inner_compiler():
    with pytest.raises(Exception, match="inner='nonsense' is no torch.compile backend"):
        gemkv_compile.compile(sdpa, inner="nonsense")(*inputs())


def test_options_are_frozen():
    with pytest.raises(AttributeError):
        Options().strict = True


def test_what_cannot_be_compiled():
    with pytest.raises(TypeError, match="takes an nn.Module or a function, got int"):
        gemkv_compile.compile(3)
    with pytest.raises(TypeError, match="Decorate the forward method"):
        gemkv_compile.compile(TupleModel)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = gemkv_compile.nonsense


@torch.no_grad()
def test_strict_raises_with_the_table():
    """A6: what is not matched is not lost quietly."""
    from attention_cases import cache_used_elsewhere

    with pytest.raises(Exception, match=r"(?s)strict=True, and 1 of 1 attentions are kept.*cache_used_elsewhere"):
        gemkv_compile.compile(cache_used_elsewhere, strict=True)(*inputs())


@torch.no_grad()
def test_pool_limit_is_an_error_and_loses_nothing():
    """Out of pages: the message names the pool and the option; the past still works once there is room."""
    model = gemkv_compile.compile(TupleModel().eval(), kv_format="model", pool_bytes=4 << 20, page_size=64)
    plain = TupleModel().eval()
    plain.load_state_dict(model.state_dict())
    logits, pasts = model(prompt(8, 60))
    others, message = [], ""
    while not message:
        try:
            others.append(model(prompt(8, 64))[1])
        except GemkvError as error:
            message = str(error)
    assert "pool model[2x16, page 64] on cpu is full" in message and "pool_bytes" in message
    with pytest.raises(GemkvError, match="Every cache is still valid"):
        model(prompt(8, 4), pasts)
    others.clear()
    ours, _ = model(prompt(8, 4), pasts)
    torch.testing.assert_close(
        ours, plain(torch.cat([prompt(8, 60), prompt(8, 4)], 1))[0][:, 60:], rtol=1e-4, atol=1e-4
    )
    assert logits.shape == (8, 60, 256)


@torch.no_grad()
def test_wrong_pasts():
    model = gemkv_compile.compile(TupleModel().eval())
    _, pasts = model(prompt(2, 70))
    with pytest.raises(Exception, match="Sizes of tensors must match"):  # eager's own error, while tracing
        model(prompt(3, 1), pasts)
    pasts[0][0].release()
    with pytest.raises(GemkvError, match="was released"):
        model(prompt(2, 1), pasts)


@torch.no_grad()
def test_eager_prefill_is_imported():
    """A cache that was filled outside compiled code: real tensors are paged at the next call."""
    plain = build("gemma3")
    ids = prompt(1, 40)
    out = plain(ids, use_cache=True)
    model = gemkv_compile.compile(plain, kv_format="model", strict=True)
    cache, token, tokens = out.past_key_values, out.logits[:, -1:].argmax(-1), []
    for _ in range(24):
        tokens.append(token)
        step = model(token, past_key_values=cache, use_cache=True)
        cache, token = step.past_key_values, step.logits[:, -1:].argmax(-1)
    assert isinstance(cache.layers[0].keys, PagedKVTensor)
    assert torch.equal(torch.cat([ids, *tokens], 1), generated("gemma3", 1, 40, 24))


def test_two_devices():
    """Keys on one device and queries on another: eager's own error, nothing of ours in between."""
    q, k, v, past = inputs()
    with torch.no_grad(), pytest.raises(Exception, match="device"):
        gemkv_compile.compile(sdpa)(q, k, v, tuple(t.to("meta") for t in past))


def test_autocast():
    """Under autocast the attention's dtype is not that of its inputs: kept, and equal to eager."""
    q, k, v, past = inputs()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        report = gemkv_compile.explain(sdpa, q, k, v, past)
        ours, theirs = gemkv_compile.compile(sdpa)(q, k, v, past), sdpa(q, k, v, past)
    assert [(site.status, site.reason) for site in report.sites] == [("kept", "dtype_differs")]
    assert ours[0].dtype == theirs[0].dtype == torch.bfloat16
    tree_close(ours, theirs)


@torch.no_grad()
def test_equal_graphs_of_different_inner_compilers_are_not_mixed_up():
    ran = []

    def named(name):
        def inner(module, example_inputs):
            ran.append(name)
            return module.forward

        return inner

    for name in ("first", "second", "first again"):
        torch._dynamo.reset()
        gemkv_compile.compile(sdpa, inner=named(name))(*inputs())
    assert ran == ["first", "second", "first again"]
