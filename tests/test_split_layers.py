"""Graphs cut at their layers: equal ones are compiled once, and the results are those of the whole graph."""

import weakref

import pytest
import torch
from tiny_models import build, prompt, tuple_model
from tiny_models import greedy as tuple_greedy

import gemkv_compile
from gemkv_compile import Options
from gemkv_compile.backend import Backend
from gemkv_compile.compat import expr_of
from gemkv_compile.inner import InnerCompiler, by_layers
from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.split_layers import split_layers
from gemkv_compile.passes.symbols import free_symbols


@pytest.fixture
def compiled_parts(monkeypatch):
    """Graphs that the inner compiler was given, layer by layer; it runs them as they are."""
    given = []

    def compile_part(module, examples):
        given.append(module.graph)
        return module.forward

    def choose(*_):
        return by_layers(InnerCompiler("recorded", compile_part, True, "recorded"))

    monkeypatch.setattr("gemkv_compile.backend.choose_inner", choose)
    return given


def generate(model, tokens, steps=20):
    with torch.no_grad():
        return model.generate(prompt(2, tokens), max_new_tokens=steps, do_sample=False)


def eager(family, tokens, **changes):
    with torch.compiler.set_stance("force_eager"):
        return generate(build(family, **changes), tokens)


TWELVE = dict(num_hidden_layers=12, layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 2)


def test_equal_layers_are_compiled_once(compiled_parts):
    """C7: twelve layers are compiled as two are, a sliding and a full one, with what stands before and after them."""
    model = gemkv_compile.compile(build("gemma3", **TWELVE), kv_format="model", strict=True)
    assert torch.equal(generate(model, 10, 4), eager("gemma3", 10, **TWELVE)[:, :14])
    graphs = len(gemkv_compile.report_of(model).graphs)
    assert graphs >= 2 and len(compiled_parts) <= 4 * graphs


def test_equal_layers_of_a_prompt_of_any_length_are_compiled_once(compiled_parts):
    """A later prompt of another length has a graph with symbols, one a cache among them."""
    model = gemkv_compile.compile(build("gemma3", **TWELVE), kv_format="model", strict=True)
    with torch.no_grad():
        for tokens in (33, 45):
            compiled_parts.clear()
            model(prompt(1, tokens), use_cache=True)
            assert 0 < len(compiled_parts) <= 4
    assert len(gemkv_compile.report_of(model).graphs) == 2


@pytest.mark.parametrize(
    "family",
    [pytest.param("gemma3n", marks=pytest.mark.slow), "llama", pytest.param("gpt_oss", marks=pytest.mark.slow)],
)
def test_tokens_are_the_same(compiled_parts, family):
    attention = {"gpt_oss": "eager"}.get(family, "sdpa")
    changes = {} if family == "gemma3n" else {"num_hidden_layers": 4}
    if family == "gpt_oss":
        changes["layer_types"] = ["sliding_attention", "full_attention"] * 2
    model = gemkv_compile.compile(build(family, attention, **changes), kv_format="model", strict=True)
    with torch.compiler.set_stance("force_eager"):
        expected = generate(build(family, attention, **changes), 10)
    assert torch.equal(generate(model, 10), expected)
    assert len(compiled_parts) > 4


def test_a_module_by_hand(compiled_parts):
    model, plain = (tuple_model(layers=5) for _ in range(2))
    gemkv_compile.compile(model, kv_format="model", strict=True)
    assert torch.equal(tuple_greedy(model, prompt(2, 9), 12)[0], tuple_greedy(plain, prompt(2, 9), 12)[0])


def test_what_is_not_cut(compiled_parts):
    """Two layers, and calls with gradients."""
    model = gemkv_compile.compile(tuple_model(layers=2), kv_format="model")
    tuple_greedy(model, prompt(1, 9), 1)
    assert len(compiled_parts) == 1
    deep = gemkv_compile.compile(tuple_model(layers=5), kv_format="model")
    logits, _ = deep(prompt(1, 9))
    logits.sum().backward()
    assert len(compiled_parts) == 2


def test_values_are_let_go(monkeypatch):
    """What no later part takes is not kept until the call ends."""
    made = []

    def compile_part(module, examples):
        def run(*inputs):
            assert all(ref() is None for refs in made[1:-2] for ref in refs)  # before: masks
            results = module.forward(*inputs)
            made.append([weakref.ref(each) for each in results])
            return results

        return run

    compiler = by_layers(InnerCompiler("recorded", compile_part, True, "recorded"))
    monkeypatch.setattr("gemkv_compile.backend.choose_inner", lambda *_: compiler)
    model = gemkv_compile.compile(tuple_model(layers=5), kv_format="model")
    with torch.no_grad():
        model(prompt(1, 9))
    assert len(made) == 7 and sum(map(len, made)) >= 7


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
def test_inductor(split):
    """The real inner compiler on a CPU."""
    model = tuple_model(layers=4)
    backend = Backend(Options(kv_format="model", inner="inductor", split_layers=split))
    compiled = torch.compile(model, backend=backend)
    ours = tuple_greedy(compiled, prompt(1, 9), 5)
    theirs = tuple_greedy(tuple_model(layers=4), prompt(1, 9), 5)
    assert torch.equal(ours[0], theirs[0])
    assert all(("layer by layer" in graph.inner) == split for graph in backend.graphs)


class SumsOfOneMore(torch.nn.Module):
    """Layers that take a tensor whose size is one more than that of what it was made of."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, past):
        mask = torch.cat([past, x[:, :1]], dim=1)
        for layer in self.layers:
            x = layer(x) + mask.sum()
        return x


def test_every_symbol_of_a_part_is_a_size_of_its_inputs():
    found = []

    def look(module, inputs):
        found.extend(split_layers(module.graph))
        return module.forward

    torch.compile(SumsOfOneMore(), backend=look, dynamic=True)(torch.ones(1, 4), torch.ones(1, 7))
    assert len(found) >= 4
    for part in found:
        values = [value_of(node) for node in part.inputs]
        sizes = {expr_of(size) for value in values for size in getattr(value, "shape", (value,))}
        assert free_symbols(values) <= sizes, sizes
    assert any(isinstance(value_of(node), torch.SymInt) for node in found[-1].inputs)
