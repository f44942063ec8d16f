"""A decode graph says whether it is the same at every length of its caches, and if not, which node is not."""

import json

import attention_cases as cases
import pytest
import torch
from attention_cases import grown
from tiny_models import greedy, prompt, tuple_model

import gemkv_compile
from gemkv_compile import Options
from gemkv_compile.backend import Backend

sdpa = torch.nn.functional.scaled_dot_product_attention


def steps_of(function, *more, batch=2):
    """The last graph of three steps, which has symbolic lengths."""
    backend = Backend(Options(kv_format="model"))
    compiled = torch.compile(function, backend=backend)
    with torch.no_grad():
        for past in (5, 6, 7):
            arguments = cases.inputs(batch=batch, tokens=1, past=past)
            extra = [make(past) for make in more]
            cases.tree_close(compiled(*arguments, *extra), function(*arguments, *extra), rtol=1e-5, atol=1e-5)
    return backend.graphs


def test_proven_masks():
    for function in (cases.sdpa, cases.sliding, cases.shared_by_two):
        torch._dynamo.reset()
        first, last = steps_of(function)[0], steps_of(function)[-1]
        assert (last.length_free, last.length_reason) == (True, ""), last.after
        assert first.length_free is False and "a past of exactly 5 rows" in first.length_reason


def test_a_symbolic_batch_is_no_length():
    backend = Backend(Options(kv_format="model"))
    compiled = torch.compile(cases.sdpa, backend=backend)
    with torch.no_grad():
        for batch, past in ((2, 5), (3, 7)):
            compiled(*cases.inputs(batch=batch, tokens=1, past=past))
    assert backend.graphs[-1].length_free, backend.graphs[-1].after


def test_dense_masks_are_named():
    graph = steps_of(cases.mask_hides_every_third)[-1]
    assert graph.sites[0].mask == "dense" and graph.length_free is False
    assert graph.length_reason.startswith("`add` takes or gives a size or number that may change with the cache (s")
    assert "attention_cases.py:" in graph.length_reason and "in places: return torch.arange" in graph.length_reason
    torch._dynamo.reset()
    given = steps_of(cases.mask_is_an_input, lambda past: torch.rand(2, 1, 1, past + 1) > -1)[-1]
    assert given.length_reason.startswith("`gemkv::attend_pages`") and "mask_is_an_input" in given.length_reason


def with_number(use):
    """Attention whose output meets the number of rows."""

    def function(q, k, v, past):
        keys, values = grown(k, v, past)
        return use(sdpa(q, keys, values, enable_gqa=True), keys.shape[2]), (keys, values)

    return function


LIFTED = {
    "mul": lambda x, n: x * n,
    "method": lambda x, n: x.sub(n),
    "compare": lambda x, n: x + (torch.arange(10) <= n)[:, None].sum(),
    "arange": lambda x, n: x + torch.arange(n - 1, n + 3).to(x.dtype).sum(),
    "arange of int32": lambda x, n: x + torch.arange(start=n, end=n + 1, dtype=torch.int32),
    "from the left": lambda x, n: n - x,
}
NAMED = {
    "full": lambda x, n: x + torch.full((), n),
    "alpha": lambda x, n: torch.add(x, n, alpha=2),
    "size": lambda x, n: x + torch.ones(n).sum(),
    "float arange": lambda x, n: x + torch.arange(n, n + 1, dtype=torch.float32),
    "no dimensions": lambda x, n: x + (torch.tensor(3, dtype=torch.int32) + n),
    "one of two": lambda x, n: x * n + torch.full((), n),
}


@pytest.mark.parametrize("use", LIFTED.values(), ids=LIFTED)
def test_a_number_that_grows_becomes_a_tensor(use):
    graph = steps_of(with_number(use))[-1]
    assert graph.length_free, graph.length_reason
    assert "size_0" in graph.after


@pytest.mark.parametrize("use", NAMED.values(), ids=NAMED)
def test_a_number_that_grows_is_named(use):
    graph = steps_of(with_number(use))[-1]
    assert graph.length_free is False and "NAMED" not in graph.length_reason and "lambda" in graph.length_reason
    assert "size_0" not in graph.after


def test_padding_that_the_executable_prepares():
    def function(q, k, v, past, pad):
        keys, values = grown(k, v, past)
        return sdpa(q, keys, values, pad[:, None, None].bool(), enable_gqa=True), (keys, values)

    graph = steps_of(function, lambda past: torch.ones(2, past + 1, dtype=torch.int64))[-1]
    assert graph.sites[0].mask == "causal, padding" and graph.length_free


def test_what_the_report_shows():
    model = gemkv_compile.compile(tuple_model(), kv_format="model", strict=True)
    greedy(model, prompt(1, 9), 4)
    report = gemkv_compile.report_of(model)
    states = [graph.length_free for graph in report.graphs]
    assert states[0] is None and states[-1] is True
    assert "  the same at every length of its caches" in str(report)
    assert "  not the same at every length of its caches: this graph is for a past of exactly 9 rows" in str(report)
    assert json.loads(report.to_json())["graphs"][-1]["length_free"] is True
