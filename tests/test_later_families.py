"""Families beyond the first: layers that share keys and values, two head sizes in one model, sinks."""

import pytest
import torch
from tiers import tiers
from tiny_models import LATER_CELLS, build, prompt

import gemkv_compile
from gemkv_compile import Options, PagedKVTensor


def generate(model, ids, tokens=40):
    with torch.no_grad():
        return model.generate(ids, max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True)


SLOW = [cell for cell in LATER_CELLS if cell[0] != "gpt_oss"]  # of which other tests are, and those on a GPU
CELLS = tiers([cell for cell in LATER_CELLS if cell not in SLOW], SLOW)


@pytest.mark.parametrize("family, attention", CELLS)
def test_equal_eager_past_the_window(family, attention):
    pytest.importorskip(f"transformers.models.{family}")
    model, ids = build(family, attention), prompt(2, 10)
    expected = generate(model, ids).sequences
    compiled = generate(gemkv_compile.compile(model, kv_format="model", strict=True), ids)
    assert gemkv_compile.report_of(model).graphs[-1].length_free
    assert torch.equal(compiled.sequences, expected)
    layers = [layer for layer in compiled.past_key_values.layers if layer.keys is not None]
    assert all(isinstance(layer.keys, PagedKVTensor) for layer in layers)


@pytest.mark.parametrize("family", tiers([], [("gemma3n",), ("gemma4",)]))
def test_layers_that_share_keys_own_nothing(family):
    """Six layers read the caches of four; the bytes are those four's, and exactly what the formula says."""
    pytest.importorskip(f"transformers.models.{family}")
    model, ids = build(family), prompt(1, 70)
    with torch.no_grad():
        report = gemkv_compile.explain(model, ids)
    assert len(report.sites) == 6 and {site.status for site in report.sites} == {"rewritten"}
    assert len(report.graphs[0].caches) == 4
    out = generate(gemkv_compile.compile(model), ids, 30)
    ledger = gemkv_compile.kv_memory(out.past_key_values)
    assert len(ledger.layers) == 4 and ledger.total == report.memory_bytes(1, 99)


def test_head_sizes_256_and_512_in_one_model():
    """Each layer's pages have its own size, and all bytes are accounted for."""
    pytest.importorskip("transformers.models.gemma4")
    sizes = dict(head_dim=256, global_head_dim=512, num_hidden_layers=2, num_kv_shared_layers=0)
    model = build("gemma4", num_attention_heads=2, layer_types=["sliding_attention", "full_attention"], **sizes)
    ids = prompt(1, 70)
    with torch.no_grad():
        report = gemkv_compile.explain(model, ids)
    assert [site.head_dim for site in report.sites] == [256, 512]
    expected = generate(model, ids, 8).sequences
    out = generate(gemkv_compile.compile(model, kv_format="model"), ids, 8)
    assert torch.equal(out.sequences, expected)
    torch._dynamo.reset()
    out = generate(gemkv_compile.compile(model), ids, 70)
    ledger = gemkv_compile.kv_memory(out.past_key_values)
    assert ledger.total == report.memory_bytes(1, 139)


def test_sinks_are_part_of_the_softmax():
    """Near miss: the same chain with a column that is no number per head is kept."""
    import attention_cases as cases
    from attention_cases import additive, causal, grown

    def with_column(spread):
        def function(q, k, v, past, sinks):
            keys, values = grown(k, v, past)
            scores = q @ keys.mT * 0.25 + additive(causal(q, keys))
            both = torch.cat([scores, spread(sinks, q)], -1)
            both = both - both.max(-1, keepdim=True).values
            return both.softmax(-1)[..., :-1] @ values, (keys, values)

        return function

    def per_head(sinks, q):
        return sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)

    def per_token(sinks, q):
        return sinks[:3].reshape(1, 1, 3, 1).expand(q.shape[0], 4, -1, -1)

    for spread, verdict in ((per_head, ("rewritten", "")), (per_token, ("kept", "attention_not_recognised"))):
        arguments, function = (*cases.inputs(kv_heads=4), torch.randn(4)), with_column(spread)
        with torch.no_grad():
            (site,) = gemkv_compile.explain(function, *arguments, gemkv_options=Options(kv_format="model")).sites
            ours = gemkv_compile.compile(function, kv_format="model")(*arguments)
        assert (site.status, site.reason) == verdict
        cases.tree_close(ours, function(*arguments), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_scales_of_two_models_in_one_process():
    """Dynamo makes a float symbolic once it has seen two values of it; a scale that changes is compiled again."""
    ids = prompt(1, 10)
    for scalar in (16, 64, 100):
        model = build("gemma3", query_pre_attn_scalar=scalar)
        expected = generate(model, ids, 5).sequences
        out = generate(gemkv_compile.compile(model, kv_format="model", strict=True), ids, 5)
        assert torch.equal(out.sequences, expected)
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.7
    changed = build("gemma3", query_pre_attn_scalar=100)
    for layer in changed.model.layers:
        layer.self_attn.scaling = 0.7
    assert torch.equal(generate(model, ids, 5).sequences, generate(changed, ids, 5).sequences)
