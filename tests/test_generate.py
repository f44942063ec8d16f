"""Unmodified generate(): every mode of it gives eager's tokens."""

import copy
import functools

import pytest
import torch
from tiers import tiers
from tiny_models import FAMILIES, build, generated, greedy, prompt, tuple_model

import gemkv_compile
from gemkv_compile import PagedKVTensor

pytestmark = pytest.mark.shares_compiles


@functools.cache
def compiled(family, attention="sdpa", **options):
    return gemkv_compile.compile(build(family, attention), **{"kv_format": "model", "strict": True} | options)


def run(model, ids, steps=24, **kwargs):
    with torch.no_grad():
        return model.generate(ids, max_new_tokens=steps, **{"do_sample": False} | kwargs)


OFTEN = ("gemma2", "eager"), ("gemma2", "sdpa"), ("gemma3", "sdpa"), ("llama", "sdpa")
# Gemma 2 has no sdpa form: its softcap is written out.
CELLS = tiers(
    [("gemma2", "eager"), ("gemma3", "sdpa"), ("llama", "sdpa")],
    [(family, form) for family in FAMILIES for form in ("eager", "sdpa") if (family, form) not in OFTEN],
)


@pytest.mark.parametrize("family, attention", CELLS)
def test_families_equal_eager_past_the_window(family, attention):
    """A4: tokens are right past the window."""
    model = compiled(family, attention)
    out = run(model, prompt(1, 10), 64, return_dict_in_generate=True)
    assert torch.equal(out.sequences, generated(family, 1, 10, 64, attention))
    assert all(isinstance(layer.keys, PagedKVTensor) for layer in out.past_key_values.layers)
    assert gemkv_compile.report_of(model).graphs[-1].length_free


def test_prompt_longer_than_the_window():
    ids = prompt(2, 100)
    assert torch.equal(run(compiled("gemma3"), ids), run(build("gemma3"), ids))


def test_sampling_draws_the_same_tokens():
    outs = []
    for model in (build("gemma3"), compiled("gemma3")):
        torch.manual_seed(7)
        outs.append(run(model, prompt(2, 12), do_sample=True, top_k=20))
    assert torch.equal(*outs)


@pytest.mark.parametrize("family", tiers(["gemma3"], [("llama",)]))
def test_beam_search(family):
    ids = prompt(2, 12)
    kwargs = dict(steps=30, num_beams=3, num_return_sequences=2)
    assert torch.equal(run(compiled(family), ids, **kwargs), run(build(family), ids, **kwargs))


@pytest.mark.parametrize("attention", tiers(["sdpa"], [("eager",)]))
def test_left_padding_row_by_row(attention):
    """A9: each row of a left-padded batch equals its unpadded run (huggingface/transformers#30670)."""
    model, plain = compiled("gemma3", attention), build("gemma3", attention)
    lengths, ids = (5, 12, 31), prompt(3, 31)
    mask = torch.tensor([[0] * (31 - n) + [1] * n for n in lengths])
    out = run(model, ids * mask, 30, attention_mask=mask)
    for row, length in enumerate(lengths):
        alone = run(plain, ids[row : row + 1, 31 - length :], 30)
        assert torch.equal(out[row, 31:], alone[0, length:])


@pytest.mark.parametrize("family", tiers(["gemma3"], [("llama",)]))
def test_prompt_lookup_and_crop(family):
    ids = prompt(1, 12).repeat(1, 3)
    kwargs = dict(steps=40, prompt_lookup_num_tokens=3)
    assert torch.equal(run(compiled(family), ids, **kwargs), run(build(family), ids, **kwargs))


def test_assisted_decoding():
    """D14."""
    ids = prompt(1, 12)
    outs = []
    for model in (build("gemma3"), compiled("gemma3")):
        outs.append(run(model, ids, 40, assistant_model=build("gemma3", seed=1)))
    assert torch.equal(*outs)


@pytest.mark.slow
def test_both_models_of_assisted_decoding_compiled():
    assistant = gemkv_compile.compile(build("gemma3", seed=1), kv_format="model")
    ids = prompt(1, 12)
    expected = run(build("gemma3"), ids, 40, assistant_model=build("gemma3", seed=1))
    assert torch.equal(run(compiled("gemma3"), ids, 40, assistant_model=assistant), expected)


def test_second_prompt_and_continued_conversation():
    model, plain = compiled("gemma3"), build("gemma3")
    for tokens, seed in ((10, 1), (33, 2), (7, 3)):
        ids = prompt(1, tokens, seed)
        first = run(model, ids, return_dict_in_generate=True)
        assert torch.equal(first.sequences, run(plain, ids))
        longer = torch.cat([first.sequences, prompt(1, 9, seed + 10)], 1)
        second = run(model, longer, past_key_values=first.past_key_values)
        assert torch.equal(second, run(plain, longer))


def test_inference_mode_then_no_grad_on_one_model():
    model, ids = compiled("gemma3"), prompt(1, 20)
    with torch.inference_mode():
        first = model.generate(ids, max_new_tokens=40, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(first.sequences, run(build("gemma3"), ids, 40))
    assert not first.past_key_values.layers[0].keys.is_inference()
    longer = torch.cat([first.sequences, prompt(1, 3)], 1)
    assert torch.equal(
        run(model, longer, past_key_values=copy.deepcopy(first.past_key_values)), run(build("gemma3"), longer)
    )


def test_lengths_and_contents_after_the_first_call():
    """B10: tracing changes no cache (Lightning-AI/lightning-thunder#1396)."""
    from transformers import DynamicCache

    model, plain, ids = compiled("gemma3"), build("gemma3"), prompt(1, 40)
    caches = [DynamicCache(config=plain.config) for _ in range(2)]
    with torch.no_grad():
        for some, cache in zip((model, plain), caches, strict=True):
            some(ids, past_key_values=cache)
    for ours, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
        assert ours.get_seq_length() == theirs.get_seq_length()
        torch.testing.assert_close(ours.keys.materialise(), theirs.keys)
        torch.testing.assert_close(ours.values.materialise(), theirs.values)


@pytest.mark.parametrize("rows_first", [False, True])
def test_hand_written_module_with_a_tuple_cache(rows_first):
    plain, model = (tuple_model(rows_first=rows_first) for _ in range(2))
    gemkv_compile.compile(model, kv_format="model", strict=True)
    ids = prompt(2, 11)
    tokens, _, pasts = greedy(model, ids, 80)
    assert torch.equal(tokens, greedy(plain, ids, 80)[0])
    assert isinstance(pasts[0][0], PagedKVTensor)


def test_two_continuations_of_one_past():
    """D13: a tuple cache."""
    plain, model = tuple_model(), gemkv_compile.compile(tuple_model(), kv_format="model", strict=True)
    with torch.no_grad():
        pasts = [some(prompt(1, 60))[1] for some in (model, plain)]
    for seed in (1, 2, 3):
        ids = prompt(1, 5, seed)
        assert torch.equal(greedy(model, ids, 70, pasts[0])[0], greedy(plain, ids, 70, pasts[1])[0])


def test_forked_chat():
    """D13: copies of one conversation's cache go on in two ways."""
    model, plain = compiled("gemma3"), build("gemma3")
    first = run(model, prompt(1, 50), 20, return_dict_in_generate=True)
    for seed in (4, 5):
        longer = torch.cat([first.sequences, prompt(1, 6, seed)], 1)
        out = run(model, longer, 40, past_key_values=copy.deepcopy(first.past_key_values))
        assert torch.equal(out, run(plain, longer, 40))
