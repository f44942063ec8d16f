"""What a compiled graph is called with has the strides of its examples, which Inductor compiles for and asserts."""

import pytest
import torch
from tiny_models import WINDOW, build, prompt
from transformers import DynamicCache

import gemkv_compile


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
