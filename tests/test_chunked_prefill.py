"""generate(prefill_chunk_size=...): the whole prompt's tokens, few traces, nothing of the past's size in a chunk."""

import pytest
import torch
from fake_engine import fake_engine
from tiny_models import FAMILIES, build, prompt
from torch._dynamo.utils import counters

import gemkv_compile
from gemkv_compile import PagedKVTensor
from gemkv_compile.inner import shared_compiles
from gemkv_compile.passes.lens import value_of
from gemkv_compile.passes.symbols import free_symbols

CHUNK = 24  # above the window; nothing else in the models has 24 or 48 of anything


def traces():
    return counters["stats"]["unique_graphs"]


def generate(model, ids, chunk=None, steps=6, **kwargs):
    with torch.no_grad():
        return model.generate(ids, max_new_tokens=steps, do_sample=False, prefill_chunk_size=chunk, **kwargs)


def attention_of(family):
    return "eager" if family == "gemma2" else "sdpa"


class Recorded:
    """An inner compiler that runs the graph as it is, and keeps it."""

    def __init__(self):
        self.graphs = []

    def __call__(self, module, examples):
        self.graphs.append(module.graph)
        return module.forward


def past_sizes(graph):
    """Tensors that a graph computes with a size that is none of its ids', and those with one of a whole past of 48."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    own = free_symbols(value_of(node) for node in inputs if "input_ids" in node.name)
    values = [value_of(node) for node in graph.nodes if node not in inputs and node.op != "output"]
    tensors = [x for value in values for x in (value if isinstance(value, tuple) else (value,)) if torch.is_tensor(x)]
    return [x.shape for x in tensors if free_symbols([x]) - own or 2 * CHUNK in x.shape]


@pytest.mark.slow
def test_a_window_and_a_full_layer():
    """Rows that a chunk ends in the middle of a page or a group; other lengths and chunks trace nothing new."""
    inner, plain = Recorded(), build("gemma3")
    model = gemkv_compile.compile(build("gemma3"), kv_format="model", strict=True, inner=inner)
    for tokens, chunk in ((2 * CHUNK + 6, CHUNK), (3 * CHUNK + 20, CHUNK), (100, 33)):
        ids = prompt(2, tokens, tokens)
        out = generate(model, ids, chunk, return_dict_in_generate=True)
        assert torch.equal(out.sequences, generate(plain, ids))
        assert all(isinstance(layer.keys, PagedKVTensor) for layer in out.past_key_values.layers)
    seen = traces()
    assert seen <= 6
    for tokens, chunk in ((5 * CHUNK, CHUNK), (90, 70), (120, 26)):
        ids = prompt(2, tokens, tokens)
        assert torch.equal(generate(model, ids, chunk), generate(plain, ids))
    assert traces() == seen
    assert [found for graph in inner.graphs if (found := past_sizes(graph))] == []
    assert len(inner.graphs) >= 3


def test_the_record_would_see_a_past():
    """The check of the test above, on a function that makes a mask of the past's size."""

    def masked(ids, past):
        return ids[:, :, None] <= torch.arange(past.shape[1] + ids.shape[1])

    inner = Recorded()
    compiled = torch.compile(masked, backend=lambda module, examples: inner(module, examples))
    for past in (CHUNK, 3 * CHUNK):
        compiled(torch.zeros(2, CHUNK), torch.zeros(2, past))
    found = [past_sizes(graph) for graph in inner.graphs]
    assert all(found) and len(found) == 2


@pytest.mark.slow
def test_with_an_engine_for_the_first_chunk(monkeypatch, tmp_path):
    """First and later chunks are one graph to the inner compiler."""
    with fake_engine(monkeypatch, tmp_path) as fake:
        model = gemkv_compile.compile(build("llama"), kv_format="model", strict=True, prefill="fake")
        ids = prompt(2, 2 * CHUNK)
        assert torch.equal(generate(model, ids, CHUNK, steps=3), generate(build("llama"), ids, steps=3))
        assert fake.prompts == [CHUNK] * 2
    first, later, _ = gemkv_compile.report_of(model).graphs
    assert (first.inner_shared, later.inner_shared, shared_compiles.compiles) == (False, True, 2)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    """Chunks below and above the window, padded rows, and a cache that goes on."""
    attention = attention_of(family)
    model = gemkv_compile.compile(build(family, attention), kv_format="model", strict=True)
    plain = build(family, attention)
    for tokens, chunk in ((70, 32), (131, 16), (40, 8), (65, 64)):
        ids = prompt(2, tokens, tokens)
        assert torch.equal(generate(model, ids, chunk), generate(plain, ids))
    assert traces() <= 12
    mask = torch.ones(2, 70, dtype=torch.int64)
    mask[0, :37] = 0
    ids = prompt(2, 70) * mask
    expected = generate(plain, ids, attention_mask=mask)
    assert torch.equal(generate(model, ids, 32, attention_mask=mask), expected)
    first = generate(model, prompt(2, 40), 32, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, prompt(2, 50, 3)], 1)
    assert torch.equal(generate(model, longer, 32, past_key_values=first.past_key_values), generate(plain, longer))


@pytest.mark.slow
def test_int8_pages_do_not_depend_on_where_chunks_end():
    """Whole groups are quantised from the same rows: caches agree to what the rows themselves differ by."""
    caches = []
    for chunk in (None, 64):  # a chunk that reads its past reads it quantised, so its own rows differ a little
        model = gemkv_compile.compile(build("llama"), strict=True)
        out = generate(model, prompt(1, 200), chunk, steps=1, return_dict_in_generate=True)
        caches.append([layer.keys.materialise() for layer in out.past_key_values.layers])
    assert torch.equal(caches[0][0], caches[1][0])  # of the first layer: made of tokens alone
    for whole, parts in zip(*caches, strict=True):
        torch.testing.assert_close(parts, whole, rtol=0.05, atol=0.05)
