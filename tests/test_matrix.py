"""Cells of the matrix that no other test runs: one a family, and one an idiom. `make matrix` runs all of them."""

import attention_cases
import pytest
import torch
from matrix_cells import run_cell
from tiers import tiers

import gemkv_compile
from gemkv_compile import Options

CELLS = [(family, "sdpa", "dynamic") for family in ("phi3", "glm4")]
CELLS += [("gemma3", "sdpa", "tuple"), ("llama", "flex_attention", "tuple")]
MORE_CELLS = [(family, "sdpa", "dynamic") for family in ("llama3", "qwen2", "olmo2", "stablelm")]
MORE_CELLS += [("llama", "flex_attention", "dynamic")]


@pytest.mark.parametrize("family, attention, cache", tiers(CELLS, MORE_CELLS))
def test_rewritten_with_the_tokens_of_eager(family, attention, cache):
    row = run_cell(family, attention, cache)
    assert (row["status"], row["dense"]) == ("rewritten", 0), row


def copied(past):
    """What `DynamicCache(pasts)` makes of a tensor."""
    return torch.cat([torch.tensor([]), past], dim=-2)


def grown_by_copies(q, k, v, past):
    past = [copied(each) for each in past]
    k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True), (k, v)


def returned_copy(q, k, v, past):
    """Near miss: the caller gets the copy, and may edit it."""
    past = [copied(each) for each in past]
    k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True), (k, v), past


def written_after_the_copy(q, k, v, past):
    """Near miss: the copy is of what the past was."""
    copies = [copied(each) for each in past]
    past[0].mul_(2)
    k, v = torch.cat([copies[0], k], 2), torch.cat([copies[1], v], 2)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True), (k, v)


@pytest.mark.parametrize(
    "function, status",
    [(grown_by_copies, "rewritten"), (returned_copy, "kept"), (written_after_the_copy, "kept")],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_copy_of_a_past(function, status):
    ours, theirs = attention_cases.inputs(tokens=1), attention_cases.inputs(tokens=1)
    with torch.no_grad():
        (site,) = gemkv_compile.explain(
            function, *attention_cases.inputs(tokens=1), gemkv_options=Options(kv_format="model")
        ).sites
        assert (site.status, site.reason) == (status, "" if status == "rewritten" else "past_not_an_input")
        result = gemkv_compile.compile(function, kv_format="model")(*ours)
    attention_cases.tree_close(result, function(*theirs), rtol=1e-5, atol=1e-5)
