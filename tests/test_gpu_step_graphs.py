"""CUDA graphs on a GPU: the tokens and logits of the same compile without them. Run with `make test-gpu`."""

import copy

import pytest
import torch
from static_models import BY_TENSOR, static_greedy, static_model
from tiny_models import FAMILIES, LATER_CELLS, build, prompt

import gemkv_compile
from gemkv_compile.runtime.recording import Recording

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
CELLS = [(family, "eager" if family == "gemma2" else "sdpa") for family in FAMILIES] + LATER_CELLS


def compiled(family, attention="sdpa", **options):
    return gemkv_compile.compile(build(family, attention).cuda(), **{"strict": True, "cuda_graphs": True} | options)


def run(model, ids, steps, **options):
    with torch.no_grad():
        return model.generate(ids.cuda(), max_new_tokens=steps, do_sample=False, **options)


def said(model):
    return [line for graph in gemkv_compile.report_of(model).graphs for line in graph.cuda_graphs]


SOME = ("gemma1", "gemma3", "gemma3n", "gpt_oss")  # with both inner compilers; the others with Inductor
INNER = [(*cell, inner) for cell in CELLS for inner in ("eager", "inductor") if inner == "inductor" or cell[0] in SOME]


@pytest.mark.parametrize("family, attention, inner", INNER)
def test_the_tokens_and_logits_of_no_graph(family, attention, inner):
    """Two prompts past the window and past a group of 64; logits kept from every step (C5).

    A captured step adds up its shares of keys in another order. Until a group of 64 is complete that moves logits by
    1e-6. Then a row that lies between two int8 codes may get the other one, which moves them by 1e-3 at most (int8
    itself: 4e-3); another row's logits differ by 0.1 or more.
    """
    pytest.importorskip(f"transformers.models.{'gemma' if family == 'gemma1' else family}")
    model, plain = (compiled(family, attention, inner=inner, cuda_graphs=on) for on in (True, False))
    options = dict(return_dict_in_generate=True, output_logits=True)
    for tokens in (10, 33):
        ours, theirs = (run(each, prompt(2, tokens), 80, **options) for each in (model, plain))
        assert torch.equal(ours.sequences, theirs.sequences)
        for step, (one, other) in enumerate(zip(ours.logits, theirs.logits, strict=True)):
            bound = 1e-4 if tokens + step < 64 else 1e-2
            torch.testing.assert_close(one, other, rtol=bound, atol=bound)
    if family == "gemma3n" and inner == "eager":  # makes tensors on the CPU in each step, which Inductor folds
        assert any("cannot be captured: RuntimeError: Cannot copy between CPU and CUDA" in line for line in said(model))
        return
    assert said(model).count("captured for 2 sequences") == 1 and not any("cannot" in line for line in said(model))
    assert not said(plain)


def test_padding():
    model, plain = (compiled("gemma3", cuda_graphs=on) for on in (True, False))
    for tokens in (20, 33):
        mask = torch.tensor([[0] * (3 * i + 1) + [1] * (tokens - 3 * i - 1) for i in range(3)]).cuda()
        ours, theirs = (run(each, prompt(3, tokens), 40, attention_mask=mask) for each in (model, plain))
        assert torch.equal(ours, theirs)
    assert said(model).count("captured for 3 sequences") == 1


def rows(model, cache, token, count):
    logits = []
    for _ in range(count):
        position = torch.tensor([[cache.get_seq_length()]]).cuda()
        with torch.no_grad():
            ids = torch.tensor([[token]]).cuda()
            out = model(ids, past_key_values=cache, position_ids=position, use_cache=True)
        logits.append(out.logits[0, -1])
    return torch.stack(logits)


def test_caches_that_take_turns_and_fork():
    models = [compiled("gemma3", cuda_graphs=on) for on in (True, False)]
    outs = []
    for model in models:
        with torch.no_grad():
            caches = [model(prompt(1, 20 + i, i).cuda(), use_cache=True).past_key_values for i in (0, 1)]
        parts = [rows(model, caches[i % 2], 7, 9) for i in range(16)]
        other = copy.deepcopy(caches[0])
        parts += [rows(model, cache, token, 9) for cache, token in ((caches[0], 3), (other, 5), (caches[1], 9))]
        outs.append(parts)
    for number, (one, other) in enumerate(zip(*outs, strict=True)):
        bound = 1e-4 if number < 8 else 1e-2  # both caches are below 64 tokens until then; see the test of logits above
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


def test_static_caches():
    write = BY_TENSOR[0]
    models = [gemkv_compile.compile(static_model(write).cuda(), cuda_graphs=on) for on in (True, False)]
    outs = [static_greedy(model, prompt(2, 10).cuda(), 20) for model in models]
    assert torch.equal(*outs)
    generated = []
    for on in (True, False):
        model = compiled("gemma3", cuda_graphs=on)
        generated.append(run(model, prompt(2, 20), 40, cache_implementation="static"))
    assert torch.equal(*generated)


def test_a_failed_recording_leaves_nothing_behind():
    """A recording that waits for the device fails; memory, random numbers and the next recording are as before."""
    device, generator = torch.device("cuda", 0), torch.cuda.default_generators[0]
    generator.manual_seed(3)
    expected = torch.rand(4, device=device)
    generator.manual_seed(3)
    ones = torch.ones(4, device=device)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            Recording(lambda: [ones * 2, ones.cpu()], device)
        recording = Recording(lambda: [ones * 2], device)
        assert recording.replay()[0].tolist() == [2.0] * 4
        del recording
    assert torch.equal(torch.rand(4, device=device), expected)


def test_memory_returns():
    model = compiled("gemma3")
    run(model, prompt(2, 60), 20)
    gemkv_compile.trim()
    before = torch.cuda.memory_allocated()
    for tokens in (80, 300, 150):
        run(model, prompt(2, tokens), 20)
    gemkv_compile.trim()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
