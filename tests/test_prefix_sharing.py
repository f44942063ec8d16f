"""A prompt that many texts begin with is stored once, whichever way Transformers offers to go on from it."""

import copy
import functools

import pytest
import torch
from tiers import tiers
from tiny_models import build, prompt
from transformers import DynamicCache

import gemkv_compile
from gemkv_compile.runtime.ledger import kv_memory

PROMPT, QUESTION, ANSWER = 1000, 5, 16  # the last token of an answer is not cached
FORKS = 5
CASES = tiers([("gemma3", "model"), ("llama", "model")], [("gemma3", "int4"), ("gemma3", "int8"), ("llama", "k8v4")])


pytestmark = pytest.mark.shares_compiles


@functools.cache
def models(family, kv_format):
    return gemkv_compile.compile(build(family), kv_format=kv_format, strict=True), build(family)


def with_prompt(model):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt(1, PROMPT), past_key_values=cache, logits_to_keep=1)
    return cache


def answers(model, cache, questions, steps=ANSWER):
    """What `generate` adds to the prompt and the questions [n, tokens], of which `cache` has the prompt."""
    ids = torch.cat([prompt(1, PROMPT).expand(len(questions), -1), questions], 1)
    with torch.no_grad():
        out = model.generate(ids, past_key_values=cache, max_new_tokens=steps, do_sample=False)
    return out[:, ids.shape[1] :]


def in_use():
    return sum(pool.in_use for pool in kv_memory(()).pools)


def questions(number=FORKS):
    return [prompt(1, QUESTION, seed=each + 1) for each in range(number)]


@pytest.mark.parametrize("family, kv_format", CASES)
def test_forks_of_a_prompt_cost_their_tails(family, kv_format):
    """Transformers' way to use a prefix again: copy.deepcopy(cache) for each text. No group is completed here."""
    model, plain = models(family, kv_format)
    before, ours, theirs = in_use(), with_prompt(model), with_prompt(plain)
    alone, forks = kv_memory(ours), []
    prompt_pages = in_use() - before
    assert prompt_pages == sum(layer.pages for layer in alone.layers) > 0
    for question in questions():
        fork = copy.deepcopy(ours)
        tokens = answers(model, fork, question)
        assert kv_format != "model" or torch.equal(tokens, answers(plain, copy.deepcopy(theirs), question))
        forks.append(fork)
    assert in_use() - before == prompt_pages
    # The first to go on does so in the prompt's own table.
    tails = sum(layer.tail + layer.tables for layer in alone.layers)
    assert kv_memory([ours, *forks]).total == alone.total + (FORKS - 1) * tails


def test_forks_that_outgrow_a_page_copy_that_one_page():
    model, plain = models("llama", "model")
    before, ours, theirs = in_use(), with_prompt(model), with_prompt(plain)
    prompt_pages, forks = in_use() - before, []
    for question in questions(3):
        forks.append(copy.deepcopy(ours))
        assert torch.equal(answers(model, forks[-1], question, 64), answers(plain, copy.deepcopy(theirs), question, 64))
    # A group ends at 1,024 tokens, in the last of 4 pages: all but the first continuation need one of their own there.
    assert in_use() - before == prompt_pages // 4 * (4 + 2)


def test_a_dead_answer_leaves_no_page_beside_the_prompt():
    """The first answer is written into the prompt's own table; the next question gives its pages back."""
    model, _ = models("llama", "int8")
    before, ours = in_use(), with_prompt(model)
    prompt_pages = in_use() - before
    answers(model, copy.deepcopy(ours), questions(1)[0], 300)
    for question in questions(2):
        answers(model, copy.deepcopy(ours), question)
        assert in_use() - before == prompt_pages


def test_a_batch_of_one_prompt_repeated_shares_it():
    model, plain = models("gemma3", "model")
    before, ours, theirs = in_use(), with_prompt(model), with_prompt(plain)
    prompt_pages = in_use() - before
    for cache in (ours, theirs):
        cache.batch_repeat_interleave(FORKS)
    batch = torch.cat(questions())
    assert torch.equal(answers(model, ours, batch), answers(plain, theirs, batch))
    assert in_use() - before == prompt_pages


def test_a_cache_that_is_cropped_to_the_prompt_goes_on_without_a_copy():
    model, plain = models("llama", "model")
    before, ours, theirs = in_use(), with_prompt(model), with_prompt(plain)
    prompt_pages = in_use() - before
    for question in questions(3):
        assert torch.equal(answers(model, ours, question), answers(plain, theirs, question))
        for cache in (ours, theirs):
            cache.crop(PROMPT - cache.get_seq_length())
        assert in_use() - before == prompt_pages and ours.get_seq_length() == PROMPT
