"""Decode steps that are captured and replayed; on a CPU `replayed.Replayed` stands for a CUDA graph."""

import copy
import gc
import weakref

import pytest
import torch
from replayed import replayed_on_cpu
from static_models import BY_TENSOR, static_greedy, static_model
from tiers import tiers
from tiny_models import build, prompt, tuple_model
from tiny_models import greedy as tuple_greedy

import gemkv_compile
from gemkv_compile.runtime import recording, step_graphs


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    with replayed_on_cpu(monkeypatch) as made:
        yield made


def greedy(model, tokens, steps=30, batch=1, seed=0, **options):
    options = dict(max_new_tokens=steps, do_sample=False) | options
    with torch.no_grad():
        return model.generate(prompt(batch, tokens, seed), **options)


def expected(family, *args, attention="sdpa", **options):
    with torch.compiler.set_stance("force_eager"):
        return greedy(build(family, attention), *args, **options)


def compiled(family, attention="sdpa", **options):
    options = dict(kv_format="model", strict=True, cuda_graphs=True) | options
    return gemkv_compile.compile(build(family, attention), **options)


def said(model):
    return [line for graph in gemkv_compile.report_of(model).graphs for line in graph.cuda_graphs]


def test_one_capture_serves_every_length_prompt_and_cache(recorded):
    """C4: prompts on both sides of the window, each with a new cache."""
    model = compiled("gemma3")
    for tokens, steps in ((20, 50), (3, 30), (61, 10)):
        assert torch.equal(greedy(model, tokens, steps, seed=tokens), expected("gemma3", tokens, steps, seed=tokens))
    assert len(recorded) == 1 and recorded[0].replays > 60
    assert "captured for 1 sequences" in said(model)


def test_one_capture_a_batch_size(recorded):
    model = compiled("llama")
    greedy(model, 12, 10)
    for tokens in (20, 9):
        assert torch.equal(greedy(model, tokens, 15, batch=2), expected("llama", tokens, 15, batch=2))
    assert len(recorded) == 2


def test_padding_is_copied(recorded):
    """Zeros to the left, of another length at each call, and a mask that outgrows its buffer."""
    model = compiled("gemma3")
    for tokens in (20, 33):
        mask = torch.tensor([[0] * (3 * i + 1) + [1] * (tokens - 3 * i - 1) for i in range(3)])
        ours = greedy(model, tokens, batch=3, attention_mask=mask)
        assert torch.equal(ours, expected("gemma3", tokens, batch=3, attention_mask=mask))
    assert len(recorded) == 1


@pytest.mark.slow
def test_a_mask_that_outgrows_its_buffer(recorded, monkeypatch):
    monkeypatch.setattr(step_graphs, "MIN_PADDING_COLUMNS", 8)
    model = compiled("llama")
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    ours = greedy(model, 6, 40, batch=2, attention_mask=mask)
    assert torch.equal(ours, expected("llama", 6, 40, batch=2, attention_mask=mask))
    assert 2 <= len(recorded) <= 4


def test_kept_logits_stay_what_they_were():
    """C5: no later step writes into what an earlier one returned."""
    model = compiled("gemma3")
    options = dict(return_dict_in_generate=True, output_logits=True)
    kept = greedy(model, 20, **options).logits
    for ours, theirs in zip(kept, expected("gemma3", 20, **options).logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def steps(model, cache, token, count):
    """Logits of decode steps, always with the same token."""
    rows = []
    for _ in range(count):
        position = torch.tensor([[cache.get_seq_length()]])
        with torch.no_grad():
            out = model(torch.tensor([[token]]), past_key_values=cache, position_ids=position, use_cache=True)
        rows.append(out.logits[0, -1])
    return torch.stack(rows)


def start(model, tokens, seed):
    with torch.no_grad():
        return model(prompt(1, tokens, seed), use_cache=True).past_key_values


def test_caches_that_take_turns(recorded):
    model, plain = (compiled("gemma3", kv_format="int8", cuda_graphs=on) for on in (True, False))
    alone = [steps(plain, start(plain, 20 + i, i), 7, 50) for i in (0, 1)]
    caches = [start(model, 20 + i, i) for i in (0, 1)]
    rows = [[], []]
    for _ in range(10):
        for i in (0, 1):
            rows[i].append(steps(model, caches[i], 7, 5))
    assert len(recorded) == 1
    for i in (0, 1):
        torch.testing.assert_close(torch.cat(rows[i]), alone[i], rtol=1e-4, atol=1e-4)
        assert caches[i].get_seq_length() == 70 + i


@pytest.mark.slow
def test_an_older_cache_is_continued(recorded):
    """Two continuations of one past: the table forks, and both are right."""
    outs = []
    for on in (True, False):
        model = compiled("llama", cuda_graphs=on)
        first = start(model, 20, 0)
        steps(model, first, 5, 4)
        second = copy.deepcopy(first)
        outs.append([steps(model, cache, token, 6) for cache, token in ((first, 9), (second, 11), (first, 3))])
    for ours, theirs in zip(*outs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_table_that_outgrows_its_slot(recorded, monkeypatch):
    from gemkv_compile.runtime import state_slot

    monkeypatch.setattr(state_slot, "FULL_COLUMNS", 2)
    model = compiled("llama", page_size=16, group_size=16)
    assert torch.equal(greedy(model, 100, 60), expected("llama", 100, 60))
    assert 2 <= len(recorded) <= 4


def test_weights_that_move_or_change(recorded):
    model, plain = compiled("llama"), build("llama")
    before = greedy(model, 12)
    for each in (model, plain):
        layer = each.model.layers[0].mlp.down_proj
        with torch.no_grad():
            layer.weight.mul_(-3)  # in place: seen by the capture
    with torch.compiler.set_stance("force_eager"):
        changed = greedy(plain, 12)
    assert torch.equal(greedy(model, 12), changed) and not torch.equal(changed, before)
    assert len(recorded) == 1
    for each in (model, plain):
        layer = each.model.layers[1].mlp.down_proj
        layer.weight.data = layer.weight.data * -2  # elsewhere: captured again
    with torch.compiler.set_stance("force_eager"):
        changed = greedy(plain, 12)
    assert torch.equal(greedy(model, 12), changed)
    assert len(recorded) == 2


@pytest.mark.slow
def test_expanded_inputs(recorded):
    """Positions of one row for all sequences, as `expand` gives them."""
    outs = []
    for on in (True, False):
        model = compiled("llama", cuda_graphs=on)
        with torch.no_grad():
            cache = model(prompt(3, 20), use_cache=True).past_key_values
            for step in range(5):
                position = torch.tensor([[20 + step]]).expand(3, 1)
                token = torch.tensor([[step]]).expand(3, 1)
                logits = model(token, past_key_values=cache, position_ids=position, use_cache=True).logits
        outs.append(logits)
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-4)
    assert len(recorded) == 1


def test_a_capture_that_fails(monkeypatch, caplog):
    def refuse(function, device):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setitem(recording.RECORDERS, "cpu", refuse)
    model = compiled("gemma3")
    with caplog.at_level("INFO", "gemkv_compile"):
        assert torch.equal(greedy(model, 20, 10), expected("gemma3", 20, 10))
    assert len([line for line in said(model) if "not permitted" in line]) == 1
    assert caplog.text.count("not permitted") == 1


def test_a_replay_that_is_interrupted(recorded):
    """The cache is what it was, and the next step is right."""
    model = compiled("gemma3", kv_format="int8")
    cache, reference = start(model, 50, 0), start(model, 50, 0)
    assert torch.equal(steps(model, cache, 7, 5), steps(model, reference, 7, 5))
    replay = recorded[0].replay

    def interrupted():
        replay()
        raise KeyboardInterrupt

    for _ in range(12):  # a group is completed on the way
        recorded[0].replay = interrupted
        length = cache.get_seq_length()
        with pytest.raises(KeyboardInterrupt):
            steps(model, cache, 3, 1)
        assert cache.get_seq_length() == length
        recorded[0].replay = replay
        torch.testing.assert_close(steps(model, cache, 7, 1), steps(model, reference, 7, 1))


def test_modules_without_transformers(recorded):
    model, plain = gemkv_compile.compile(tuple_model(), kv_format="model", cuda_graphs=True), tuple_model()
    assert torch.equal(tuple_greedy(model, prompt(2, 10), 20)[0], tuple_greedy(plain, prompt(2, 10), 20)[0])
    assert len(recorded) == 1
    static = gemkv_compile.compile(static_model(BY_TENSOR[0]), kv_format="model", cuda_graphs=True)
    expected = static_greedy(static_model(BY_TENSOR[0]), prompt(2, 10), 20)
    assert torch.equal(static_greedy(static, prompt(2, 10), 20), expected)
    assert len(recorded) == 2


@pytest.mark.parametrize("family", tiers(["gemma3"], [("llama",)]))
def test_static_cache(recorded, family):
    model = compiled(family)
    for tokens in (20, 9):
        ours = greedy(model, tokens, cache_implementation="static")
        assert torch.equal(ours, expected(family, tokens, cache_implementation="static"))
    assert len(recorded) >= 1, said(model)


def test_off(recorded):
    model = compiled("gemma3", cuda_graphs=False)
    greedy(model, 20)
    assert not recorded and not said(model)


@pytest.mark.slow
def test_a_capture_keeps_no_model_alive(recorded):
    model = compiled("llama")
    greedy(model, 12)
    weight = weakref.ref(model.model.layers[0].mlp.down_proj.weight)
    recorded.clear()  # the stand-in holds its function; a CUDA graph does not
    for capture in captures():
        capture.recording = None
    del model
    torch._dynamo.reset()
    gc.collect()
    assert weight() is None


def captures():
    from gemkv_compile.inner import shared_compiles

    return [capture for graph in shared_compiles._known.values() for capture in graph.captures]


def test_threads(recorded):
    """Threads that step caches of their own at once: who finds the slot taken runs as without graphs."""
    import threading

    model = compiled("gemma3")
    alone = [steps(model, start(model, 20 + i, i), 7, 15) for i in range(3)]
    caches, results = [start(model, 20 + i, i) for i in range(3)], [None] * 3

    def work(i):
        results[i] = steps(model, caches[i], 7, 15)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ours, theirs in zip(results, alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
