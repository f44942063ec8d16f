"""The compiled module stays legal for training, and the cache stays outside autograd."""

import pytest
import torch
from tiers import tiers
from tiny_models import build, greedy, prompt, tuple_model

import gemkv_compile
from gemkv_compile import PagedKVTensor


def gradients(model, run):
    model.zero_grad()
    run(model).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same_gradients(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("inference", tiers([False], [(True,)]))
def test_training_step_after_generation(inference):
    model, plain = gemkv_compile.compile(build("gemma3"), kv_format="model"), build("gemma3")
    ids = prompt(2, 24)
    with torch.inference_mode(inference), torch.no_grad():
        model.generate(ids[:, :10], max_new_tokens=20, do_sample=False)
    loss = lambda some: some(ids, labels=ids).loss  # noqa: E731
    assert_same_gradients(gradients(model, loss), gradients(plain, loss))


def test_cache_of_a_training_call_stays_differentiable():
    model = gemkv_compile.compile(build("gemma3"), kv_format="model")
    out = model(prompt(1, 12), labels=prompt(1, 12))
    keys = out.past_key_values.layers[1].keys
    assert not isinstance(keys, PagedKVTensor) and keys.requires_grad


def test_no_page_is_allocated_in_training():
    from gemkv_compile.runtime.pool import pools

    before = sum(stats.pages for stats in pools.stats())
    model = gemkv_compile.compile(build("gemma3"), kv_format="model")
    model(prompt(1, 200), labels=prompt(1, 200)).loss.backward()
    assert sum(stats.pages for stats in pools.stats()) == before


@pytest.mark.parametrize("kv_format", tiers(["model", "int4"], [("int8",)]))
@pytest.mark.parametrize("new_tokens", [1, 9])
def test_gradients_through_a_call_with_a_paged_past(kv_format, new_tokens):
    """Gradients of this call's tokens; the past is constant. Compared with eager over the same, dense past."""
    model, plain = gemkv_compile.compile(tuple_model(), kv_format=kv_format), tuple_model()
    with torch.no_grad():
        _, pasts = model(prompt(2, 150))
    dense = [tuple(past.materialise() for past in pair) for pair in pasts]
    ids = prompt(2, new_tokens, seed=3)
    presents = []

    def loss(some, pasts):
        logits, present = some(ids, pasts)
        presents.append(present)
        return logits.logsumexp(-1).sum()

    ours = gradients(model, lambda some: loss(some, pasts))
    theirs = gradients(plain, lambda some: loss(some, dense))
    assert_same_gradients(ours, theirs)
    keys = presents[0][0][0]
    assert isinstance(keys, PagedKVTensor) and not keys.requires_grad and keys.grad is None


def test_backward_after_the_cache_is_gone():
    model, plain = gemkv_compile.compile(tuple_model(), kv_format="model"), tuple_model()
    with torch.no_grad():
        _, pasts = model(prompt(1, 150))
    dense = [tuple(past.materialise() for past in pair) for pair in pasts]
    ids = prompt(1, 4, seed=3)

    def ours(some):
        nonlocal pasts
        logits, presents = some(ids, pasts)
        del presents
        pasts = None
        with torch.no_grad():  # reuse whatever pages were given back
            some(prompt(1, 300, seed=9))
        return logits.logsumexp(-1).sum()

    theirs = gradients(plain, lambda some: some(ids, dense)[0].logsumexp(-1).sum())
    assert_same_gradients(gradients(model, ours), theirs)


def test_prefix_tuning_keeps_the_site():
    plain = tuple_model()
    prefix = [tuple(torch.randn(1, 2, 6, 16).requires_grad_() for _ in range(2)) for _ in range(2)]
    report = gemkv_compile.explain(plain, prompt(1, 5), prefix)
    assert {site.reason for site in report.sites} == {"past_requires_grad"}
    model = gemkv_compile.compile(tuple_model())
    grads = []
    for some in (plain, model):
        some(prompt(1, 5), prefix)[0].sum().backward()
        grads.append([past.grad.clone() for pair in prefix for past in pair])
        for pair in prefix:
            for past in pair:
                past.grad = None
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_frozen_parameters_page_even_with_grad_enabled():
    model = gemkv_compile.compile(tuple_model().requires_grad_(False), kv_format="model")
    _, presents = model(prompt(1, 8))
    assert isinstance(presents[0][0], PagedKVTensor)


def test_generation_without_no_grad_is_right_and_says_why_it_is_not_paged():
    plain = tuple_model()
    report = gemkv_compile.explain(plain, prompt(1, 8))
    assert {site.reason for site in report.sites} == {"grad_enabled"}
    assert "torch.no_grad()" in report.sites[0].sentence
    ids, model = prompt(1, 8), gemkv_compile.compile(tuple_model())
    expected, pasts, past = greedy(plain, ids, 6)[0], None, None
    tokens = []
    for _ in range(6):
        logits, pasts = model(ids, pasts)
        ids = logits[:, -1:].argmax(-1)
        tokens.append(ids)
    assert torch.equal(torch.cat(tokens, 1), expected) and past is None


@pytest.mark.parametrize("new_tokens", [1, 5])
def test_only_queries_require_grad(new_tokens):
    """As with an adapter on the query projection: keys and values are paged, gradients of the queries are right."""
    plain, model = tuple_model().requires_grad_(False), tuple_model().requires_grad_(False)
    for some in (plain, model):
        for layer in some.layers:
            layer.q.requires_grad_(True)
        some.layers[1].q.requires_grad_(True)
    gemkv_compile.compile(model, kv_format="model")
    with torch.no_grad():
        pasts = [some(prompt(1, 70))[1] for some in (model, plain)]
    ids = prompt(1, new_tokens, 3)
    ours = gradients(model, lambda some: some(ids, pasts[0])[0].logsumexp(-1).sum())
    theirs = gradients(plain, lambda some: some(ids, pasts[1])[0].logsumexp(-1).sum())
    assert_same_gradients(ours, theirs)


def test_learned_mask_keeps_the_site():
    from attention_cases import biased, inputs

    bias = torch.zeros(4, 3, 8, requires_grad=True)
    (site,) = gemkv_compile.explain(biased, *inputs(), bias).sites
    assert (site.status, site.reason) == ("kept", "grad_enabled") and "mask or sink requires grad" in site.sentence
    gemkv_compile.compile(biased)(*inputs(), bias)[0].square().sum().backward()
    assert bias.grad.abs().max() > 0
