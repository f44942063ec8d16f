"""How often Dynamo traces, and that nothing that grows makes it trace again (huggingface/transformers#37908)."""

import pytest
import torch
from tiers import tiers
from tiny_models import build, prompt, tuple_model
from torch._dynamo.utils import counters

import gemkv_compile
from gemkv_compile.inner import shared_compiles


def traces():
    return counters["stats"]["unique_graphs"]


def generate(model, tokens, batch=1, steps=50, seed=0, **kwargs):
    model.generate(prompt(batch, tokens, seed), max_new_tokens=steps, do_sample=False, **kwargs)


def padded(batch, tokens):
    return {"attention_mask": torch.tensor([[0] * (i + 1) + [1] * (tokens - i - 1) for i in range(batch)])}


@pytest.fixture
def model():
    return gemkv_compile.compile(build("gemma3"), kv_format="int8")


def test_five_prompts_of_different_length(model):
    """C1 and C4: few traces for many lengths, none when a kind repeats, with a new cache object each time."""
    with torch.no_grad():
        for tokens in (20, 33, 27, 61, 45):
            generate(model, tokens)
        seen = traces()
        assert seen <= 4 and shared_compiles.compiles <= 3
        for tokens in (20, 90, 31):
            generate(model, tokens)
    assert traces() == seen < torch._dynamo.config.recompile_limit


def test_prompts_that_cross_the_window(model):
    with torch.no_grad():
        for tokens in (10, 12, 7, 9):
            generate(model, tokens)
        assert traces() <= 7 and shared_compiles.compiles <= 3
        seen = traces()
        generate(model, 11)
    assert traces() == seen


def test_every_length(model):
    with torch.no_grad():
        for tokens in (10, 1, 2, 16, 15, 17, 14, 33, 100, 3, 64):
            generate(model, tokens, steps=20)
    assert traces() <= 12 and shared_compiles.compiles <= 3
    assert torch._dynamo.config.recompile_limit >= 64 > traces()


@pytest.mark.parametrize("kind", tiers(["padded batch", "inference mode"], [("batch",)]))
def test_each_kind_of_batch(model, kind):
    with torch.inference_mode(kind == "inference mode"), torch.no_grad():
        for tokens in (20, 33, 27):
            batch = 1 if kind == "inference mode" else 3
            generate(model, tokens, batch, **(padded(batch, tokens) if kind == "padded batch" else {}))
        seen = traces()
        generate(model, 40, batch, **(padded(batch, 40) if kind == "padded batch" else {}))
    assert seen <= 4 and shared_compiles.compiles <= 3 and traces() == seen


def test_limit_is_raised_once_and_said(caplog):
    torch._dynamo.config.recompile_limit = 8
    with caplog.at_level("INFO", logger="gemkv_compile.backend"), torch.no_grad():
        model = gemkv_compile.compile(build("llama"))
        generate(model, 10, steps=3)
    assert torch._dynamo.config.recompile_limit == 64
    assert [record.message for record in caplog.records] == ["gemkv: torch._dynamo.config.recompile_limit is now 64"]


class WithPosition(torch.nn.Module):
    """A hand-written model that is told, or counts itself, how many tokens came before: a Python int."""

    def __init__(self, counts):
        super().__init__()
        self.inner, self.counts, self.seen = tuple_model(layers=1), counts, 0

    def forward(self, ids, pasts, seen):
        logits, pasts = self.inner(ids, pasts)
        if self.counts:
            self.seen += ids.shape[1]
            seen = self.seen
        return logits + seen, pasts


@pytest.mark.parametrize("counts", [False, True], ids=["an argument", "an attribute"])
def test_a_python_int_that_grows_with_each_token(counts):
    """C2: an argument becomes symbolic; Dynamo takes a module's attribute for constant, and the report says so."""
    outs, pasts, models = [], [None, None], [WithPosition(counts).eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    models[0] = gemkv_compile.compile(models[0], kv_format="model", strict=True)
    with torch.no_grad():
        for step in range(7):
            for i, model in enumerate(models):
                logits, pasts[i] = model(prompt(1, 1, step), pasts[i], step)
                outs.append(logits)
    for ours, theirs in zip(outs[::2], outs[1::2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    report = gemkv_compile.report_of(models[0])
    if counts:
        assert traces() == 7 <= torch._dynamo.config.recompile_limit
        assert "self.seen ==" in report.graphs[-1].recompiled and "traced again: " in str(report)
        assert "considers integer attributes of the nn.Module to be static" in str(report)
    else:
        assert traces() <= 4
