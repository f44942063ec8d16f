"""Quantised formats: what the model computes is what eager computes over independently quantised keys and values."""

import pytest
import torch
from quantised_cache import quantised_cache
from tiers import tiers
from tiny_models import build, greedy, prompt, tuple_model
from transformers import DynamicCache

import gemkv_compile
from gemkv_compile import Options
from gemkv_compile.backend import Backend
from gemkv_compile.report import Report
from gemkv_compile.runtime.ledger import kv_memory


def teacher_forced(model, ids, prompt_tokens, cache):
    """Logits of a prompt and of each further token, all given."""
    with torch.no_grad():
        logits = [model(ids[:, :prompt_tokens], past_key_values=cache).logits]
        for t in range(prompt_tokens, ids.shape[1]):
            logits.append(model(ids[:, t : t + 1], past_key_values=cache).logits)
    return torch.cat(logits, 1)


CELLS = [
    ("gemma3", "sdpa", "int8"),
    ("gemma3", "sdpa", "k8v4"),
    ("gemma3", "sdpa", "int4"),
    ("gemma2", "eager", "int8"),
    ("gemma2", "eager", "int4"),
    ("llama", "sdpa", "int8"),
    ("llama", "sdpa", "k6v4"),
    ("gemma1", "eager", "int8"),
    ("qwen3", "sdpa", "int8"),
    ("mistral", "sdpa", "int8"),
]


OFTEN = [cell for cell in CELLS if cell[0] == "gemma3"] + [("gemma2", "eager", "int8"), ("llama", "sdpa", "k6v4")]
CASES = [(100, *cell) for cell in OFTEN]
MORE_CASES = [(1, *cell) for cell in CELLS] + [(100, *cell) for cell in CELLS if cell not in OFTEN]


@pytest.mark.parametrize("prompt_tokens, family, attention, kv_format", tiers(CASES, MORE_CASES))
def test_logits_are_those_of_the_format(prompt_tokens, family, attention, kv_format):
    """The budget is derived: twice float32's own noise (eager against float64) plus nothing for quantisation,
    because both sides quantise; and the distance from exact eager is that of the independent model."""
    plain, ids = build(family, attention), prompt(2, 150)
    exact = teacher_forced(plain, ids, prompt_tokens, DynamicCache(config=plain.config))
    expected = teacher_forced(plain, ids, prompt_tokens, quantised_cache(plain.config, kv_format))
    in_double = teacher_forced(build(family, attention).double(), ids, prompt_tokens, DynamicCache(config=plain.config))
    model = gemkv_compile.compile(plain, kv_format=kv_format, strict=True)
    ours = teacher_forced(model, ids, prompt_tokens, DynamicCache(config=plain.config))
    noise = (exact - in_double).abs().max()
    quantisation = (expected - exact).abs().max()
    assert quantisation > 20 * noise  # the test can tell the two apart
    assert (ours - expected).abs().max() <= 0.02 * quantisation + 4 * noise
    assert (ours - exact).abs().max() <= 1.02 * quantisation + 4 * noise


def test_hand_written_module_is_within_the_format_s_bound():
    plain, model = tuple_model(), gemkv_compile.compile(tuple_model(), strict=True)
    ids = prompt(1, 100)
    _, theirs, _ = greedy(plain, ids, 1)
    with torch.no_grad():
        _, pasts = model(ids)
        dense = [tuple(past.materialise() for past in pair) for pair in pasts]
        token = prompt(1, 1, 9)
        ours, expected = model(token, pasts)[0], plain(token, dense)[0]
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert theirs.shape == (1, 1, 256)


@pytest.mark.parametrize(
    "kv_format, prompt_tokens",
    tiers([("int8", 300), ("int4", 1)], [("int8", 1), ("k8v4", 70), ("model", 40)]),
)
def test_memory_formula_equals_the_ledger_at_every_length(kv_format, prompt_tokens):
    model, backend = build("gemma3", dtype=torch.bfloat16), Backend(Options(kv_format=kv_format))
    model.compile(backend=backend)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt(2, prompt_tokens), past_key_values=cache)
        for tokens in range(prompt_tokens + 1, prompt_tokens + 140):
            model(prompt(2, 1), past_key_values=cache)
            ledger = kv_memory(cache)
            assert ledger.dense == 0 and len(ledger.layers) == 2
            assert ledger.total == Report(tuple(backend.graphs)).memory_bytes(2, tokens), tokens
    dense = Report(tuple(backend.graphs)).dense_bytes(2, tokens)
    assert dense == 2 * (tokens + 15) * 2 * 2 * 16 * 2
