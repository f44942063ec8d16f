"""What a compiled graph is called with has the strides of its examples, which Inductor compiles for and asserts."""

import pytest
import torch
from replayed import replayed_on_cpu
from tiny_models import WINDOW, build, prompt
from transformers import DynamicCache

import gemkv_compile
from gemkv_compile.runtime import padding, step_graphs


class Strict:
    """An inner compiler that runs graphs as they are, and refuses tensors whose memory is laid out in another way."""

    def __init__(self):
        self.calls = 0

    def __call__(self, module, examples):
        contiguous = [isinstance(each, torch.Tensor) and each.is_contiguous() for each in examples]

        def run(*args):
            self.calls += 1
            for number, (arg, must) in enumerate(zip(args, contiguous, strict=True)):
                assert not must or arg.is_contiguous(), f"input {number}: {tuple(arg.shape)}, {arg.stride()}"
            return module.forward(*args)

        return run


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_a_dense_cache_of_several_sequences_goes_on(family):
    """A table with the window's rows of a cache that eager filled takes the end of a mask: a view with gaps."""
    inner, plain = Strict(), build(family)
    model = gemkv_compile.compile(build(family), kv_format="model", strict=True, inner=inner)
    ids = prompt(3, 2 * WINDOW + 5)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    logits = []
    for each in (plain, model):
        cache, now = DynamicCache(config=plain.config), mask
        with torch.no_grad():
            plain(ids, attention_mask=now, past_key_values=cache)
            for step in range(4):
                now = torch.cat([now, torch.ones_like(now[:, :1])], 1)
                out = each(prompt(3, 1, step), attention_mask=now, past_key_values=cache)
        logits.append(out.logits)
    torch.testing.assert_close(*logits)
    assert inner.calls == 4


def test_layers_share_padding_masks(monkeypatch):
    """A mask is brought to a numbering once a call, not once a layer, and a captured step reads one buffer for it."""
    made, buffers = [], []
    aligned, buffer = padding.aligned, step_graphs._mask_buffer
    monkeypatch.setattr(padding, "aligned", lambda *args: made.append(args) or aligned(*args))
    monkeypatch.setattr(step_graphs, "_mask_buffer", lambda *args: buffers.append(args) or buffer(*args))
    layers = dict(num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3)
    model = gemkv_compile.compile(build("gemma3", **layers), kv_format="model", strict=True)
    plain, ids = build("gemma3", **layers), prompt(2, 2 * WINDOW)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    options = dict(max_new_tokens=8, do_sample=False)
    with replayed_on_cpu(monkeypatch) as recorded, torch.no_grad():
        out = model.generate(ids, attention_mask=mask, **options)
        assert torch.equal(out, plain.generate(ids, attention_mask=mask, **options))
    assert len(recorded) == 1 and len(buffers) == 1  # both numberings begin at token 0
    assert len(made) <= 3  # the prompt, and steps before the capture


def test_an_imported_window_has_a_numbering_of_its_own(monkeypatch):
    """Layers whose numbers differ have two masks, and a capture of one numbering is not used for the other."""
    buffers, buffer = [], step_graphs._mask_buffer
    monkeypatch.setattr(step_graphs, "_mask_buffer", lambda *args: buffers.append(args) or buffer(*args))
    plain, model = build("gemma3"), gemkv_compile.compile(build("gemma3"), kv_format="model", strict=True)
    ids = prompt(2, 2 * WINDOW + 3)
    mask = torch.ones_like(ids)
    mask[0, : WINDOW + 9] = 0  # hides some of what the window sees
    results = []
    with replayed_on_cpu(monkeypatch) as recorded, torch.no_grad():
        for each in (plain, model):
            for dense in (False, True, False):
                cache, now, logits = DynamicCache(config=plain.config), mask, []
                (plain if dense else each)(ids, attention_mask=mask, past_key_values=cache)
                for step in range(5):
                    now = torch.cat([now, torch.ones_like(now[:, :1])], 1)
                    logits.append(each(prompt(2, 1, step), attention_mask=now, past_key_values=cache).logits)
                results.append(torch.stack(logits))
    for theirs, ours in zip(results[:3], results[3:], strict=True):
        torch.testing.assert_close(ours, theirs)
    assert len(recorded) == 2 and len(buffers) == 3  # the second serves both
