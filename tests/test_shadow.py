"""The shadow: what it measures, and that nothing else changes because of it."""

import copy
import gc
import json

import pytest
import torch
import torch.nn.functional as F
from attention_cases import inputs, sdpa
from tiers import tiers
from tiny_models import build, generated, greedy, prompt, tuple_model

import gemkv_compile
from gemkv_compile import Options
from gemkv_compile.report_parts import Drift
from gemkv_compile.runtime.exact_rows import exact_rows
from gemkv_compile.runtime.ledger import kv_memory

ROUNDING = 2e-6  # of float32, relative to the largest output


@pytest.fixture(autouse=True)
def nothing_is_left():
    exact_rows._rows.clear()  # what a test that failed has left
    yield
    gc.collect()
    assert len(exact_rows) == 0


def shadows(model):
    """The shadowed calls of every graph that has some."""
    return [graph.shadow for graph in gemkv_compile.report_of(model).graphs if graph.shadow]


def calls(model):
    return [call for graph in shadows(model) for call in graph]


def warned(caplog):
    return [each.message for each in caplog.records if each.name.startswith("gemkv_compile")]


def test_generate_gives_the_same_tokens():
    model = gemkv_compile.compile(build("gemma3"), shadow=3)
    with torch.no_grad():
        out = model.generate(prompt(1, 10), max_new_tokens=24, do_sample=False)
    assert torch.equal(out, generated("gemma3", 1, 10, 24))
    assert max(len(graph) for graph in shadows(model)) == 3
    assert all(call.rewrite_error.relative < ROUNDING and not call.failure for call in calls(model))


def test_pages_in_the_models_dtype_have_no_format_error():
    model = gemkv_compile.compile(tuple_model(), kv_format="model", shadow=100)
    greedy(model, prompt(2, 50), 40)
    assert len(calls(model)) == 40
    for call in calls(model):
        assert call.rewrite_error.relative < ROUNDING
        assert (call.format_error.largest, call.format_error.relative, call.format_error.changed) == (0, 0, 0)


@pytest.mark.parametrize("rows_first, mode", [(False, torch.no_grad), (True, torch.inference_mode)])
def test_int8_has_a_format_error_and_no_rewrite_error(rows_first, mode):
    model = gemkv_compile.compile(tuple_model(rows_first=rows_first), group_size=16, page_size=64, shadow=100)
    plain = gemkv_compile.compile(tuple_model(rows_first=rows_first), group_size=16, page_size=64)
    with mode():
        logits = greedy(model, prompt(2, 20), 40)[1]
        assert torch.equal(logits, greedy(plain, prompt(2, 20), 40)[1])
    first, *steps = calls(model)
    assert first.format_error.largest == 0 and first.rewrite_error.relative < ROUNDING
    assert all(1e-6 < step.format_error.largest < 0.01 for step in steps)
    # A step that completes a group (32 and 48 tokens) reads its own row rounded, which the original graph cannot.
    assert [20 + i for i, step in enumerate(steps, 1) if step.rewrite_error is None] == [32, 48]
    assert all(step.rewrite_error is None or step.rewrite_error.relative < ROUNDING for step in steps)


@torch.no_grad()
@pytest.mark.slow
def test_format_error_beside_that_of_a_dense_cache():
    """Against the plain module on a dense cache. From the second chunk on its rows come from other hidden states."""
    model, plain = gemkv_compile.compile(tuple_model(), shadow=100), tuple_model()
    ours = theirs = None
    for seed, tokens in enumerate((70, 5, 80, 1)):
        ids = prompt(1, tokens, seed)
        logits, ours = model(ids, ours)
        expected, theirs = plain(ids, theirs)
        drift, error = float((logits - expected).abs().max()), calls(model)[-1].format_error
        assert error.rows == tokens and error.largest == pytest.approx(drift, abs=2e-6, rel=0.5 if seed > 1 else 0)
    assert error.largest > 1e-5


@torch.no_grad()
def test_unknown_exact_rows_are_not_called_exact():
    model, plain = gemkv_compile.compile(tuple_model(), shadow=100), tuple_model()
    model(prompt(2, 70), plain(prompt(2, 5))[1])  # quantises a dense past, and then knows it
    _, pasts = model(prompt(2, 9), plain(prompt(2, 70))[1])
    assert calls(model)[-1].rewrite_error is None and calls(model)[-1].format_error is None
    _, pasts = model(prompt(2, 9), pasts)
    assert calls(model)[-1].format_error.largest > 0
    cropped = [tuple(rows[:, :, :66] for rows in pair) for pair in pasts]
    model(prompt(2, 9), cropped)
    assert calls(model)[-1].format_error.largest > 0
    swapped = [tuple(rows.index_select(0, torch.tensor([1, 0])) for rows in pair) for pair in pasts]
    _, swapped = model(prompt(2, 9), swapped)
    model(prompt(2, 9), swapped)
    for call in calls(model)[-2:]:
        assert call.format_error is None and call.rewrite_error.relative < ROUNDING
    assert str(gemkv_compile.report_of(model)).count("unknown") == 4  # both errors of the first two graphs


@torch.no_grad()
def test_padding_rows_are_left_out():
    model = gemkv_compile.compile(build("gemma3"), kv_format="model", shadow=3)
    mask = torch.tensor([[0] * 12 + [1] * 8, [1] * 20])
    model(prompt(2, 20), attention_mask=mask)
    (call,) = calls(model)
    assert call.rewrite_error.relative < ROUNDING and call.rewrite_error.rows == 28


def doubled(original):
    def wrong(q, *arguments):
        return original(q * 40, *arguments)

    return wrong


def test_a_wrong_operator_is_a_rewrite_error(monkeypatch, caplog):
    from gemkv_compile.kernels import ops

    right = ops.implementation
    monkeypatch.setattr(ops, "implementation", lambda *a: doubled(right(*a)) if a[0] == "attend_pages" else right(*a))
    model = gemkv_compile.compile(tuple_model(), kv_format="model", shadow=5)
    greedy(model, prompt(1, 20), 12)
    report = gemkv_compile.report_of(model)
    assert report.graphs[0].rewrite_error.relative < ROUNDING
    assert all(graph.rewrite_error.relative > 1e-3 for graph in report.graphs[1:])
    assert all(graph.format_error.largest == 0 for graph in report.graphs)
    warnings = warned(caplog)
    assert len(warnings) == len(report.graphs) - 1  # once a graph
    assert "differs from the graph as it was, on the same cache" in warnings[0]
    assert "rounding explains up to 3.5e-04" in warnings[0]


def test_a_shadow_that_fails_breaks_nothing(monkeypatch, caplog):
    from gemkv_compile.runtime import shadow

    def fail(*_):
        raise ValueError("no such thing")

    monkeypatch.setattr(shadow, "measure", fail)
    model = gemkv_compile.compile(tuple_model(), shadow=5)
    tokens, _, _ = greedy(model, prompt(1, 20), 12)
    assert torch.equal(tokens, greedy(gemkv_compile.compile(tuple_model()), prompt(1, 20), 12)[0])
    assert [[call.failure for call in graph] for graph in shadows(model)] == [["ValueError: no such thing"]] * 3
    assert len(warned(caplog)) == 3 and "results are not affected" in warned(caplog)[0]
    assert "failed: ValueError: no such thing" in str(gemkv_compile.report_of(model))
    caplog.clear()  # what was logged holds the frames, and with them the cache


@torch.no_grad()
def test_an_error_of_the_call_is_the_callers():
    model = gemkv_compile.compile(tuple_model(), shadow=5)
    _, pasts = model(prompt(2, 70))
    pasts[0][0].release()
    with pytest.raises(gemkv_compile.errors.GemkvError, match="was released"):
        model(prompt(2, 1), pasts)


def dropped(q, k, v, past, seen):
    """Attention with dropout around it, and a counter that is written in place and read through a view."""
    seen[:1].add_(1)
    out, present = sdpa(F.dropout(q, 0.5), k, v, past)
    return F.dropout(out, 0.5) * seen.sum(), present


@torch.no_grad()
@pytest.mark.parametrize("inner", tiers(["eager"], [("inductor",)]))
def test_random_numbers_and_writes_are_those_of_the_call(inner):
    outs = []
    for shadow in (0, 5):
        torch._dynamo.reset()
        torch.manual_seed(3)
        function = gemkv_compile.compile(dropped, kv_format="model", inner=inner, shadow=shadow)
        seen = torch.ones(2)
        results = [function(*inputs(), seen)[0] for _ in range(3)]
        outs.append((*results, seen, torch.get_rng_state()))
    assert all(map(torch.equal, *outs)) and seen.tolist() == [4, 1]
    for call in calls(function):
        assert not call.failure and call.format_error.largest == 0
        # Inductor draws other random numbers than eager, so that nothing can be said.
        assert call.rewrite_error is None if inner == "inductor" else call.rewrite_error.relative < ROUNDING


def test_gradients_are_those_of_the_call():
    grads = []
    for shadow in (0, 5):
        model = gemkv_compile.compile(tuple_model(), shadow=shadow)
        with torch.no_grad():
            _, pasts = model(prompt(1, 70))
        model(prompt(1, 9), pasts)[0].sum().backward()
        grads.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert all(map(torch.equal, *grads)) and len(calls(model)) == 2


@pytest.mark.slow
def test_pages_and_rows_go_with_the_cache():
    before = sum(pool.in_use for pool in kv_memory(()).pools)
    model = gemkv_compile.compile(build("gemma3"), shadow=1000)
    with torch.no_grad():
        out = model.generate(prompt(1, 90), max_new_tokens=70, do_sample=False, return_dict_in_generate=True)
        forks = [copy.deepcopy(out.past_key_values) for _ in range(2)]
        for fork in forks:
            model(prompt(1, 1), past_key_values=fork)
    assert len(exact_rows) > 0 and sum(pool.in_use for pool in kv_memory(()).pools) > before
    del out, forks, fork
    assert len(exact_rows) == 0 and sum(pool.in_use for pool in kv_memory(()).pools) == before


@torch.no_grad()
def test_nothing_dense_is_kept_after_the_last_shadowed_call():
    model = gemkv_compile.compile(tuple_model(), shadow=2)
    _, pasts = model(prompt(1, 70))
    kept = []
    for _ in range(8):
        _, pasts = model(prompt(1, 1), pasts)
        kept.append(len(exact_rows))
    assert kept[0] == 2 and kept[-3:] == [0, 0, 0]


@torch.no_grad()
def test_where_it_is_reported():
    report = gemkv_compile.explain(tuple_model(), prompt(1, 9), gemkv_options=Options(shadow=1))
    (graph,) = report.graphs
    assert "format error" in str(report) and f"{graph.rewrite_error}" in str(report)
    assert json.loads(report.to_json())["graphs"][0]["shadow"][0]["format_error"]["rows"] == 9
    function = gemkv_compile.compile(sdpa, kv_format="model", shadow=1)
    function(*inputs())
    assert isinstance(gemkv_compile.report_of(function).graphs[0].rewrite_error, Drift)
    assert "shadow" not in str(gemkv_compile.explain(tuple_model(), prompt(1, 9)))
    with pytest.raises(TypeError, match=r"report_of takes what gemkv_compile.compile returned, got another TupleModel"):
        gemkv_compile.report_of(tuple_model())
