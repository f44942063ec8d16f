"""Every rule: what it rewrites, with a golden graph; near misses, with their sentence; numerics of both."""

import json

import attention_cases as cases
import pytest
import torch
from golden import check_golden, graph_text

import gemkv_compile
from gemkv_compile import Options, PagedKVTensor
from gemkv_compile.reasons import REASONS
from gemkv_compile.report import describe_mask


def explain(function, *arguments, **options):
    with torch.no_grad():
        return gemkv_compile.explain(function, *arguments, gemkv_options=Options(**{"kv_format": "model"} | options))


def call(function, *arguments):
    """The compiled function's result; its cache as dense tensors."""
    with torch.no_grad():
        return gemkv_compile.compile(function, kv_format="model")(*arguments)


@pytest.mark.parametrize("function", cases.REWRITTEN, ids=lambda f: f.__name__)
@pytest.mark.parametrize("tokens", [1, 3])
def test_rewritten(function, tokens):
    arguments = cases.inputs(tokens=tokens)
    report = explain(function, *arguments)
    assert {(site.status, site.reason) for site in report.sites} == {("rewritten", "")}
    assert all(__file__.rsplit("/", 1)[0] in site.source for site in report.sites)
    check_golden(f"{function.__name__}-{tokens}", graph_text(report))
    ours, theirs = call(function, *arguments), function(*arguments)
    assert isinstance(ours[1][0], PagedKVTensor)
    cases.tree_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", cases.DENSE)
def test_rewritten_with_the_dense_mask(name):
    function, mask = cases.DENSE[name]
    arguments = (*cases.inputs(), *([] if mask is None else [mask]))
    report = explain(function, *arguments)
    (site,) = report.sites
    reason, _, kind = name.removesuffix(")").partition(" (")
    assert (site.status, site.reason, site.mask.split(" (")[0]) == ("rewritten", reason, "dense")
    assert bool(site.predicate) == (reason == "mask_kind_dense") == ((kind.split(" of ")[0] or "none") in site.mask)
    assert site.sentence and "attend_chunk" in site.operator
    cases.tree_close(call(function, *arguments), function(*arguments), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reason, function", cases.KEPT, ids=lambda x: getattr(x, "__name__", x))
def test_kept(reason, function):
    kv_heads = 4 if function is cases.past_of_other_heads else 2
    arguments = cases.inputs(kv_heads=kv_heads)
    report = explain(function, *arguments)
    kept = [site for site in report.sites if site.status == "kept"]
    assert [site.reason for site in kept] == [reason], report
    assert kept[0].sentence[-1] == "." and "attention_cases.py:" in kept[0].source
    assert report.graphs[0].before == report.graphs[0].after
    torch.manual_seed(0)
    ours = call(function, *arguments)
    torch.manual_seed(0)
    cases.tree_close(ours, function(*arguments), rtol=1e-5, atol=1e-5)


SENTENCES = {
    cases.einsum_of_transposed_values: "does not read as weights @ v",
    cases.keys_folded_heads_first: "folded to it from the same [batch, heads, ...]",
    cases.baddbmm_with_half_the_mask: "what baddbmm adds is scaled, capped or masked once more",
    cases.keys_reshaped_to_three_dims: "the scores of this softmax are no q @ k^T",
}


@pytest.mark.parametrize("function", SENTENCES, ids=lambda f: f.__name__)
def test_near_misses_say_why(function):
    assert SENTENCES[function] in explain(function, *cases.inputs()).sites[0].sentence


@pytest.mark.parametrize("function", [cases.bmm_form, cases.baddbmm_form, cases.bmm_of_scaled_query])
def test_batch_and_heads_are_split_for_any_batch(function):
    from gemkv_compile.backend import Backend

    backend = Backend(Options(kv_format="model"))
    compiled = torch.compile(function, backend=backend)
    with torch.no_grad():
        for batch in (2, 3, 5):
            arguments = cases.inputs(batch=batch)
            cases.tree_close(compiled(*arguments), function(*arguments), rtol=1e-5, atol=1e-5)
    assert {(site.status, site.mask) for graph in backend.graphs for site in graph.sites} == {("rewritten", "causal")}


def test_scaled_keys_that_start_a_cache():
    """The scale is part of the rows that are returned, not of the attention."""

    def function(q, k, v, past):
        k, v = k * 0.5, v * 1.0
        return (q @ k.repeat_interleave(2, 1).mT).softmax(-1) @ v.repeat_interleave(2, 1), (k, v)

    arguments = cases.inputs()
    assert [site.status for site in explain(function, *arguments).sites] == ["rewritten"]
    cases.tree_close(call(function, *arguments), function(*arguments), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("folded", [False, True])
def test_what_is_hidden_is_read_where_it_is_applied(folded):
    """Not where the attention stands, after the tensor was written to."""

    def function(q, k, v, past, numbers):
        k, v = cases.grown(k, v, past)
        q, keys, values = (x.flatten(0, 1) if folded else x for x in (q, *cases.repeated(k, v)))
        hidden = numbers > 0
        scores = (q @ keys.mT).masked_fill(hidden if folded else hidden.unflatten(0, (2, 4)), float("-inf"))
        hidden.fill_(False)
        return (scores.softmax(-1) @ values).view(2, 4, 3, 16), (k, v)

    arguments = (*cases.inputs(), torch.randn(8, 3, 8, generator=torch.Generator().manual_seed(0)) - 0.5)
    assert [site.status for site in explain(function, *arguments).sites] == ["rewritten"]
    cases.tree_close(call(function, *arguments), function(*arguments), rtol=1e-5, atol=1e-5)


OTHER_KEPT = {
    "layout_unsupported (head size)": ({"dim": 20}, "head_dim must be a multiple of 16"),
    "layout_unsupported (dtype)": ({"dtype": torch.float64}, "must be float16, bfloat16 or float32, got torch.float64"),
    "heads_unsupported": ({"heads": 34, "kv_heads": 2}, "34 query heads do not share 2 key/value heads"),
}


@pytest.mark.parametrize("name", OTHER_KEPT)
def test_kept_for_its_shape(name):
    shape, sentence = OTHER_KEPT[name]
    arguments = cases.inputs(**shape)
    (site,) = explain(cases.sdpa, *arguments).sites
    assert (site.status, site.reason) == ("kept", name.split(" (")[0]) and sentence in site.sentence
    cases.tree_close(call(cases.sdpa, *arguments), cases.sdpa(*arguments))


def test_kept_for_its_dtypes():
    def upcast(q, k, v, past):
        keys, values = cases.grown(k, v, past)
        weights = (q.float() @ keys.float().repeat_interleave(2, 1).mT).softmax(-1).to(q.dtype)
        return weights @ values.repeat_interleave(2, 1), (keys, values)

    arguments = cases.inputs(dtype=torch.bfloat16)
    report = explain(upcast, *arguments)
    assert [site.status for site in report.sites] == ["kept"]
    cases.tree_close(call(upcast, *arguments), upcast(*arguments))


def test_a_scale_that_changes_is_compiled_again():
    """Dynamo makes it symbolic at its second value."""

    def scaled(q, k, v, past, scale):
        k, v = cases.grown(k, v, past)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True), (k, v)

    from gemkv_compile.backend import Backend

    backend = Backend(Options(kv_format="model"))
    compiled = torch.compile(scaled, backend=backend)
    with torch._dynamo.config.patch(specialize_float=False), torch.no_grad():
        for scale in (0.1, 0.2, 0.3, 0.1):
            result = compiled(*cases.inputs(), scale)
            cases.tree_close(result, scaled(*cases.inputs(), scale), rtol=1e-5, atol=1e-5)
    assert {(site.status, site.reason) for graph in backend.graphs for site in graph.sites} == {("rewritten", "")}


def test_kept_when_rows_kept_are_not_constant():
    def rolling(q, k, v, past, keep):
        k, v = cases.grown(k, v, past)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return out, (k[:, :, -keep:, :], v[:, :, -keep:, :])

    from gemkv_compile.backend import Backend

    backend = Backend(Options(kv_format="model"))
    compiled = torch.compile(rolling, backend=backend)
    with torch.no_grad():
        for keep in (4, 5, 6):
            cases.tree_close(compiled(*cases.inputs(), keep), rolling(*cases.inputs(), keep), rtol=1e-5, atol=1e-5)
    assert [site.reason for graph in backend.graphs for site in graph.sites] == ["", "slice_not_constant"]


def test_softcap_is_read_from_the_graph():
    """Not from a config (NVIDIA/TensorRT-LLM#4789): with tanh the cap, without it none."""
    capped = explain(cases.softcapped, *cases.inputs()).sites[0]
    plain = explain(cases.matmul_form, *cases.inputs()).sites[0]
    assert (capped.softcap, plain.softcap) == (5.0, None)


def test_second_application_changes_nothing():
    """A rewritten graph given to the passes again has no site and stays as it is."""
    from gemkv_compile.backend import Backend, compile_graph

    seen = []

    def again(module, example_inputs):
        _, report = compile_graph(module, example_inputs, Options(inner="eager"))
        seen.append(report)
        return module.forward

    with torch.no_grad():
        torch.compile(cases.sdpa, backend=Backend(Options(inner=again)))(*cases.inputs())
    assert seen and all(report.sites == () and report.before == report.after for report in seen)


def test_dynamo_s_own_graph_is_not_changed():
    from gemkv_compile.backend import compile_graph
    from gemkv_compile.passes.printing import format_graph

    texts = []

    def backend(module, example_inputs):
        texts.append(format_graph(module.graph))
        compiled, _ = compile_graph(module, example_inputs, Options())
        texts.append(format_graph(module.graph))
        return compiled

    with torch.no_grad():
        torch.compile(cases.sdpa, backend=backend)(*cases.inputs())
    assert texts[0] == texts[1]


def test_in_place_writes_survive():
    """A side effect on another input beside a rewritten attention is not taken for dead code."""

    def counted(q, k, v, past, counter):
        counter.add_(1)
        counter[0] = 7.0
        return cases.sdpa(q, k, v, past)

    counter = torch.zeros(2)
    out = call(counted, *cases.inputs(), counter)
    assert counter.tolist() == [7.0, 1.0]
    cases.tree_close(out, cases.sdpa(*cases.inputs()), rtol=1e-5, atol=1e-5)


def test_every_reason_has_a_case():
    """Each reason code that the passes can give is shown by a test of this suite."""
    shown = {reason for reason, _ in cases.KEPT} | {name.split(" (")[0] for name in (*cases.DENSE, *OTHER_KEPT)}
    elsewhere = {"grad_enabled", "past_requires_grad", "scale_not_constant", "slice_not_constant", "dtype_differs"}
    elsewhere |= {"written_in_place", "inside_higher_order_op", "internal_error"}  # test_soundness
    elsewhere |= {"score_mod_not_recognised", "aux_outputs_used", "block_mask_not_proven"}  # test_flex
    assert REASONS.keys() - shown - elsewhere <= {"cache_shapes_differ", "head_dim_unsupported"}


def test_masks_in_words():
    assert describe_mask(True, 4, None, False) == "causal, window 4"
    assert describe_mask(False, None, None, False) == "none" and describe_mask(False, None, None, True) == "dense"
    assert describe_mask(True, None, None, True, ("documents",)) == "dense (causal, documents)"


def test_the_report_gives_the_proven_formula():
    report = explain(cases.mask_of_documents, *cases.inputs(), torch.ones(2, 8, dtype=torch.int64))
    formula = "kv <= q + 5 and ids[b, q + 5] == ids[b, kv]"
    assert report.sites[0].predicate == formula
    assert json.loads(report.to_json())["graphs"][0]["sites"][0]["predicate"] == formula
    assert f"    sees: {formula}\n" in str(report)
    assert explain(cases.mask_by_unknown_op, *cases.inputs()).sites[0].predicate == ""


def test_layers_that_share_a_formula_give_it_once():
    text = str(explain(cases.shared_by_two, *cases.inputs()))
    assert text.count("sees:") == len({line for line in text.splitlines() if "_cases.py" in line})


def test_a_window_that_no_mask_says_is_not_given_as_proven():
    def step(q, k, v, past):
        k, v = cases.grown(k, v, past)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return out, (k[:, :, -7:, :], v[:, :, -7:, :])

    (site,) = explain(step, *cases.inputs(tokens=1)).sites
    assert (site.mask, site.window) == ("causal, window 8", 8)
    rows = "window 8 is not the mask's: it follows from the rows that the cache keeps, which each call checks"
    assert site.predicate == f"kv <= q + 5; {rows}"
