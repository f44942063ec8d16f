"""FlexAttention: what is rewritten, with a golden graph; near misses, with their sentence; numerics of both."""

import re

import attention_cases
import flex_cases as cases
import pytest
import torch
from golden import check_golden
from tiers import tiers
from tiny_models import build, greedy, prompt
from torch.nn.attention import flex_attention as flex_module

from gemkv_compile import Options, PagedKVTensor, compat_flex
from gemkv_compile.backend import Backend
from gemkv_compile.passes.version import pass_version
from gemkv_compile.reasons import REASONS

inputs = attention_cases.inputs


@pytest.fixture(autouse=True)
def plain_eager(monkeypatch):
    """FlexAttention outside a compile runs as it is, without a compile of its own."""
    monkeypatch.setattr(flex_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def run(function, *arguments):
    """The one graph's report and the compiled function's result, which is compared with the function's own."""
    backend = Backend(Options(kv_format="model"))
    with torch.no_grad():
        ours, theirs = torch.compile(function, backend=backend)(*arguments), function(*arguments)
    (graph,) = backend.graphs
    attention_cases.tree_close(ours, theirs, rtol=1e-5, atol=1e-5)
    return graph, ours


@pytest.mark.parametrize("function", cases.REWRITTEN, ids=lambda f: f.__name__)
@pytest.mark.parametrize("tokens", tiers([3], [(1,)]))
def test_rewritten(function, tokens):
    graph, result = run(function, *inputs(tokens=tokens))
    assert {(site.status, site.reason) for site in graph.sites} == {("rewritten", "")}, graph.sites
    assert all("flex_cases.py:" in site.source for site in graph.sites)
    assert isinstance(result[1][0], PagedKVTensor)
    check_golden(f"{function.__name__}-{tokens}", _golden(graph))


def _golden(graph):
    """The sites and the graph after; before, what PyTorch makes of create_block_mask is its own affair, and long."""
    sites = [
        f"# {s.operator}: {s.mask}; softcap {s.softcap}; {s.num_q_heads}/{s.num_kv_heads} x {s.head_dim}; {s.rule}"
        for s in graph.sites
    ]
    assert not re.search("flex_attention|vmap|batch_dim", graph.after)
    names = dict(re.findall(r"^(%\d+) = input\((\w+)\)", graph.after, re.M))
    given = sorted(re.findall(r"^%\d+ = (input.*)$", graph.after, re.M))
    rest = re.sub(r"^%\d+ = input.*\n", "", graph.after, flags=re.M)
    rest = re.sub(r"%\d+", lambda m: names.get(m[0], m[0]), rest).replace(repr(pass_version()), "'VERSION'")
    return re.sub(r"\bs\d+\b", "s", "\n".join([*sites, "", *given, rest])) + "\n"


@pytest.mark.parametrize("tokens", [1, 3])
def test_padding_is_read_through_the_mask_mod(tokens):
    padding = torch.ones(2, 5 + tokens, dtype=torch.int64)
    padding[0, :2] = 0
    (site,) = run(cases.flex_padded, *inputs(tokens=tokens), padding)[0].sites
    assert (site.status, site.mask) == ("rewritten", "causal, padding")


@pytest.mark.parametrize("function, given, mask", cases.DENSE_KINDS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_kind_of_mask_is_proven_through_its_mod(function, given, mask):
    graph, _ = run(function, *inputs(), given)
    (site,) = graph.sites
    assert (site.status, site.reason, site.mask) == ("rewritten", "mask_kind_dense", mask)
    check_golden(f"{function.__name__}-3", _golden(graph) + f"\n{site.predicate}\n")


@pytest.mark.parametrize("function, given, mask", cases.DENSE_KINDS, ids=lambda x: getattr(x, "__name__", ""))
def test_one_query_looks_neither_ahead_nor_past_a_prefix(function, given, mask):
    """What is left of a prefix and a right window is what the operators take."""
    given = given[:, :6] if function is cases.flex_packed else given
    (site,) = run(function, *inputs(tokens=1), given)[0].sites
    dense = function is cases.flex_packed
    assert (site.status, site.reason) == ("rewritten", "mask_kind_dense" if dense else "")


@pytest.mark.parametrize("reason, function", cases.DENSE, ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.parametrize("tokens", tiers([3], [(1,)]))
def test_a_mask_that_is_not_proven_is_computed_densely(reason, function, tokens):
    (site,) = run(function, *inputs(tokens=tokens))[0].sites
    assert (site.status, site.reason, site.mask) == ("rewritten", reason, "dense") and site.sentence


@pytest.mark.parametrize("reason, function", cases.KEPT, ids=lambda x: getattr(x, "__name__", x))
def test_kept(reason, function):
    graph, _ = run(function, *inputs())
    (site,) = graph.sites
    assert (site.status, site.reason) == ("kept", reason), site
    assert site.sentence[-1] == "." and "flex_cases.py:" in site.source
    assert graph.before == graph.after


def test_every_reason_of_this_rule_has_a_case():
    new = {"score_mod_not_recognised", "aux_outputs_used", "block_mask_not_proven"}
    assert new <= {reason for reason, _ in cases.KEPT} and new <= REASONS.keys()


@pytest.mark.parametrize("blocks", tiers([False], [(True,)]))
def test_decoding_over_many_lengths(blocks):
    """Lengths on both sides of a block of 128; symbolic sizes; every attention of every graph is rewritten."""
    model, backend = cases.flex_model(blocks), Backend(Options(kv_format="model", strict=True))
    compiled = torch.compile(model, backend=backend)
    for tokens in (5, 126, 9):
        theirs, ours = greedy(model, prompt(2, tokens), 4), greedy(compiled, prompt(2, tokens), 4)
        assert torch.equal(ours[0], theirs[0])
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-5)
        assert isinstance(ours[2][0][0], PagedKVTensor)
    assert {(site.status, site.mask) for graph in backend.graphs for site in graph.sites} == {("rewritten", "causal")}
    assert len(backend.graphs) <= 6


def test_softcaps_of_two_models_are_both_constants():
    """Dynamo makes the second model's softcap symbolic."""
    backend = Backend(Options(kv_format="model", strict=True))
    for softcap in (5.0, 7.0):
        model = cases.flex_model(False, softcap)
        compiled = torch.compile(model, backend=backend)
        ours, theirs = greedy(compiled, prompt(2, 5), 2), greedy(model, prompt(2, 5), 2)
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-5)
    assert {site.softcap for graph in backend.graphs for site in graph.sites} == {5.0, 7.0}


def test_layers_share_one_dense_mask():
    def twice(q, k, v, past):
        k, v = attention_cases.grown(k, v, past)

        def score_mod(score, b, h, i, j):
            return torch.where((j + h) % 3 > 0, score, -float("inf"))

        first = cases.flex(q, k, v, score_mod=score_mod)
        return cases.flex(first * 0.5, k, v, score_mod=score_mod), (k, v)

    graph, _ = run(twice, *inputs())
    assert [site.mask for site in graph.sites] == ["dense", "dense"]
    assert graph.after.count("mod(") == 1


def test_a_mask_is_computed_again_where_what_it_captures_is_written_between_two_layers():
    def changed(q, k, v, past, limit):
        k, v = attention_cases.grown(k, v, past)
        limit = limit.clone()

        def score_mod(score, b, h, i, j):
            return torch.where(j >= limit[b], score, -float("inf"))

        first = cases.flex(q, k, v, score_mod=score_mod)
        limit.add_(2)
        return cases.flex(first * 0.5, k, v, score_mod=score_mod), (k, v)

    run(changed, *inputs(), torch.tensor([1, 2]))


def test_log_sum_exp_that_nothing_needs_does_not_matter():
    """Transformers asks for it on a GPU, whatever is done with it."""

    def asked(q, k, v, past):
        k, v = attention_cases.grown(k, v, past)
        out, aux = cases.flex(q, k, v, return_aux=flex_module.AuxRequest(lse=True))
        aux.lse.to(v.dtype)
        return out, (k, v)

    assert [site.status for site in run(asked, *inputs())[0].sites] == ["rewritten"]


def test_a_block_mask_from_outside_is_read():
    def given(q, k, v, past, block_mask):
        k, v = attention_cases.grown(k, v, past)
        return cases.flex(q, k, v, block_mask=block_mask), (k, v)

    block_mask = flex_module.create_block_mask(lambda b, h, i, j: i + 5 >= j, None, None, 3, 8, device="cpu")
    (site,) = run(given, *inputs(), block_mask)[0].sites
    assert (site.status, site.mask) == ("rewritten", "dense")


@pytest.mark.parametrize("with_full", [False, True])
def test_blocks_say_what_is_shown(with_full):
    """Listed as full: shown; listed as partial: where mask_mod shows it; else hidden. Numbers after the count are none.

    PyTorch's own eager form does not look at the blocks, so the expected mask is made here.
    """
    q, k, v, past = inputs(tokens=4, past=8)
    partial = torch.tensor([[1, 0, -7], [2, 9, 9]], dtype=torch.int32)
    full = torch.tensor([[2, 5, 5], [0, 1, 9]], dtype=torch.int32)
    counts = torch.tensor([[[2, 1]]], dtype=torch.int32), torch.tensor([[[1, 2]]], dtype=torch.int32)
    lists = (counts[0], partial[None, None], *((counts[1], full[None, None]) if with_full else ()))
    shown = torch.zeros(4, 12, dtype=torch.bool)
    for row in range(4):
        for key in range(12):
            at, block = row // 2, key // 4
            in_partial = block in partial[at, : counts[0][0, 0, at]]
            in_full = with_full and block in full[at, : counts[1][0, 0, at]]
            shown[row, key] = in_full or (in_partial and key % 3 != row % 3)

    def given(q, k, v, past, lists):
        k, v = attention_cases.grown(k, v, past)
        block_mask = flex_module.BlockMask.from_kv_blocks(
            *lists, BLOCK_SIZE=(2, 4), mask_mod=lambda b, h, i, j: j % 3 != i % 3, seq_lengths=(4, 12)
        )
        return cases.flex(q, k, v, block_mask=block_mask), (k, v)

    backend = Backend(Options(kv_format="model", strict=True))
    with torch.no_grad():
        ours, _ = torch.compile(given, backend=backend)(q, k, v, past, lists)
        keys, values = attention_cases.grown(k, v, past)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=shown, enable_gqa=True)
    torch.testing.assert_close(ours, theirs)


def test_transformers_block_mask_is_traced():
    """It asks create_block_mask to compile itself; in a trace that is one graph with the layers, and proven."""
    from transformers import DynamicCache

    model, backend = build("gemma3", "flex_attention"), Backend(Options(kv_format="model", strict=True))
    caches, ids = [DynamicCache(config=model.config) for _ in range(2)], prompt(2, 20)
    with torch.no_grad():
        ours = torch.compile(model, backend=backend)(ids, past_key_values=caches[0]).logits
        with torch.compiler.set_stance("force_eager"):
            theirs = model(ids, past_key_values=caches[1]).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    (graph,) = backend.graphs
    assert [site.mask for site in graph.sites] == ["causal, window 16", "causal"]


def test_create_block_mask_outside_a_trace_is_as_it_was(monkeypatch):
    """It still compiles itself when asked to; a second call of the hook changes nothing."""
    asked = []
    monkeypatch.setattr(torch, "compile", lambda function: asked.append(function) or function)
    flex_module.create_block_mask(lambda b, h, i, j: i >= j, None, None, 8, 8, device="cpu", _compile=True)
    assert asked == [flex_module.create_block_mask]
    assert not compat_flex.inline_create_block_mask()
