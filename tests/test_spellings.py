"""One attention in many spellings gets one verdict."""

import attention_cases as cases
import pytest
import torch
from attention_cases import LOW, causal, grown

import gemkv_compile
from gemkv_compile import Options

sdpa = torch.nn.functional.scaled_dot_product_attention


def verdict(function, *arguments):
    """What becomes of the attention: the sites, and the operator's scale; results are compared with eager's."""
    with torch.no_grad():
        report = gemkv_compile.explain(function, *arguments, gemkv_options=Options(kv_format="model"))
        torch._dynamo.reset()
        ours, theirs = gemkv_compile.compile(function, kv_format="model")(*arguments), function(*arguments)
    cases.tree_close(ours, theirs, rtol=2e-3, atol=2e-3)
    (site,), after = report.sites, report.graphs[0].after
    return site.status, site.operator, site.mask, site.softcap, ", 0.25, None, True, None, 256, 'model'" in after


SCALES = {
    "mul": lambda q, k: (q @ k.mT) * 0.25,
    "mul by 1/s": lambda q, k: (q @ k.mT).mul(1 / 4.0),
    "div": lambda q, k: (q @ k.mT).div(4.0),
    "operator": lambda q, k: (q @ k.mT) / 4,
    "query": lambda q, k: (q / 4.0) @ k.mT,
    "key": lambda q, k: q @ (k * 0.25).mT,
    "both": lambda q, k: (q * 0.5) @ (k / 2.0).mT,
    "tensor": lambda q, k: (q @ k.mT) / torch.full([], 4.0),
}
ON_THE_QUERY = ("query", "both")  # a scaled query stays in the graph, and the operator's scale is what is left


@pytest.mark.parametrize("name", SCALES)
def test_scales(name):
    """A3 (pytorch/pytorch#195412, #195784): mul(1/s) and div(s) are one scale, wherever they stand."""

    def function(q, k, v, past):
        keys, values = grown(k, v, past)
        scores = SCALES[name](q, keys.repeat_interleave(2, 1)) + torch.where(causal(q, keys), 0.0, LOW)
        return scores.softmax(-1) @ values.repeat_interleave(2, 1), (keys, values)

    assert verdict(function, *cases.inputs()) == ("rewritten", "attend_chunk", "causal", None, name not in ON_THE_QUERY)


def mask_of(dtype, q, keys):
    visible = causal(q, keys)
    return visible if dtype == torch.bool else torch.where(visible, 0.0, torch.finfo(dtype).min).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bool], ids=str)
@pytest.mark.parametrize("form", ["sdpa", "written out"])
def test_masks_of_other_dtypes(form, dtype):
    """A3: float16 queries and keys with a mask of float32, float16 or bool."""

    def function(q, k, v, past):
        keys, values = grown(k, v, past)
        mask = mask_of(dtype, q, keys)
        if form == "sdpa":
            return sdpa(q, keys, values, mask, enable_gqa=True), (keys, values)
        scores = (q @ keys.repeat_interleave(2, 1).mT) * 0.25
        scores = scores.masked_fill(~mask, -torch.inf) if dtype == torch.bool else scores + mask
        weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
        return weights @ values.repeat_interleave(2, 1), (keys, values)

    assert verdict(function, *cases.inputs(dtype=torch.float16)) == ("rewritten", "attend_chunk", "causal", None, True)


DECOMPOSED = [cases.matmul_form, cases.bmm_form, cases.einsum_form, cases.softmax_written_out, cases.where_form]
NEAR_MISSES = [cases.keys_folded_heads_first, cases.softmax_without_the_largest, cases.mask_before_softcap]


@pytest.mark.parametrize("function", DECOMPOSED, ids=lambda f: f.__name__)
def test_decomposed_attention_keeps_its_paging(function):
    """A6 (huggingface/optimum-intel#1948): a form that is matched passes under strict, and its cache is paged."""
    with torch.no_grad():
        _, cache = gemkv_compile.compile(function, kv_format="model", strict=True)(*cases.inputs())
    assert all(isinstance(rows, gemkv_compile.PagedKVTensor) for rows in cache)


@pytest.mark.parametrize("function", NEAR_MISSES, ids=lambda f: f.__name__)
def test_decomposed_attention_that_is_not_matched_raises_under_strict(function):
    """A6: paging is not lost quietly."""
    with torch.no_grad(), pytest.raises(Exception, match="(?s)StrictError: strict=True, and 1 of 1.*not_recognised"):
        gemkv_compile.compile(function, strict=True)(*cases.inputs())
