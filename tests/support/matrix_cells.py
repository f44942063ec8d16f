"""One cell of the matrix: a family, an attention implementation and a kind of cache, compiled, beside eager."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from unittest import mock

import torch
from tiny_models import FAMILIES, LATER_FAMILIES, MORE_FAMILIES, build, greedy, prompt
from torch import nn
from torch.nn.attention import flex_attention

import gemkv_compile
from gemkv_compile import PagedKVTensor
from gemkv_compile.inner import shared_compiles

ALL_FAMILIES = (*FAMILIES, *MORE_FAMILIES, *LATER_FAMILIES)
ATTENTIONS = ("eager", "sdpa", "flex_attention")
CACHES = ("dynamic", "static", "tuple")


class TupleCached(nn.Module):
    """A Transformers model whose calls take and return a tuple of (keys, values), as before Cache objects.

    forward(ids [batch, tokens], pasts or None) -> (logits [batch, tokens, vocabulary], pasts). Layers that share the
    keys of others have (None, None).
    """

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, pasts=None):
        from transformers import DynamicCache

        cache = DynamicCache(pasts)
        logits = self.model(ids, past_key_values=cache, use_cache=True).logits
        return logits, tuple((layer.keys, layer.values) for layer in cache.layers)


def run_cell(family, attention, cache, tokens=10, steps=24):
    """What becomes of one cell.

    Returns:
        A row. `status` is "rewritten" if every attention with a cache, of every graph, is rewritten and the tokens are
        eager's; "copied" if also the graph is broken and cached rows are copied between its parts; "kept"; "differs"
        (other tokens); "as dynamic" (eager differs from itself with a dynamic cache, which ours equals); "failed"; or
        "not offered" if eager itself raises. With counts of `sites`, `dense` masks and `copies` of a handle's rows,
        `reasons` ({code: count}) and `why`.
    """
    row = {"family": family, "attention": attention, "cache": cache}
    ids = prompt(2, tokens)
    try:
        with _plainly():
            expected = _tokens(_model(family, attention, cache), ids, cache, steps)
    except Exception as error:
        return row | {"status": "not offered", "why": _first_line(error)}
    torch._dynamo.reset()
    shared_compiles.clear()
    model = gemkv_compile.compile(_model(family, attention, cache), kv_format="model")
    try:
        with _counted_copies() as copies:
            found = _tokens(model, ids, cache, steps)
    except Exception as error:
        return row | {"status": "failed", "why": _first_line(error)}
    row |= _verdict(gemkv_compile.report_of(model), _layers(model), torch.equal(found, expected), len(copies))
    if row["status"] == "differs" and cache != "dynamic":
        with _plainly():
            dynamic = _tokens(_model(family, attention, "dynamic"), ids, "dynamic", steps)
        if torch.equal(found, dynamic):
            row |= {"status": "as dynamic", "why": "eager's own tokens are not those of its dynamic cache; ours are"}
    return row


def _verdict(report, layers, is_equal, copies):
    """Status, counts and why, of a report's sites."""
    with_cache = [[s for s in graph.sites if s.reason != "no_cache"] for graph in report.graphs]
    sites = [site for graph in with_cache for site in graph]
    kept = [site for site in sites if site.status == "kept"]
    split = any(len(graph) % layers for graph in with_cache) or not sites
    status = "kept" if kept or split else "rewritten"
    why = f"{kept[0].sentence}" if kept else "the attentions are spread over several graphs" if split else ""
    if status == "rewritten" and copies and not all(with_cache):
        status, why = "copied", "the graph is broken, and cached rows are copied to a dense tensor between its parts"
    if not is_equal:
        status, why = "differs", "the tokens are not eager's"
    return {
        "status": status,
        "graphs": len(report.graphs),
        "sites": len(sites) - len(kept),
        "dense": sum(site.mask == "dense" for site in sites),
        "copies": copies,
        "reasons": dict(Counter(site.reason for site in kept)),
        "why": why,
    }


def _model(family, attention, cache):
    model = build(family, attention)
    return TupleCached(model).eval() if cache == "tuple" else model


def _tokens(model, ids, cache, steps):
    if cache == "tuple":
        return greedy(model, ids, steps)[0]
    options = {"cache_implementation": "static"} if cache == "static" else {}
    with torch.no_grad():
        return model.generate(ids, max_new_tokens=steps, do_sample=False, **options)


def _layers(model):
    return (model.model if isinstance(model, TupleCached) else model).config.num_hidden_layers


@contextmanager
def _plainly():
    """Eager, also where Transformers or PyTorch compile FlexAttention by themselves."""
    plain = mock.patch.object(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    with plain, torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _counted_copies():
    """A list with an entry for every handle of a cache that is read as a dense tensor."""
    copies, whole = [], PagedKVTensor.materialise
    with mock.patch.object(PagedKVTensor, "materialise", lambda handle: copies.append(1) or whole(handle)):
        yield copies


def _first_line(error):
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
